"""Callbacks that keep an eye on a training: its history, its curves, and known troubles.

They work with any Trainer of the library; `scripts/train.py` uses both.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import statistics
import time
from collections import deque
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

logger = logging.getLogger(__name__)

HISTORY_FILE = "history.jsonl"
CURVES_FILE = "curves.png"
TROUBLESHOOTING = "docs/troubleshooting.md"

# (title, {key in the history: label of the line}, whether the axis is logarithmic)
_PANELS: tuple[tuple[str, dict[str, str], bool], ...] = (
    (
        "loss a token (nats)",
        {"loss": "training, smoothed, with dropout", "eval_loss": "validation, NLL, without"},
        False,
    ),
    ("validation score", {"eval_bleu": "BLEU", "eval_chrf": "chrF"}, False),
    ("learning rate", {"learning_rate": ""}, False),
    ("norm of the gradients", {"grad_norm": ""}, True),
    ("real target tokens a second", {"target_tokens_per_second": ""}, False),
    ("padding (% of the tokens)", {"padding_percent": ""}, False),
)


class RunHistoryCallback(TrainerCallback):
    """Writes what the Trainer logs into history.jsonl, and the curves into curves.png at the end.

    A line of history.jsonl is one entry of the log with "step", "epoch" and "seconds" since the training (or this part
    of it) began. A resumed run goes on in the file where its checkpoint was. The picture needs matplotlib (the extra
    "plot"); without it one line of the log says so.
    """

    def __init__(self) -> None:
        self._began = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin the file, or drop what came after the checkpoint that the run resumes from."""
        self._began = time.perf_counter()
        if not state.is_world_process_zero:
            return
        path = Path(args.output_dir, HISTORY_FILE)
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = [entry for entry in read_history(path) if entry["step"] <= state.global_step] if path.exists() else []
        path.write_text("".join(json.dumps(entry) + "\n" for entry in kept if state.global_step), encoding="utf-8")

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Write an entry."""
        if state.is_world_process_zero and logs:
            seconds = round(time.perf_counter() - self._began, 2)
            line = {"step": state.global_step, "epoch": state.epoch, "seconds": seconds, **logs}
            path = Path(args.output_dir, HISTORY_FILE)
            path.parent.mkdir(parents=True, exist_ok=True)  # somebody may have cleared it away: no reason to stop
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line, ensure_ascii=False, default=float) + "\n")

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Draw the curves."""
        folder = Path(args.output_dir)
        if not (state.is_world_process_zero and (folder / HISTORY_FILE).is_file()):
            return
        try:
            draw_curves(folder / HISTORY_FILE, folder / CURVES_FILE)
        except ImportError:
            logger.info("No %s: that needs matplotlib (pip install 'vanilla-transformer[plot]').", CURVES_FILE)


def read_history(path: str | Path) -> list[dict[str, Any]]:
    """Return the entries of a history.jsonl; a last line that was cut off is left out.

    Raises:
        ValueError: If another line is no JSON object with a "step".
    """
    lines = Path(path).read_text(encoding="utf-8").removesuffix("\n").split("\n")  # not at U+2028 as splitlines()
    entries = []
    for number, line in enumerate(lines, start=1):
        try:
            entry = json.loads(line)
            entry["step"]
        except (ValueError, TypeError, KeyError) as error:
            if number == len(lines):
                break
            raise ValueError(f"{path}, line {number}, is no entry of a training history: {line[:80]!r}") from error
        entries.append(entry)
    return entries


def draw_curves(history: str | Path, picture: str | Path) -> None:
    """Draw a history.jsonl: loss, scores, learning rate, norm of the gradients, speed and padding over the updates.

    Args:
        history: The file to read.
        picture: The file to write; its suffix names the format, such as .png or .pdf.

    Raises:
        ImportError: If matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    entries = read_history(history)
    figure = Figure(figsize=(11, 9), layout="constrained")
    for axes, (title, lines, logarithmic) in zip(figure.subplots(3, 2).flat, _PANELS, strict=True):
        axes.set_title(title)
        axes.set_xlabel("update")
        axes.grid(alpha=0.3)
        for key, label in lines.items():
            points = [(entry["step"], entry[key]) for entry in entries if key in entry]
            points = [
                (step, value) for step, value in points if isinstance(value, (int, float)) and math.isfinite(value)
            ]
            if points:
                axes.plot(
                    *zip(*points, strict=True), marker="o" if len(points) < 30 else "", markersize=3, label=label
                )
        if logarithmic and axes.lines:
            axes.set_yscale("log")
        if any(lines.values()) and axes.lines:
            axes.legend()
        if not axes.lines:
            axes.text(0.5, 0.5, "not logged", ha="center", va="center", transform=axes.transAxes)
    figure.savefig(picture, dpi=120)


class TroubleWarningCallback(TrainerCallback):
    """Warns, once for each trouble, when a training goes wrong in a known way, and says what to do.

    Of translations it warns again when the trouble had passed and comes back.

    It sees losses and gradients that are not finite, a norm of the gradients far above its usual, a validation loss
    that rises while the training loss falls, translations that never end and translations that copy their source. The
    last two need the percentages "eval_unended_percent" and "eval_copied_percent", which `VanillaTransformerTrainer`
    gives.

    Args:
        norm_factor: How many times its median the norm of the gradients may be.
        evaluations: After how many evaluations, each with a higher loss than the one before, to warn.
        unended_percent: From how many percent of the translations on.
        copied_percent: From how many percent of the translations on.
    """

    def __init__(
        self,
        norm_factor: float = 10.0,
        evaluations: int = 3,
        unended_percent: float = 10.0,
        copied_percent: float = 20.0,
    ) -> None:
        self.norm_factor = norm_factor
        self.evaluations = evaluations
        self.unended_percent = unended_percent
        self.copied_percent = copied_percent
        self.warned: set[str] = set()
        self._norms: deque[float] = deque(maxlen=50)
        self._training_losses: list[float] = []
        self._at_evaluations: list[tuple[float, float]] = []  # training loss since the one before, validation loss

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Look at an entry of the log."""
        if not state.is_world_process_zero or not logs:
            return
        if "loss" in logs or "grad_norm" in logs:
            self._look_at_training(state.global_step, logs)
        if "eval_loss" in logs:
            self._look_at_evaluation(state.global_step, logs)

    def _look_at_training(self, step: int, logs: dict[str, Any]) -> None:
        loss, norm = (float(logs.get(name, 0.0)) for name in ("loss", "grad_norm"))
        # The library's own arguments hide a loss that is not finite behind a mean (`logging_nan_inf_filter`): the norm
        # shows it then.
        if not (math.isfinite(loss) and math.isfinite(norm)):
            self._warn(
                "not finite",
                step,
                f"loss {loss:.3g}, norm of the gradients {norm:.3g}",
                "The weights are lost from here on: go back to the last checkpoint before. Lower peak_lr, raise "
                "warmup_steps, set max_grad_norm=1, and compute in bf16 or float32 rather than fp16",
            )
            return
        if "loss" in logs:
            self._training_losses.append(loss)
        if "grad_norm" not in logs:
            return
        usual = statistics.median(self._norms) if len(self._norms) >= 5 else math.inf
        if norm > self.norm_factor * usual:
            self._warn(
                "exploding gradients",
                step,
                f"norm of the gradients {norm:.3g}, its median was {usual:.3g}",
                "Lower peak_lr, raise warmup_steps, or set max_grad_norm=1; look for odd pairs in the text",
            )
        self._norms.append(norm)

    def _look_at_evaluation(self, step: int, logs: dict[str, Any]) -> None:
        if self._training_losses:
            self._at_evaluations.append((statistics.fmean(self._training_losses), float(logs["eval_loss"])))
            self._training_losses = []
        last = self._at_evaluations[-self.evaluations - 1 :]
        steps = list(itertools.pairwise(last))
        if len(steps) == self.evaluations and all(b[1] > a[1] and b[0] < a[0] for a, b in steps):
            self._warn(
                "overfitting",
                step,
                f"the validation loss rose {self.evaluations} times, to {last[-1][1]:.3f}, and the training loss fell",
                "The model learns its text by heart: raise dropout, use BPE-dropout, a smaller model or more text, "
                "and keep the best checkpoint (load_best_model_at_end, early stopping)",
            )
        for name, limit, problem, remedy in (
            (
                "unended_percent",
                self.unended_percent,
                "of the translations had no end at the length limit",
                "Early in training this passes. Later: see that the labels end with the end token, that no text was "
                "cut (over_length), and that the length limit (max_length_offset) is not too short",
            ),
            (
                "copied_percent",
                self.copied_percent,
                "of the translations were their source, word for word",
                "Look for pairs with the same text on both sides in the training text (on_bad_pair=drop), and that "
                "source and target are not the same column",
            ),
        ):
            value = logs.get(f"eval_{name}")
            if value is None:
                continue
            if float(value) >= limit:
                self._warn(name, step, f"{float(value):.0f}% {problem}", remedy)
            else:
                self.warned.discard(name)  # the first evaluations are often bad: that must not hide a later trouble

    def _warn(self, kind: str, step: int, what: str, remedy: str) -> None:
        if kind not in self.warned:
            self.warned.add(kind)
            logger.warning("Update %d: %s. %s. More in %s.", step, what, remedy, TROUBLESHOOTING)
