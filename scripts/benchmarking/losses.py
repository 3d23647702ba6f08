"""The loss: output projection and label-smoothed cross-entropy with gradients, fused against torch's own two calls."""

from __future__ import annotations

import statistics
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from vanilla_transformer.loss_vanilla_transformer import label_smoothed_loss

from . import machine

SIZES = [(256, 8_000), (512, 8_000), (512, 37_000)]  # d_model, V
FUSED, PLAIN = "fused", "lm_head + F.cross_entropy"


def _run(kind: str, hidden: torch.Tensor, lm_head: nn.Linear, labels: torch.Tensor, bf16: bool) -> None:
    lm_head.weight.grad = hidden.grad = None
    with torch.autocast(hidden.device.type, torch.bfloat16, enabled=bf16):
        if kind == FUSED:
            loss = label_smoothed_loss(hidden, lm_head, labels, label_smoothing=0.1)
        else:
            loss = F.cross_entropy(lm_head(hidden).float(), labels, label_smoothing=0.1)
    loss.backward()


def _inputs(width: int, vocab_size: int, tokens: int, device: str) -> tuple[torch.Tensor, nn.Linear, torch.Tensor]:
    torch.manual_seed(1)
    lm_head = nn.Linear(width, vocab_size, bias=False, device=device)
    hidden = torch.randn(tokens, width, device=device, requires_grad=True)
    return hidden, lm_head, torch.randint(vocab_size, (tokens,), device=device)


def peak_memory_of(kind: str, width: int, vocab_size: int, tokens: int, bf16: bool, device: str) -> int:
    """Return the memory in bytes that the loss needs beyond its inputs and gradients. For a process of its own."""
    inputs = _inputs(width, vocab_size, tokens, device)
    inputs[0].grad, inputs[1].weight.grad = torch.zeros_like(inputs[0]), torch.zeros_like(inputs[1].weight)
    _run(kind, *_inputs(width, 64, 8, device), bf16)  # what libraries allocate once
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        _run(kind, *inputs, bf16)
        return torch.cuda.max_memory_allocated(device) - before
    before = machine.peak_memory()
    _run(kind, *inputs, bf16)
    return machine.peak_memory() - before


def benchmark(
    sizes: list[tuple[int, int]], *, tokens: int, rounds: int, device: str, with_memory: bool = True
) -> list[dict[str, Any]]:
    """Return a row for each (d_model, V) and precision: milliseconds and peak memory of both ways."""
    rows = []
    for width, vocab_size in sizes:
        for bf16 in (False, True):
            inputs = _inputs(width, vocab_size, tokens, device)
            runs = {
                kind: (lambda kind=kind: machine.timed(lambda: _run(kind, *inputs, bf16), 1, device))  # noqa: B023
                for kind in (FUSED, PLAIN)
            }
            results = machine.alternate(runs, rounds)
            row: dict[str, Any] = {"d_model": width, "vocab_size": vocab_size, "tokens": tokens, "bf16": bf16}
            for kind in (FUSED, PLAIN):
                row[f"{kind} seconds"] = statistics.median(results[kind])
                if with_memory:
                    arguments = (kind, width, vocab_size, tokens, bf16, device)
                    row[f"{kind} memory"] = machine.in_own_process(peak_memory_of, *arguments)
            row["plain_over_fused"] = machine.paired_ratio(results[PLAIN], results[FUSED])
            rows.append(row)
    return rows
