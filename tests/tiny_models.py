"""A tiny model's sizes, the ways in which its matrices can be shared, and a batch with padding."""

from __future__ import annotations

import torch
from torch import Tensor

# A few thousand parameters; sizes that could be mixed up differ.
TINY = {
    "vocab_size": 50,
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 40,
    "dropout": 0.0,
}
# The same for models of the library beside ours.
SMALL = {
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "d_model": 16,
}
SEPARATE = {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 37}
SHARING = {
    "tied": {},
    "untied": {"tie_word_embeddings": False},
    "separate": SEPARATE,
    "separate, untied": {**SEPARATE, "tie_word_embeddings": False},
}

# Three pairs of different lengths; the second source and the third target are the shortest.
SOURCES = [[11, 12, 13, 14, 15, 16, 1], [21, 22, 1], [31, 32, 33, 34, 1]]
TARGETS = [[2, 17, 18, 19, 20, 17], [2, 23, 24, 25, 26, 27, 28, 29], [2, 35]]


def pad(rows: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Return ids and mask, padded on the right."""
    width = max(map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    return ids, mask


def batch() -> dict[str, Tensor]:
    """Return `SOURCES` and `TARGETS` as the arguments of a model, padded on the right."""
    source, source_mask = pad(SOURCES)
    target, target_mask = pad(TARGETS)
    return {
        "input_ids": source,
        "attention_mask": source_mask,
        "decoder_input_ids": target,
        "decoder_attention_mask": target_mask,
    }


def randomise(model, std=0.4):
    """Give a fresh model weights so large that its outputs depend on its inputs."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1 and parameter.requires_grad:  # not Marian's sinusoids, which no checkpoint holds
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
    return model.eval()
