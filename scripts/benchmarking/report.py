"""Tables of results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .losses import FUSED, PLAIN


def table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return a Markdown table, its columns aligned; the first is text, the others stand to the right."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [
        max(len(str(name)), *(len(row[i]) for row in cells)) if cells else len(name) for i, name in enumerate(header)
    ]

    def line(row: Sequence[str]) -> str:
        return (
            "| "
            + " | ".join(
                c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))
            )
            + " |"
        )

    rule = "|" + "|".join("-" * (w + 2) if i == 0 else "-" * (w + 1) + ":" for i, w in enumerate(widths)) + "|"
    return "\n".join([line(list(header)), rule, *map(line, cells)])


def training_table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the table of a training benchmark."""
    return table(
        ["contender", "batch", "tokens/s", "ours is", "of GEMM rate", "memory MB", "of it the model's and step's"],
        [
            [
                row["contender"],
                row["settings"],
                f"{row['tokens_per_second']:,.0f}",
                f"{row['ours_over_this']:.2f}x",
                f"{row['share_of_gemm']:.0%}",
                megabytes(row, "peak"),
                megabytes(row, "peak", "before"),
            ]
            for row in rows
        ],
    )


def megabytes(row: dict[str, Any], name: str, minus: str | None = None) -> str:
    """Return a memory of a row in MB, or a dash."""
    memory = row.get("memory")
    if memory is None:
        return "-"
    return f"{(memory[name] - (memory[minus] if minus else 0)) / 1e6:,.0f}"


def loss_table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the table of the loss alone."""
    return table(
        ["d_model, V", "precision", "fused ms", "plain ms", "ratio", "fused MB", "plain MB"],
        [
            [
                f"{row['d_model']}, {row['vocab_size']:,}",
                "bf16" if row["bf16"] else "fp32",
                f"{row[f'{FUSED} seconds'] * 1e3:.0f}",
                f"{row[f'{PLAIN} seconds'] * 1e3:.0f}",
                f"{row['plain_over_fused']:.2f}x",
                *(
                    "-" if row.get(f"{kind} memory") is None else f"{row[f'{kind} memory'] / 1e6:,.0f}"
                    for kind in (FUSED, PLAIN)
                ),
            ]
            for row in rows
        ],
    )


def decoding_table(rows: Sequence[dict[str, Any]], sentences: int) -> str:
    """Return the table of a decoding benchmark."""
    return table(
        ["contender", "searches x batch", "seconds", "tokens/s", "ours fp32 is", "same output", "BLEU", "memory MB"],
        [
            [
                row["contender"],
                row["settings"],
                f"{row['seconds']:.2f}",
                f"{row['tokens_per_second']:,.0f}",
                f"{row['ours_over_this']:.2f}x",
                f"{row['same_as_ours']} of {sentences}",
                "-" if row["bleu"] is None else f"{row['bleu']:.2f}",
                megabytes(row, "peak", "before"),
            ]
            for row in rows
        ],
    )


def latency_table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the table of sentences decoded alone."""
    return table(
        ["contender", "ms a sentence", "ours fp32 is"],
        [[row["contender"], f"{row['seconds'] * 1e3:.0f}", f"{row['ours_over_this']:.2f}x"] for row in rows],
    )


def loading_table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the table of loading a model."""
    return table(
        ["model", "import s", "load s", "weights MB"],
        [
            [
                row["contender"],
                f"{row['import_seconds']:.2f}",
                f"{row['load_seconds']:.2f}",
                f"{row['bytes'] / 1e6:,.0f}",
            ]
            for row in rows
        ],
    )


def growth_table(curve: dict[str, Any]) -> str:
    """Return the table of one curve."""
    memory = curve.get("memory") or [None] * len(curve["x"])
    return table(
        [curve["axis"], "ms", "memory MB"],
        [
            [f"{x:,}", f"{y * 1e3:,.1f}", "-" if m is None else f"{m / 1e6:,.0f}"]
            for x, y, m in zip(curve["x"], curve["y"], memory, strict=True)
        ],
    )
