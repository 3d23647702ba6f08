"""Rename tables between another system's tensors and ours, strict both ways; folders that appear whole or not at all.

A table has a row for each tensor: their name to our name, "{i}" for the number of a layer. What is in no row, what a
row asks for and is not there, and what has another shape is an error that lists all of it; nothing is guessed.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from vanilla_transformer.output_folders import is_free
from vanilla_transformer.output_folders import whole_folder as whole

Table = Mapping[str, str]
_SHOWN = 12


class ConversionError(ValueError):
    """A model that cannot be converted as it is; the message says what does not fit."""


def weight_and_bias(theirs: str, ours: str) -> dict[str, str]:
    """Return the rows of a module that has both."""
    return {f"{theirs}.{kind}": f"{ours}.{kind}" for kind in ("weight", "bias")}


def invert(table: Table) -> dict[str, str]:
    """Return the table for the other direction."""
    inverse = {ours: theirs for theirs, ours in table.items()}
    if len(inverse) != len(table):
        raise ValueError("A table with two rows for one of our tensors has no inverse.")
    return inverse


def their_name(ours: str, table: Table) -> str:
    """Return what the tensor `ours` of the right side of `table` is called on its left; `ours` without a row."""
    for theirs, row in table.items():
        match = _pattern(row).fullmatch(ours)
        if match:
            return theirs.replace("{i}", match.groups()[0] if match.groups() else "")
    return ours


def rename(
    tensors: Mapping[str, Tensor],
    table: Table,
    shapes: Mapping[str, Sequence[int]],
    *,
    system: str,
    ignored: Sequence[str] = (),
) -> dict[str, Tensor]:
    """Return `tensors` under the names of the other side of `table`.

    Args:
        tensors: The source's tensors by its own names.
        table: Source name → target name, with "{i}" for numbers.
        shapes: The shape of every tensor that the target has to get, by its name there.
        system: Name of the other system, for messages.
        ignored: Source names (with "{i}") that carry nothing: buffers and copies. Each use says why in a comment.

    Raises:
        ConversionError: Unknown, missing or misshapen tensors, all of them in one message.
    """
    rows = [(_pattern(source), target) for source, target in table.items()]
    skipped = [_pattern(name) for name in ignored]
    found: dict[str, Tensor] = {}
    unknown: list[str] = []
    for name, tensor in tensors.items():
        for pattern, target in rows:
            match = pattern.fullmatch(name)
            if match:
                found[target.replace("{i}", match.groups()[0] if match.groups() else "")] = tensor
                break
        else:
            if not any(pattern.fullmatch(name) for pattern in skipped):
                unknown.append(name)
    problems = [f"unknown: {name}" for name in sorted(unknown)]
    problems += [f"missing: {their_name(name, table)}" for name in shapes if name not in found]
    problems += [
        f"no place for: {their_name(name, table)} (the configuration has no {name})"
        for name in found
        if name not in shapes
    ]
    problems += [
        f"wrong shape: {their_name(name, table)} is {list(found[name].shape)}, {list(shape)} is needed"
        for name, shape in shapes.items()
        if name in found and list(found[name].shape) != list(shape)
    ]
    if problems:
        raise ConversionError(
            f"The tensors do not fit between {system} and this model; nothing was converted:\n  {listed(problems)}"
        )
    return {name: found[name] for name in shapes}


def listed(problems: Sequence[str]) -> str:
    """Return problems as lines of a message, and of many the first ones and the number of the others."""
    more = [f"and {len(problems) - _SHOWN} more"] if problems[_SHOWN:] else []
    return "\n  ".join([*problems[:_SHOWN], *more])


def _pattern(name: str) -> re.Pattern[str]:
    return re.compile(re.escape(name).replace(re.escape("{i}"), r"(\d+)"))


def own_shapes(model: Any) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a model's tensors by name, each tied matrix once, under the name that the others copy."""
    copies = getattr(model, "all_tied_weights_keys", None) or {}
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if name not in copies}


def own_tensors(model: Any) -> dict[str, Tensor]:
    """Return a model's tensors by name, each tied matrix once."""
    state = model.state_dict()
    return {name: state[name] for name in own_shapes(model)}


def load_own_tensors(model: Any, tensors: Mapping[str, Tensor]) -> None:
    """Give a model the tensors of `own_shapes`, converted to its own types; tied copies follow."""
    state = model.state_dict()
    for name, tensor in tensors.items():
        state[name].copy_(tensor)  # tied names are one storage
    model.tie_weights()


def check_is_free(output_dir: str | Path) -> None:
    """Raise a ConversionError if `output_dir` exists and is not an empty folder."""
    output = Path(output_dir)
    if not is_free(output):
        raise ConversionError(f"{output} exists and is not an empty folder: choose another place to write to.")


@contextlib.contextmanager
def whole_folder(output_dir: str | Path) -> Iterator[Path]:
    """Give a folder to write into that takes the place of `output_dir` at the end, and is gone after an error.

    Raises:
        ConversionError: `output_dir` exists and is not an empty folder.
    """
    check_is_free(output_dir)
    with whole(Path(output_dir)) as scratch:
        yield scratch
