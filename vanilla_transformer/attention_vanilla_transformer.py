"""Positions, masks and attention of the Transformer (sections 3.2 and 3.5 of "Attention Is All You Need").

Axes in shape comments: B batch, S source tokens, T target tokens, P tokens already in the cache, D d_model, H heads,
K d_k. In every attention mask 1 or True means: attend.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, EncoderDecoderCache
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask
from transformers.modeling_outputs import Seq2SeqLMOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import is_torchdynamo_compiling

from .configuration_vanilla_transformer import VanillaTransformerConfig
from .dropout_vanilla_transformer import dropout as drop

# The library renamed `past_key_values` to `cache` in 5.24; its own output class says which name is in force.
CACHE_NAME = "cache" if "cache" in Seq2SeqLMOutput.__dataclass_fields__ else "past_key_values"
_CAUSAL_MASK_ARGUMENTS = inspect.signature(create_causal_mask).parameters
# Queries times keys up to which `_trains_faster_plainly`: 32 tokens, 64 in half precision.
_SHORT, _SHORT_HALF = 32 * 32, 64 * 64
_CACHE_UPDATE_ARGUMENTS = inspect.signature(Cache.update).parameters


# ---------------------------------------------------------------------------------------- positions (section 3.5)


def sinusoids(positions: Tensor, config: VanillaTransformerConfig) -> Tensor:
    """Return the position encodings of section 3.5.

        PE(pos, 2i) = sin(pos / 10000^(2i / d_model)),   PE(pos, 2i + 1) = cos(the same)

    Angles are formed in float64 (float32 where a device has no float64), so that they are right at any position.
    tensor2tensor's variant, which fairseq took over, has i / (d_model/2 - 1) for 2i / d_model.

    Args:
        positions: Integer positions, any shape [...].
        config: Gives `d_model`, `position_embedding_type` and `sinusoid_layout`.

    Returns:
        [..., D] in float64 (float32 where a device has no float64).
    """
    half = config.d_model // 2
    wide = torch.float32 if positions.device.type == "mps" else torch.float64
    denominator = half - 1 if config.position_embedding_type == "sinusoidal_tensor2tensor" else half
    exponents = torch.arange(half, device=positions.device, dtype=wide) / denominator
    angles = positions[..., None].to(wide) * torch.exp(exponents * -math.log(10_000.0))  # [..., D/2]
    pair = (angles.sin(), angles.cos())
    if config.sinusoid_layout == "interleaved":
        return torch.stack(pair, dim=-1).flatten(-2)
    return torch.cat(pair, dim=-1)


class SinusoidalPositions(nn.Module):
    """Computed anew in each forward pass: any length, nothing learned, nothing saved, nothing stale after loading."""

    def __init__(self, config: VanillaTransformerConfig) -> None:
        super().__init__()
        self.config = config

    def forward(self, positions: Tensor) -> Tensor:
        """Return the encodings [..., D] of integer `positions` [...]."""
        return sinusoids(positions, self.config)


class LearnedPositions(nn.Embedding):
    """Table 3 row E: a trained vector for each position up to `max_position_embeddings`."""

    def __init__(self, config: VanillaTransformerConfig) -> None:
        super().__init__(config.max_position_embeddings + config.position_offset, config.d_model)


def make_positions(config: VanillaTransformerConfig) -> SinusoidalPositions | LearnedPositions:
    """Return the position module that `config.position_embedding_type` names."""
    return LearnedPositions(config) if config.position_embedding_type == "learned" else SinusoidalPositions(config)


def add_positions(
    embeddings: Tensor,
    embed_positions: nn.Module,
    config: VanillaTransformerConfig,
    attention_mask: Tensor | None,
    past_length: int | Tensor = 0,
) -> Tensor:
    """Return embedding · sqrt(d_model) + position, summed in float32 (sections 3.4 and 3.5).

    Positions count from the first real token of a row, so that padding on the left changes nothing.

    Args:
        embeddings: Unscaled token embeddings [B, T, D].
        embed_positions: The stack's position module.
        config: The model's configuration.
        attention_mask: 1 for real tokens [B, P + T]; other shapes say nothing of padding.
        past_length: Number P of tokens that came before.

    Raises:
        ValueError: Learned positions, and more tokens than they have.
    """
    length = embeddings.shape[1]
    _check_length(config, length, past_length)
    positions = torch.arange(length, device=embeddings.device) + past_length  # [T]
    if attention_mask is None or attention_mask.dim() != 2:
        encoded = embed_positions(positions + config.position_offset)  # [T, D]
    else:
        padding_left = attention_mask.int().argmax(dim=-1, keepdim=True)  # [B, 1], first real token
        rows = (positions - padding_left).clamp(min=0)  # [B, T]
        if length > 1 and isinstance(past_length, int) and past_length == 0:
            table = embed_positions(positions + config.position_offset)
            encoded = nn.functional.embedding(rows, table)  # [B, T, D]
        else:
            encoded = embed_positions(rows + config.position_offset)
    wide = torch.promote_types(torch.float32, embeddings.dtype)
    scale = math.sqrt(config.d_model) if config.scale_embedding else 1.0
    return (embeddings.to(wide) * scale + encoded.to(wide)).to(embeddings.dtype)


def _check_length(config: VanillaTransformerConfig, length: int, past_length: int | Tensor) -> None:
    if config.position_embedding_type != "learned" or is_torchdynamo_compiling():
        return
    total = int(past_length) + length
    if total > config.max_position_embeddings:
        raise ValueError(
            f"An input of {total} tokens is longer than the {config.max_position_embeddings} learned positions of "
            "this model: shorten or truncate it, or train with a larger max_position_embeddings or with sinusoidal "
            "positions, which have no limit."
        )


# ---------------------------------------------------------------------------------------- attention (section 3.2)


def eager_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Scaled dot-product attention, softmax(Q Kᵀ / sqrt(d_k)) V, written out (section 3.2.1).

    Args:
        module: The attention; `module.is_causal` says whether a missing mask means a causal one.
        query: [B, H, T, K].
        key: [B, H, S, K].
        value: [B, H, S, d_v].
        attention_mask: Boolean (True: attend) or additive, broadcastable to [B, H, T, S].
        scaling: 1 / sqrt(d_k).
        dropout: Dropout on the attention weights.
        **kwargs: Taken for the sake of the attention registry, unused.

    Returns:
        Output [B, T, H, d_v] and attention weights [B, H, T, S].
    """
    scores = (query * scaling) @ key.transpose(-1, -2)  # scaled first: float16 ends at 65,504
    scores = scores.to(torch.promote_types(torch.float32, scores.dtype))  # softmax statistics in float32
    if attention_mask is None and getattr(module, "is_causal", False) and query.shape[-2] > 1:
        attention_mask = scores.new_ones(scores.shape[-2:], dtype=torch.bool).tril(key.shape[-2] - query.shape[-2])
    if attention_mask is None:
        weights = scores.softmax(dim=-1)
    elif attention_mask.dtype == torch.bool:
        # The smallest number and not -inf: a row without any key is no NaN, and attends to nothing, as under "sdpa".
        scores = scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min)
        weights = scores.softmax(dim=-1).masked_fill(~attention_mask, 0.0)
    else:
        weights = (scores + attention_mask).softmax(dim=-1)
    weights = weights.to(value.dtype)
    weights = drop(weights, dropout, module.training)
    return (weights @ value).transpose(1, 2).contiguous(), weights


class VanillaTransformerAttention(nn.Module):
    """Multi-head attention: Concat(head_1, ..., head_h) W^O, head_i = Attention(Q W_i^Q, K W_i^K, V W_i^V) (3.2.2).

    The projections of all heads are one matrix each: W^Q and W^K d_model → h·d_k, W^V d_model → h·d_v, W^O back.
    """

    def __init__(
        self, config: VanillaTransformerConfig, num_heads: int, layer_idx: int, is_causal: bool = False
    ) -> None:
        super().__init__()
        self.config = config
        self.num_heads = num_heads
        self.layer_idx = layer_idx
        self.is_causal = is_causal
        self.d_k, self.d_v = config.head_dims(num_heads)
        self.scaling = self.d_k**-0.5
        self.attention_dropout = config.attention_dropout
        self.q_proj = nn.Linear(config.d_model, num_heads * self.d_k, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.d_model, num_heads * self.d_k, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.d_model, num_heads * self.d_v, bias=config.attention_bias)
        self.out_proj = nn.Linear(num_heads * self.d_v, config.d_model, bias=config.attention_bias)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Any,
        key_value_states: Tensor | None = None,
        cache: EncoderDecoderCache | None = None,
        output_attentions: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend from `hidden_states` [B, T, D] to themselves, or to `key_value_states` [B, S, D] if given.

        Returns:
            Output [B, T, D] and, where the implementation gives them, attention weights [B, H, T, S].
        """
        query = self._split_heads(self.q_proj(hidden_states), self.d_k)  # [B, H, T, K]
        key, value = self._keys_and_values(hidden_states, key_value_states, cache)
        attention = self._attention_function(output_attentions)
        is_short = self.training and self.config._attn_implementation == "sdpa" and _trains_faster_plainly(query, key)
        if is_short:
            attention = eager_attention_forward
        if attention is not eager_attention_forward and self.d_k != self.d_v:
            # Fused kernels want equal head widths; zeros change neither the scores nor the kept part of the output.
            width = max(self.d_k, self.d_v)
            query, key, value = (nn.functional.pad(x, (0, width - x.shape[-1])) for x in (query, key, value))
        output, weights = attention(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
        )
        output = output[..., : self.d_v].flatten(-2)  # [B, T, H·d_v]
        return self.out_proj(output), None if is_short and not output_attentions else weights

    def _split_heads(self, states: Tensor, width: int) -> Tensor:
        # As many heads as came: under tensor parallelism a process has its share of them.
        return states.unflatten(-1, (-1, width)).transpose(1, 2)

    def _keys_and_values(
        self, hidden_states: Tensor, key_value_states: Tensor | None, cache: EncoderDecoderCache | None
    ) -> tuple[Tensor, Tensor]:
        """Project keys and values, or take the source's from the cache after the first step."""
        is_cross = key_value_states is not None
        if cache is not None and is_cross and cache.is_updated.get(self.layer_idx):
            layer = cache.cross_attention_cache.layers[self.layer_idx]
            return layer.keys, layer.values
        states = key_value_states if key_value_states is not None else hidden_states
        key = self._split_heads(self.k_proj(states), self.d_k)
        value = self._split_heads(self.v_proj(states), self.d_v)
        if cache is not None:
            part = cache.cross_attention_cache if is_cross else cache.self_attention_cache
            arguments: dict[str, Any] = {}
            if "cache_kwargs" in _CACHE_UPDATE_ARGUMENTS and not is_cross:
                # The static cache of older releases (seen in 5.0) does not count: without this it writes from 0 on.
                positions = torch.arange(key.shape[2], device=key.device) + part.get_seq_length(self.layer_idx)
                arguments["cache_kwargs"] = {"cache_position": positions}
            key, value = part.update(key, value, self.layer_idx, **arguments)
            if is_cross:
                cache.is_updated[self.layer_idx] = True
        return key, value

    def _attention_function(self, output_attentions: bool) -> Callable[..., tuple[Tensor, Tensor | None]]:
        implementation = self.config._attn_implementation
        if output_attentions or implementation in (None, "eager"):
            return eager_attention_forward
        # `get_interface` is there since 5.1; the library looks for both spellings in this file's text.
        if hasattr(ALL_ATTENTION_FUNCTIONS, "get_interface"):
            return ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager_attention_forward)
        return ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]


def _trains_faster_plainly(query: Tensor, key: Tensor) -> bool:
    """Return whether plain matrix products train faster than the fused kernel of "sdpa", which they equal.

    So it is on a CPU, where the kernel's backward pass is made for long rows. Forward and backward of 256 rows of 16
    tokens, 4 heads of 64, on two cores: 5.6 ms against 35 in bfloat16, 9.7 against 13.5 in float32; at 64 tokens 19
    against 48 and 34 against 27 (torch 2.13). Memory stays linear in the number of tokens, as the rows are short.
    """
    if query.device.type != "cpu" or is_torchdynamo_compiling():
        return False
    half = query.dtype != torch.float32 and query.dtype != torch.float64
    return query.shape[2] * key.shape[2] <= (_SHORT_HALF if half else _SHORT)


def padding_attention_mask(
    config: VanillaTransformerConfig, query_states: Tensor, attention_mask: Tensor | None, key_value_states: Tensor
) -> Any:
    """Return the mask that keeps padding out of an attention over the source, as the implementation takes it.

    For "eager" and "sdpa" it is [B, 1, 1, S]: it broadcasts over the queries, so that memory grows with S, not S².

    Args:
        config: Names the attention implementation.
        query_states: [B, T, D].
        attention_mask: 1 for real tokens [B, S]; a ready mask of four dimensions passes through; None: no padding.
        key_value_states: What is attended to [B, S, D].
    """
    if attention_mask is None or attention_mask.dim() == 4:
        return attention_mask
    if config._attn_implementation in (None, "eager", "sdpa"):
        if attention_mask.device.type == "cpu" and not is_torchdynamo_compiling() and bool(attention_mask.all()):
            return None  # on other devices the look would make the host wait
        return attention_mask[:, None, None, :].bool()
    return create_bidirectional_mask(config, query_states, attention_mask, key_value_states)


def causal_attention_mask(
    config: VanillaTransformerConfig,
    states: Tensor,
    attention_mask: Tensor | None,
    cache: EncoderDecoderCache | None,
    past_length: int | Tensor,
) -> Any:
    """Return the decoder's mask: no position sees a later one (section 3.2.3). None leaves it to the kernel's flag.

    Args:
        config: Names the attention implementation.
        states: Decoder input embeddings [B, T, D].
        attention_mask: 1 for real target tokens [B, P + T], or None.
        cache: Keys and values of the P tokens before.
        past_length: P.
    """
    is_start = isinstance(past_length, int) and past_length == 0  # also with a new, empty cache
    if attention_mask is not None and attention_mask.dim() == 2 and is_start and _is_right_padded(attention_mask):
        attention_mask = None  # causality alone keeps real tokens from the padding behind them; no [T, T] mask
    self_attention_cache = None if cache is None else cache.self_attention_cache
    arguments: dict[str, Any] = {CACHE_NAME: self_attention_cache}
    if "cache_position" in _CAUSAL_MASK_ARGUMENTS:  # gone in 5.9
        arguments["cache_position"] = torch.arange(states.shape[1], device=states.device) + past_length
    return create_causal_mask(config, states, attention_mask, **arguments)


def _is_right_padded(attention_mask: Tensor) -> bool:
    if is_torchdynamo_compiling():
        return False  # data cannot decide there
    return bool((attention_mask[:, 1:].int() <= attention_mask[:, :-1].int()).all())
