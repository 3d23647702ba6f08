"""Beam search with the paper's ranking (section 6.1; Wu et al. 2016, section 7), or with the library's.

What makes it quick: keys and values of the source are computed once a sentence and attended to by all its beams as
queries; so are those of the target, of which none is ever moved when beams change places, as each beam knows which are
its own (a mask); finished sentences leave the batch; candidates come from the largest logits and one log-sum-exp.

Axes: B sentences, K beams, S source tokens, C cache slots, L layers, H heads, D d_model, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from .attention_vanilla_transformer import add_positions

NEVER = -1.0e9  # the score of what cannot be chosen, as in the library


@dataclass
class Ranking:
    """How hypotheses are ranked, and when a sentence is done.

    Args:
        gnmt_alpha: α of the paper: log P(Y) / ((5 + |Y|) / 6)^α, |Y| in generated tokens with the end token. None:
            the library's ranking, log P(Y) / |Y|^length_penalty.
        length_penalty: The library's.
        early_stopping: The library's rule: True, False or "never". Without effect on the paper's ranking, where a
            sentence is done when no running hypothesis can reach what is to be returned.
    """

    gnmt_alpha: float | None = None
    length_penalty: float = 1.0
    early_stopping: bool | str = False

    def divisor(self, length: Tensor | int) -> Any:
        """What log P of a hypothesis of so many tokens is divided by."""
        if self.gnmt_alpha is not None:
            return ((5.0 + length) / 6.0) ** self.gnmt_alpha
        return length**self.length_penalty

    def best_reachable(self, running: Tensor, length: int, caps: Tensor) -> Tensor:
        """The best score [B] that a sentence's best running hypothesis [B] of `length` tokens can still get.

        log P only falls. With the paper's ranking that is a bound, and so under the library's "never" but for its
        negative penalties; under False it is the library's guess, the score it would have now.
        """
        longest = caps.to(running.dtype)
        if self.gnmt_alpha is None and not (self.early_stopping == "never" and self.length_penalty > 0.0):
            longest = torch.full_like(longest, length)
        return running / self.divisor(longest)


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
        batch = encoder_states.shape[0]
        self.targets = [
            tuple(encoder_states.new_empty(batch, x.num_heads, num_slots, width) for width in (x.d_k, x.d_v))
            for x in (layer.self_attn for layer in self.decoder.layers)
        ]

    def step(
        self,
        tokens: Tensor,
        position: int,
        slot: int,
        mask: Tensor,
        prompt_mask: Tensor | None = None,
        record: _Record | None = None,
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
        for layer, (keys, values), source in zip(decoder.layers, self.targets, self.sources, strict=True):
            inputs = layer.sublayer_input(states, layer.self_attn_layer_norm)
            new_keys, new_values = self._keys_and_values(layer.self_attn, inputs)
            keys[:, :, slot : slot + queries] = new_keys
            values[:, :, slot : slot + queries] = new_values
            seen = keys[:, :, : slot + queries], values[:, :, : slot + queries]
            output = _attend(layer.self_attn, inputs, seen, attend, None if record is None else record.self_weights)
            states = layer.add_and_norm(states, output, layer.self_attn_layer_norm)
            inputs = layer.sublayer_input(states, layer.encoder_attn_layer_norm)
            output = _attend(
                layer.encoder_attn, inputs, source, self.source_mask, None if record is None else record.cross_weights
            )
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
        for keys, values in self.targets:
            for cache in (keys, values):
                cache[: len(rows), :, :slots] = cache[rows, :, :slots]
        self.targets = [(keys[: len(rows)], values[: len(rows)]) for keys, values in self.targets]

    @staticmethod
    def _keys_and_values(attention: Any, states: Tensor) -> tuple[Tensor, Tensor]:
        """Project states [B, T, D] to keys [B, H, T, d_k] and values [B, H, T, d_v]."""
        keys = attention.k_proj(states).unflatten(-1, (-1, attention.d_k)).transpose(1, 2)
        values = attention.v_proj(states).unflatten(-1, (-1, attention.d_v)).transpose(1, 2)
        return keys, values


def _attend(
    attention: Any, states: Tensor, seen: tuple[Tensor, Tensor], mask: Tensor | None, weights: list[Tensor] | None
) -> Tensor:
    """Attend from states [B, Q, D] to keys and values; keep the weights [B, H, Q, C] if a list for them is given."""
    query = attention.q_proj(states).unflatten(-1, (-1, attention.d_k)).transpose(1, 2)  # [B, H, Q, d_k]
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


class _Record:
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


@dataclass
class BeamSearchOptions:
    """What a search goes by.

    Args:
        num_beams: K.
        num_return_sequences: How many hypotheses of each sentence to return, at most K.
        caps: Most tokens that each sentence may get, the end token included [B].
        eos_token_ids: The end tokens, maybe none.
        pad_token_id: What the results are filled up with.
        ranking: How hypotheses are ranked.
        logits_processor: Called with all tokens so far and log-probabilities, one row a beam; None: nothing to do.
        stopping_criteria: Called with the candidates' tokens, besides end tokens and caps; None: nothing to do.
        output_scores: Keep the processed log-probabilities of each step.
        output_logits: Keep the logits of each step.
        output_hidden_states: Keep the decoder's hidden states of each step.
        output_attentions: Keep the decoder's attention weights of each step.
    """

    num_beams: int
    num_return_sequences: int
    caps: Tensor
    eos_token_ids: Tensor | None
    pad_token_id: int
    ranking: Ranking
    logits_processor: Any = None
    stopping_criteria: Any = None
    output_scores: bool = False
    output_logits: bool = False
    output_hidden_states: bool = False
    output_attentions: bool = False


class BeamSearch:
    """A beam search over a batch of sentences: each keeps K running hypotheses and the K best finished ones.

    A step extends every running hypothesis by every token and looks at the 2·K best of these (more with several end
    tokens). Those among the first K of them that end are finished hypotheses; the K best that do not end run on.

    Args:
        model: A `VanillaTransformerForConditionalGeneration`.
        encoder_states: The encoder's output [B, S, D].
        attention_mask: 1 for real source tokens [B, S], or None.
        prompt: What the target begins with [B, T].
        options: What to go by.
        prompt_mask: 1 for real tokens of the prompt, 0 for padding on its left [B, T], or None.
    """

    def __init__(
        self,
        model: Any,
        encoder_states: Tensor,
        attention_mask: Tensor | None,
        prompt: Tensor,
        options: BeamSearchOptions,
        prompt_mask: Tensor | None = None,
    ) -> None:
        self.options, self.prompt_length = options, prompt.shape[1]
        batch, beams, device = prompt.shape[0], options.num_beams, prompt.device
        steps = int(options.caps.max())
        slots = self.prompt_length + beams * max(0, steps - 1)
        self.decoder = SharedBeamDecoder(model, encoder_states, attention_mask, slots)
        self.rows = torch.arange(batch, device=device)  # which sentence each row is; finished ones leave
        self.caps = options.caps.to(device)
        shape = (batch, beams, self.prompt_length + steps)
        self.running = torch.full(shape, options.pad_token_id, device=device)
        self.running[:, :, : self.prompt_length] = prompt[:, None]
        self.finished = self.running.clone()
        self.origins = torch.full((batch, beams, steps), -1, dtype=torch.int32, device=device)  # of the running ones
        self.finished_origins = self.origins.clone()
        self.running_scores = torch.full((batch, beams), NEVER, device=device)
        self.running_scores[:, 0] = 0.0  # at first all beams are the same: take one
        self.scores = torch.full((batch, beams), NEVER, device=device)
        self.is_finished = torch.zeros(batch, beams, dtype=torch.bool, device=device)
        self.is_done = torch.zeros(batch, dtype=torch.bool, device=device)
        self.mine = torch.zeros(batch, beams, slots, dtype=torch.bool, device=device)  # slots of each beam's tokens
        self.mine[:, :, : self.prompt_length] = True
        self.prompt_mask = prompt_mask if prompt_mask is None or not bool(prompt_mask.all()) else None
        self.results = [self.finished.clone(), self.scores.clone(), self.finished_origins.clone()]
        width = max(2, 1 + (0 if options.eos_token_ids is None else len(options.eos_token_ids)))
        self.candidates = width * beams
        recorded = options.output_hidden_states or options.output_attentions
        self.record = _Record(beams, options.output_attentions) if recorded else None
        self.all_scores: list[Tensor] = []
        self.all_logits: list[Tensor] = []
        # What looks at the rows by number, or is kept of them, needs all of them to stay.
        self.rows_stay = bool(
            options.logits_processor or options.stopping_criteria or options.output_scores or options.output_logits
        ) or bool(recorded)

    def run(self) -> tuple[Tensor, Tensor, Tensor]:
        """Search; return tokens [B, R, T], scores [B, R] and the beam each token came from [B, R, steps], or -1."""
        length = 0
        while len(self.rows):
            logits = self._logits(length)
            length += 1
            scores, parents, tokens = self._best_candidates(logits, length)
            self._advance(scores, parents, tokens, length)
            self._let_go(length)
        tokens, scores, origins = (result[:, : self.options.num_return_sequences] for result in self.results)
        steps = int((origins >= 0).sum(dim=-1).max())
        return tokens[:, :, : self.prompt_length + steps], scores, origins[:, :, :steps]

    def _logits(self, length: int) -> Tensor:
        """The logits [B, K, V] of the token after `length` generated ones."""
        beams, start = self.options.num_beams, self.prompt_length
        if length == 0:
            own = self.mine[:, :1, :start].expand(-1, start, -1).tril()
            logits = self.decoder.step(
                self.running[:, 0, :start], 0, 0, self._without_padding(own), self.prompt_mask, self.record
            )
            logits = logits[:, -1:].expand(-1, beams, -1)
        else:
            slot = start + (length - 1) * beams
            self.mine[:, :, slot : slot + beams] = torch.eye(beams, dtype=torch.bool, device=self.rows.device)
            own = self.mine[:, :, : slot + beams]
            position = start + length - 1
            tokens = self.running[:, :, position]
            logits = self.decoder.step(
                tokens, position, slot, self._without_padding(own), self.prompt_mask, self.record
            )
        if self.record is not None:
            self.record.end_step(own, length == 0)
        return logits

    def _without_padding(self, own: Tensor) -> Tensor:
        """Which of their own slots [B, Q, C] queries may attend to."""
        if self.prompt_mask is None:
            return own
        own = own.clone()
        own[:, :, : self.prompt_length] &= self.prompt_mask[:, None].bool()
        return own

    def _best_candidates(self, logits: Tensor, length: int) -> tuple[Tensor, Tensor, Tensor]:
        """Scores, parent beams and tokens of the best continuations, each [B, C], the best first."""
        options, vocab_size = self.options, logits.shape[-1]
        if options.output_logits:
            self.all_logits.append(logits.flatten(0, 1).clone())
        if options.logits_processor or options.output_scores:
            log_probabilities = logits.log_softmax(dim=-1).flatten(0, 1)
            if options.logits_processor:
                so_far = self.running[:, :, : self.prompt_length + length - 1].flatten(0, 1)
                log_probabilities = options.logits_processor(so_far, log_probabilities)
            if options.output_scores:
                self.all_scores.append(log_probabilities.clone())
            logits = log_probabilities.view_as(logits)
            normalizer: Tensor | float = 0.0
        else:
            normalizer = logits.logsumexp(dim=-1, keepdim=True)
        values, tokens = logits.topk(min(self.candidates, vocab_size), dim=-1)  # of each beam
        values = (values - normalizer + self.running_scores[:, :, None]).flatten(1)
        scores, places = values.topk(min(self.candidates, values.shape[1]), dim=-1)
        return scores, places // tokens.shape[-1], tokens.flatten(1).gather(1, places)

    def _advance(self, scores: Tensor, parents: Tensor, tokens: Tensor, length: int) -> None:
        """Sort the candidates into finished hypotheses and running ones, and see which sentences are done."""
        options, beams, end = self.options, self.options.num_beams, self.prompt_length + length
        sequences = _take(self.running, parents)
        sequences[:, :, end - 1] = tokens
        origins = _take(self.origins, parents)
        origins[:, :, length - 1] = parents + self.rows[:, None] * beams
        ends = (length >= self.caps)[:, None].expand_as(tokens)
        if options.eos_token_ids is not None:
            ends = ends | torch.isin(tokens, options.eos_token_ids)
        if options.stopping_criteria:
            seen = sequences[:, :, :end].flatten(0, 1)
            ends = ends | options.stopping_criteria(seen, tuple(self.all_scores)).view_as(ends)

        ended = ends.clone()
        ended[:, beams:] = False  # the others stand by, so that K can always run on
        takes_no_more = self.is_done[:, None]
        if self._ends_when_full:
            takes_no_more = takes_no_more | self.is_finished.all(dim=-1, keepdim=True)
        final = (scores / options.ranking.divisor(length)).masked_fill(~ended | takes_no_more, NEVER)
        merged = torch.cat([self.scores, final], dim=1)
        self.scores, best = merged.topk(beams, dim=-1)
        self.finished = _take(torch.cat([self.finished, sequences], dim=1), best)
        self.finished_origins = _take(torch.cat([self.finished_origins, origins], dim=1), best)
        self.is_finished = torch.cat([self.is_finished, ended & ~takes_no_more], dim=1).gather(1, best)

        self.running_scores, best = (scores + ends * NEVER).topk(beams, dim=-1)
        self.running, self.origins = _take(sequences, best), _take(origins, best)
        self.mine = _take(self.mine, parents.gather(1, best))
        self.is_done |= self._cannot_improve(length) | ends.all(dim=-1)
        if self._ends_when_full:
            self.is_done |= self.is_finished.all(dim=-1)

    @property
    def _ends_when_full(self) -> bool:
        ranking = self.options.ranking
        return ranking.gnmt_alpha is None and ranking.early_stopping is True

    def _cannot_improve(self, length: int) -> Tensor:
        """Which sentences [B] have finished hypotheses that no running one can reach any more."""
        ranking = self.options.ranking
        # The paper's ranking has an exact bound, so that what is to be returned is all that counts.
        wanted = self.options.num_beams if ranking.gnmt_alpha is None else self.options.num_return_sequences
        worst = self.scores[:, wanted - 1].masked_fill(~self.is_finished[:, :wanted].all(dim=-1), NEVER)
        return ranking.best_reachable(self.running_scores[:, 0], length, self.caps) <= worst

    def _let_go(self, length: int) -> None:
        """Write down the sentences that are done, and go on with the others, once it pays to move what is kept."""
        done, count = self.is_done, len(self.rows)
        finished = int(done.sum())
        if finished == 0 or (finished < count and (self.rows_stay or finished < 0.125 * count)):
            return
        for result, rows in zip(self.results, (self.finished, self.scores, self.finished_origins), strict=True):
            result[self.rows[done]] = rows[done]
        keep = (~done).nonzero()[:, 0]
        for name in (
            *("rows", "caps", "running", "finished", "origins", "finished_origins"),
            *("running_scores", "scores", "is_finished", "is_done", "mine"),
        ):
            setattr(self, name, getattr(self, name)[keep])
        if self.prompt_mask is not None:
            self.prompt_mask = self.prompt_mask[keep]
        if len(keep):
            self.decoder.keep(keep, self.prompt_length + (length - 1) * self.options.num_beams)


def _take(values: Tensor, places: Tensor) -> Tensor:
    """Pick beams: values [B, K, ...] at places [B, C] give [B, C, ...]."""
    index = places.view(*places.shape, *[1] * (values.dim() - 2)).expand(-1, -1, *values.shape[2:])
    return values.gather(1, index)
