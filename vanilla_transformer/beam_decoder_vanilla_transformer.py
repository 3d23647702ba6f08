"""The decoder a step at a time for all beams of a batch of sentences, as `BeamSearch` drives it.

What makes it quick: keys and values of the source are computed once a sentence and attended to by all its beams as
queries; so are those of the target, of which none is ever moved when beams change places, as each beam knows which are
its own (a mask).

Axes: B sentences, K beams, S source tokens, Q queries, C cache slots, H heads, D d_model, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention

from .attention_vanilla_transformer import add_positions
from .loss_vanilla_transformer import is_plain_linear


class SharedBeamDecoder:
    """The decoder of a model, a step at a time, for all beams of a batch of sentences.

    Args:
        model: A `VanillaTransformerForConditionalGeneration`.
        encoder_states: The encoder's output [B, S, D].
        attention_mask: 1 for real source tokens [B, S], or None.
        num_slots: C, room for the keys and values of all tokens of all beams.
    """

    def __init__(self, model: Any, encoder_states: Tensor, attention_mask: Tensor | None, num_slots: int) -> None:
        self.model = model
        self.decoder = model.model.decoder
        self.source_mask = None if attention_mask is None else attention_mask[:, None, None, :].bool()
        self.sources = [self._keys_and_values(layer.encoder_attn, encoder_states) for layer in self.decoder.layers]
        self.projections = [_OneProjection.of(layer.self_attn) for layer in self.decoder.layers]
        # Keys beside values, a token's row in one piece, as the projection gives them.
        self.targets = [
            encoder_states.new_empty(encoder_states.shape[0], num_slots, x.num_heads * (x.d_k + x.d_v))
            for x in (layer.self_attn for layer in self.decoder.layers)
        ]

    def step(
        self,
        tokens: Tensor,
        position: int,
        slot: int,
        mask: Tensor,
        prompt_mask: Tensor | None = None,
        record: StepRecord | None = None,
    ) -> Tensor:
        """Feed Q tokens of each sentence and return the logits of what follows each, [B, Q, V] in float32.

        Args:
            tokens: [B, Q]: the beams' last tokens, or the prompt that all beams share.
            position: Position of the first of them; all beams stand at the same, the prompt's follow each other.
            slot: Where their keys and values go: slots `slot` to `slot` + Q.
            mask: Which slots each may attend to [B, Q, slot + Q].
            prompt_mask: 1 for real tokens of the prompt [B, T], where it is padded on the left: positions count from
                the first real one.
            record: Where hidden states and attention weights are kept, if they are asked for.
        """
        batch, queries = tokens.shape
        decoder = self.decoder
        embeddings = decoder.embed_tokens(tokens)
        if slot > 0:  # beams side by side, all at one position
            flat = embeddings.reshape(batch * queries, 1, -1)
            real = None if prompt_mask is None else prompt_mask.repeat_interleave(queries, dim=0)
            states = add_positions(flat, decoder.embed_positions, decoder.config, real, position).view_as(embeddings)
        else:
            states = add_positions(embeddings, decoder.embed_positions, decoder.config, prompt_mask, position)
        attend = mask[:, None]
        if record is not None:
            record.begin_step(states)
        seen = slot + queries
        for layer, project, target, source in zip(
            decoder.layers, self.projections, self.targets, self.sources, strict=True
        ):
            inputs = layer.sublayer_input(states, layer.self_attn_layer_norm)
            query, target[:, slot:seen] = project(inputs)
            weights = None if record is None else record.self_weights
            output = _attend(layer.self_attn, query, _heads(layer.self_attn, target[:, :seen]), attend, weights)
            states = layer.add_and_norm(states, output, layer.self_attn_layer_norm)
            inputs = layer.sublayer_input(states, layer.encoder_attn_layer_norm)
            weights = None if record is None else record.cross_weights
            query = layer.encoder_attn.q_proj(inputs)
            output = _attend(layer.encoder_attn, query, source, self.source_mask, weights)
            states = layer.feed_forward(layer.add_and_norm(states, output, layer.encoder_attn_layer_norm))
            if record is not None:
                record.hidden_states.append(states)
        states = decoder.layer_norm(states)
        if record is not None:
            record.hidden_states[-1] = states
        logits = self.model.lm_head(states)
        if self.model.final_logits_bias is not None:
            logits = logits + self.model.final_logits_bias
        return logits.float()

    def keep(self, rows: Tensor, slots: int) -> None:
        """Go on with these sentences only; `slots` have been filled."""
        if self.source_mask is not None:
            self.source_mask = self.source_mask[rows]
        self.sources = [(keys[rows], values[rows]) for keys, values in self.sources]
        for target in self.targets:
            target[: len(rows), :slots] = target[rows, :slots]
        self.targets = [target[: len(rows)] for target in self.targets]

    @staticmethod
    def _keys_and_values(attention: Any, states: Tensor) -> tuple[Tensor, Tensor]:
        """Project states [B, T, D] to keys [B, H, T, d_k] and values [B, H, T, d_v]."""
        keys = attention.k_proj(states).unflatten(-1, (-1, attention.d_k)).transpose(1, 2)
        values = attention.v_proj(states).unflatten(-1, (-1, attention.d_v)).transpose(1, 2)
        return keys, values


class _OneProjection:
    """Queries, and keys beside values, of a self-attention from one matrix product."""

    def __init__(self, weight: Tensor, bias: Tensor | None, widths: tuple[int, int]) -> None:
        self.weight, self.bias, self.widths = weight, bias, widths

    @classmethod
    def of(cls, attention: Any) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
        """Return what maps states [B, Q, D] to queries and keys with values; module by module where one is no matrix.

        A quantised or adapted layer, or one with hooks, is called as it is.
        """
        layers = (attention.q_proj, attention.k_proj, attention.v_proj)
        if not all(is_plain_linear(layer) for layer in layers):
            return lambda states: (
                attention.q_proj(states),
                torch.cat((attention.k_proj(states), attention.v_proj(states)), dim=-1),
            )
        query, *others = (layer.weight.shape[0] for layer in layers)
        bias = None if attention.q_proj.bias is None else torch.cat([layer.bias for layer in layers])
        return cls(torch.cat([layer.weight for layer in layers]), bias, (query, sum(others)))

    def __call__(self, states: Tensor) -> tuple[Tensor, Tensor]:
        query, others = linear(states, self.weight, self.bias).split(self.widths, dim=-1)
        return query, others


def _heads(attention: Any, rows: Tensor) -> tuple[Tensor, Tensor]:
    """View keys beside values [B, C, H·(d_k + d_v)] as keys [B, H, C, d_k] and values [B, H, C, d_v]."""
    keys, values = rows.split((attention.num_heads * attention.d_k, attention.num_heads * attention.d_v), dim=-1)
    return (
        keys.unflatten(-1, (-1, attention.d_k)).transpose(1, 2),
        values.unflatten(-1, (-1, attention.d_v)).transpose(1, 2),
    )


def _attend(
    attention: Any, query: Tensor, seen: tuple[Tensor, Tensor], mask: Tensor | None, weights: list[Tensor] | None
) -> Tensor:
    """Attend by queries [B, Q, H·d_k] to keys and values; keep the weights [B, H, Q, C] if a list is given."""
    query = query.unflatten(-1, (-1, attention.d_k)).transpose(1, 2)  # [B, H, Q, d_k]
    keys, values = seen
    if weights is None:
        output = scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=attention.scaling)
    else:
        scores = (query * attention.scaling @ keys.transpose(-1, -2)).float()
        if mask is not None:
            scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        probabilities = scores.softmax(dim=-1)
        if mask is not None:
            probabilities = probabilities.masked_fill(~mask, 0.0)
        weights.append(probabilities)
        output = probabilities.to(values.dtype) @ values
    return attention.out_proj(output.transpose(1, 2).flatten(-2))


class StepRecord:
    """What `generate()` returns of each step when asked: hidden states, attention weights, scores, logits.

    In the library's shapes: rows are sentences times beams; weights are those over the beam's own tokens, in order.
    """

    def __init__(self, num_beams: int, attentions: bool) -> None:
        self.num_beams = num_beams
        self.attentions = attentions
        self.steps: dict[str, list[tuple[Tensor, ...]]] = {
            "decoder_hidden_states": [],
            "decoder_attentions": [],
            "cross_attentions": [],
        }

    def begin_step(self, states: Tensor) -> None:
        """Begin with the embeddings of the step."""
        self.hidden_states = [states]
        self.self_weights: list[Tensor] | None = [] if self.attentions else None
        self.cross_weights: list[Tensor] | None = [] if self.attentions else None

    def end_step(self, mask: Tensor, is_prompt: bool) -> None:
        """Take what the step left; `mask` [B, Q, C] says which slots are each query's own."""
        beams = self.num_beams
        own, cross = self.self_weights or [], self.cross_weights or []
        if is_prompt:  # one row a sentence, the same for all its beams
            parts = [[x.repeat_interleave(beams, dim=0) for x in part] for part in (self.hidden_states, own, cross)]
        else:
            # Each beam's slots, ascending, which is their order in time.
            slots = mask.nonzero()[:, -1].view(mask.shape[0], 1, beams, -1)
            own = [x.gather(-1, slots.expand(-1, x.shape[1], -1, -1)) for x in own]
            sides = [[x.transpose(1, 2).flatten(0, 1)[:, :, None] for x in part] for part in (own, cross)]
            parts = [[x.flatten(0, 1)[:, None] for x in self.hidden_states], *sides]
        for steps, part in zip(self.steps.values(), parts, strict=True):
            steps.append(tuple(part))
