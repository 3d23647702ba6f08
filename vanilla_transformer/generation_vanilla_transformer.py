"""Decoding as the paper does it (section 6.1): beam 4, α 0.6, and at most source length + 50 tokens a sentence.

The cap belongs to the sentence, not to the batch: a batch's longest sentence must not change what another one gets.

Beam search is our own, for the paper's ranking and for speed; it is reached by the library's `custom_generate`. What
it does not do (see `SUPPORTED`) the library's beam search does, with the library's ranking; all other modes are the
library's.
"""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation import (
    EosTokenCriteria,
    GenerateBeamEncoderDecoderOutput,
    GenerationMixin,
    MaxLengthCriteria,
    StoppingCriteriaList,
)
from transformers.utils import logging

from .beam_search_vanilla_transformer import BeamSearch, BeamSearchOptions, Ranking
from .length_limits_vanilla_transformer import (
    SentenceLengthCriteria,
    decoder_prompt_length,
    pad_behind_end,
    source_lengths,
)

logger = logging.get_logger(__name__)

NUM_BEAMS = 4  # section 6.1
GNMT_ALPHA = 0.6  # section 6.1
MAX_LENGTH_OFFSET = 50  # section 6.1
_SETTINGS = threading.Lock()  # of all models: batches of one may be decoded side by side


# Options of `generate()` that our beam search honours, itself or by the library's processors and criteria, and those
# without effect on any beam search that does not sample.
SUPPORTED = frozenset(
    """
    num_beams num_return_sequences length_penalty early_stopping gnmt_alpha max_length_offset max_length max_new_tokens
    min_length min_new_tokens max_time bos_token_id eos_token_id pad_token_id decoder_start_token_id
    forced_bos_token_id forced_eos_token_id bad_words_ids suppress_tokens begin_suppress_tokens sequence_bias
    no_repeat_ngram_size encoder_no_repeat_ngram_size repetition_penalty encoder_repetition_penalty
    exponential_decay_length_penalty remove_invalid_values renormalize_logits watermarking_config
    return_dict_in_generate output_scores output_logits output_hidden_states output_attentions

    temperature top_k top_p top_h min_p typical_p epsilon_cutoff eta_cutoff diversity_penalty is_assistant
    num_assistant_tokens num_assistant_tokens_schedule assistant_confidence_threshold assistant_ensemble_weight
    assistant_lookbehind target_lookbehind max_matching_ngram_size cache_config max_cache_len compile_config
    disable_compile continuous_batching_config transformers_version
    """.split()  # noqa: SIM905 - a list would take a line a name
)
# All other options leave a search to the library's own, unless they have the library's default or this value.
UNSUPPORTED = {
    **dict.fromkeys(("do_sample", "low_memory", "synced_gpus"), False),
    **dict.fromkeys(("num_beam_groups", "guidance_scale"), 1),
    **dict.fromkeys(("penalty_alpha", "dola_layers", "constraints", "force_words_ids"), None),
    **dict.fromkeys(("assistant_model", "prompt_lookup_num_tokens", "cache_implementation"), None),
    **dict.fromkeys(("cache", "past_key_values", "decoder_inputs_embeds", "stop_strings", "streamer"), None),
    "use_cache": True,
}


class PaperGenerationMixin(GenerationMixin):
    """The library's `generate()` with the paper's length limit; for an encoder-decoder `PreTrainedModel`."""

    config: Any
    generation_config: GenerationConfig
    # The settings at the last `generate()`, and which of the library's fields they left open.
    _open_settings: tuple[GenerationConfig, frozenset[str]] | None = None

    @torch.no_grad()
    def generate(
        self,
        inputs: Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        logits_processor: Any = None,
        stopping_criteria: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Translate; the library's `generate()` with the paper's length limit and beam search.

        Without an explicit `max_length` or `max_new_tokens` each sentence gets at most its own source length, padding
        left out and end token counted, + `max_length_offset` new tokens, in every decoding mode.

        With several beams hypotheses are ranked as in the paper, by log P(Y) / ((5 + |Y|) / 6)^`gnmt_alpha`, and a
        sentence is done when no running hypothesis can reach what is to be returned. An explicit `length_penalty`, or
        `gnmt_alpha=None`, selects the library's ranking and its `early_stopping`. Sampling with beams, beam groups,
        constraints, a given cache, `stop_strings` and all else that is not in `SUPPORTED` go through the library's
        beam search, whose ranking then holds (a warning says so, once). A streamer needs `num_beams=1`.

        Args:
            inputs: Source tokens [B, S]; also as `input_ids`, `inputs_embeds` or `encoder_outputs`.
            generation_config: As in the library.
            logits_processor: As in the library.
            stopping_criteria: As in the library; the cap comes on top.
            **kwargs: As in the library, `max_length_offset` and `gnmt_alpha`.

        Returns:
            Token ids [B · num_return_sequences, T], or the library's output object with `return_dict_in_generate`.

        Raises:
            ValueError: `max_length_offset` is not an integer of at least 0, `gnmt_alpha` is not a number of at least
                0, or both it and `length_penalty` are given.
        """
        self._forget_library_defaults()
        if "num_beams" in kwargs and kwargs["num_beams"] is None:  # not given, as for the library's Seq2SeqTrainer
            del kwargs["num_beams"]
        configs = [config for config in (generation_config, self.generation_config) if config is not None]
        sources = [kwargs, *map(vars, configs)]
        offset = length_offset(sources)
        start, pad = (setting(name, sources) for name in ("decoder_start_token_id", "pad_token_id"))
        prompt_length = decoder_prompt_length(
            kwargs.get("decoder_input_ids"), self.config.decoder_start_token_id if start is None else start
        )
        eos, caps = setting("eos_token_id", sources), None
        pad = self.config.pad_token_id if pad is None else pad
        if offset is not None:
            caps = self._caps(inputs, kwargs, offset, prompt_length)
            criteria = SentenceLengthCriteria(caps, prompt_length)
            stopping_criteria = StoppingCriteriaList([criteria, *(stopping_criteria or [])])
            longest = int(caps.max())
            if generation_config is None:
                kwargs["max_new_tokens"] = longest
            else:  # the library wants either a config or arguments
                generation_config = copy.deepcopy(generation_config)
                generation_config.max_new_tokens = longest
        alpha = gnmt_alpha(sources)
        for name in ("max_length_offset", "gnmt_alpha"):
            kwargs.pop(name, None)
        beams = setting("num_beams", sources) or 1
        if beams > 1 and kwargs.get("custom_generate") is None:
            if self._searches_itself(sources):
                kwargs["custom_generate"] = functools.partial(beam_search, ranking_alpha=alpha)
                if generation_config is None:
                    kwargs["use_cache"] = False  # the search has its own; the library's would be made for nothing
            elif alpha is not None:
                logger.warning_once(
                    "This call goes through the library's beam search, which ranks by length_penalty and not as the "
                    "paper does (gnmt_alpha)."
                )
        output = super().generate(inputs, generation_config, logits_processor, stopping_criteria, **kwargs)
        return pad_behind_end(output, prompt_length, caps, eos, pad)

    def save_pretrained(self, *args: Any, **kwargs: Any) -> Any:
        """Save as the library does; its defaults that `Seq2SeqTrainer` wrote into the settings stay out."""
        self._forget_library_defaults()
        return super().save_pretrained(*args, **kwargs)

    def _forget_library_defaults(self) -> None:
        """Undo what `Seq2SeqTrainer` did to `generation_config`, and note which of its fields are open now.

        After each batch that it decodes, the library's trainer (5.0 to 5.24) fills every open field of the model's own
        settings with the library's default, `max_length` 20 among them: what follows would be cut at 20 tokens, and
        the next checkpoint of a training would say so to everybody.
        """
        with _SETTINGS:
            settings = self.generation_config
            # The trainer calls the same method; it is the library's own, not public (5.0 to 5.24).
            defaults = {k: v for k, v in settings._get_default_generation_params().items() if v is not None}
            still_open = frozenset(name for name in defaults if getattr(settings, name, None) is None)
            if not still_open and self._open_settings is not None and self._open_settings[0] is settings:
                # All filled, which nobody does by hand.
                still_open = frozenset(k for k in self._open_settings[1] if getattr(settings, k) == defaults[k])
                for name in still_open:
                    setattr(settings, name, None)
            self._open_settings = settings, still_open

    def _searches_itself(self, sources: Sequence[Mapping[str, Any]]) -> bool:
        """Return whether our own search does what is asked for, on this model as it is placed and wrapped."""
        neutral = _neutral_values()
        asked = {name: setting(name, sources) for name in neutral}
        if any(value is not None and not _is(value, neutral[name]) for name, value in asked.items()):
            return False
        placed = len(set((getattr(self, "hf_device_map", None) or {}).values())) > 1  # hooks move what it would need
        sharded = any(hasattr(p, "ds_id") or hasattr(p.data, "device_mesh") for p in self.parameters())
        return not (placed or sharded or self.training)

    def _caps(self, inputs: Tensor | None, kwargs: dict[str, Any], offset: int, prompt_length: int) -> Tensor:
        """Return how many tokens each source sentence may get [B]."""
        input_ids = kwargs.get("input_ids") if inputs is None else inputs
        states = kwargs.get("inputs_embeds")
        if kwargs.get("encoder_outputs") is not None:
            states = kwargs["encoder_outputs"][0]
        caps = source_lengths(input_ids, kwargs.get("attention_mask"), states, self.config.pad_token_id) + offset
        if self.config.position_embedding_type == "learned":
            caps = caps.clamp(max=self.config.max_position_embeddings - prompt_length + 1)
        return caps.clamp(min=1)


def set_generation_defaults(generation_config: GenerationConfig) -> None:
    """Set what the paper decodes with on the `generation_config` of a fresh model."""
    generation_config.num_beams = NUM_BEAMS
    generation_config.gnmt_alpha = GNMT_ALPHA
    generation_config.max_length_offset = MAX_LENGTH_OFFSET
    # The library's own mark (5.0 to 5.24): while it is True, fields that are not its own are dropped in loading.
    generation_config._from_model_config = False


def setting(name: str, sources: Sequence[Mapping[str, Any]]) -> Any:
    """Return the first value of `name` that is not None; `sources` come the most important first."""
    return next((source[name] for source in sources if source.get(name) is not None), None)


@functools.cache
def _neutral_values() -> dict[str, Any]:
    """The options that our search leaves to the library's, those of the installed release with them."""
    fields = {name: value for name, value in vars(GenerationConfig()).items() if not name.startswith("_")}
    return {name: value for name, value in fields.items() if name not in SUPPORTED} | UNSUPPORTED


def _is(value: Any, neutral: Any) -> bool:
    """Return whether an option has its neutral value; other kinds of object than numbers never do."""
    return (value is False and neutral is None) or (isinstance(value, (bool, int, float)) and value == neutral)


def gnmt_alpha(sources: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the α in force, or None where an explicit `length_penalty` or `gnmt_alpha=None` rules.

    Args:
        sources: The arguments of `generate()`, then the fields of generation configs, the most important first.

    Raises:
        ValueError: α is not a number of at least 0, or both it and a `length_penalty` are given.
    """
    alpha: Any = GNMT_ALPHA  # a folder without generation_config.json has none
    for place, source in enumerate(sources):
        if source.get("length_penalty") is not None:
            if place == 0 and source.get("gnmt_alpha") is not None:
                raise ValueError("gnmt_alpha and length_penalty are two ways to rank hypotheses: give one of them.")
            return None
        if "gnmt_alpha" in source:
            alpha = source["gnmt_alpha"]
            break
    if alpha is not None and (isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not alpha >= 0):
        raise ValueError(f"gnmt_alpha={alpha!r} is not valid: it is a number of at least 0, or None.")
    return alpha


def length_offset(sources: Sequence[Mapping[str, Any]]) -> int | None:
    """Return the `max_length_offset` in force, or None where an explicit `max_length` / `max_new_tokens` rules.

    Args:
        sources: The arguments of `generate()`, then the fields of generation configs, the most important first.

    Raises:
        ValueError: `max_length_offset` is not an integer of at least 0.
    """
    if setting("max_length", sources) is not None or setting("max_new_tokens", sources) is not None:
        return None
    offsets = (source["max_length_offset"] for source in sources if "max_length_offset" in source)
    offset = next(offsets, MAX_LENGTH_OFFSET)  # a folder without generation_config.json has none
    if offset is not None and (not isinstance(offset, int) or isinstance(offset, bool) or offset < 0):
        raise ValueError(
            f"max_length_offset={offset!r} is not valid: it is the number of tokens that an output may be longer than "
            "its source, an integer of at least 0, or None for the library's own length limits."
        )
    return offset


def beam_search(
    model: Any,
    input_ids: Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: GenerationConfig,
    ranking_alpha: float | None = GNMT_ALPHA,
    **model_kwargs: Any,
) -> Any:
    """Do the beam search of a call of `generate()`, which has prepared everything; a `custom_generate` callable.

    Args:
        model: The model.
        input_ids: What the target begins with, each sentence's rows beside each other [B · K, T].
        logits_processor: The library's list of processors.
        stopping_criteria: The library's list of criteria.
        generation_config: The settings in force.
        ranking_alpha: The paper's α, or None for the library's ranking.
        **model_kwargs: What the encoder gave, and its mask, each sentence K times.

    Returns:
        Token ids [B · R, T], or the library's output object with `return_dict_in_generate`.
    """
    beams, settings = generation_config.num_beams, generation_config
    encoded, mask = model_kwargs["encoder_outputs"], model_kwargs.get("attention_mask")
    prompt = input_ids[::beams]
    caps = prompt.new_full((len(prompt),), settings.max_length - prompt.shape[1])
    others = StoppingCriteriaList()
    for criterion in stopping_criteria:
        if isinstance(criterion, SentenceLengthCriteria):
            caps = torch.minimum(caps, criterion.max_new_tokens.to(caps.device))
        elif not isinstance(criterion, (EosTokenCriteria, MaxLengthCriteria)):
            others.append(criterion)
    ends = settings.eos_token_id
    asks = bool(settings.return_dict_in_generate)
    options = BeamSearchOptions(
        num_beams=beams,
        num_return_sequences=settings.num_return_sequences,
        caps=caps,
        eos_token_ids=None if ends is None else torch.as_tensor(ends, device=prompt.device).reshape(-1),
        pad_token_id=settings.pad_token_id,
        ranking=Ranking(ranking_alpha, settings.length_penalty, settings.early_stopping),
        logits_processor=logits_processor or None,
        stopping_criteria=others or None,
        output_scores=asks and bool(settings.output_scores),
        output_logits=asks and bool(settings.output_logits),
        output_hidden_states=asks and bool(settings.output_hidden_states),
        output_attentions=asks and bool(settings.output_attentions),
    )
    prompt_mask = model_kwargs.get("decoder_attention_mask")
    masks = (None if given is None else given[::beams] for given in (mask, prompt_mask))
    search = BeamSearch(model, encoded[0][::beams], next(masks), prompt, options, next(masks))
    tokens, scores, origins = (result.flatten(0, 1) for result in search.run())
    if not asks:
        return tokens
    steps = {} if search.record is None else {name: tuple(kept) or None for name, kept in search.record.steps.items()}
    if not options.output_hidden_states:
        steps.pop("decoder_hidden_states", None)
    return GenerateBeamEncoderDecoderOutput(
        sequences=tokens,
        sequences_scores=scores if options.output_scores else None,
        scores=tuple(search.all_scores) or None,
        logits=tuple(search.all_logits) or None,
        beam_indices=origins if options.output_scores else None,
        encoder_attentions=encoded.get("attentions") if options.output_attentions else None,
        encoder_hidden_states=encoded.get("hidden_states") if options.output_hidden_states else None,
        **steps,
    )
