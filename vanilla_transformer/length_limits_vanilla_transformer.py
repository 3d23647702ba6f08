"""How long a translation may get (section 6.1): each sentence its own source length + 50 tokens.

`generate()` has one length for all rows, so the cap of each row is a stopping criterion, in every decoding mode.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.generation import StoppingCriteria


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


def decoder_prompt_length(prompt: Tensor | None, decoder_start_token_id: int) -> int:
    """Return the number of tokens that decoding starts with; `prompt` are the decoder's input ids [B, T], if given."""
    if prompt is None:
        return 1
    # generate() puts the start token before a prompt that has none.
    return prompt.shape[1] + int(bool((prompt[:, 0] != decoder_start_token_id).all()))


def pad_behind_end(
    output: Any, prompt_length: int, caps: Tensor | None, eos_token_id: int | list[int] | None, pad_token_id: int
) -> Any:
    """Return what `generate()` gave, with padding behind each sentence's end token and cap.

    The library's beam search takes a padding id of 0 for none and fills up with the end token (5.0 to 5.24), so that a
    sentence that was cut looks finished; without an end token, greedy search goes on behind the cap.

    Args:
        output: Token ids [rows, T], or an output object that has them as `sequences`; anything else is returned as is.
        prompt_length: Number of tokens at the beginning that were given.
        caps: Most tokens that each source sentence may get [B]; rows are a multiple of B.
        eos_token_id: The end token, or several, or None.
        pad_token_id: What to fill up with.
    """
    sequences = output if isinstance(output, Tensor) else getattr(output, "sequences", None)
    if not isinstance(sequences, Tensor):
        return output
    generated = sequences[:, prompt_length:]
    ends = [] if eos_token_id is None else eos_token_id if isinstance(eos_token_id, list) else [eos_token_id]
    is_end = torch.isin(generated, torch.tensor(ends, dtype=generated.dtype, device=generated.device)).int()
    behind = is_end.cumsum(dim=-1) > is_end
    if caps is not None:
        rows = caps.to(generated.device).repeat_interleave(generated.shape[0] // caps.shape[0])
        behind |= torch.arange(generated.shape[1], device=generated.device) >= rows[:, None]
    generated.masked_fill_(behind, pad_token_id)
    return output
