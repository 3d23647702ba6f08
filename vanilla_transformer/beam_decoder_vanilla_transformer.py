"""The decoder a step at a time for all beams of a batch of sentences, as `BeamSearch` drives it.

What makes it quick: keys and values of the source are computed once a sentence and attended to by all its beams as
queries; so are those of the target, of which none is ever moved when beams change places, as each beam knows which are
its own (a mask); matrices are packed once for the shape that the products need.

Axes: B sentences, K beams, S source tokens, Q queries, C cache slots, H heads, D d_model, V vocabulary.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, pad, scaled_dot_product_attention

from .attention_vanilla_transformer import add_positions
from .projection_vanilla_transformer import Projection, Workspace

_MANY_ROWS = 64  # queries of a step from which on it pays to pack the layers' matrices
_MORE_SLOTS = 32  # that room is made for at a time, at least
_HALF = (torch.bfloat16, torch.float16)
_FEW_STEPS = 8  # tokens up to which it does not pay to pack the output projection's


class SharedBeamDecoder:
    """The decoder of a model, a step at a time, for all beams of a batch of sentences.

    Args:
        model: A `VanillaTransformerForConditionalGeneration`.
        encoder_states: The encoder's output [B, S, D].
        attention_mask: 1 for real source tokens [B, S], or None.
        num_beams: K.
        prompt_length: Number of tokens that the target begins with.
        steps: Most tokens that are generated.
    """

    def __init__(
        self,
        model: Any,
        encoder_states: Tensor,
        attention_mask: Tensor | None,
        num_beams: int,
        prompt_length: int,
        steps: int,
    ) -> None:
        self.model = model
        self.decoder = model.model.decoder
        self.source_mask = None if attention_mask is None else _Mask(attention_mask[:, None, None, :].bool())
        batch, width, _ = encoder_states.shape
        many = batch * num_beams >= _MANY_ROWS
        self.layers = [_Layer(layer, pack=many) for layer in self.decoder.layers]
        # A sentence gets about as many tokens as its source has.
        self.output = Projection([model.lm_head], pack=min(width, steps) > _FEW_STEPS)
        self.sources = [layer.source_keys_and_values(encoder_states) for layer in self.layers]
        self.num_slots = prompt_length + num_beams * max(0, steps - 1)  # for the tokens of all beams
        self.room = 0  # slots that there is room for so far
        self.targets = [(keys[:, :, :0], values[:, :, :0]) for keys, values in self.sources]  # as many heads, as wide
        # On a CPU products of 16 bits copy keys and values that do not lie together, so all of them are attended to.
        self.attends_to_room = encoder_states.device.type == "cpu" and encoder_states.dtype in _HALF
        self.positions = _PositionTable(self.decoder)
        self.workspace = Workspace()

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

        The next step may overwrite them.

        Args:
            tokens: [B, Q]: the beams' last tokens, or the prompt that all beams share.
            position: Position of the first of them; all beams stand at the same, the prompt's follow each other.
            slot: Where their keys and values go: slots `slot` to `slot` + Q.
            mask: Which slots each may attend to [B, Q, slot + Q].
            prompt_mask: 1 for real tokens of the prompt [B, T], where it is padded on the left: positions count from
                the first real one.
            record: Where hidden states and attention weights are kept, if they are asked for.
        """
        queries = tokens.shape[1]
        states = self._embed(tokens, position, slot, prompt_mask)
        seen = slot + queries
        self._make_room(seen)
        attended = self.room if self.attends_to_room and record is None else seen
        attend = _Mask(pad(mask, (0, attended - seen))[:, None], never_empty=True if prompt_mask is None else None)
        if record is not None:
            record.begin_step(states)
        for layer, (keys, values), source in zip(self.layers, self.targets, self.sources, strict=True):
            query, keys[:, :, slot:seen], values[:, :, slot:seen] = layer.self_heads(states)
            weights = None if record is None else record.self_weights
            output = _attend(layer.scaling, query, keys[:, :, :attended], values[:, :, :attended], attend, weights)
            states = layer.after_self(states, output)
            weights = None if record is None else record.cross_weights
            output = _attend(layer.scaling, layer.cross_query(states), *source, self.source_mask, weights)
            states = layer.feed_forward(layer.after_cross(states, output))
            if record is not None:
                record.hidden_states.append(states)
        states = self.decoder.layer_norm(states)
        if record is not None:
            record.hidden_states[-1] = states
        logits = self.output(states)
        if self.model.final_logits_bias is not None:
            logits = logits + self.model.final_logits_bias
        if logits.dtype != torch.float32:  # not `float()`: see `Workspace`
            logits = self.workspace.like(logits).copy_(logits)
        return logits

    def keep(self, rows: Tensor) -> None:
        """Go on with these sentences only."""
        if self.source_mask is not None:
            self.source_mask = _Mask(self.source_mask.shown[rows])
        for caches in (self.sources, self.targets):
            for number, (keys, values) in enumerate(caches):  # one by one: old and new are there at once
                caches[number] = keys[rows], values[rows]

    def keep_slots(self, slots: Tensor) -> None:
        """Go on with these slots [B, C] of each sentence only, which become the first."""
        # Room for the steps to come, which holds anything: nobody attends to it before it is written.
        self.room = min(self.num_slots, slots.shape[1] + _MORE_SLOTS)
        slots = pad(slots, (0, self.room - slots.shape[1]))
        sentences = torch.arange(len(slots), device=slots.device)[:, None, None]
        heads = torch.arange(self.targets[0][0].shape[1], device=slots.device)[:, None]
        for number, (keys, values) in enumerate(self.targets):
            places = (sentences, heads, slots[:, None])
            self.targets[number] = keys[places], values[places]

    def _make_room(self, slots: int) -> None:
        """Make room for the keys and values of so many slots, and of some more, for the steps to come."""
        if slots <= self.room:
            return
        more = min(self.num_slots, slots + max(_MORE_SLOTS, slots // 4)) - self.room
        for number, (keys, values) in enumerate(self.targets):
            self.targets[number] = pad(keys, (0, 0, 0, more)), pad(values, (0, 0, 0, more))
        self.room += more

    def _embed(self, tokens: Tensor, position: int, slot: int, prompt_mask: Tensor | None) -> Tensor:
        batch, queries = tokens.shape
        embeddings = self.decoder.embed_tokens(tokens)
        table = self.positions.up_to(position + queries)
        if slot == 0:
            return add_positions(embeddings, table, self.decoder.config, prompt_mask, position)
        # Beams side by side, all at one position.
        flat = embeddings.reshape(batch * queries, 1, -1)
        real = None if prompt_mask is None else prompt_mask.repeat_interleave(queries, dim=0)
        return add_positions(flat, table, self.decoder.config, real, position).view_as(embeddings)


class _Layer:
    """A decoder layer taken apart: what is done to states [B, Q, D] before, between and after its attentions."""

    def __init__(self, layer: Any, pack: bool) -> None:
        own, cross = layer.self_attn, layer.encoder_attn
        self.layer, self.scaling = layer, own.scaling
        self.d_k, self.d_v = own.d_k, own.d_v
        self.self_input = Projection([own.q_proj, own.k_proj, own.v_proj], pack=pack)
        self.self_output = Projection([own.out_proj], pack=pack)
        self.cross_input = Projection([cross.q_proj], pack=pack)
        self.source_input = Projection([cross.k_proj, cross.v_proj], pack=pack)
        self.cross_output = Projection([cross.out_proj], pack=pack)
        self.inner = Projection([layer.fc1], pack=pack, activation=layer.activation_fn)
        self.outer = Projection([layer.fc2], pack=pack)

    def source_keys_and_values(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Project the encoder's output [B, S, D] to keys [B, H, S, d_k] and values [B, H, S, d_v]."""
        keys, values = self._split(self.source_input(states), self.d_k, self.d_v)
        return keys.contiguous(), values.contiguous()

    def self_heads(self, states: Tensor) -> tuple[Tensor, ...]:
        """Return queries, keys and values of the self-attention, [B, H, Q, d_k or d_v]."""
        inputs = self.layer.sublayer_input(states, self.layer.self_attn_layer_norm)
        return self._split(self.self_input(inputs), self.d_k, self.d_k, self.d_v)

    def after_self(self, states: Tensor, output: Tensor) -> Tensor:
        """Return the states after the self-attention, whose heads gave `output` [B, H, Q, d_v]."""
        output = self.self_output(output.transpose(1, 2).flatten(-2))
        return self.layer.add_and_norm(states, output, self.layer.self_attn_layer_norm)

    def cross_query(self, states: Tensor) -> Tensor:
        """Return the queries of the attention over the source [B, H, Q, d_k]."""
        inputs = self.layer.sublayer_input(states, self.layer.encoder_attn_layer_norm)
        return self._split(self.cross_input(inputs), self.d_k)[0]

    def after_cross(self, states: Tensor, output: Tensor) -> Tensor:
        """Return the states after the attention over the source, whose heads gave `output` [B, H, Q, d_v]."""
        output = self.cross_output(output.transpose(1, 2).flatten(-2))
        return self.layer.add_and_norm(states, output, self.layer.encoder_attn_layer_norm)

    def feed_forward(self, states: Tensor) -> Tensor:
        """Return the states after the feed-forward sublayer."""
        inputs = self.layer.sublayer_input(states, self.layer.final_layer_norm)
        return self.layer.add_and_norm(states, self.outer(self.inner(inputs)), self.layer.final_layer_norm)

    def _split(self, rows: Tensor, *widths: int) -> tuple[Tensor, ...]:
        """View outputs beside each other [B, T, H·(w₁ + w₂ + …)] as heads [B, H, T, wᵢ]."""
        heads = rows.shape[-1] // sum(widths)
        parts = rows.split([heads * width for width in widths], dim=-1)
        return tuple(
            part.unflatten(-1, (heads, width)).transpose(1, 2) for part, width in zip(parts, widths, strict=True)
        )


class _PositionTable(nn.Module):
    """The positions' encodings so far, so that a step looks its own up in place of computing it."""

    def __init__(self, decoder: Any) -> None:
        super().__init__()
        self.decoder = [decoder]  # in a list, so that it is no submodule
        self.encodings: Tensor | None = None

    def up_to(self, length: int) -> nn.Module:
        """Return a module that knows the first `length` positions; the model's own, where they are learned."""
        decoder = self.decoder[0]
        if decoder.config.position_embedding_type == "learned":
            return decoder.embed_positions
        length += decoder.config.position_offset
        if self.encodings is None or len(self.encodings) < length:
            positions = torch.arange(max(64, 2 * length), device=decoder.embed_tokens.weight.device)
            encodings = decoder.embed_positions(positions)
            self.encodings = encodings.to(torch.promote_types(torch.float32, decoder.embed_tokens.weight.dtype))
        return self

    def forward(self, positions: Tensor) -> Tensor:
        """Return the encodings [..., D] of `positions` [...]."""
        assert self.encodings is not None
        return embedding(positions, self.encodings)


class _Mask:
    """Which keys queries may attend to, in the forms that the two ways of attending want.

    Args:
        shown: True where they may [B, 1, Q or 1, C].
        never_empty: Every query has a key to attend to; None: to be looked up.
    """

    def __init__(self, shown: Tensor, never_empty: bool | None = None) -> None:
        self.shown = shown
        if never_empty is not None:
            self.never_empty = never_empty

    @functools.cached_property
    def hidden(self) -> Tensor:
        """True where they may not."""
        return ~self.shown

    @functools.cached_property
    def never_empty(self) -> bool:
        """Whether every query has a key to attend to."""
        return bool(self.shown.any(dim=-1).all())


def _attend(
    scaling: float, query: Tensor, keys: Tensor, values: Tensor, mask: _Mask | None, weights: list[Tensor] | None
) -> Tensor:
    """Attend by queries [B, H, Q, d_k] and return [B, H, Q, d_v]; keep the weights [B, H, Q, C] if a list is given."""
    if weights is None and not _is_faster_plainly(query, keys):
        shown = None if mask is None else mask.shown
        return scaled_dot_product_attention(query, keys, values, attn_mask=shown, scale=scaling)
    scores = (query * scaling @ keys.transpose(-1, -2)).float()
    if mask is not None:
        scores.masked_fill_(mask.hidden, torch.finfo(scores.dtype).min)
    probabilities = scores.softmax(dim=-1)
    if mask is not None and not mask.never_empty:
        probabilities.masked_fill_(mask.hidden, 0.0)
    if weights is not None:
        weights.append(probabilities)
    return probabilities.to(values.dtype) @ values


def _is_faster_plainly(query: Tensor, keys: Tensor) -> bool:
    """Return whether plain products attend faster than the fused kernel, which is made for many queries.

    So it is on a CPU for many sentences: for 64 with 4 beams, 4 heads of 64 and 30 keys 0.30 ms against 0.81 in
    bfloat16, 0.37 against 0.46 in float32; with 80 keys 0.6 against 1.5 and 2.4 against 2.2 (torch 2.13, one core).
    """
    if query.device.type != "cpu" or query.shape[0] * query.shape[1] < 32:
        return False
    return query.dtype in (torch.bfloat16, torch.float16) or keys.shape[2] <= 64


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
