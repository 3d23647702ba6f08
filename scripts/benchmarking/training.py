"""Training: the contenders by turns, each with its own best settings: tokens a second, share of the hardware, memory.

What is reported is real target tokens (no padding) a second, over whole updates.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import datasets
import torch

from . import machine
from .contenders import GROUPED, JOEYNMT, OURS, RANDOM, TORCH_NN, Run, Settings, TrainingBench
from .workload import Workload, word_tokenizer


def best_settings(
    bench: TrainingBench,
    name: str,
    tokens_per_update: int,
    precisions: Sequence[bool],
    trial: int = 1024,
    tries: int = 3,
) -> Settings:
    """Return the settings with which a contender is fastest, tried on updates of about `trial` tokens or one batch.

    The precision is chosen with the smallest batch; then the batch grows as long as that is not clearly slower. Of
    `tries` updates the fastest counts: the first of a fresh model does more, and any may meet a busy moment.
    """

    def rate(batch: int, bf16: bool) -> float:
        return bench.make(name, Settings(batch, bf16, min(trial, tokens_per_update)))(tries).best_rate()

    smallest, *larger = bench.batch_sizes(name, tokens_per_update)
    rates = {bf16: rate(smallest, bf16) for bf16 in precisions}
    bf16 = max(rates, key=lambda precision: rates[precision])
    best, highest = smallest, rates[bf16]
    for batch in larger:
        found = rate(batch, bf16)
        if found > highest:
            best, highest = batch, found
        elif found < 0.95 * highest:
            break
    return Settings(best, bf16, tokens_per_update)


@dataclass(frozen=True)
class Row:
    """A line of the table: its label, who it is, and how it runs."""

    label: str
    contender: str
    settings: Settings


def peak_memory_of(
    workload: Workload, name: str, settings: Settings, pairs: dict[str, Any], device: str
) -> dict[str, int]:
    """Return the peak memory of two updates in bytes: all, and before the model was made. For a process of its own."""
    bench = TrainingBench(workload, datasets.Dataset.from_dict(pairs), word_tokenizer(workload.vocab_size), device)
    if name == JOEYNMT:
        _ = bench.joey_pairs  # its imports are the libraries' share
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats(device)
        bench.make(name, settings)(2)
        return {"peak": torch.cuda.max_memory_allocated(device), "before": 0}
    before = machine.peak_memory()
    bench.make(name, settings)(2)
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
    contenders: Sequence[str] = (OURS, RANDOM, GROUPED, TORCH_NN),
    precisions: Sequence[bool] = (False, True),
    with_memory: bool = True,
    trial: int = 1024,
    tries: int = 3,
    known: dict[str, Settings] | None = None,
    seconds: float = math.inf,
) -> list[dict[str, Any]]:
    """Return a row a contender: settings, tokens a second, share of the matrix product's rate, ratio, memory.

    Ours has a row in its other precision too, for its share of the hardware there. The matrix product is timed in each
    round, beside those whose share it measures.

    Args:
        workload: Size and vocabulary.
        dataset: Columns "input_ids" and "labels".
        tokenizer: For padding.
        tokens_per_update: Real target tokens an update.
        updates: Measured updates a round.
        rounds: Rounds; each contender runs once in each.
        device: Where to train.
        contenders: Who takes part; the first is what the others are compared with.
        precisions: Whether bf16 may be chosen, fp32, or both.
        with_memory: Measure memory too, each in a process of its own, with an update in one forward batch.
        trial: Real target tokens of an update when settings are tried.
        tries: Updates of each trial.
        known: Settings of contenders, which are not tried again; those found now are added.
        seconds: No further round begins after so many.
    """
    bench = TrainingBench(workload, dataset, tokenizer, device)
    known = {} if known is None else known
    for name in contenders:
        if name not in known:
            known[name] = best_settings(bench, name, tokens_per_update, precisions, trial, tries)
    rows = [Row(name, name, known[name]) for name in contenders]
    if OURS in contenders and len(precisions) > 1:
        best = rows[contenders.index(OURS)].settings
        other = dataclasses.replace(best, bf16=not best.bf16)
        rows.append(Row(f"{OURS}, the other precision", OURS, other))
    runs = {row.label: bench.make(row.contender, row.settings) for row in rows}
    for run in runs.values():
        run(1)  # not measured: first calls, fresh memory, the optimizer's state
    measured = {label: functools.partial(_rate, run, updates) for label, run in runs.items()}
    for bf16 in {row.settings.bf16 for row in rows}:
        measured[_gemm(bf16)] = functools.partial(machine.gemm_rate, _dtype(bf16), device)
    results = machine.alternate(measured, rounds, seconds)
    flops = bench.flops_per_token()
    pairs = dataset.select(range(min(len(dataset), 4000))).to_dict()
    found = []
    for row in rows:
        rates = results[row.label]
        figures: dict[str, Any] = {
            "workload": str(workload),
            "contender": row.label,
            "settings": str(row.settings),
            "tokens_per_second": statistics.median(rates),
            "all_rounds": rates,
            "share_of_gemm": flops * machine.paired_ratio(rates, results[_gemm(row.settings.bf16)]),
            "ours_over_this": machine.paired_ratio(results[rows[0].label], rates),
        }
        if with_memory and row.label == row.contender:
            whole = dataclasses.replace(row.settings, batch=bench.whole_batch(row.contender, tokens_per_update))
            figures["memory"] = machine.in_own_process(peak_memory_of, workload, row.contender, whole, pairs, device)
        found.append(figures)
    return found


def _rate(run: Run, updates: int) -> float:
    return run(updates).rate()


def _dtype(bf16: bool) -> torch.dtype:
    return torch.bfloat16 if bf16 else torch.float32


def _gemm(bf16: bool) -> str:
    return f"matrix product {_dtype(bf16)}"
