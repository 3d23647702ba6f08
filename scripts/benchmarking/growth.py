"""Growth: what encoding, training and decoding cost as length, batch, beam and vocabulary grow, with their curves."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import torch

from vanilla_transformer import VanillaTransformerForConditionalGeneration

from . import machine
from .workload import EOS, Workload

LENGTHS = (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
BATCHES = (1, 4, 16, 64, 128)
BEAMS = (1, 2, 4, 8, 16)
VOCABULARIES = (2_000, 8_000, 16_000, 37_000, 64_000)
DECODED = 24  # tokens, forced


def _seconds(function: Any, rounds: int, device: str) -> float:
    return statistics.median(machine.timings(function, rounds, device))


def _random(rows: int, columns: int, device: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(3, 1_999, (rows, columns), generator=generator).to(device)


def encode_memory(workload: Workload, length: int) -> int:
    """Return the memory in bytes beyond the model's that encoding one source needs. For a process of its own."""
    model = workload.ours().eval()
    with torch.inference_mode():
        model.model.encoder(_random(1, 8, "cpu"))
        before = machine.peak_memory()
        model.model.encoder(_random(1, length, "cpu"))
    return machine.peak_memory() - before


def _encode_by_length(workload: Workload, rounds: int, device: str) -> dict[str, Any]:
    model = workload.ours().eval().to(device)
    seconds, memory = [], []
    for length in LENGTHS:
        source = _random(1, length, device)
        with torch.inference_mode():
            seconds.append(_seconds(lambda: model.model.encoder(source), rounds, device))  # noqa: B023
        memory.append(machine.in_own_process(encode_memory, workload, length) if device == "cpu" else None)
    config, layers = model.config, model.config.encoder_layers
    width, inner = config.d_model, config.encoder_ffn_dim
    expected = [layers * n * (8 * width**2 + 4 * width * inner + 4 * width * n) for n in LENGTHS]
    return {
        "name": "encode",
        "axis": "source tokens",
        "x": LENGTHS,
        "y": seconds,
        "expected": expected,
        "memory": memory,
    }


def _decode(model: VanillaTransformerForConditionalGeneration, source: torch.Tensor, beams: int) -> None:
    with torch.inference_mode():
        model.generate(source, num_beams=beams, min_new_tokens=DECODED, max_new_tokens=DECODED)


def _decode_by_batch(workload: Workload, rounds: int, device: str) -> dict[str, Any]:
    model = workload.ours().eval().to(device)
    sources = {size: _random(size, 16, device) for size in BATCHES}
    seconds = [_seconds(lambda: _decode(model, sources[size], 4), rounds, device) for size in BATCHES]  # noqa: B023
    expected = list(BATCHES)
    return {"name": "decode", "axis": "sentences, 4 beams", "x": BATCHES, "y": seconds, "expected": expected}


def _decode_by_beams(workload: Workload, rounds: int, device: str) -> dict[str, Any]:
    model = workload.ours().eval().to(device)
    source = _random(16, 16, device)
    seconds = [_seconds(lambda: _decode(model, source, beams), rounds, device) for beams in BEAMS]  # noqa: B023
    return {"name": "decode", "axis": "beams, 16 sentences", "x": BEAMS, "y": seconds, "expected": list(BEAMS)}


def _train_by_vocabulary(workload: Workload, rounds: int, device: str) -> dict[str, Any]:
    seconds = []
    source, labels = _random(64, 16, device), _random(64, 16, device)
    labels[:, -1] = EOS
    for size in VOCABULARIES:
        model = Workload(workload.size, size).ours().train().to(device)
        seconds.append(_seconds(lambda: model(source, labels=labels).loss.backward(), rounds, device))  # noqa: B023
    config = workload.config()
    body = config.encoder_layers * (4 * config.d_model**2 + 2 * config.d_model * config.encoder_ffn_dim)
    body += config.decoder_layers * (8 * config.d_model**2 + 2 * config.d_model * config.decoder_ffn_dim)
    expected = [body + config.d_model * size for size in VOCABULARIES]
    return {
        "name": "train, 1,024 tokens",
        "axis": "vocabulary",
        "x": VOCABULARIES,
        "y": seconds,
        "expected": expected,
    }


def benchmark(workload: Workload, *, rounds: int, device: str) -> list[dict[str, Any]]:
    """Return the curves: a name, an axis, its values, seconds, the operations expected, and memory for encoding."""
    return [
        measure(workload, rounds, device)
        for measure in (_encode_by_length, _decode_by_batch, _decode_by_beams, _train_by_vocabulary)
    ]


def plot(curves: list[dict[str, Any]], path: Path, title: str) -> None:
    """Draw the curves, each with the expected growth, scaled to its last point, and memory where it is known."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullFormatter

    figure = Figure(figsize=(14, 3.4), layout="constrained")
    for axes, curve in zip(figure.subplots(1, len(curves)), curves, strict=True):
        scale = curve["y"][-1] / curve["expected"][-1]
        axes.loglog(curve["x"], curve["y"], "o-", label="measured")
        axes.loglog(curve["x"], [value * scale for value in curve["expected"]], "--", label="arithmetic operations")
        axes.set(title=curve["name"], xlabel=curve["axis"], ylabel="seconds")
        axes.grid(alpha=0.3)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_minor_formatter(NullFormatter())  # on less than a decade they would lie on each other
        memory = curve.get("memory")
        if memory and None not in memory:
            beside = axes.twinx()
            beside.loglog(curve["x"], [value / 1e6 for value in memory], "s:", color="gray", label="memory")
            beside.set_ylabel("MB beyond the model's")
            beside.legend(fontsize=8, loc="lower right")
        axes.legend(fontsize=8, loc="upper left")
    figure.suptitle(title, fontsize=9)
    figure.savefig(path, dpi=110)
