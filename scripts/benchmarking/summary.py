"""The figures of a run at a glance: each of ours against each peer, by the median of the ratios within a round."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from . import contenders, decoding, losses, machine

Line = tuple[str, str, str]


def lines(results: dict[str, Any]) -> list[Line]:
    """Return lines of (what, against, measured) of the results of benchmark.py's commands, those that are there."""
    found = list(_training(results.get("train", ())))
    if rows := results.get("decode"):
        found += _decoding("decoding, the trained model", rows)
        found += _quality(rows)
    for workload, rows in results.get("decode_random", {}).items():
        found += _decoding(f"decoding, {workload}", rows)
    if rows := results.get("latency"):
        found.append(_against("one sentence alone, fp32", rows, decoding.OURS, decoding.MARIAN))
    for row in results.get("loss", ()):
        precision = "bf16" if row["bf16"] else "fp32"
        what = f"loss, d_model {row['d_model']}, V {row['vocab_size']:,}, {precision}"
        found.append((what, losses.PLAIN, f"{row['plain_over_fused']:.2f}x"))
    for size, (ours, theirs) in results.get("load", {}).items():
        ratio = _loading_seconds(theirs) / _loading_seconds(ours)
        found.append((f"import and load, {size}", theirs["contender"], f"{ratio:.2f}x"))
    return found


def _loading_seconds(row: dict[str, Any]) -> float:
    return float(row["import_seconds"] + row["load_seconds"])


def _training(rows: Iterable[dict[str, Any]]) -> Iterator[Line]:
    ours: dict[str, Any] = {}
    for row in rows:
        workload, name = row["workload"], row["contender"]
        if name.startswith(contenders.OURS):
            precision = row["settings"].split()[-1]
            yield f"training, {workload}, {precision}", "matrix product", f"{row['share_of_gemm']:.0%}"
            ours = row if name == contenders.OURS else ours
            continue
        yield f"training, {workload}, tokens/s", name, f"{row['ours_over_this']:.2f}x"
        if "memory" in row:
            mine, theirs = (one["memory"]["peak"] - one["memory"]["before"] for one in (ours, row))
            yield f"training, {workload}, peak memory", name, f"{mine / theirs:.0%}"


def _against(what: str, rows: list[dict[str, Any]], ours: str, peer: str) -> Line:
    rounds = {row["contender"]: row["all_rounds"] for row in rows}
    return what, peer, f"{machine.paired_ratio(rounds[peer], rounds[ours]):.2f}x"


def _decoding(what: str, rows: list[dict[str, Any]]) -> Iterator[Line]:
    there = {row["contender"] for row in rows}
    for ours, precision in ((decoding.OURS, "fp32"), (decoding.HALF, "bf16"), (decoding.INT8, "int8")):
        for peer in (decoding.MARIAN, decoding.MARIAN_HALF, decoding.MARIAN_THREADS, decoding.CT2, decoding.CT2_INT8):
            if {ours, peer} <= there:
                yield _against(f"{what}, {precision}", rows, ours, peer)


def _quality(rows: list[dict[str, Any]]) -> Iterator[Line]:
    by_name = {row["contender"]: row for row in rows}
    ours = by_name[decoding.OURS]
    yield "same translations, fp32", decoding.MARIAN, _share(by_name[decoding.MARIAN], ours)
    for name in (decoding.HALF, decoding.INT8):
        if name in by_name and ours["bleu"] is not None:
            yield f"BLEU, {name.split()[-1]}", decoding.OURS, f"{by_name[name]['bleu'] - ours['bleu']:+.2f}"


def _share(row: dict[str, Any], ours: dict[str, Any]) -> str:
    return f"{row['same_as_ours']:,} of {ours['same_as_ours']:,}"
