"""Averages of checkpoints (the paper, section 6.1) and of all weights of a run.

The paper's models are the average of the last 5 (base) or 20 (big) checkpoints, written at 10-minute intervals.
`average_checkpoints` makes such an average, in float32, one tensor at a time. `ExponentialMovingAverageCallback` keeps
a running average over the updates instead, which costs a second copy of the weights in memory.
"""

from __future__ import annotations

import json
import logging
import math
import re
import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from transformers import TrainerCallback
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from .checkpointing import whole_checkpoints
from .output_folders import is_free, whole_folder
from .training_arguments import LOWER_IS_BETTER

logger = logging.getLogger(__name__)

# Fields of config.json that say where a model comes from, not what it is.
_ORIGIN = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache")
# What a checkpoint holds of the run rather than of the model.
_RUN_FILES = re.compile(
    r"optimizer.*|scheduler.*|scaler.*|rng_state.*|global_step.*|trainer_state\.json|training_args\.bin"
    r"|README\.md|model_card\.json|metrics\.json|complete\.json"
)


def average_checkpoints(checkpoints: Sequence[str | Path], output_dir: str | Path) -> Path:
    """Write the mean of the weights of several checkpoints as a checkpoint of its own.

    The mean is taken in float32 (float64 stays float64) and stored in the checkpoints' own type, one tensor at a time:
    besides the tensors of one output file nothing is held in memory. Configuration, tokenizer and code are those of
    the last checkpoint; the state of its optimizer and of its run is left out.

    Args:
        checkpoints: Folders with model.safetensors, or its shards and their index, all of one run.
        output_dir: Folder to write; must not exist or be empty.

    Returns:
        The path of `output_dir`.

    Raises:
        ValueError: If no checkpoint is given, one is given twice, models or tensors differ, or `output_dir` is not
            empty. Nothing is written then.
        FileNotFoundError: If a checkpoint has no configuration or no safetensors weights.
    """
    folders = [Path(folder) for folder in checkpoints]
    output = Path(output_dir)
    if not folders:
        raise ValueError("average_checkpoints needs at least one checkpoint, got none.")
    twice = sorted({str(folder) for folder in folders if [f.resolve() for f in folders].count(folder.resolve()) > 1})
    if twice:
        raise ValueError(f"Checkpoints given twice: {', '.join(twice)}. Each counts once in the average.")
    if not is_free(output):
        raise ValueError(f"The output folder {output} is not empty: choose another one.")
    with ExitStack() as stack:
        opened = [_OpenCheckpoint(folder, stack) for folder in folders]
        for other in opened[:-1]:
            other.check_same_model(opened[-1])
        with whole_folder(output) as scratch:
            _copy_model_files(folders[-1], scratch)
            for file_name, names in opened[-1].files.items():
                save_file(
                    {name: _mean(opened, name) for name in names}, scratch / file_name, metadata={"format": "pt"}
                )
    return output


class _OpenCheckpoint:
    """The configuration of a checkpoint and its tensors, read when asked for."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        config, index, single = (folder / name for name in ("config.json", SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME))
        if not config.is_file():
            raise FileNotFoundError(f"{folder} is not a checkpoint: it has no config.json.")
        self.config = {
            key: value for key, value in json.loads(config.read_text("utf-8")).items() if key not in _ORIGIN
        }
        if index.is_file():
            file_of: dict[str, str] = json.loads(index.read_text("utf-8"))["weight_map"]
            file_names = sorted(set(file_of.values()))
        elif single.is_file():
            file_names = [SAFE_WEIGHTS_NAME]
        else:
            raise FileNotFoundError(f"{folder} has no {SAFE_WEIGHTS_NAME}, nor shards and their index.")
        self.files: dict[str, list[str]] = {}
        self._reader_of: dict[str, Any] = {}
        for file_name in file_names:
            try:
                reader = stack.enter_context(safe_open(folder / file_name, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise ValueError(
                    f"{folder / file_name} cannot be read ({error}): it is missing or was cut off. Leave it out."
                ) from error
            self.files[file_name] = list(reader.keys())
            self._reader_of.update(dict.fromkeys(self.files[file_name], reader))

    def shapes(self) -> dict[str, tuple[list[int], str]]:
        """Return shape and type of each tensor, without reading it."""
        slices = {name: reader.get_slice(name) for name, reader in self._reader_of.items()}
        return {name: (view.get_shape(), view.get_dtype()) for name, view in slices.items()}

    def tensor(self, name: str) -> torch.Tensor:
        """Read one tensor."""
        tensor: torch.Tensor = self._reader_of[name].get_tensor(name)
        return tensor

    def check_same_model(self, other: _OpenCheckpoint) -> None:
        """Raise unless both have the same configuration and tensors of the same shapes and types."""
        mine, theirs = self.config, other.config
        wrong = [key for key in sorted({*mine, *theirs}) if mine.get(key) != theirs.get(key)]
        what = "configurations differ in"
        if not wrong:
            shapes, others = self.shapes(), other.shapes()
            wrong = [name for name in sorted({*shapes, *others}) if shapes.get(name) != others.get(name)]
            what = "tensors differ:"
        if wrong:
            shown = ", ".join(wrong[:5]) + (f" and {len(wrong) - 5} more" if len(wrong) > 5 else "")
            raise ValueError(
                f"{self.folder} and {other.folder} are not checkpoints of one model: their {what} {shown}. An average "
                "makes sense within one run only."
            )


def _mean(checkpoints: Sequence[_OpenCheckpoint], name: str) -> torch.Tensor:
    """The mean of one tensor; what is not a number with a fraction must be the same everywhere."""
    first = checkpoints[0].tensor(name)
    if not first.is_floating_point():
        if any(not torch.equal(first, checkpoint.tensor(name)) for checkpoint in checkpoints[1:]):
            raise ValueError(f"{name} holds whole numbers that differ between the checkpoints: it has no average.")
        return first
    total = first.to(torch.promote_types(torch.float32, first.dtype), copy=True)
    for checkpoint in checkpoints[1:]:
        total += checkpoint.tensor(name)
    return (total / len(checkpoints)).to(first.dtype)


def _copy_model_files(source: Path, target: Path) -> None:
    """Copy a checkpoint without its weights and without the state of its run."""
    for path in source.iterdir():
        if path.is_file() and path.suffix != ".safetensors" and not _RUN_FILES.fullmatch(path.name):
            shutil.copy2(path, target / path.name)


def last_checkpoints(run_dir: str | Path, count: int) -> list[Path]:
    """Return the last `count` checkpoints of a run, the oldest first.

    Args:
        run_dir: The run's output folder, with folders named checkpoint-<update>.
        count: How many, at least 1.

    Raises:
        ValueError: If `count` is below 1 or there are not so many.
    """
    found = _checkpoints(run_dir, count)
    return [found[step] for step in sorted(found)[-count:]]


def best_checkpoints(
    run_dir: str | Path, count: int, metric: str, *, greater_is_better: bool | None = None
) -> list[Path]:
    """Return the `count` checkpoints of a run with the best value of a metric, the oldest first.

    Args:
        run_dir: The run's output folder, with folders named checkpoint-<update>.
        count: How many, at least 1.
        metric: A metric of the evaluations, such as "bleu", "chrf" or "loss" (with or without "eval_" before it).
        greater_is_better: By default False for a loss, a perplexity and TER, else True.

    Raises:
        ValueError: If `count` is below 1, fewer checkpoints than that were evaluated by that metric, or the newest one
            has lost its trainer_state.json.
    """
    name = metric if metric.startswith("eval_") else f"eval_{metric}"
    if greater_is_better is None:
        greater_is_better = not name.endswith(LOWER_IS_BETTER)
    found = _checkpoints(run_dir, count)
    state = found[max(found)] / "trainer_state.json"
    if not state.is_file():
        raise ValueError(f"{state}, where the values of {metric!r} stand, is gone: take the last checkpoints instead.")
    log = json.loads(state.read_text("utf-8"))["log_history"]
    values = {entry["step"]: entry[name] for entry in log if name in entry}
    known = {key.removeprefix("eval_") for entry in log for key in entry if key.startswith("eval_")}
    scored = [step for step in found if step in values and math.isfinite(values[step])]
    if len(scored) < count:
        raise ValueError(
            f"{len(scored)} of the {len(found)} checkpoints in {run_dir} were evaluated by {metric!r}, {count} were "
            f"asked for. Metrics there: {', '.join(sorted(known)) or 'none'}. Evaluate as often as you save."
        )
    best = sorted(scored, key=lambda step: values[step], reverse=greater_is_better)[:count]
    return [found[step] for step in sorted(best)]


def averageable_checkpoints(run_dir: str | Path) -> dict[int, Path]:
    """Return the checkpoints of a run by the number of the update, but for those that were cut off, which are logged.

    Args:
        run_dir: The run's output folder, with folders named checkpoint-<update>.
    """
    found = whole_checkpoints(run_dir, besides=_RUN_FILES)
    return {step: path for step, path in found.items() if (path / "config.json").is_file()}


def _checkpoints(run_dir: str | Path, count: int) -> dict[int, Path]:
    """The checkpoints of a run by the number of the update; raise if there are fewer than `count`."""
    if count < 1:
        raise ValueError(f"At least one checkpoint is needed for an average, got {count}.")
    found = averageable_checkpoints(run_dir)
    if len(found) < count:
        there = ", ".join(found[step].name for step in sorted(found)) or "none"
        raise ValueError(
            f"{count} checkpoints were asked for, {run_dir} has {len(found)} ({there}). Save more often (save_steps) "
            "and keep more of them (save_total_limit)."
        )
    return found


class ExponentialMovingAverageCallback(TrainerCallback):
    """Keeps an exponential moving average of the weights and saves it beside them.

    After each update  average ← decay · average + (1 - decay) · weights.  Every checkpoint, and the output folder at
    the end, gets a folder "ema" with the averaged model, which loads like any other (`subfolder="ema"`); a resumed run
    goes on from there. Costs one copy of the weights.

    Args:
        decay: How much of the average stays at each update, in (0, 1). 0.999 averages over the last 1,000 or so.

    Raises:
        ValueError: If `decay` is out of its range, or the weights are sharded (FSDP, ZeRO-3).
    """

    FOLDER = "ema"

    def __init__(self, decay: float = 0.999) -> None:
        if not 0 < decay < 1:
            raise ValueError(f"decay must be between 0 and 1, got {decay}: 0.999 averages over some 1,000 updates.")
        self.decay = decay
        self.average: AveragedModel | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Begin with the weights as they are, or with the average that was saved with them."""
        if any(type(parameter.data) is not torch.Tensor for parameter in model.parameters()):
            raise ValueError("A moving average needs whole weights on each process; these are sharded.")
        self.average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(self.decay))
        if not state.global_step:
            return
        point = args.resume_from_checkpoint
        if not point or not Path(point).is_dir():  # "true", or given to the library's `train()`, which tells nobody
            point = Path(args.output_dir, f"checkpoint-{state.global_step}")
        saved = Path(point, self.FOLDER)
        if not saved.is_dir():
            logger.warning("The moving average begins with the weights as they are: there is none in %s.", saved)
        else:
            loaded = type(model).from_pretrained(saved, dtype=torch.float32)
            self.average.module.load_state_dict(loaded.state_dict())
            self.average.n_averaged.fill_(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Take the new weights into the average."""
        assert self.average is not None
        self.average.update_parameters(model)

    def on_save(self, args: Any, state: Any, control: Any, processing_class: Any = None, **kwargs: Any) -> None:
        """Write the average into the checkpoint."""
        self._save(Path(args.output_dir, f"checkpoint-{state.global_step}"), state, processing_class)

    def on_train_end(self, args: Any, state: Any, control: Any, processing_class: Any = None, **kwargs: Any) -> None:
        """Write the average into the output folder."""
        self._save(Path(args.output_dir), state, processing_class)

    def _save(self, folder: Path, state: Any, processing_class: Any) -> None:
        if not state.is_world_process_zero or self.average is None:
            return
        model: Any = self.average.module
        model.save_pretrained(folder / self.FOLDER)
        if processing_class is not None:
            processing_class.save_pretrained(folder / self.FOLDER)
