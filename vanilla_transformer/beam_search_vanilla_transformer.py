"""Beam search with the paper's ranking (section 6.1; Wu et al. 2016, section 7), or with the library's.

What makes it quick: keys and values of the source are computed once a sentence and attended to by all its beams as
queries; so are those of the target, of which none is ever moved when beams change places, as each beam knows which are
its own (a mask); finished sentences leave the batch; candidates come from the logits and one log-sum-exp, found by
blocks of the vocabulary for all beams of a sentence together.

Axes: B sentences, K beams, S source tokens, C cache slots, L layers, H heads, D d_model, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .beam_decoder_vanilla_transformer import SharedBeamDecoder, StepRecord
from .projection_vanilla_transformer import Workspace

NEVER = -1.0e9  # the score of what cannot be chosen, as in the library
_LOG2_E = math.log2(math.e)
_STEPS_BETWEEN_CLEARING = 8  # of the cache
_MOST_IN_USE = 0.6  # of the cache, where it pays to clear it
_BLOCK = 32  # elements of a vocabulary looked at together


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
        self.decoder = SharedBeamDecoder(model, encoder_states, attention_mask, beams, self.prompt_length, steps)
        self.workspace = Workspace()
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
        # Which slots of the decoder's cache hold each beam's tokens [B, K, C].
        self.mine = torch.ones(batch, beams, self.prompt_length, dtype=torch.bool, device=device)
        self.prompt_mask = prompt_mask if prompt_mask is None or not bool(prompt_mask.all()) else None
        self.results = [self.finished.clone(), self.scores.clone(), self.finished_origins.clone()]
        width = max(2, 1 + (0 if options.eos_token_ids is None else len(options.eos_token_ids)))
        self.candidates = width * beams
        recorded = options.output_hidden_states or options.output_attentions
        self.record = StepRecord(beams, options.output_attentions) if recorded else None
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
            self._let_go()
            if len(self.rows) and length % _STEPS_BETWEEN_CLEARING == 0:
                self._clear_slots()
        tokens, scores, origins = (result[:, : self.options.num_return_sequences] for result in self.results)
        steps = int((origins >= 0).sum(dim=-1).max())
        return tokens[:, :, : self.prompt_length + steps], scores, origins[:, :, :steps]

    def _logits(self, length: int) -> Tensor:
        """The logits [B, K, V] of the token after `length` generated ones; [B, 1, V] of the first."""
        beams, start = self.options.num_beams, self.prompt_length
        if length == 0:
            own = self.mine[:, :1].expand(-1, start, -1).tril()
            logits = self.decoder.step(
                self.running[:, 0, :start], 0, 0, self._without_padding(own), self.prompt_mask, self.record
            )
            logits = logits[:, -1:]  # the same for all beams
        else:
            slot, position = self.mine.shape[-1], start + length - 1
            new = torch.eye(beams, dtype=torch.bool, device=self.mine.device).expand(len(self.mine), -1, -1)
            own = self.mine = torch.cat((self.mine, new), dim=-1)
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
        options, beams, vocab_size = self.options, self.options.num_beams, logits.shape[-1]
        if options.output_logits:
            self.all_logits.append(logits.expand(-1, beams, -1).flatten(0, 1).clone())
        if options.logits_processor or options.output_scores:
            log_probabilities = logits.log_softmax(dim=-1).expand(-1, beams, -1).flatten(0, 1)
            if options.logits_processor:
                so_far = self.running[:, :, : self.prompt_length + length - 1].flatten(0, 1)
                log_probabilities = options.logits_processor(so_far, log_probabilities)
            if options.output_scores:
                self.all_scores.append(log_probabilities.clone())
            scores = log_probabilities.view(-1, beams, vocab_size) + self.running_scores[:, :, None]
        else:
            before = self.running_scores[:, :, None] - log_sum_exp(logits, self.workspace)
            scores = logits.add_(before) if logits.shape[1] == beams else logits + before
        scores, places = largest(scores.flatten(1), min(self.candidates, beams * vocab_size))
        return scores, places // vocab_size, places % vocab_size

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

    def _clear_slots(self) -> None:
        """Drop the slots of tokens that no running hypothesis descends from any more, if they are many."""
        used = self.mine.any(dim=1)
        most = int(used.sum(dim=-1).max())
        if most > _MOST_IN_USE * used.shape[-1]:
            return
        slots = used.int().argsort(dim=-1, descending=True, stable=True)[:, :most]  # those in use, in their order
        self.mine = self.mine.gather(2, slots[:, None].expand(-1, self.mine.shape[1], -1))
        self.decoder.keep_slots(slots)

    def _let_go(self) -> None:
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
            self.decoder.keep(keep)


def log_sum_exp(values: Tensor, workspace: Workspace) -> Tensor:
    """Return the logarithm of the sum of exponentials over the last axis [..., 1].

    With powers of two, which cost a third of those of e on a CPU (torch 2.13).
    """
    maximum = values.amax(dim=-1, keepdim=True)
    powers = torch.sub(values, maximum, out=workspace.like(values)).mul_(_LOG2_E).exp2_()
    return maximum + powers.sum(dim=-1, keepdim=True).log()


def largest(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the largest `count` of the last axis, the largest first, and their places, as `torch.topk` does.

    On a CPU torch looks at every element in turn. Here the maxima of blocks, which are quick to find, say which blocks
    can hold any of them.
    """
    blocks = values.shape[-1] // _BLOCK
    if values.device.type != "cpu" or blocks < 4 * count:
        return values.topk(count, dim=-1)
    whole = blocks * _BLOCK
    best_blocks = values[..., :whole].unflatten(-1, (blocks, _BLOCK)).amax(dim=-1).topk(count, dim=-1).indices
    inside = torch.arange(_BLOCK, device=values.device)
    places = (best_blocks[..., None] * _BLOCK + inside).flatten(-2)
    rest = torch.arange(whole, values.shape[-1], device=values.device).expand(*places.shape[:-1], -1)
    places = torch.cat((places, rest), dim=-1)
    found, order = values.gather(-1, places).topk(count, dim=-1)
    return found, places.gather(-1, order)


def _take(values: Tensor, places: Tensor) -> Tensor:
    """Pick beams: values [B, K, ...] at places [B, C] give [B, C, ...]."""
    index = places.view(*places.shape, *[1] * (values.dim() - 2)).expand(-1, -1, *values.shape[2:])
    return values.gather(1, index)
