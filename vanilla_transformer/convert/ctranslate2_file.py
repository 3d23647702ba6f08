"""The files of a CTranslate2 folder: model.bin, config.json, vocabularies.

model.bin has binary version 6, little-endian, as `ctranslate2.specs.ModelSpec` writes it:

    uint32 version, string specification, uint32 revision
    uint32 number of variables, of each: string name, uint8 rank, uint32 × rank shape, uint8 type, uint32 bytes, data
    uint32 number of aliases, of each: string alias, string name of the variable that it stands for

A string is a uint16 length, its bytes and a closing zero, which the length counts. Every size is checked against what
is left of the file before anything of that size is read or made, so a file can't ask for more memory than it has.
"""

from __future__ import annotations

import json
import math
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from .renaming import ConversionError

BINARY_VERSION = 6  # of CTranslate2 3.0 (2022) to 4.8

# The library's names by the number of CTranslate2's `Activation`; the first of each is the one that reading gives.
ACTIVATIONS: tuple[tuple[str, ...], ...] = (
    ("relu",),
    ("gelu_pytorch_tanh", "gelu_new", "gelu_fast", "gelu_accurate", "gelu_python_tanh"),
    ("silu", "swish"),
    ("gelu", "gelu_python"),
    ("quick_gelu",),
    ("tanh",),
    ("sigmoid",),
)
# In the order of `DataType` in CTranslate2's types.h: the type is stored as its place here.
_DTYPES = (torch.float32, torch.int8, torch.int16, torch.int32, torch.float16, torch.bfloat16)
_QUANTISED = (torch.int8, torch.int16)
_DEFAULT_LAYER_NORM_EPS = 1e-5  # where config.json has none
_MOST_AXES = 8
_SMALLEST_VARIABLE = 2 + 2 + 1 + 1 + 4 + 1  # a name of one letter, rank 0, type, size, one byte
_SMALLEST_ALIAS = 2 * (2 + 2)


@dataclass
class ModelFile:
    """What a model.bin holds.

    Args:
        specification: Name of the kind of model, "TransformerSpec" for an encoder-decoder.
        revision: Revision of that specification.
        variables: Tensors by name, aliases too (an alias is the same tensor object); scalars have no axis.
        aliases: The name of the variable that an alias stands for, by alias.
    """

    specification: str
    revision: int
    variables: dict[str, Tensor]
    aliases: dict[str, str]


def read_model_file(path: str | Path) -> ModelFile:
    """Read a model.bin, quantised matrices as the float32 matrices that they stand for.

    Args:
        path: The file.

    Returns:
        Its content; every floating tensor is float32, in memory of its own.

    Raises:
        ConversionError: No such file, another binary version, or a file that is cut off or damaged: says where.
    """
    path = Path(path)
    if not path.is_file():
        raise ConversionError(
            f"{path} does not exist: a CTranslate2 model is a folder with model.bin and config.json."
        )
    with path.open("rb") as stream:
        reader = _Reader(stream, path)
        version = reader.number("I", "binary version")
        if version != BINARY_VERSION:
            raise ConversionError(
                f"{path} has binary version {version}, and {BINARY_VERSION} can be read: convert the original model "
                "again with CTranslate2 3.0 or newer (or this is no CTranslate2 model)."
            )
        specification = reader.string("specification")
        revision = reader.number("I", "revision")
        variables: dict[str, Tensor] = {}
        for _ in range(reader.count("variables", _SMALLEST_VARIABLE)):
            name = reader.string("name of a variable")
            if name in variables:
                reader.fail(f"the variable {name} is there twice")
            variables[name] = reader.tensor(name)
        aliases: dict[str, str] = {}
        for _ in range(reader.count("aliases", _SMALLEST_ALIAS)):
            alias, name = reader.string("alias"), reader.string("name behind an alias")
            if alias in variables or alias in aliases:
                reader.fail(f"the variable {alias} is there twice")
            if name not in variables:
                reader.fail(f"{alias} stands for {name}, which is not there")
            aliases[alias] = name
        if reader.left():
            reader.fail(f"{reader.left()} bytes follow the end of the model")
    variables = _dequantised(variables, path)
    variables.update({alias: variables[name] for alias, name in aliases.items() if name in variables})
    return ModelFile(specification, revision, variables, aliases)


class _Reader:
    """Reads the parts of a file in their order; none beyond the file's end."""

    def __init__(self, stream: BinaryIO, path: Path) -> None:
        self.stream = stream
        self.path = path
        self.size = os.fstat(stream.fileno()).st_size

    def left(self) -> int:
        return self.size - self.stream.tell()

    def fail(self, reason: str) -> None:
        raise ConversionError(f"{self.path} is damaged or cut off: at byte {self.stream.tell()}, {reason}.")

    def take(self, size: int, what: str) -> bytes:
        if size > self.left():
            self.fail(f"{what} needs {size} bytes and {self.left()} are left")
        return self.stream.read(size)

    def number(self, kind: str, what: str) -> int:
        layout = f"<{kind}"
        return int(struct.unpack(layout, self.take(struct.calcsize(layout), what))[0])

    def count(self, what: str, smallest: int) -> int:
        number = self.number("I", f"number of {what}")
        if number * smallest > self.left():
            self.fail(f"{number} {what} can't be in the {self.left()} bytes that are left")
        return number

    def string(self, what: str) -> str:
        raw = self.take(self.number("H", what), what)
        text = raw[:-1]
        if not text or raw[-1] or 0 in text:
            self.fail(f"{what} is empty or has no closing zero")
        try:
            return text.decode("utf-8")
        except UnicodeDecodeError:
            self.fail(f"{what} is not UTF-8")
            raise

    def tensor(self, name: str) -> Tensor:
        rank = self.number("B", f"rank of {name}")
        if rank > _MOST_AXES:
            self.fail(f"{name} has {rank} axes, more than {_MOST_AXES}")
        shape = [self.number("I", f"shape of {name}") for _ in range(rank)]
        kind = self.number("B", f"type of {name}")
        if kind >= len(_DTYPES):
            self.fail(f"{name} has the unknown type {kind}")
        stored = self.number("I", f"size of {name}")
        size = math.prod(shape) * _DTYPES[kind].itemsize  # no overflow: Python's integers
        if size != stored or not size:
            self.fail(f"{name} of shape {shape} and {_DTYPES[kind]} has {size} bytes, and {stored} are given")
        data = bytearray(self.take(size, name))
        return torch.frombuffer(data, dtype=_DTYPES[kind]).reshape(shape)


def _dequantised(variables: dict[str, Tensor], path: Path) -> dict[str, Tensor]:
    """Undo the quantisation: int8 has a scale a row, int16 one a matrix, and stored = round(value · scale)."""
    floating: dict[str, Tensor] = {}
    scales = {f"{name}_scale" for name in variables if f"{name}_scale" in variables}
    for name, tensor in variables.items():
        scale = variables.get(f"{name}_scale")
        if name in scales:
            continue
        if scale is None:
            if tensor.dtype in _QUANTISED and tensor.dim():
                raise ConversionError(f"{path} holds {name} quantised ({tensor.dtype}) without its {name}_scale.")
            floating[name] = tensor.float() if tensor.is_floating_point() else tensor
            continue
        if tensor.dtype not in _QUANTISED or tensor.dim() != 2 or scale.shape not in ((), (1,), tensor.shape[:1]):
            raise ConversionError(
                f"{path} holds {name} ({tensor.dtype}, {list(tensor.shape)}) with a scale of shape "
                f"{list(scale.shape)}: int8 or int16 matrices with one scale, or one a row, can be read."
            )
        scale = scale.float().reshape(-1, 1)
        if not bool((scale.isfinite() & (scale > 0)).all()):
            raise ConversionError(f"{path} holds {name}_scale with values that are not positive numbers.")
        floating[name] = tensor.float() / scale
    return floating


# ---------------------------------------------------------------------------------------- config.json and vocabularies


@dataclass
class FolderSettings:
    """What the small files of a CTranslate2 folder say.

    Args:
        source: The source vocabulary's tokens by id.
        target: The target's.
        layer_norm_eps: ε of all LayerNorms.
        names: Names of tokens by role: "bos_token", "eos_token", "decoder_start_token", "pad_token"; None: not said.
        added: Tokens that CTranslate2 itself puts at the source's two ends, None where it puts none.
    """

    source: list[str]
    target: list[str]
    layer_norm_eps: float
    names: dict[str, str | None]
    added: tuple[str | None, str | None]


def read_settings(folder: Path) -> FolderSettings:
    """Read config.json and the vocabularies.

    Raises:
        ConversionError: A file is missing or damaged, or config.json has a field that our class has no place for.
    """
    config = _json(folder / "config.json", dict)
    if config.pop("multi_query_attention", False):
        raise ConversionError("multi_query_attention=true can't be converted: our heads have keys of their own.")
    eps = config.pop("layer_norm_epsilon", None)
    eps = _DEFAULT_LAYER_NORM_EPS if eps is None else eps
    roles = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "decoder_start_token": "<s>"}
    names = {role: config.pop(role, default) for role, default in {**roles, "pad_token": None}.items()}
    bos, eos = (config.pop(f"add_source_{end}", False) for end in ("bos", "eos"))
    wrong = {role: name for role, name in names.items() if not isinstance(name, str | None)}
    if config or wrong or isinstance(eps, bool) or not isinstance(eps, (int, float)):
        raise ConversionError(
            f"{folder / 'config.json'} has fields that can't be converted: { ({**config, **wrong} or eps)!r:.200}"
        )
    shared = _vocabulary(folder, "shared")
    source, target = (shared or _vocabulary(folder, side) for side in ("source", "target"))
    if not source or not target:
        raise ConversionError(
            f"{folder} has no vocabulary: shared_vocabulary.json, or one of the source and one of "
            "the target, is needed."
        )
    added = names["bos_token"] if bos else None, names["eos_token"] if eos else None
    return FolderSettings(source, target, float(eps), names, added)


def _json(path: Path, kind: type) -> Any:
    if not path.is_file():
        raise ConversionError(
            f"{path} does not exist: a CTranslate2 model is a folder with model.bin and config.json."
        )
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConversionError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, kind):
        raise ConversionError(f"{path} holds a {type(value).__name__}, and a {kind.__name__} is needed.")
    return value


def _vocabulary(folder: Path, side: str) -> list[str] | None:
    path = folder / f"{side}_vocabulary.json"
    if path.is_file():
        tokens = _json(path, list)
    else:
        path = path.with_suffix(".txt")  # of CTranslate2 before 3.9
        if not path.is_file():
            return None
        try:
            tokens = path.read_bytes().decode("utf-8").removesuffix("\n").split("\n")
        except UnicodeDecodeError as error:
            raise ConversionError(f"{path} is not UTF-8: {error}") from error
        if all(token.endswith("\r") for token in tokens):  # line ends of Windows
            tokens = [token[:-1] for token in tokens]
    if not all(isinstance(token, str) for token in tokens):
        raise ConversionError(f"{path} holds tokens that are no strings.")
    return list(tokens)
