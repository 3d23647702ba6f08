"""Position encodings in CTranslate2: a table of them, or none, for those that it computes itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vanilla_transformer.attention_vanilla_transformer import sinusoids
from vanilla_transformer.configuration_vanilla_transformer import (
    POSITION_EMBEDDING_TYPES,
    SINUSOID_LAYOUTS,
    VanillaTransformerConfig,
)

from .renaming import ConversionError

# What CTranslate2 computes itself where a file has no table: sines first, tensor2tensor's exponents, from position 1.
COMPUTED_POSITIONS = {
    "position_embedding_type": "sinusoidal_tensor2tensor",
    "sinusoid_layout": "halves",
    "position_offset": 1,
}
_FURTHEST_OFFSET = 1024  # sinusoids that begin later are read as learned positions


def position_table(config: VanillaTransformerConfig, num_positions: int) -> Tensor | None:
    """Return a sinusoidal model's encodings of its first positions [num_positions, D], or None: CTranslate2's own."""
    if all(getattr(config, name) == value for name, value in COMPUTED_POSITIONS.items()):
        return None
    return sinusoids(torch.arange(num_positions) + config.position_offset, config).float()


def position_fields(tables: Sequence[Tensor | None]) -> dict[str, Any]:
    """Return our fields for the position encodings [positions, D] of the two stacks.

    A table that is one of our sinusoids, rounded, becomes that kind of position, without a limit; any other is
    "learned". Tables made in float32 differ from ours, made in float64, by 1e-7 times the position.
    """
    kinds = [COMPUTED_POSITIONS if table is None else _sinusoid_fields(table) for table in tables]
    if kinds[0] != kinds[1]:
        raise ConversionError(f"Encoder and decoder have other positions: {kinds[0]} and {kinds[1]}.")
    return dict(kinds[0])


def _sinusoid_fields(table: Tensor) -> dict[str, Any]:
    if table.dim() != 2:
        raise ConversionError(f"Position encodings have the shape {list(table.shape)}: a matrix is needed.")
    length, width = table.shape
    rounding = 2.0**-20
    for dtype, step in ((torch.float16, 2.0**-11), (torch.bfloat16, 2.0**-8)):
        if torch.equal(table, table.to(dtype).float()):
            rounding = step
    for kind in POSITION_EMBEDDING_TYPES[:2] if width % 2 == 0 and width >= 4 else ():
        for layout in SINUSOID_LAYOUTS:
            fields: dict[str, Any] = {"position_embedding_type": kind, "sinusoid_layout": layout}
            config = VanillaTransformerConfig(
                d_model=width, encoder_attention_heads=1, decoder_attention_heads=1, **fields
            )
            starts = sinusoids(torch.arange(_FURTHEST_OFFSET), config)  # [offsets, D]
            offset = int((starts - table[0]).abs().amax(dim=1).argmin())
            positions = torch.arange(length) + offset
            error = (sinusoids(positions, config) - table).abs().amax(dim=1)
            if bool((error <= rounding + 2.0**-22 * positions).all()):
                return {**fields, "position_offset": offset}
    return {"position_embedding_type": "learned", "max_position_embeddings": length}
