"""The arithmetic of docs/scaling.md, done again with the models themselves."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration

TEXT = Path(__file__).parents[1].joinpath("docs", "scaling.md").read_text(encoding="utf-8")
TOKENS = 25_000
RUNS = {"base": (100_000, 150e12), "big": (300_000, 250e12)}  # updates, FLOP/s assumed of an H100


def row(start: str, *, number: int = 0) -> list[float]:
    """The figures of a row of a table, its first cell left out."""
    lines = [line for line in TEXT.splitlines() if line.startswith(f"| {start}")]
    cells = lines[number].strip("|").split("|")[1:]
    return [float(re.search(r"[\d.]+(?:e\d+)?", cell)[0]) for cell in cells]


def matrices(name: str) -> dict[str, int]:
    """Elements of the matrices of the encoder, of the decoder and of the output projection."""
    with torch.device("meta"):
        config = getattr(VanillaTransformerConfig, name)(vocab_size=37_000)
        model = VanillaTransformerForConditionalGeneration(config)
    parts = {"encoder": model.model.encoder.layers, "decoder": model.model.decoder.layers, "output": model.lm_head}
    return {key: sum(p.numel() for p in part.parameters() if p.dim() > 1) for key, part in parts.items()}


@pytest.mark.parametrize("name", RUNS)
def test_flops_and_time(name):
    updates, speed = RUNS[name]
    size = matrices(name)
    flops = 6 * TOKENS * sum(size.values())
    expected = [size["encoder"] / 1e6, size["decoder"] / 1e6, size["output"] / 1e6, flops, flops * updates]
    assert row(f"{name}, ")[:5] == pytest.approx(expected, rel=0.01)
    hours = flops * updates / speed / 3600
    assert row(f"{name} |") == pytest.approx([hours, 3 * hours], rel=0.05)


@pytest.mark.parametrize("name", RUNS)
def test_memory_and_storage(name):
    parameters = getattr(VanillaTransformerConfig, name)(vocab_size=37_000).num_trainable_parameters()
    (training,) = re.findall(rf"{name} ([\d.]+) GB", TEXT, re.IGNORECASE)[:1]
    assert float(training) == pytest.approx(18 * parameters / 1e9, rel=0.05)
    storage = TEXT[TEXT.index("## Storage") :]
    (checkpoint,) = re.findall(rf"([\d.]+) GB for {name}", storage)[:1]
    assert float(checkpoint) == pytest.approx(12 * parameters / 1e9, rel=0.02)
    bytes_a_token = row(f"{name} |", number=1)[0] * 1e6
    (activations,) = re.findall(rf"([\d.]+) GB for {name}", TEXT[: TEXT.index("## Storage")])[:1]
    assert float(activations) == pytest.approx(TOKENS * bytes_a_token / 1e9, rel=0.02)


def test_a_hundred_million_pairs():
    pairs, length, rate = 100e6, 30, 6500
    update = 6 * TOKENS * sum(matrices("base").values()) / RUNS["base"][1]  # seconds
    steps = pairs * length / TOKENS
    for start, value in {
        "text": pairs * 2 * 150 / 1e9,
        "encoded, int32": pairs * 2 * (length * 4 + 8) / 1e9,
        "encoding": pairs / rate / 3600,
        "base, a pass": steps * update / 3600,
        "the plan": 100 * 72 / 1000,
    }.items():
        assert row(start)[-1] == pytest.approx(value, rel=0.05), start
    assert f"{steps:,.0f} updates" in TEXT
    assert f"{TOKENS / length / update:,.0f}"[:2] == "13"
    assert "13,000 a second" in TEXT
