"""Decoding limits of the paper (section 6.1): at most source length + 50 tokens for each sentence.

The cap belongs to the sentence, not to the batch: a batch's longest sentence must not change what another one gets.
`generate()` has one length for all rows, so the cap of each row is a stopping criterion, in every decoding mode.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, StoppingCriteria

NUM_BEAMS = 4  # section 6.1
MAX_LENGTH_OFFSET = 50  # section 6.1


class SentenceLengthCriteria(StoppingCriteria):
    """Stop each row at its own number of generated tokens.

    Args:
        max_new_tokens: Cap of each source sentence in tokens, the end token included, [B].
        prompt_length: Number of tokens that the decoder's input starts with, not counted.
    """

    def __init__(self, max_new_tokens: Tensor, prompt_length: int) -> None:
        self.max_new_tokens = max_new_tokens
        self.prompt_length = prompt_length

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """Return which rows of `input_ids` [rows, T] are full; rows are a multiple of B (beams, candidates)."""
        caps = self.max_new_tokens.to(input_ids.device)
        caps = caps.repeat_interleave(input_ids.shape[0] // caps.shape[0])
        return input_ids.shape[1] - self.prompt_length >= caps


def set_generation_defaults(generation_config: GenerationConfig) -> None:
    """Set what the paper decodes with on the `generation_config` of a fresh model."""
    generation_config.num_beams = NUM_BEAMS
    generation_config.max_length_offset = MAX_LENGTH_OFFSET


def length_offset(configs: list[GenerationConfig | None], generate_kwargs: dict[str, Any]) -> int | None:
    """Return the `max_length_offset` in force, or None where an explicit `max_length` / `max_new_tokens` rules.

    Args:
        configs: Generation configs, the most important first; None entries are skipped.
        generate_kwargs: The arguments of `generate()`, before all configs.

    Raises:
        ValueError: `max_length_offset` is not an integer of at least 0.
    """
    sources = [generate_kwargs, *(vars(config) for config in configs if config is not None)]
    if any(source.get(name) is not None for source in sources for name in ("max_length", "max_new_tokens")):
        return None
    offset = next((source["max_length_offset"] for source in sources if "max_length_offset" in source), None)
    if offset is not None and (not isinstance(offset, int) or isinstance(offset, bool) or offset < 0):
        raise ValueError(
            f"max_length_offset={offset!r} is not valid: it is the number of tokens that an output may be longer than "
            "its source, an integer of at least 0, or None for the library's own length limits."
        )
    return offset


def source_lengths(
    input_ids: Tensor | None, attention_mask: Tensor | None, states: Tensor | None, pad_token_id: int
) -> Tensor:
    """Return the unpadded length of each source sentence in tokens, the end token included, [B].

    Args:
        input_ids: Source tokens [B, S]; where there is no mask, padding is what equals `pad_token_id`, as in
            `generate()`.
        attention_mask: 1 for real tokens [B, S].
        states: Embeddings or encoder outputs [B, S, D], for sources without tokens.
        pad_token_id: Id of the padding token.
    """
    if attention_mask is not None:
        return attention_mask.sum(dim=-1)
    if input_ids is not None:
        return input_ids.ne(pad_token_id).sum(dim=-1)
    if states is not None:
        return torch.full((states.shape[0],), states.shape[1], device=states.device)
    raise ValueError("generate() needs a source: pass input_ids, inputs_embeds or encoder_outputs.")
