"""What the trainer says of a run: tokens a second, padding, samples, and how translations end."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
import torch
from test_trainer import RecordingTrainer, make_dataset, make_model, make_tokenizer, make_trainer

from vanilla_transformer.metrics import build_compute_metrics
from vanilla_transformer.monitoring import RunHistoryCallback, TroubleWarningCallback, read_history
from vanilla_transformer.trainer import VanillaTransformerTrainer


class CountingTrainer(RecordingTrainer):
    """Counts tokens by itself, and takes its time."""

    def training_step(self, model, inputs, *args, **kwargs):
        real = [int((inputs[name] != pad).sum()) for name, pad in (("labels", -100), ("input_ids", 0))]
        padded = inputs["labels"].numel() + inputs["input_ids"].numel()
        self.counted = [*getattr(self, "counted", []), (*real, padded)]
        time.sleep(0.02)
        return super().training_step(model, inputs, *args, **kwargs)


def test_tokens_a_second_and_padding_are_those_of_the_batches(tmp_path) -> None:
    trainer = make_trainer(tmp_path, CountingTrainer, max_steps=6, logging_steps=3, gradient_accumulation_steps=2)
    began = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - began
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(logged) == 2
    assert len(trainer.counted) == 12
    for entry, part in zip(logged, (trainer.counted[:6], trainer.counted[6:]), strict=True):
        target, source, padded = np.sum(part, axis=0)
        assert entry["padding_percent"] == pytest.approx(100 * (1 - (target + source) / padded))
        # Six batches that slept 0.02 s each, and no more time than the whole training took.
        assert target / seconds < entry["target_tokens_per_second"] < target / 0.12


def test_the_time_of_evaluations_does_not_count(tmp_path) -> None:
    def slow(prediction):
        time.sleep(1.0)
        return {}

    trainer = make_trainer(
        tmp_path, CountingTrainer, max_steps=4, logging_steps=4, eval_strategy="steps", eval_steps=2,
        eval_dataset=make_dataset(4), compute_metrics=slow, generation_num_beams=1, generation_max_length=4,
    )  # fmt: skip
    trainer.train()
    (entry,) = [entry for entry in trainer.state.log_history if "loss" in entry]
    target = sum(count[0] for count in trainer.counted)
    assert target / entry["target_tokens_per_second"] < 1.0


def test_samples_of_each_evaluation_are_logged_with_source_and_reference(tmp_path) -> None:
    tokenizer, dataset = make_tokenizer(), make_dataset(12, seed=3)
    trainer = make_trainer(
        tmp_path, eval_dataset=dataset, compute_metrics=build_compute_metrics(tokenizer), generation_num_beams=1,
        generation_max_length=9, eval_samples=2, callbacks=[RunHistoryCallback()],
    )  # fmt: skip
    (tmp_path / "history.jsonl").touch()
    metrics = trainer.evaluate()
    (entry,) = [entry for entry in read_history(tmp_path / "history.jsonl") if "eval_samples" in entry]
    lines = entry["eval_samples"].split("\n")
    assert len(lines) == 2
    for row, line in zip(dataset, lines, strict=False):
        ids = trainer.model.generate(torch.tensor([row["input_ids"]]), num_beams=1, max_length=9)[0]
        decode = lambda ids: tokenizer.decode(ids, skip_special_tokens=True)  # noqa: E731
        assert line == f"{decode(row['input_ids'])} → {decode(ids)} (reference: {decode(row['labels'])})"
    assert "eval_samples" not in metrics  # numbers only: a search over hyperparameters adds them up
    trainer.args.eval_samples = 0
    trainer.evaluate()
    assert len(read_history(tmp_path / "history.jsonl")) == 3


def test_tensorboard_has_the_curves_and_the_samples(tmp_path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trainer = make_trainer(
        tmp_path, max_steps=2, report_to="tensorboard", max_grad_norm=10.0, eval_strategy="steps", eval_steps=2,
        eval_dataset=make_dataset(4), compute_metrics=build_compute_metrics(make_tokenizer()), generation_num_beams=1,
        generation_max_length=5,
    )  # fmt: skip
    trainer.train()
    (folder,) = {path.parent for path in tmp_path.rglob("events.out.tfevents*")}
    events = EventAccumulator(str(folder)).Reload()
    tags = events.Tags()
    curves = ("train/loss", "train/grad_norm", "train/learning_rate", "train/target_tokens_per_second", "eval/bleu")
    assert {*curves, "train/padding_percent", "eval/perplexity", "eval/unended_percent"} <= set(tags["scalars"])
    logged = [entry for entry in trainer.state.log_history if "eval_samples" in entry]
    (name,) = [tag for tag in tags["tensors"] if "samples" in tag]
    (text,) = events.Tensors(name)
    assert text.tensor_proto.string_val[0].decode() == logged[0]["eval_samples"]


class Scripted(VanillaTransformerTrainer):
    """Whose model says what the test wants."""

    answers: torch.Tensor

    def prediction_step(self, model, inputs, *args, **kwargs):
        rows = [self.by_source[tuple(token for token in row.tolist() if token)] for row in inputs["input_ids"]]
        width = max(map(len, rows))
        model.generate = lambda *args, **kwargs: torch.tensor([row + [0] * (width - len(row)) for row in rows])
        return super().prediction_step(model, inputs, *args, **kwargs)


def test_translations_without_end_and_copies_are_counted(tmp_path) -> None:
    dataset = make_dataset(10, seed=8)
    trainer = make_trainer(
        tmp_path, Scripted, eval_dataset=dataset, per_device_eval_batch_size=4, generation_max_length=20,
        compute_metrics=build_compute_metrics(make_tokenizer()),
    )  # fmt: skip
    trainer.by_source = {}
    for number, row in enumerate(dataset):
        answer = [2, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5]  # no end: 3 of 10
        if number >= 3:
            answer = [2, 4, 4, 1]
        if number >= 8:
            answer = [2, *row["input_ids"]]  # the source and its end: 2 of 10
        trainer.by_source[tuple(row["input_ids"])] = answer
    metrics = trainer.evaluate()
    assert metrics["eval_unended_percent"] == pytest.approx(30.0)
    assert metrics["eval_copied_percent"] == pytest.approx(20.0)


def test_a_loss_that_is_not_finite_shows_in_the_log_and_is_warned_of(tmp_path, caplog) -> None:
    model = make_model()
    with torch.no_grad():
        model.lm_head.weight[5, 0] = math.nan
    trainer = make_trainer(tmp_path, model=model, max_steps=2, callbacks=[TroubleWarningCallback()])
    trainer.train()
    assert math.isnan(trainer.state.log_history[0]["loss"])
    assert "Update 1: loss nan" in caplog.text
    assert "go back to the last checkpoint" in caplog.text


def test_without_translations_nothing_is_said_of_their_end(tmp_path) -> None:
    trainer = make_trainer(tmp_path, eval_dataset=make_dataset(5), predict_with_generate=False, model=make_model())
    assert not [name for name in trainer.evaluate() if "percent" in name]
