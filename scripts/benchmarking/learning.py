"""Learning: validation BLEU against minutes and tokens, ours and MarianMT under the library's Trainer, in equal time.

Both have the same tokenizer, sizes, dropout, smoothing, spread of fresh weights, peak rate and schedule (a cosine to
zero), and train for the same minutes one after the other; the time of the evaluations does not count. On a CPU the
minutes are those the process computed on each of its threads, so that other work on the machine takes nothing from
whoever runs beside it; on a GPU they are of wall time. Each makes as many updates as fit: ours in token-budget
batches, MarianMT in batches of so many pairs drawn at random or grouped by length.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import datasets
import torch
from transformers import DataCollatorForSeq2Seq, Seq2SeqTrainer, Seq2SeqTrainingArguments, TrainerCallback

from vanilla_transformer.trainer import VanillaTransformerTrainer
from vanilla_transformer.training_arguments import VanillaTransformerTrainingArguments
from vanilla_transformer.translation import translate_sentences

from .contenders import GROUPED, OURS, RANDOM, Meter, grouping_by_length, quiet_arguments, watch
from .workload import LABEL_SMOOTHING, Workload


def _now(device: str) -> float:
    """Return the seconds so far that count (see the module)."""
    return time.perf_counter() if device != "cpu" else time.process_time() / torch.get_num_threads()


class _Curve(TrainerCallback):
    """Evaluates at equal distances of the training and keeps the score with the minutes and tokens so far."""

    def __init__(
        self, updates: int, points: int, validation: list[tuple[str, str]], tokenizer: Any, meter: Meter
    ) -> None:
        self.at = {round(updates * (index + 1) / points) for index in range(points)}
        self.validation, self.tokenizer, self.meter = validation, tokenizer, meter
        self.seconds, self.points = 0.0, []  # type: float, list[dict[str, float]]

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.began = _now(self.meter.device)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step not in self.at:
            return
        import sacrebleu

        self.seconds += _now(self.meter.device) - self.began
        sources, references = zip(*self.validation, strict=True)
        found = translate_sentences(model, self.tokenizer, sources, num_beams=1, max_new_tokens=80)
        bleu = sacrebleu.corpus_bleu([row[0].text for row in found], [list(references)]).score
        self.points.append(
            {"minutes": self.seconds / 60, "updates": state.global_step, "tokens": self.meter.tokens, "bleu": bleu}
        )
        print(f"  {self.points[-1]}", flush=True)
        self.began = _now(self.meter.device)


def _trainer(
    name: str,
    workload: Workload,
    dataset: datasets.Dataset,
    tokenizer: Any,
    *,
    folder: str,
    updates: int,
    batch: int,
    lr: float,
    bf16: bool,
    device: str,
) -> Any:
    options = quiet_arguments(folder, bf16, device) | {
        "max_steps": updates,
        "learning_rate": lr,
        "lr_scheduler_type": "cosine",
        "warmup_steps": max(1, updates // 10),
        "adam_beta2": 0.98,
        "adam_epsilon": 1e-9,
        "seed": 1,
    }
    if name == OURS:
        arguments: Any = VanillaTransformerTrainingArguments(
            **options, lr_schedule="library", max_tokens_per_batch=batch, predict_with_generate=False
        )
        model = workload.ours(init_std=workload.marian().config.init_std)
        return VanillaTransformerTrainer(model, arguments, train_dataset=dataset, processing_class=tokenizer)
    if name == GROUPED:
        options |= grouping_by_length()
    mean = sum(map(len, dataset["labels"])) / len(dataset)
    arguments = Seq2SeqTrainingArguments(
        **options, per_device_train_batch_size=max(1, round(batch / mean)), label_smoothing_factor=LABEL_SMOOTHING
    )
    model = workload.marian()
    return Seq2SeqTrainer(
        model,
        arguments,
        DataCollatorForSeq2Seq(tokenizer, model=model),
        train_dataset=dataset,
        processing_class=tokenizer,
    )


def benchmark(
    workload: Workload,
    dataset: datasets.Dataset,
    validation: list[tuple[str, str]],
    tokenizer: Any,
    *,
    minutes: float,
    learning_rate: float,
    tokens_per_batch: int = 1024,
    points: int = 8,
    bf16: bool = False,
    device: str = "cpu",
    contenders: tuple[str, ...] = (OURS, RANDOM, GROUPED),
    save_to: Path | None = None,
) -> dict[str, list[dict[str, float]]]:
    """Return each contender's curve: minutes, updates, real target tokens, BLEU of greedy translations.

    Args:
        workload: Size and vocabulary.
        dataset: Columns "input_ids" and "labels".
        validation: Source and reference sentences.
        tokenizer: The tokenizer of all.
        minutes: Training time of each, evaluations apart (see the module).
        learning_rate: Peak rate.
        tokens_per_batch: Our budget; the others' batches have about as many real target tokens.
        points: Evaluations.
        bf16: Mixed precision, for all.
        device: Where to train.
        contenders: Who takes part.
        save_to: Where our model is saved at its end, with the tokenizer.
    """
    curves = {}
    with tempfile.TemporaryDirectory() as folder:
        settings: dict[str, Any] = {"folder": folder, "batch": tokens_per_batch, "lr": learning_rate, "bf16": bf16}
        settings["device"] = device
        for name in contenders:
            print(f"{name}, {minutes:g} minutes", flush=True)
            trial = _trainer(name, workload, dataset, tokenizer, updates=40, **settings)
            watch(trial, trial.data_collator, Meter(device))
            start = _now(device)
            trial.train()
            updates = max(points, round(40 * minutes * 60 / (_now(device) - start)))
            trainer = _trainer(name, workload, dataset, tokenizer, updates=updates, **settings)
            meter = Meter(device)
            watch(trainer, trainer.data_collator, meter)
            curve = _Curve(updates, points, validation, tokenizer, meter)
            trainer.add_callback(curve)
            trainer.train()
            curves[name] = curve.points
            if name == OURS and save_to is not None:
                trainer.save_model(str(save_to))
    return curves


def plot(curves: dict[str, list[dict[str, float]]], path: Path, title: str) -> None:
    """Draw BLEU against minutes and against real target tokens."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    for axes, key in zip(figure.subplots(1, 2), ("minutes", "tokens"), strict=True):
        for name, points in curves.items():
            axes.plot([p[key] for p in points], [p["bleu"] for p in points], "o-", label=name)
        axes.set(xlabel="minutes of training" if key == "minutes" else "real target tokens", ylabel="validation BLEU")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.suptitle(title, fontsize=9)
    figure.savefig(path, dpi=110)
