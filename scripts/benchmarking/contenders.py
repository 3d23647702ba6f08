"""Who takes part in training: this package's Trainer, MarianMT under the library's, torch.nn.Transformer, JoeyNMT.

Each makes whole updates of about as many real target tokens, data loading and optimizer with them, and a `Meter`
looks on.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import datasets
import numpy as np
import torch
from accelerate import skip_first_batches
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    DataCollatorForSeq2Seq,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    TrainerCallback,
)
from transformers.trainer_callback import PrinterCallback

from vanilla_transformer.batching import TokenBudgetBatchSampler, sequence_lengths
from vanilla_transformer.trainer import VanillaTransformerTrainer
from vanilla_transformer.training_arguments import VanillaTransformerTrainingArguments

from . import machine
from .workload import DROPOUT, LABEL_SMOOTHING, PAD, SIZES, Workload, training_flops

BATCH_SIZES = {"cpu": (16, 32, 64, 128), "cuda": (128, 256, 512, 1024)}  # of the peers, in pairs
TOKEN_BUDGETS = {"cpu": (1024, 2048, 4096), "cuda": (8192, 25_000)}  # of ours
UNSORTED_TOKEN_BUDGETS = {"cpu": (256, 512, 1024), "cuda": (8192, 25_000)}  # of JoeyNMT: a large batch is padded more
OURS, RANDOM, GROUPED, TORCH_NN, JOEYNMT = (
    "vanilla-transformer",
    "MarianMT random",
    "MarianMT by length",
    "torch.nn.Transformer",
    "JoeyNMT",
)
# What they are called on the command line.
CONTENDERS = {
    "ours": OURS,
    "marian": RANDOM,
    "marian_by_length": GROUPED,
    "torch_nn": TORCH_NN,
    "joeynmt": JOEYNMT,
}


def why_no_joeynmt() -> str | None:
    """Return why JoeyNMT, an optional peer, cannot be imported; None if it can."""
    try:
        from . import joey  # noqa: F401
    except ImportError as error:
        return str(error)
    return None


@dataclass(frozen=True)
class Settings:
    """How a contender is run.

    Args:
        batch: Pairs of a forward batch, or its token budget where batches go by tokens.
        bf16: Mixed precision.
        tokens_per_update: About as many real target tokens an update, by accumulation.
    """

    batch: int
    bf16: bool
    tokens_per_update: int

    def __str__(self) -> str:
        return f"{self.batch} {'bf16' if self.bf16 else 'fp32'}"


class Meter:
    """Real target tokens (no padding) and the clock, from the first batch that is put together.

    Args:
        device: Where the contender trains.
    """

    def __init__(self, device: str) -> None:
        self.device = device
        self.reset()

    def reset(self) -> None:
        """Forget what was seen."""
        self._start: float | None = None
        self._seen: list[Tensor | int] = []
        self.tokens = 0  # of the updates that have ended
        self.ends: list[tuple[float, int]] = []  # seconds and tokens so far, after each update

    def begin(self) -> None:
        """Start the clock, if it does not run."""
        if self._start is None:
            self._start = time.perf_counter()

    def count(self, tokens: Tensor | int) -> None:
        """Add the real target tokens of a batch; a tensor is not waited for."""
        self._seen.append(tokens)

    def end_update(self) -> None:
        """Take the time, once the device is done."""
        machine.synchronize(self.device)
        assert self._start is not None
        self.tokens += sum(map(int, self._seen))
        self._seen.clear()
        self.ends.append((time.perf_counter() - self._start, self.tokens))

    def rate(self) -> float:
        """Return the tokens a second of all updates."""
        seconds, tokens = self.ends[-1]
        return tokens / seconds

    def best_rate(self) -> float:
        """Return the tokens a second of the fastest update, which the machine's other work held up least."""
        starts = [(0.0, 0), *self.ends]
        return max((b[1] - a[1]) / (b[0] - a[0]) for a, b in itertools.pairwise(starts))


Run = Callable[[int], Meter]  # trains for so many updates


class _MeterCallback(TrainerCallback):
    def __init__(self, meter: Meter) -> None:
        self.meter = meter

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.meter.end_update()


def real_tokens(labels: Tensor) -> Tensor:
    """Return how many labels are no padding."""
    return (labels != -100).sum()


def watch(trainer: Any, collator: Any, meter: Meter) -> None:
    """Let a Trainer batch by `collator`, show it to the meter, and print nothing.

    Labels are counted where they are trained on: accelerate's loader puts one batch more together than is used.
    """
    step = trainer.training_step

    def collating(rows: list[Any]) -> Any:
        meter.begin()
        return collator(rows)

    def counting(model: nn.Module, inputs: dict[str, Any], *rest: Any, **named: Any) -> Any:
        meter.count(real_tokens(inputs["labels"]))
        return step(model, inputs, *rest, **named)

    trainer.data_collator, trainer.training_step = collating, counting
    trainer.add_callback(_MeterCallback(meter))
    trainer.remove_callback(PrinterCallback)


def quiet_arguments(folder: str, bf16: bool, device: str) -> dict[str, Any]:
    """Return training arguments of all contenders: nothing saved, logged or reported."""
    return {
        "output_dir": folder,
        "max_steps": 2,
        "bf16": bf16,
        "use_cpu": device == "cpu",
        "report_to": "none",
        "log_level": "error",
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
        "label_names": ["labels"],
        "dataloader_pin_memory": device != "cpu",
    }


def grouping_by_length() -> dict[str, Any]:
    """Return the library's option that groups batches by length, as the installed release calls it."""
    newer = "train_sampling_strategy" in Seq2SeqTrainingArguments.__dataclass_fields__  # since 5.2
    return {"train_sampling_strategy": "group_by_length"} if newer else {"group_by_length": True}


class TrainingBench:
    """The contenders on one workload.

    Args:
        workload: Size and vocabulary.
        dataset: Columns "input_ids" and "labels".
        tokenizer: For padding.
        device: Where to train.
    """

    def __init__(self, workload: Workload, dataset: datasets.Dataset, tokenizer: Any, device: str) -> None:
        self.workload, self.dataset, self.tokenizer, self.device = workload, dataset, tokenizer, device
        self.mean_target = statistics.mean(sequence_lengths(dataset, "labels"))
        self.mean_source = statistics.mean(sequence_lengths(dataset, "input_ids"))
        self._folder = tempfile.TemporaryDirectory()

    def make(self, name: str, settings: Settings) -> Run:
        """Return what trains `name` for a number of updates and gives what was seen of it."""
        if name == OURS:
            return self._ours(settings)
        if name == TORCH_NN:
            return self._torch_nn(settings)
        if name == JOEYNMT:
            return self._joeynmt(settings)
        return self._marian(settings, by_length=name == GROUPED)

    def batch_sizes(self, name: str, tokens_per_update: int) -> list[int]:
        """Return what a contender may choose its batch from, the smallest first."""
        kind = self.device.partition(":")[0]
        if name in (OURS, TORCH_NN):
            return [size for size in TOKEN_BUDGETS[kind] if size <= tokens_per_update] or [tokens_per_update]
        if name == JOEYNMT:
            return [size for size in UNSORTED_TOKEN_BUDGETS[kind] if size <= tokens_per_update] or [tokens_per_update]
        return [size for size in BATCH_SIZES[kind] if size * self.mean_target <= 2 * tokens_per_update] or [16]

    def whole_batch(self, name: str, tokens_per_update: int) -> int:
        """Return the batch of a contender that holds about so many real target tokens."""
        if name in (OURS, TORCH_NN):
            return tokens_per_update
        pairs = round(tokens_per_update / self.mean_target)
        if name != JOEYNMT:
            return pairs
        longer = np.maximum(sequence_lengths(self.dataset, "input_ids"), sequence_lengths(self.dataset, "labels"))
        return math.ceil(pairs * np.quantile(longer, pairs / (pairs + 1)))  # about the longest of so many by chance

    def flops_per_token(self) -> float:
        """Return the training FLOP a real target token of this data, its share of the source with it."""
        sources, targets = sequence_lengths(self.dataset, "input_ids"), sequence_lengths(self.dataset, "labels")
        return training_flops(self.workload.config(), list(sources), list(targets)) / sum(targets)

    def _accumulation(self, tokens_per_batch: float, settings: Settings) -> int:
        return max(1, round(settings.tokens_per_update / tokens_per_batch))

    def _ours(self, settings: Settings) -> Run:
        model = self.workload.ours()
        longer = max(self.mean_source, self.mean_target)
        accumulation = self._accumulation(0.93 * settings.batch * self.mean_target / longer, settings)
        arguments = VanillaTransformerTrainingArguments(
            **quiet_arguments(self._folder.name, settings.bf16, self.device),
            gradient_accumulation_steps=accumulation,
            max_tokens_per_batch=settings.batch,
            predict_with_generate=False,
        )
        trainer = VanillaTransformerTrainer(
            model, arguments, train_dataset=self.dataset, processing_class=self.tokenizer
        )
        return self._by_trainer(trainer, trainer.data_collator)

    def _marian(self, settings: Settings, by_length: bool) -> Run:
        model = self.workload.marian()
        accumulation = self._accumulation(settings.batch * self.mean_target, settings)
        options = quiet_arguments(self._folder.name, settings.bf16, self.device)
        options["gradient_accumulation_steps"] = accumulation
        if by_length:
            options |= grouping_by_length()
        arguments = Seq2SeqTrainingArguments(
            **options, per_device_train_batch_size=settings.batch, label_smoothing_factor=LABEL_SMOOTHING
        )
        collator = DataCollatorForSeq2Seq(self.tokenizer, model=model)  # with decoder_input_ids, for the smoother
        trainer = Seq2SeqTrainer(model, arguments, train_dataset=self.dataset, processing_class=self.tokenizer)
        return self._by_trainer(trainer, collator)

    def _by_trainer(self, trainer: Any, collator: Any) -> Run:
        """Return what lets a Trainer make some updates, each time from another place of its epoch.

        The library groups by length so that an epoch begins with its longest pairs.
        """
        meter = Meter(self.device)
        watch(trainer, collator, meter)
        loader, places = trainer.get_train_dataloader, random.Random(1)

        def from_a_place() -> Any:
            batches = loader()
            needed = trainer.args.max_steps * trainer.args.gradient_accumulation_steps
            return skip_first_batches(batches, places.randrange(max(1, len(batches) - needed)))

        trainer.get_train_dataloader = from_a_place

        def run(updates: int) -> Meter:
            meter.reset()
            trainer.args.max_steps = updates
            trainer.train()
            return meter

        return run

    def _torch_nn(self, settings: Settings) -> Run:
        model = PlainTransformer(self.workload).to(self.device).train()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, betas=(0.9, 0.98), eps=1e-9, fused=True)
        collator = DataCollatorForSeq2Seq(self.tokenizer)
        longer = max(self.mean_source, self.mean_target)
        accumulation = self._accumulation(0.93 * settings.batch * self.mean_target / longer, settings)
        sampler = TokenBudgetBatchSampler(
            sequence_lengths(self.dataset, "input_ids"),
            sequence_lengths(self.dataset, "labels"),
            settings.batch,
            seed=42,
        )
        loader = torch.utils.data.DataLoader(self.dataset, batch_sampler=sampler, collate_fn=collator)

        def loss_of(batch: Any) -> tuple[Tensor, Tensor | int]:
            labels = batch["labels"].to(self.device)
            return model(batch["input_ids"].to(self.device), labels), real_tokens(labels)

        return self._plain_loop(settings, loader, accumulation, optimizer, loss_of)

    @functools.cached_property
    def joey_pairs(self) -> Any:
        """The pairs as JoeyNMT has them."""
        from . import joey

        return joey.Pairs(self.dataset, self.tokenizer, self.workload.vocab_size)

    def _joeynmt(self, settings: Settings) -> Run:
        from . import joey

        pairs = self.joey_pairs
        model = joey.model(self.workload, pairs.vocabulary).to(self.device).train()
        loader, mean = pairs.batches(settings.batch, self.device)

        def loss_of(batch: Any) -> tuple[Tensor, Tensor | int]:
            batch.sort_by_src_length()  # as its own loop does
            return model(return_type="loss", **vars(batch))[0], batch.ntokens

        accumulation = self._accumulation(mean, settings)
        return self._plain_loop(settings, loader, accumulation, joey.optimizer(model.parameters()), loss_of)

    def _plain_loop(
        self,
        settings: Settings,
        loader: Any,
        accumulation: int,
        optimizer: torch.optim.Optimizer,
        loss_of: Callable[[Any], tuple[Tensor, Tensor | int]],
    ) -> Run:
        """Return what trains for some updates; `loss_of` gives a batch's summed loss and its real target tokens."""
        batches = self._forever(loader)
        meter = Meter(self.device)

        def run(updates: int) -> Meter:
            meter.reset()
            meter.begin()
            for _ in range(updates):
                optimizer.zero_grad()
                for batch in itertools.islice(batches, accumulation):
                    with torch.autocast(self.device.partition(":")[0], torch.bfloat16, enabled=settings.bf16):
                        loss, tokens = loss_of(batch)
                    meter.count(tokens)
                    (loss / settings.tokens_per_update).backward()
                optimizer.step()
                meter.end_update()
            return meter

        return run

    @staticmethod
    def _forever(loader: Any) -> Iterator[Any]:
        while True:
            yield from loader


class PlainTransformer(nn.Module):
    """torch.nn.Transformer with what it lacks of the paper's model, as one writes it by hand."""

    def __init__(self, workload: Workload) -> None:
        super().__init__()
        sizes = SIZES[workload.size]
        torch.manual_seed(1)
        self.embedding = nn.Embedding(workload.vocab_size, sizes["d_model"], padding_idx=PAD)
        nn.init.normal_(self.embedding.weight, std=sizes["d_model"] ** -0.5)
        self.transformer = nn.Transformer(
            sizes["d_model"],
            sizes["heads"],
            sizes["layers"],
            sizes["layers"],
            sizes["d_ff"],
            dropout=DROPOUT,
            batch_first=True,
        )
        position, half = torch.arange(1024)[:, None], torch.arange(0, sizes["d_model"], 2)
        angles = position * torch.exp(half * (-math.log(10_000.0) / sizes["d_model"]))
        self.positions: Tensor
        self.register_buffer("positions", torch.stack((angles.sin(), angles.cos()), -1).flatten(1), persistent=False)

    def _embed(self, ids: Tensor) -> Tensor:
        width = self.embedding.embedding_dim
        return F.dropout(
            self.embedding(ids) * math.sqrt(width) + self.positions[: ids.shape[1]], DROPOUT, self.training
        )

    def forward(self, source: Tensor, labels: Tensor) -> Tensor:
        """Return the summed smoothed loss of sources [B, S] and labels [B, T], -100 behind the end."""
        target = F.pad(labels.clamp(min=0)[:, :-1], (1, 0), value=2)
        causal = torch.ones(target.shape[1], target.shape[1], dtype=torch.bool, device=source.device).triu(1)
        output = self.transformer(
            self._embed(source),
            self._embed(target),
            tgt_mask=causal,
            src_key_padding_mask=source == PAD,
            memory_key_padding_mask=source == PAD,
            tgt_is_causal=True,
        )
        logits = F.linear(output, self.embedding.weight)
        return F.cross_entropy(
            logits.flatten(0, 1).float(), labels.flatten(), label_smoothing=LABEL_SMOOTHING, reduction="sum"
        )
