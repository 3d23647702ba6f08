"""The trainer against hand-written training loops, the library's own Trainer, and itself after an interruption."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from packaging.version import Version
from safetensors.torch import load_file
from tiny_models import randomise
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    DataCollatorForSeq2Seq,
    EarlyStoppingCallback,
    HfArgumentParser,
    MarianConfig,
    MarianMTModel,
    PreTrainedTokenizerFast,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    TrainerCallback,
)

from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from vanilla_transformer.batching import TokenBudgetBatchSampler, sequence_lengths
from vanilla_transformer.dataloading import token_budget_dataloader
from vanilla_transformer.metrics import build_compute_metrics
from vanilla_transformer.trainer import VanillaTransformerTrainer
from vanilla_transformer.training_arguments import VanillaTransformerTrainingArguments

VOCABULARY = 23


def make_tokenizer() -> PreTrainedTokenizerFast:
    words = ["<pad>", "</s>", "<s>", *(f"w{i}" for i in range(VOCABULARY - 3))]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="</s>", bos_token="<s>")


def make_dataset(pairs: int, seed: int = 0) -> datasets.Dataset:
    """Random sentences and their reversal, the target cut or kept, so that the sides differ in length."""
    rng = random.Random(seed)
    rows = [[rng.randrange(3, VOCABULARY) for _ in range(rng.randrange(2, 12))] for _ in range(pairs)]
    return datasets.Dataset.from_dict(
        {
            "input_ids": [[*row, 1] for row in rows],
            "labels": [[*row[::-1][: rng.randrange(1, 12)], 1] for row in rows],
            "source": ["unused"] * pairs,
        }
    )


def make_model(dropout: float = 0.1, label_smoothing: float = 0.1) -> VanillaTransformerForConditionalGeneration:
    torch.manual_seed(0)
    config = VanillaTransformerConfig(
        d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
        encoder_ffn_dim=32, decoder_ffn_dim=32, vocab_size=VOCABULARY, dropout=dropout,
        label_smoothing=label_smoothing,
    )  # fmt: skip
    return VanillaTransformerForConditionalGeneration(config)


def make_arguments(output: Path | str, **options: Any) -> VanillaTransformerTrainingArguments:
    """Quiet and small."""
    defaults = {
        "max_tokens_per_batch": 100, "warmup_steps": 10, "peak_lr": 3e-3, "bf16": False, "use_cpu": True,
        "report_to": "none", "disable_tqdm": True, "save_strategy": "no", "logging_steps": 1,
    }  # fmt: skip
    return VanillaTransformerTrainingArguments(output_dir=str(output), **{**defaults, **options})


def make_trainer(output: Path | str, trainer=VanillaTransformerTrainer, model=None, **options: Any) -> Any:
    extras = {
        key: options.pop(key)
        for key in ("train_dataset", "eval_dataset", "compute_metrics", "callbacks", "data_collator")
        if key in options
    }
    return trainer(
        model=make_model() if model is None else model,
        args=make_arguments(output, **options),
        processing_class=make_tokenizer(),
        **{"train_dataset": make_dataset(60), **extras},
    )


def weights(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


class Recording:
    """Notes the source ids of every training batch."""

    def training_step(self, model, inputs, *args, **kwargs):
        self.seen = [*getattr(self, "seen", []), inputs["input_ids"].tolist()]
        return super().training_step(model, inputs, *args, **kwargs)


class RecordingTrainer(Recording, VanillaTransformerTrainer):
    pass


class StockTrainer(Recording, Seq2SeqTrainer):
    """The library's, with our batches by the one line."""

    def __init__(self, output: Path | str, **options: Any) -> None:
        args = Seq2SeqTrainingArguments(
            output_dir=str(output), use_cpu=True, report_to="none", disable_tqdm=True,
            **{"save_strategy": "no", **options},
        )  # fmt: skip
        collate = DataCollatorForSeq2Seq(make_tokenizer())
        super().__init__(make_model(), args, data_collator=collate, train_dataset=make_dataset(60))
        self.get_train_dataloader = lambda: token_budget_dataloader(self, 100)


class Gradients(TrainerCallback):
    """Keeps the gradients of the last update, as the optimizer gets them."""

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.value = torch.cat([p.grad.flatten() for p in model.parameters()])


# ---------------------------------------------------------------------------------------------- arguments


def test_the_defaults_are_the_papers(tmp_path) -> None:
    args = VanillaTransformerTrainingArguments(output_dir=str(tmp_path))
    assert (args.adam_beta1, args.adam_beta2, args.adam_epsilon) == (0.9, 0.98, 1e-9)
    assert (args.weight_decay, args.max_grad_norm, args.label_smoothing_factor) == (0, 0, 0)
    assert (args.warmup_steps, args.max_steps, args.max_tokens_per_batch) == (4000, 100_000, 25_000)
    assert args.predict_with_generate is True
    assert args.ddp_find_unused_parameters is False


def test_the_length_of_training_is_set_once(tmp_path) -> None:
    make = lambda **options: VanillaTransformerTrainingArguments(output_dir=str(tmp_path), **options)  # noqa: E731
    assert make(num_train_epochs=2).max_steps == -1
    assert make(num_train_epochs=2).num_train_epochs == 2
    assert make(max_steps=7).max_steps == 7
    with pytest.raises(ValueError, match="max_steps=7 and num_train_epochs=2"):
        make(max_steps=7, num_train_epochs=2)
    with pytest.raises(ValueError, match="above 0"):
        make(num_train_epochs=-1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"noam_factor": 1.0, "peak_lr": 1e-3}, "one of the two"),
        ({"noam_factor": 0.0}, "noam_factor must be"),
        ({"peak_lr": float("inf")}, "peak_lr must be"),
        ({"learning_rate": 1e-3}, "learning_rate=0.001 has no effect"),
        ({"lr_scheduler_type": "cosine"}, "lr_scheduler_type=cosine has no effect"),
        ({"lr_scheduler_kwargs": {"num_cycles": 2}}, "lr_scheduler_kwargs"),
        ({"lr_schedule": "library", "peak_lr": 1e-3}, "noam_factor and peak_lr"),
        ({"lr_schedule": "constant"}, "lr_schedule must be"),
        ({"warmup_steps": 0}, "warmup_steps above 0"),
        ({"label_smoothing_factor": 0.1}, "config.label_smoothing"),
        ({"max_tokens_per_batch": -5}, "max_tokens_per_batch must be"),
        ({"max_tokens_per_batch": 9.5}, "max_tokens_per_batch must be"),
        ({"too_long": "skip"}, "too_long must be"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size"),
        ({"dataloader_drop_last": True}, "dataloader_drop_last"),
        ({"accelerator_config": {"dispatch_batches": True}}, "dispatch_batches"),
        ({"accelerator_config": {"split_batches": True}}, "split_batches"),
    ],
)
def test_wrong_or_contradicting_arguments_are_named(tmp_path, options, words) -> None:
    with pytest.raises(ValueError, match=words):
        VanillaTransformerTrainingArguments(output_dir=str(tmp_path), **options)


def test_the_librarys_orders_of_the_data_do_not_combine_with_token_budgets(tmp_path) -> None:
    names = {field.name for field in dataclasses.fields(VanillaTransformerTrainingArguments)}
    option = (
        {"train_sampling_strategy": "group_by_length"}
        if "train_sampling_strategy" in names
        else {"group_by_length": True}
    )
    with pytest.raises(ValueError, match="order of their own"):
        VanillaTransformerTrainingArguments(output_dir=str(tmp_path), **option)
    VanillaTransformerTrainingArguments(output_dir=str(tmp_path), max_tokens_per_batch=0, **option)


def test_arguments_come_from_the_command_line_and_survive_json(tmp_path) -> None:
    parser = HfArgumentParser(VanillaTransformerTrainingArguments)
    line = "--peak_lr 2e-3 --warmup_steps 150 --max_tokens_per_batch 1200 --bf16 false --too_long drop --max_steps 9"
    (args,) = parser.parse_args_into_dataclasses(["--output_dir", str(tmp_path), *line.split()])
    assert (args.peak_lr, args.warmup_steps, args.max_tokens_per_batch) == (2e-3, 150, 1200)
    assert (args.bf16, args.too_long, args.max_steps) == (False, "drop", 9)
    (off,) = parser.parse_args_into_dataclasses(["--output_dir", str(tmp_path), "--max_tokens_per_batch", "0"])
    assert off.max_tokens_per_batch is None
    written = json.loads(args.to_json_string())
    known = {field.name for field in dataclasses.fields(args) if field.init}
    again = VanillaTransformerTrainingArguments(**{key: value for key, value in written.items() if key in known})
    assert again.to_dict() == args.to_dict()
    assert dataclasses.replace(args, seed=3).peak_lr == 2e-3


@pytest.mark.parametrize(
    ("capabilities", "expected"),
    [
        ({"avx512_bf16": True}, True),
        ({"amx_bf16": True}, True),
        ({"avx512_f": True, "avx512_bf16": False}, False),
        (None, False),  # torch before 2.13 cannot tell
    ],
)
def test_bf16_follows_the_processor(tmp_path, monkeypatch, capabilities, expected) -> None:
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    if capabilities is None:
        monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    else:
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    make = lambda **options: VanillaTransformerTrainingArguments(  # noqa: E731
        output_dir=str(tmp_path), use_cpu=True, **options
    )
    assert make().bf16 is expected
    assert make().mixed_precision == ("bf16" if expected else "no")
    assert make(bf16=False).bf16 is False
    assert make(bf16=True).bf16 is True
    assert make(fp16=True).bf16 is False
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    assert make().mixed_precision == "fp16"


def test_bf16_on_a_machine_without_accelerator_needs_no_further_argument(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("vanilla_transformer.training_arguments._has_accelerator", lambda: False)
    args = VanillaTransformerTrainingArguments(output_dir=str(tmp_path), bf16=True)
    assert (args.bf16, args.use_cpu, args.device.type) == (True, True, "cpu")


# ---------------------------------------------------------------------------------------------- training


@pytest.mark.parametrize(
    ("weight_decay", "max_grad_norm"), [(0.0, 0.0), (0.1, 0.0), (0.0, 0.1)], ids=["paper", "decayed", "clipped"]
)
def test_updates_are_adams_at_the_papers_rate(tmp_path, weight_decay, max_grad_norm) -> None:
    """Against a training loop written here with torch's optimizers and clipping and the paper's formula.

    Weight decay spares biases and norms, as it does in the library.
    """
    dataset = make_dataset(60)
    trainer = make_trainer(
        tmp_path, model=make_model(0.0), peak_lr=None, noam_factor=0.02, max_steps=12, weight_decay=weight_decay,
        max_grad_norm=max_grad_norm,
    )  # fmt: skip
    trainer.train()

    model = make_model(0.0).train()
    matrices = {name for name, parameter in model.named_parameters() if parameter.dim() > 1}
    groups = [
        {"params": [p for name, p in model.named_parameters() if name in matrices], "weight_decay": weight_decay},
        {"params": [p for name, p in model.named_parameters() if name not in matrices], "weight_decay": 0.0},
    ]
    adam = (torch.optim.AdamW if weight_decay else torch.optim.Adam)(groups, betas=(0.9, 0.98), eps=1e-9)
    sampler = TokenBudgetBatchSampler(
        sequence_lengths(dataset, "input_ids"), sequence_lengths(dataset, "labels"), 100, seed=42
    )
    collate = DataCollatorForSeq2Seq(make_tokenizer())
    columns = dataset.remove_columns("source")
    rates, step, epoch = [], 0, 0
    while step < 12:
        sampler.set_epoch(epoch)
        for batch in sampler:
            step += 1
            if step > 12:
                break
            rates.append(0.02 * 16**-0.5 * min(step**-0.5, step * 10**-1.5))
            for group in groups:
                group["lr"] = rates[-1]
            model(**collate([columns[i] for i in batch])).loss.backward()
            if max_grad_norm:
                assert torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm) > max_grad_norm
            adam.step()
            adam.zero_grad()
        epoch += 1
    torch.testing.assert_close(weights(trainer.model), weights(model), rtol=0, atol=1e-6)
    logged = [entry["learning_rate"] for entry in trainer.state.log_history if "learning_rate" in entry]
    assert logged == pytest.approx(rates, rel=1e-6)


def test_batches_stay_within_the_budget_and_cover_the_data(tmp_path) -> None:
    trainer = make_trainer(tmp_path, RecordingTrainer, num_train_epochs=2)
    trainer.train()
    loader = trainer.get_train_dataloader()
    assert trainer.state.global_step == 2 * len(loader)
    assert trainer.num_examples(loader) == 60
    assert all(len(batch) * len(batch[0]) <= 100 for batch in trainer.seen)
    expected = sorted(map(str, make_dataset(60)["input_ids"]))
    for half in (trainer.seen[: len(loader)], trainer.seen[len(loader) :]):
        rows = [str([token for token in row if token != 0]) for batch in half for row in batch]
        assert sorted(rows) == expected
    assert trainer.seen[: len(loader)] != trainer.seen[len(loader) :]


def test_the_stock_trainer_gets_such_batches_by_one_line(tmp_path) -> None:
    trainer = StockTrainer(tmp_path, num_train_epochs=2)
    trainer.train()
    ours = make_trainer(tmp_path, RecordingTrainer, num_train_epochs=2)
    ours.train()
    assert trainer.seen == ours.seen


def test_the_stock_trainer_resumes_such_batches_in_the_middle_of_a_later_epoch(tmp_path) -> None:
    stop = len(StockTrainer(tmp_path).get_train_dataloader()) + 2
    straight = StockTrainer(tmp_path, max_steps=stop + 3, save_strategy="steps", save_steps=stop)
    straight.train()
    resumed = StockTrainer(tmp_path, max_steps=stop + 3)
    torch.manual_seed(99)  # nothing of the random state may be left over
    resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{stop}"))
    assert resumed.seen == straight.seen[stop:]
    assert torch.equal(weights(resumed.model), weights(straight.model))


def test_workers_and_seed_are_honoured(tmp_path) -> None:
    def batches(**options: Any) -> list[list[list[int]]]:
        loader = make_trainer(tmp_path, **options).get_train_dataloader()
        return [batch["input_ids"].tolist() for batch in loader]

    plain = batches()
    assert batches(dataloader_num_workers=2) == plain
    assert batches(seed=7) != plain
    assert batches(seed=7, data_seed=42) == plain


@pytest.mark.parametrize(("stop", "workers"), [(6, 0), (12, 0), (6, 2)])
def test_resumes_bit_exact_in_the_middle_of_an_epoch_and_at_the_end(tmp_path, stop, workers) -> None:
    straight = make_trainer(tmp_path / "straight", RecordingTrainer, max_steps=12, dataloader_num_workers=workers)
    straight.train()
    steps_an_epoch = len(straight.get_train_dataloader())
    assert 6 < steps_an_epoch < 12  # the first stop is within epoch 0, the twelfth update within epoch 1

    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop |= state.global_step == stop

    options = {
        "max_steps": 12, "save_strategy": "steps", "save_steps": stop, "dataloader_num_workers": workers,
    }  # fmt: skip
    first = make_trainer(tmp_path / "parts", RecordingTrainer, callbacks=[Stop()], **options)
    first.train()
    assert first.state.global_step == stop
    torch.manual_seed(99)  # nothing of the random state may be left over
    second = make_trainer(tmp_path / "parts", RecordingTrainer, **options)
    second.train(resume_from_checkpoint=True)
    assert second.state.global_step == 12
    assert [*first.seen, *getattr(second, "seen", [])] == straight.seen
    assert torch.equal(weights(second.model), weights(straight.model))


@pytest.mark.parametrize(
    "options", [{}, {"max_grad_norm": 0.1}, {"weight_decay": 0.1}], ids=["plain", "clipped", "decayed"]
)
def test_accumulation_of_two_equals_one_large_batch(tmp_path, options) -> None:
    dataset = make_dataset(16, seed=3)
    trained = []
    for batch, steps in ((16, 1), (8, 2)):
        trainer = make_trainer(
            tmp_path, model=make_model(0.0), train_dataset=dataset, max_tokens_per_batch=0, max_steps=3,
            per_device_train_batch_size=batch, gradient_accumulation_steps=steps, **options,
        )  # fmt: skip
        trainer.train()
        trained.append(weights(trainer.model))
    torch.testing.assert_close(*trained, rtol=0, atol=1e-6)
    assert (trained[0] - weights(make_model(0.0))).abs().max() > 1e-4


# Not the weights after the update are compared: Adam makes the same of gradients that are all twice too large.
GRADIENT_CASES: dict[str, dict[str, Any]] = {"plain": {}, "clipped": {"max_grad_norm": 0.1}, "bf16": {"bf16": True}}
BATCHES = 4  # of an update, over all accumulation steps and processes


def first_gradients(output: Path | str, processes: int, **options: Any) -> torch.Tensor:
    """Those of the first update of our trainer."""
    gradients = Gradients()
    make_trainer(
        output, model=make_model(0.0), gradient_accumulation_steps=BATCHES // processes, max_steps=1,
        callbacks=[gradients], **options,
    ).train()  # fmt: skip
    return gradients.value


def gradients_of_one_big_batch() -> torch.Tensor:
    """Of torch's smoothed cross-entropy over all the tokens of an update's pairs, padded together."""
    dataset = make_dataset(60)
    lengths = [sequence_lengths(dataset, column) for column in ("input_ids", "labels")]
    batches = list(TokenBudgetBatchSampler(*lengths, 100, seed=42))[:BATCHES]
    counts = [int(lengths[1][batch].sum()) for batch in batches]
    assert len(set(counts)) > 1  # uneven, so that a mean of means would differ
    rows = dataset.select_columns(["input_ids", "labels"]).select([i for batch in batches for i in batch])
    batch = DataCollatorForSeq2Seq(make_tokenizer())(list(rows))
    model = make_model(0.0).eval()  # which gives logits, and has no dropout to leave out
    F.cross_entropy(model(**batch).logits.transpose(1, 2), batch["labels"], label_smoothing=0.1).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def assert_gradients_of_one_big_batch(found: dict[str, torch.Tensor]) -> None:
    plain = gradients_of_one_big_batch()
    torch.testing.assert_close(found["plain"], plain, rtol=0, atol=1e-6)
    torch.testing.assert_close(found["clipped"], plain * 0.1 / plain.norm(), rtol=0, atol=1e-6)
    error = (found["bf16"] - plain).norm() / plain.norm()
    assert 0 < error < 0.02  # of eight bits


def test_accumulated_gradients_are_those_of_one_big_batch(tmp_path) -> None:
    assert_gradients_of_one_big_batch(
        {name: first_gradients(tmp_path, 1, **options) for name, options in GRADIENT_CASES.items()}
    )


def test_long_pairs_are_an_error_before_training_or_dropped(tmp_path) -> None:
    longest = {"input_ids": [[5] * 150], "labels": [[5, 1]], "source": ["unused"]}
    dataset = datasets.concatenate_datasets([make_dataset(20), datasets.Dataset.from_dict(longest)])
    with pytest.raises(ValueError, match="Pair 20 has 150 source and 2 target tokens"):
        make_trainer(tmp_path, train_dataset=dataset, max_steps=1).train()
    trainer = make_trainer(tmp_path, train_dataset=dataset, too_long="drop", num_train_epochs=1)
    trainer.train()
    assert trainer.num_examples(trainer.get_train_dataloader()) == 20


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("linear", [0, 0.0025, 0.005, 0.0075, 0.01, 0.0075, 0.005, 0.0025]),
        # The paper's formula, with its first update counted as step 0.
        ("inverse_sqrt", [0, *(0.01 * min(step / 4, (4 / step) ** 0.5) for step in range(1, 8))]),
    ],
)
def test_the_librarys_schedule_on_request(tmp_path, kind, expected) -> None:
    options = {"lr_schedule": "library", "peak_lr": None, "learning_rate": 1e-2, "lr_scheduler_type": kind}
    trainer = make_trainer(tmp_path, max_steps=8, **{**options, "warmup_steps": 4})
    trainer.train()
    logged = [entry["learning_rate"] for entry in trainer.state.log_history if "learning_rate" in entry]
    assert logged == pytest.approx(expected)


def test_a_share_of_the_updates_as_warmup_and_a_second_run_begin_anew(tmp_path) -> None:
    trainer = make_trainer(tmp_path, max_steps=8, warmup_steps=0.5)
    for _ in range(2):
        trainer.train()
        logged = [entry["learning_rate"] for entry in trainer.state.log_history if "learning_rate" in entry]
        assert max(logged) == logged[3] == pytest.approx(3e-3)


def test_bf16_trains_in_mixed_precision(tmp_path) -> None:
    trainer = make_trainer(tmp_path, bf16=True, max_steps=2)
    trainer.train()
    assert trainer.accelerator.mixed_precision == "bf16"
    assert {parameter.dtype for parameter in trainer.model.parameters()} == {torch.float32}
    assert math.isfinite(trainer.state.log_history[-1]["train_loss"])


def test_any_sequence_to_sequence_model_of_the_library_trains(tmp_path) -> None:
    torch.manual_seed(0)
    config = MarianConfig(
        vocab_size=VOCABULARY, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, pad_token_id=0, eos_token_id=1,
        decoder_start_token_id=2, forced_eos_token_id=None, num_beams=2, max_length=20,
    )  # fmt: skip
    trainer = make_trainer(
        tmp_path, model=MarianMTModel(config), max_steps=30, eval_dataset=make_dataset(10, seed=5),
        compute_metrics=build_compute_metrics(make_tokenizer()),
    )  # fmt: skip
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert np.mean(losses[-5:]) < np.mean(losses[:5])
    assert {"eval_loss", "eval_perplexity", "eval_bleu", "eval_chrf", "eval_gen_len"} <= set(trainer.evaluate())


def test_the_stock_trainer_smooths_labels_itself(tmp_path) -> None:
    """Its loss is F.cross_entropy's of the model's logits, whatever the model's own label_smoothing says."""
    model = make_model(0.0, label_smoothing=0.3)
    dataset = make_dataset(8)
    collate = DataCollatorForSeq2Seq(make_tokenizer(), model=model)
    args = Seq2SeqTrainingArguments(
        output_dir=str(tmp_path), label_smoothing_factor=0.1, max_steps=2, per_device_train_batch_size=8,
        use_cpu=True, report_to="none", disable_tqdm=True, save_strategy="no", logging_steps=1, learning_rate=1e-3,
        lr_scheduler_type="constant",
    )  # fmt: skip
    trainer = Seq2SeqTrainer(model, args, data_collator=collate, train_dataset=dataset)
    batch = collate([{k: row[k] for k in ("input_ids", "labels")} for row in dataset])
    with torch.no_grad():
        logits = model.eval()(**batch).logits
    expected = F.cross_entropy(logits.transpose(1, 2), batch["labels"], label_smoothing=0.1)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[0] == pytest.approx(float(expected), abs=1e-4)  # the log rounds
    assert losses[1] < losses[0]


def test_the_stock_trainer_trains_with_the_models_own_smoothing(tmp_path) -> None:
    model = make_model(0.0, label_smoothing=0.3)
    dataset = make_dataset(8)
    args = Seq2SeqTrainingArguments(
        output_dir=str(tmp_path), max_steps=1, per_device_train_batch_size=4, gradient_accumulation_steps=2,
        use_cpu=True, report_to="none", disable_tqdm=True, save_strategy="no", logging_steps=1,
    )  # fmt: skip
    collate = DataCollatorForSeq2Seq(make_tokenizer())
    batch = collate([{k: row[k] for k in ("input_ids", "labels")} for row in dataset])
    with torch.no_grad():
        logits = model.eval()(**batch).logits
    expected = F.cross_entropy(logits.transpose(1, 2), batch["labels"], label_smoothing=0.3)
    trainer = Seq2SeqTrainer(model, args, data_collator=collate, train_dataset=dataset)
    trainer.train()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(float(expected), abs=1e-4)


# ---------------------------------------------------------------------------------------------- evaluation


def test_the_evaluation_loss_is_the_mean_over_tokens_at_any_batch_size(tmp_path) -> None:
    dataset = make_dataset(23, seed=4)
    model = make_model()
    nll = tokens = 0.0
    for row in dataset:  # one sentence at a time, without padding
        labels = torch.tensor([row["labels"]])
        with torch.no_grad():
            logits = model.eval()(input_ids=torch.tensor([row["input_ids"]]), labels=labels).logits
        nll += float(F.cross_entropy(logits.double()[0], labels[0], reduction="sum"))
        tokens += labels.numel()
    for size in (1, 4, 64):
        for compute_metrics in (None, build_compute_metrics(make_tokenizer())):
            metrics = make_trainer(
                tmp_path, model=model, eval_dataset=dataset, per_device_eval_batch_size=size,
                compute_metrics=compute_metrics, generation_num_beams=1,
            ).evaluate()  # fmt: skip
            assert metrics["eval_loss"] == pytest.approx(nll / tokens, abs=1e-6)
            assert metrics["eval_perplexity"] == pytest.approx(math.exp(nll / tokens), rel=1e-5)
            assert ("eval_bleu" in metrics) == (compute_metrics is not None)


def test_logits_are_still_available_without_generation(tmp_path) -> None:
    dataset = make_dataset(7, seed=4)
    trainer = make_trainer(tmp_path, predict_with_generate=False, per_device_eval_batch_size=3)
    output = trainer.predict(dataset)
    with torch.no_grad():
        row = trainer.model(
            input_ids=torch.tensor([dataset[4]["input_ids"]]), labels=torch.tensor([dataset[4]["labels"]])
        ).logits[0]
    np.testing.assert_allclose(output.predictions[0][4, : len(row)], row.numpy(), atol=1e-5)


@pytest.mark.parametrize("each", [1, 3])
def test_predictions_come_in_the_order_of_the_dataset(tmp_path, each) -> None:
    """Sentence by sentence by `generate`, also for several translations each, from batches sorted by length."""
    dataset = make_dataset(10, seed=6)
    seen = []

    def compute_metrics(prediction):
        seen.append((prediction.predictions, prediction.label_ids))
        return {}

    trainer = make_trainer(tmp_path, per_device_eval_batch_size=4, compute_metrics=compute_metrics)
    output = trainer.predict(dataset, num_beams=3, num_return_sequences=each, max_new_tokens=6)
    assert len(output.predictions) == 10 * each
    assert len(output.label_ids) == 10
    for i, row in enumerate(dataset):
        alone = trainer.model.generate(
            torch.tensor([row["input_ids"]]), num_beams=3, num_return_sequences=each, max_new_tokens=6
        )
        for translation, expected in zip(output.predictions[i * each : (i + 1) * each], alone.tolist(), strict=True):
            kept = [token for token in translation.tolist() if token not in (0, 1, -100)]
            assert kept == [token for token in expected if token not in (0, 1)]
        assert [token for token in output.label_ids[i].tolist() if token not in (0, -100)] == row["labels"]
    np.testing.assert_array_equal(seen[0][0], output.predictions)
    np.testing.assert_array_equal(seen[0][1], output.label_ids)


def test_evaluation_leaves_the_generation_settings_alone(tmp_path) -> None:
    trainer = make_trainer(
        tmp_path, eval_dataset=make_dataset(5), compute_metrics=build_compute_metrics(make_tokenizer())
    )
    before = trainer.model.generation_config.to_dict()
    trainer.evaluate()
    assert trainer.model.generation_config.to_dict() == before
    # Sentences may be as long as the model's own settings allow, beyond the library's 20 tokens.
    output = trainer.predict(make_dataset(5), num_beams=1)
    assert output.predictions.shape[1] > 21


def test_generation_arguments_are_honoured(tmp_path, monkeypatch) -> None:
    trainer = make_trainer(
        tmp_path, eval_dataset=make_dataset(5), compute_metrics=build_compute_metrics(make_tokenizer()),
        generation_num_beams=2, generation_max_length=7,
    )  # fmt: skip
    seen = []
    generate = trainer.model.generate
    monkeypatch.setattr(
        trainer.model, "generate", lambda *args, **kwargs: seen.append(kwargs) or generate(*args, **kwargs)
    )
    trainer.evaluate()
    trainer.evaluate(num_beams=1, max_length=9)
    assert [(call["num_beams"], call["max_length"]) for call in seen] == [(2, 7), (1, 9)]


@pytest.mark.parametrize("metric", ["bleu", "chrf"])
def test_early_stopping_returns_to_the_best(tmp_path, metric) -> None:
    scores = iter([10.0, 30.0, 20.0, 25.0, 99.0])
    trainer = make_trainer(
        tmp_path, eval_dataset=make_dataset(4), compute_metrics=lambda prediction: {metric: next(scores)},
        callbacks=[EarlyStoppingCallback(early_stopping_patience=2)], max_steps=40, eval_strategy="steps",
        eval_steps=4, save_strategy="steps", save_steps=4, load_best_model_at_end=True, metric_for_best_model=metric,
        generation_num_beams=1, generation_max_length=4,
    )  # fmt: skip
    trainer.train()
    assert trainer.state.global_step == 16
    assert trainer.state.best_metric == 30.0
    saved = load_file(tmp_path / "checkpoint-8" / "model.safetensors")
    trained = dict(trainer.model.named_parameters())
    assert all(torch.equal(trained[name], value) for name, value in saved.items() if name in trained)
    later = load_file(tmp_path / "checkpoint-16" / "model.safetensors")
    assert not torch.equal(later["model.shared.weight"], saved["model.shared.weight"])


@pytest.mark.parametrize(
    ("metric", "greater"),
    [("bleu", True), ("eval_chrf", True), ("loss", False), ("perplexity", False), ("ter", False)],
)
def test_the_best_is_the_lowest_where_lower_is_better(tmp_path, metric, greater) -> None:
    assert make_arguments(tmp_path, metric_for_best_model=metric).greater_is_better is greater
    assert make_arguments(tmp_path, metric_for_best_model=metric, greater_is_better=True).greater_is_better is True


def test_a_best_checkpoint_that_was_removed_is_an_error_and_the_others_stay(tmp_path) -> None:
    scores = iter([30.0, 20.0, 10.0])

    class Remove(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 10:
                shutil.rmtree(tmp_path / "checkpoint-4")

    trainer = make_trainer(
        tmp_path, eval_dataset=make_dataset(4), compute_metrics=lambda prediction: {"bleu": next(scores)},
        callbacks=[Remove()], max_steps=12, eval_strategy="steps", eval_steps=4, save_strategy="steps", save_steps=4,
        load_best_model_at_end=True, metric_for_best_model="bleu", generation_num_beams=1, generation_max_length=4,
    )  # fmt: skip
    with pytest.raises(FileNotFoundError, match=r"checkpoint-4, was removed.* there: checkpoint-8, checkpoint-12\."):
        trainer.train()
    assert all((tmp_path / f"checkpoint-{step}" / "model.safetensors").is_file() for step in (8, 12))


# ---------------------------------------------------------------------------------------------- what does not fit


def test_streams_are_batched_in_sentences_on_request(tmp_path) -> None:
    stream = make_dataset(40).to_iterable_dataset()
    trainer = make_trainer(
        tmp_path, RecordingTrainer, train_dataset=stream, max_steps=2, max_tokens_per_batch=0,
        per_device_train_batch_size=5,
    )  # fmt: skip
    trainer.train()
    assert [len(batch) for batch in trainer.seen] == [5, 5]


def test_a_rate_set_later_is_not_ignored_either(tmp_path) -> None:
    trainer = make_trainer(tmp_path, max_steps=1)
    trainer.args.learning_rate = 1e-2  # as Trainer.hyperparameter_search does
    with pytest.raises(ValueError, match=r"learning_rate=0\.01 has no effect"):
        trainer.train()


def test_what_does_not_fit_is_named(tmp_path) -> None:
    with pytest.raises(ValueError, match="per_device_train_batch_size=16 has no effect"):
        make_trainer(tmp_path, per_device_train_batch_size=16)
    stream = make_dataset(3).to_iterable_dataset()
    with pytest.raises(ValueError, match="a stream is read by one worker"):
        make_trainer(tmp_path, train_dataset=stream, dataloader_num_workers=2)
    with pytest.raises(ValueError, match="set max_steps in place of num_train_epochs"):
        make_trainer(tmp_path, train_dataset=stream, num_train_epochs=2)
    with pytest.raises(ValueError, match='save_strategy="epoch"'):
        make_trainer(tmp_path, train_dataset=stream, save_strategy="epoch")
    with pytest.raises(ValueError, match="processing_class"):
        VanillaTransformerTrainer(make_model(), make_arguments(tmp_path), train_dataset=make_dataset(3))
    with pytest.raises(TypeError, match="VanillaTransformerTrainingArguments, got Seq2SeqTrainingArguments"):
        VanillaTransformerTrainer(make_model(), Seq2SeqTrainingArguments(output_dir=str(tmp_path), use_cpu=True))
    plain = make_dataset(5).rename_column("labels", "target")
    with pytest.raises(ValueError, match="no column 'labels'"):
        make_trainer(tmp_path, train_dataset=plain, max_steps=1).train()


# ---------------------------------------------------------------------------------------------- several processes


def resume(trainer: Any, step: int) -> Any:
    """The trainer, trained to its end from a checkpoint; None where the library cannot."""
    try:
        trainer.train(resume_from_checkpoint=str(Path(trainer.args.output_dir, f"checkpoint-{step}")))
    except RuntimeError as error:
        # transformers 5.0.0 on several CPU processes asks torch to load the optimizer to "cpu:0", which it refuses.
        if "cpu:0" not in str(error):
            raise
        return None
    return trainer


METRICS = (
    *("eval_loss", "loss_alone", "eval_bleu", "eval_chrf", "eval_gen_len"),
    *("eval_unended_percent", "eval_copied_percent"),
)


def run_part(output: Path, processes: int) -> None:
    """What one process of the test below does: train in two parts, evaluate, and write down what came out."""
    evaluation = make_dataset(21, seed=8)
    options: dict[str, Any] = {
        "gradient_accumulation_steps": 2 // processes,
        "max_steps": 10,
        "save_strategy": "steps",
        "save_steps": 3,
        "eval_dataset": evaluation,
        "compute_metrics": build_compute_metrics(make_tokenizer()),
        "generation_num_beams": 1,
        "generation_max_length": 8,
        "per_device_eval_batch_size": 4,
    }
    straight = make_trainer(output / "straight", RecordingTrainer, model=make_model(0.0), **options)
    straight.train()
    # A model that learned so little says the same to all: one whose translations differ is evaluated.
    varied = make_trainer(output / "varied", model=randomise(make_model(0.0)), **options)
    metrics = varied.evaluate()
    predicted = varied.predict(evaluation)
    varied.compute_metrics = None
    metrics["loss_alone"] = varied.evaluate()["eval_loss"]
    resumed = resume(make_trainer(output / "straight", RecordingTrainer, model=make_model(0.0), **options), 3)
    # A number of batches that is odd for one process: none may be seen twice to make it even for two.
    odd = make_trainer(output / "straight", max_tokens_per_batch=140).get_train_dataloader()
    options = {"max_steps": 24 // processes, "save_strategy": "steps", "save_steps": 7}
    stream, again = (
        make_trainer(
            output / "stream", RecordingTrainer, train_dataset=make_dataset(60).to_iterable_dataset(), **options
        )
        for _ in range(2)
    )
    stream.train()
    again = resume(again, 7)
    rank = straight.args.process_index
    torch.save(
        {
            "weights": weights(straight.model),
            "resumed": None if resumed is None else weights(resumed.model),
            "seen": straight.seen,
            "stream": stream.seen,
            "resumed stream": None if again is None else (again.seen, weights(again.model)),
            "stream weights": weights(stream.model),
            "gradients": {
                name: first_gradients(output / "gradients", processes, **options)
                for name, options in GRADIENT_CASES.items()
            },
            "metrics": {key: metrics[key] for key in METRICS},
            "predictions": predicted.predictions,
            "labels": predicted.label_ids,
            "odd": [[token for token in row if token] for batch in odd for row in batch["input_ids"].tolist()],
        },
        output / f"rank{rank}.pt",
    )


def test_two_processes_train_and_evaluate_as_one(tmp_path) -> None:
    """`accelerate launch` with two gloo processes against one process that accumulates two batches."""
    root = Path(__file__).parents[1]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)}
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file"]
    for name, command in (
        ("one", [sys.executable, __file__]),
        ("two", [*launch, str(root / "scripts" / "recipes" / "accelerate" / "ddp_cpu.yaml"), __file__]),
    ):
        (tmp_path / name).mkdir()
        done = subprocess.run(
            [*command, str(tmp_path / name)], env=environment, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr[-3000:]
    load = lambda path: torch.load(tmp_path / path, weights_only=False)  # noqa: E731
    one, ranks = load("one/rank0.pt"), [load("two/rank0.pt"), load("two/rank1.pt")]
    for rank in (one, *ranks):
        if rank["resumed stream"] is not None or Version(transformers.__version__) >= Version("5.24"):
            seen, trained = rank["resumed stream"]
            assert seen == rank["stream"][7:]
            assert torch.equal(trained, rank["stream weights"])
    for rank in ranks:
        assert_gradients_of_one_big_batch(rank["gradients"])
        torch.testing.assert_close(rank["weights"], one["weights"], rtol=0, atol=1e-6)
        if rank["resumed"] is not None or Version(transformers.__version__) >= Version("5.24"):
            torch.testing.assert_close(rank["resumed"], rank["weights"], rtol=0, atol=0)
        assert rank["metrics"] == pytest.approx(one["metrics"], abs=1e-6)
        np.testing.assert_array_equal(rank["predictions"], one["predictions"])
        # Each pair once, in order.
        assert [[x for x in row if x > 0] for row in rank["labels"].tolist()] == make_dataset(21, seed=8)["labels"][:]
    # What would be the same for all pairs would show no order, and a score of 0 no agreement.
    assert len({tuple(row) for row in one["predictions"].tolist()}) > 5
    assert one["metrics"]["eval_bleu"] > 0
    assert one["metrics"]["eval_chrf"] > 0
    taken = [batch for pair in zip(ranks[0]["seen"], ranks[1]["seen"], strict=True) for batch in pair]
    assert taken == one["seen"]
    # From a stream, too, each process has batches of its own, and together they have every pair once a pass.
    batches = [batch for pair in zip(ranks[0]["stream"], ranks[1]["stream"], strict=True) for batch in pair]
    rows = [[token for token in row if token] for batch in batches for row in batch]
    assert len(rows) >= 120
    for start in (0, 60):
        assert sorted(rows[start : start + 60]) == sorted(make_dataset(60)["input_ids"])
    assert sorted([*ranks[0]["odd"], *ranks[1]["odd"]]) == sorted(make_dataset(60)["input_ids"])


def test_adam_is_the_fused_one(tmp_path):
    trainer = make_trainer(tmp_path)
    optimizer = trainer.create_optimizer()
    assert type(optimizer).__name__ == "AdamW"
    assert optimizer.defaults["fused"] is True
    assert {group["weight_decay"] for group in optimizer.param_groups} == {0.0}  # which makes it Adam


if __name__ == "__main__":
    run_part(Path(sys.argv[1]), int(os.environ.get("WORLD_SIZE", "1")))
