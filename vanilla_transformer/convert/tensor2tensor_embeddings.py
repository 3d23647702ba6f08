"""The embedding matrices of tensor2tensor: shards put together, and what else it adds to embeddings folded in."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from .renaming import ConversionError

TARGET_SPACE = "body/target_space_embedding/kernel"
_SHARD = re.compile(r"symbol_modality_(\d+)_(\d+)/(shared|input_emb|target_emb|softmax)/weights_(\d+)")


def join_shards(
    tensors: Mapping[str, Tensor], scale: float, target_space_id: int | None, source_vocab_size: int | None
) -> dict[str, Tensor]:
    """Return the tensors with "source_embedding", "target_embedding" and "softmax" in place of shards.

    Args:
        tensors: Tensors by their names in the model's scope.
        scale: What embeddings are multiplied by.
        target_space_id: The target space, whose embedding goes into the source embeddings.
        source_vocab_size: Size of the source vocabulary, where two "shared" matrices leave it open.

    Raises:
        ConversionError: Shards are missing, or it is open which matrix or which target space is meant.
    """
    shards: dict[tuple[str, int], dict[int, Tensor]] = {}
    others = {}
    for name, tensor in tensors.items():
        match = _SHARD.fullmatch(name)
        if match:
            shards.setdefault((match[3], int(match[1])), {})[int(match[4])] = tensor
        else:
            others[name] = tensor
    matrices = {key: _whole(key, parts) for key, parts in shards.items()}
    source = _one(matrices, "input_emb", source_vocab_size)
    target_size = next((size for kind, size in matrices if kind == "softmax"), None)
    if target_size is None and source_vocab_size is not None:
        target_size = next((size for kind, size in matrices if size != source_vocab_size), source_vocab_size)
    target = _one(matrices, "target_emb", target_size)
    softmax = _one(matrices, "softmax", target_size)
    if target[0].any():
        target = torch.cat([torch.zeros_like(target[:1]), target[1:]])
    if TARGET_SPACE in others:
        spaces = others.pop(TARGET_SPACE)
        if target_space_id is None or not 0 <= target_space_id < len(spaces):
            raise ConversionError(
                f"target_space_id={target_space_id}: this checkpoint adds the embedding of a target space to its "
                f"source; give its number, 0 to {len(spaces) - 1} (`target_space_id` of the problem's class)."
            )
        source = source + spaces[target_space_id] / scale
    elif target_space_id is not None:
        raise ConversionError(f"target_space_id={target_space_id}, and the checkpoint has no {TARGET_SPACE}.")
    return {**others, "source_embedding": source, "target_embedding": target, "softmax": softmax}


def _whole(key: tuple[str, int], parts: Mapping[int, Tensor]) -> Tensor:
    rows = sum(len(part) for part in parts.values())
    if set(parts) != set(range(len(parts))) or rows != key[1]:
        raise ConversionError(
            f"symbol_modality_{key[1]}_*/{key[0]}: the shards {sorted(parts)} have {rows} rows, not the {key[1]} of "
            "its name."
        )
    return torch.cat([parts[number] for number in range(len(parts))])


def _one(matrices: Mapping[tuple[str, int], Tensor], kind: str, size: int | None) -> Tensor:
    """Return the matrix of a kind, or the shared one in its place."""
    for name in (kind, "shared"):
        sizes = [rows for found, rows in matrices if found == name and size in (None, rows)]
        if len(sizes) == 1:
            return matrices[name, sizes[0]]
        if sizes:
            raise ConversionError(
                f"There are {name} matrices of {sizes} rows: source_vocab_size says which is the source's."
            )
    raise ConversionError(f"missing: symbol_modality_V_D/{kind}/weights_0, or shared ones; nothing was converted.")
