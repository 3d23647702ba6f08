"""Training: this package's Trainer against MarianMT under the library's, torch.nn.Transformer and JoeyNMT in a loop.

Each contender makes whole updates, data loading and optimizer with them, of about as many real target tokens; what is
reported is real target tokens (no padding) a second from the end of the first update to the end of the last.
"""

from __future__ import annotations

import functools
import itertools
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import datasets
import numpy as np
import torch
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
from .workload import DROPOUT, LABEL_SMOOTHING, PAD, SIZES, Workload, training_flops, word_tokenizer

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


@dataclass
class _Meter:
    """Real target tokens and the clock at the end of each update."""

    tokens: int = 0
    ends: list[tuple[float, int]] = field(default_factory=list)

    def count(self, labels: Tensor) -> None:
        self.tokens += int((labels != -100).sum())

    def end_update(self, device: str) -> None:
        machine.synchronize(device)
        self.ends.append((time.perf_counter(), self.tokens))

    def rate(self) -> float:
        """Tokens a second, the first update left out."""
        (first, before), (last, after) = self.ends[0], self.ends[-1]
        return (after - before) / (last - first)


class _MeterCallback(TrainerCallback):
    def __init__(self, meter: _Meter, device: str) -> None:
        self.meter, self.device = meter, device

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.meter.end_update(self.device)


def _run_trainer(trainer: Any, collator: Any, updates: int, device: str) -> float:
    """Train for one update and then so many more, and return the rate of the latter."""
    meter = _Meter()
    watch_labels(trainer, collator, meter.count)
    callback = _MeterCallback(meter, device)
    trainer.add_callback(callback)
    trainer.args.max_steps = updates + 1
    trainer.train()
    trainer.remove_callback(callback)
    return meter.rate()


def watch_labels(trainer: Any, collator: Any, count: Callable[[Tensor], None]) -> None:
    """Let a Trainer batch by `collator`, show the labels of each batch to `count`, and print nothing."""

    def counting(rows: list[Any]) -> Any:
        batch = collator(rows)
        count(batch["labels"])
        return batch

    trainer.data_collator = counting
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

    def make(self, name: str, settings: Settings) -> Callable[[int], float]:
        """Return what trains `name` for a number of updates and gives its rate."""
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

    def _ours(self, settings: Settings) -> Callable[[int], float]:
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
        collator = trainer.data_collator
        return lambda updates: _run_trainer(trainer, collator, updates, self.device)

    def _marian(self, settings: Settings, by_length: bool) -> Callable[[int], float]:
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
        return lambda updates: _run_trainer(trainer, collator, updates, self.device)

    def _torch_nn(self, settings: Settings) -> Callable[[int], float]:
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

        def loss_of(batch: Any) -> tuple[Tensor, int]:
            loss = model(batch["input_ids"].to(self.device), batch["labels"].to(self.device))
            return loss, int((batch["labels"] != -100).sum())

        return self._plain_loop(settings, loader, accumulation, optimizer, loss_of)

    @functools.cached_property
    def joey_pairs(self) -> Any:
        """The pairs as JoeyNMT has them."""
        from . import joey

        return joey.Pairs(self.dataset, self.tokenizer, self.workload.vocab_size)

    def _joeynmt(self, settings: Settings) -> Callable[[int], float]:
        from . import joey

        pairs = self.joey_pairs
        model = joey.model(self.workload, pairs.vocabulary).to(self.device).train()
        loader, mean = pairs.batches(settings.batch, self.device)

        def loss_of(batch: Any) -> tuple[Tensor, int]:
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
        loss_of: Callable[[Any], tuple[Tensor, int]],
    ) -> Callable[[int], float]:
        """Return what trains for some updates; `loss_of` gives a batch's summed loss and its real target tokens."""
        batches = self._forever(loader)

        def run(updates: int) -> float:
            meter = _Meter()
            for _ in range(updates + 1):
                optimizer.zero_grad()
                for batch in itertools.islice(batches, accumulation):
                    with torch.autocast(self.device.partition(":")[0], torch.bfloat16, enabled=settings.bf16):
                        loss, tokens = loss_of(batch)
                    meter.tokens += tokens
                    (loss / settings.tokens_per_update).backward()
                optimizer.step()
                meter.end_update(self.device)
            return meter.rate()

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


def best_settings(bench: TrainingBench, name: str, tokens_per_update: int, precisions: Sequence[bool]) -> Settings:
    """Return the settings with which a contender is fastest, tried on small updates.

    The precision is chosen with the smallest batch; then the batch grows as long as that is faster.
    """
    trial = min(max(512, tokens_per_update // 4), tokens_per_update)

    def rate(batch: int, bf16: bool) -> float:
        return bench.make(name, Settings(batch, bf16, trial))(1)

    smallest, *larger = bench.batch_sizes(name, tokens_per_update)
    rates = {bf16: rate(smallest, bf16) for bf16 in precisions}
    bf16 = max(rates, key=lambda precision: rates[precision])
    best, highest = smallest, rates[bf16]
    for batch in larger:
        found = rate(batch, bf16)
        if found < highest:
            break
        best, highest = batch, found
    return Settings(best, bf16, tokens_per_update)


def peak_memory_of(
    workload: Workload, name: str, settings: Settings, pairs: dict[str, Any], device: str
) -> dict[str, int]:
    """Return the peak memory of two updates in bytes: all, and before the model was made. For a process of its own."""
    bench = TrainingBench(workload, datasets.Dataset.from_dict(pairs), word_tokenizer(workload.vocab_size), device)
    if name == JOEYNMT:
        _ = bench.joey_pairs  # its imports are the libraries' share
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats(device)
        bench.make(name, settings)(1)
        return {"peak": torch.cuda.max_memory_allocated(device), "before": 0}
    before = machine.peak_memory()
    bench.make(name, settings)(1)
    return {"peak": machine.peak_memory(), "before": before}


def benchmark(
    workload: Workload,
    dataset: datasets.Dataset,
    tokenizer: Any,
    *,
    tokens_per_update: int,
    updates: int,
    rounds: int,
    device: str,
    gemm: dict[bool, float],
    contenders: Sequence[str] = (OURS, RANDOM, GROUPED, TORCH_NN),
    precisions: Sequence[bool] = (False, True),
    with_memory: bool = True,
    memory_tokens: int | None = None,
    seconds: float = math.inf,
) -> list[dict[str, Any]]:
    """Return a row a contender: settings, tokens a second, share of the matrix product's rate, ratio, memory.

    Args:
        workload: Size and vocabulary.
        dataset: Columns "input_ids" and "labels".
        tokenizer: For padding.
        tokens_per_update: Real target tokens an update.
        updates: Measured updates a round.
        rounds: Rounds; each contender runs once in each.
        device: Where to train.
        gemm: FLOP a second of a matrix product, by whether it is in bf16.
        contenders: Who takes part; the first is what the others are compared with.
        precisions: Whether bf16 may be chosen, fp32, or both.
        with_memory: Measure memory too, each in a process of its own, with an update in one forward batch.
        memory_tokens: Real target tokens of that update, if not the same.
        seconds: No further round begins after so many.
    """
    bench = TrainingBench(workload, dataset, tokenizer, device)
    chosen = {name: best_settings(bench, name, tokens_per_update, precisions) for name in contenders}
    runs = {name: bench.make(name, settings) for name, settings in chosen.items()}
    results = machine.alternate({name: functools.partial(run, updates) for name, run in runs.items()}, rounds, seconds)
    flops = bench.flops_per_token()
    pairs = dataset.select(range(min(len(dataset), 4000))).to_dict()
    rows = []
    for name, settings in chosen.items():
        rate = statistics.median(results[name])
        row: dict[str, Any] = {
            "workload": str(workload),
            "contender": name,
            "settings": str(settings),
            "tokens_per_second": rate,
            "all_rounds": results[name],
            "share_of_gemm": rate * flops / gemm[settings.bf16],
            "ours_over_this": machine.paired_ratio(results[contenders[0]], results[name]),
        }
        if with_memory:
            tokens = memory_tokens or tokens_per_update
            one_batch = Settings(bench.whole_batch(name, tokens), settings.bf16, tokens)
            row["memory"] = machine.in_own_process(peak_memory_of, workload, name, one_batch, pairs, device)
        rows.append(row)
    return rows
