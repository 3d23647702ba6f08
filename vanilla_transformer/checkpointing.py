"""Which checkpoints of a run are whole: a marker written last, and a search that skips those without it.

A process that is killed while it writes leaves a folder checkpoint-<update> that looks like the others. The library
takes the newest folder for the one to resume from, whatever is in it. `CompleteCheckpointCallback` writes the file
`complete.json` into a checkpoint when everything else is there, with the size of every file, and
`last_complete_checkpoint` goes by it.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
from pathlib import Path
from typing import Any

from accelerate import PartialState
from transformers import TrainerCallback
from transformers.trainer_utils import SaveStrategy

logger = logging.getLogger(__name__)

MARKER_FILE = "complete.json"
# What safetensors and torch say when nothing more can be written.
_DISK_FULL = ("No space left", "PytorchStreamWriter failed writing", "iostream error", "] . unexpected pos ")


class CompleteCheckpointCallback(TrainerCallback):
    """Marks every checkpoint of a Trainer as complete when all processes have written it.

    `VanillaTransformerTrainer` has it by itself; add it to the callbacks of another Trainer, as the last one.
    """

    def __init__(self) -> None:
        # The mark of a checkpoint that may be written over, and what it says.
        self.taken: tuple[Path, str] | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Find the best checkpoint of a run whose folder was moved since."""
        self.taken = None  # what a training before left that failed
        if state.best_model_checkpoint and not Path(state.best_model_checkpoint).is_dir():
            moved = Path(args.output_dir, Path(state.best_model_checkpoint).name)
            if moved.is_dir():
                state.best_model_checkpoint = str(moved)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Take the mark from a checkpoint that may be written over now: a run went back and comes by once more."""
        # Whether the best is saved is known only after the evaluation, and then no callback is asked before it is.
        if control.should_save or (control.should_evaluate and args.save_strategy == SaveStrategy.BEST):
            marker = _folder(args, state) / MARKER_FILE
            if _marks(args, state) and marker.is_file():
                self.taken = marker, marker.read_text(encoding="utf-8")
                marker.unlink()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Likewise where it is saved after each epoch."""
        self.on_step_end(args, state, control)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Mark the checkpoint just written."""
        self.taken = None
        PartialState().wait_for_everyone()  # each process writes the state of its random numbers
        if _marks(args, state):
            mark_complete(_folder(args, state))

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Give the mark back to a checkpoint that was not written over."""
        if self.taken is not None and self.taken[0].parent.is_dir():
            _write_marker(*self.taken)
        self.taken = None

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Likewise after the last update."""
        self.on_step_begin(args, state, control)


def _marks(args: Any, state: Any) -> bool:
    """Return whether this is the process that marks."""
    return bool(state.is_local_process_zero if args.save_on_each_node else state.is_world_process_zero)


def _folder(args: Any, state: Any) -> Path:
    return Path(args.output_dir, f"checkpoint-{state.global_step}")


def mark_complete(checkpoint: str | Path) -> None:
    """Write the marker into a checkpoint folder: the names and sizes of all files there."""
    folder = Path(checkpoint)
    _write_marker(folder / MARKER_FILE, json.dumps({"files": _sizes(folder)}, indent=1))


def _write_marker(marker: Path, content: str) -> None:
    scratch = marker.with_name(f".{MARKER_FILE}")
    with scratch.open("w", encoding="utf-8") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    scratch.replace(marker)  # all of it or nothing


def _sizes(folder: Path) -> dict[str, int]:
    """Sizes in bytes of the files under a folder by their path there, the marker left out."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    sizes = {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}
    return {name: size for name, size in sizes.items() if Path(name).name.lstrip(".") != MARKER_FILE}


def what_is_missing(checkpoint: str | Path, besides: re.Pattern[str] | None = None) -> str | None:
    """Return why a checkpoint is not whole, or None if it is.

    Args:
        checkpoint: A folder checkpoint-<update>.
        besides: Names of files that may be gone or have changed.
    """
    folder = Path(checkpoint)
    marker = folder / MARKER_FILE
    if not marker.is_file():
        return "it has no complete.json: it was cut off while it was written, or another Trainer wrote it"
    wanted = json.loads(marker.read_text(encoding="utf-8"))["files"]
    found = _sizes(folder)
    for name, size in wanted.items():
        if besides is not None and besides.fullmatch(name):
            continue
        if name not in found:
            return f"{name} is gone"
        if found[name] != size:
            return f"{name} has {found[name]:,} bytes and had {size:,} when it was written"
    return None


def checkpoints_of(output_dir: str | Path) -> dict[int, Path]:
    """Return the checkpoint folders of a run by the number of the update, complete or not."""
    matches = ((re.fullmatch(r"checkpoint-(\d+)", path.name), path) for path in Path(output_dir).glob("checkpoint-*"))
    return {int(match[1]): path for match, path in matches if match and path.is_dir()}


def whole_checkpoints(output_dir: str | Path, besides: re.Pattern[str] | None = None) -> dict[int, Path]:
    """Return the complete checkpoints of a run by the number of the update. Those left out are logged.

    Where none has a mark, as of the library's own Trainer, all are taken for complete.

    Args:
        output_dir: The run's output folder, with folders named checkpoint-<update>.
        besides: Names of files that may be gone or have changed.
    """
    found = checkpoints_of(output_dir)
    if not any((path / MARKER_FILE).is_file() for path in found.values()):
        return found
    problems = {step: what_is_missing(path, besides) for step, path in found.items()}
    for step, problem in sorted(problems.items()):
        if problem is not None:
            logger.warning("%s is left out: %s.", found[step], problem)
    return {step: path for step, path in found.items() if problems[step] is None}


def last_complete_checkpoint(output_dir: str | Path) -> Path | None:
    """Return the newest complete checkpoint of a run; None if there is no checkpoint at all. Skipped ones are logged.

    Args:
        output_dir: The run's output folder, with folders named checkpoint-<update>.

    Raises:
        ValueError: If there are checkpoints and none is complete.
    """
    found = checkpoints_of(output_dir)
    skipped: list[str] = []
    for step in sorted(found, reverse=True):
        problem = what_is_missing(found[step])
        if problem is None:
            for line in skipped:
                logger.warning("Not resumed from %s.", line)
            return found[step]
        skipped.append(f"{found[step]}: {problem}")
    if skipped:
        raise ValueError(
            f"No checkpoint in {output_dir} is complete. {'; '.join(skipped)}. To resume from one of them all the "
            "same, name its folder."
        )
    return None


def check_resumable(checkpoint: str | Path) -> None:
    """Raise unless a run can resume from a folder that the user named; a missing marker alone is only logged.

    Args:
        checkpoint: The folder.

    Raises:
        FileNotFoundError: If there is no such folder, or it is not a checkpoint of a Trainer.
        ValueError: If files of it are gone or were cut off.
    """
    folder = Path(checkpoint)
    if not folder.joinpath("trainer_state.json").is_file():
        there = sorted(path.name for path in folder.parent.glob("checkpoint-*") if path != folder)
        what = "is not a checkpoint of a run (it has no trainer_state.json)" if folder.is_dir() else "does not exist"
        raise FileNotFoundError(
            f"Cannot resume from {folder}: it {what}. Checkpoints beside it: {', '.join(there) or 'none'}."
        )
    problem = what_is_missing(folder)
    if problem is None:
        return
    if folder.joinpath(MARKER_FILE).is_file():
        raise ValueError(f"Cannot resume from {folder}: {problem}. Name another checkpoint.")
    logger.warning("Resuming from %s as asked, though %s.", folder, problem)


def is_disk_full(error: BaseException) -> bool:
    """Return whether an error of writing a checkpoint means that there is no room for it.

    safetensors and torch report it in words of their own, without an `errno`; torch (2.5 to 2.13) may raise a second
    error while it closes the file, behind which the first one is hidden.
    """
    found: BaseException | None = error
    while found is not None:
        if isinstance(found, OSError) and found.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        if any(words in str(found) for words in _DISK_FULL):
            return True
        found = found.__cause__ or found.__context__
    return False
