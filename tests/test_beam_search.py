"""Our beam search against the library's, option by option, and against the paper's ranking written out in Python."""

import copy
import itertools
import logging
import math

import pytest
import torch
from tiny_models import SHARING, SOURCES, TINY, pad, randomise
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    WatermarkingConfig,
)
from transformers.generation import BaseStreamer, StoppingCriteria, StoppingCriteriaList

import vanilla_transformer as vt
from vanilla_transformer import beam_decoder_vanilla_transformer as beam_decoder
from vanilla_transformer import beam_search_vanilla_transformer as beam_search
from vanilla_transformer import generation_vanilla_transformer as generation
from vanilla_transformer.beam_search_vanilla_transformer import largest, log_sum_exp
from vanilla_transformer.metrics import TranslationScore
from vanilla_transformer.phrase_grammar import generate_splits
from vanilla_transformer.projection_vanilla_transformer import Workspace
from vanilla_transformer.quantization import quantize_int8

KINDS = {
    "post-norm": {},
    "pre-norm, biases": {"norm_position": "pre", "attention_bias": True, "output_bias": True},
    "learned positions": {"position_embedding_type": "learned", "max_position_embeddings": 70},
    "other heads": {"d_k": 6, "d_v": 3},
    **SHARING,
}


def make_model(std=0.4, **fields):
    config = vt.VanillaTransformerConfig(**{**TINY, **fields})
    return randomise(vt.VanillaTransformerForConditionalGeneration(config), std)


@pytest.fixture(scope="module")
def model():
    return make_model()


def sources():
    ids, mask = pad([*SOURCES, [41, 3, 1], [9, 8, 7, 6, 5, 4, 3, 9, 8, 1]])
    return {"input_ids": ids, "attention_mask": mask}


def both(model, monkeypatch, **options):
    """The outputs of our search and of the library's, with the library's ranking."""
    options = {"length_penalty": 1.0, "max_new_tokens": 12, **options}
    ours = model.generate(**sources(), **options)
    with monkeypatch.context() as patch:
        patch.setattr(type(model), "_searches_itself", lambda self, sources: False)
        theirs = model.generate(**sources(), **options)
    return ours, theirs


def dictionary(scores=True, **options):
    return {"return_dict_in_generate": True, "output_scores": scores, **options}


def assert_same(ours, theirs):
    assert ours.sequences.tolist() == theirs.sequences.tolist()
    torch.testing.assert_close(ours.sequences_scores, theirs.sequences_scores, rtol=1e-5, atol=1e-5)


# ------------------------------------------------------------------------------------- against the library's search


@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_librarys_search_for_every_kind_of_model(kind, monkeypatch):
    model = make_model(**KINDS[kind])
    assert_same(*both(model, monkeypatch, num_beams=4, num_return_sequences=4, **dictionary()))


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 0.6, 1.0, 2.0])
@pytest.mark.parametrize("num_beams", [2, 5])
def test_equals_the_librarys_three_rules_of_stopping(model, monkeypatch, early_stopping, length_penalty, num_beams):
    options = {"early_stopping": early_stopping, "length_penalty": length_penalty, "num_beams": num_beams}
    for eos in (1, [1, 7, 20]):  # with several end tokens more hypotheses end early
        assert_same(
            *both(model, monkeypatch, num_return_sequences=num_beams, eos_token_id=eos, **options, **dictionary())
        )


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.7},
        {"no_repeat_ngram_size": 2},
        {"min_new_tokens": 6},
        {"bad_words_ids": [[5], [9, 4]]},
        {"forced_bos_token_id": 9},
        {"forced_eos_token_id": 1},
        {"encoder_repetition_penalty": 1.5},
        {"prefix_allowed_tokens_fn": lambda batch, ids: [1, 3 + batch, 10, 11, 12, 13, 14]},
        {"exponential_decay_length_penalty": (3, 1.5)},
        {"renormalize_logits": True, "suppress_tokens": [4, 5, 6]},
        {"min_length": 7},
        {"begin_suppress_tokens": [9, 10, 11, 12]},
        {"encoder_no_repeat_ngram_size": 1},
        {"sequence_bias": [[[5], 3.0], [[9, 4], -2.0]]},
        {"remove_invalid_values": True},
        {"watermarking_config": WatermarkingConfig(bias=1.5)},
        {"max_time": 1e-9},  # over after the first step
        {"temperature": 0.3, "top_k": 2, "top_p": 0.5},  # of sampling, without effect here
    ],
    ids=lambda options: next(iter(options)),
)
def test_equals_the_librarys_search_under_logits_processors(model, monkeypatch, options):
    assert_same(*both(model, monkeypatch, num_beams=3, num_return_sequences=3, **options, **dictionary()))


class EndsAtEven(StoppingCriteria):
    """Stops a row at an even token above 30."""

    def __call__(self, input_ids, scores, **kwargs):
        return (input_ids[:, -1] % 2 == 0) & (input_ids[:, -1] > 30)


def test_equals_the_librarys_search_under_further_stopping_criteria(model, monkeypatch):
    options = {"num_beams": 3, "num_return_sequences": 3, "stopping_criteria": StoppingCriteriaList([EndsAtEven()])}
    ours, theirs = both(model, monkeypatch, **options, **dictionary())
    stopped = 0
    for mine, its in zip(ours.sequences.tolist(), theirs.sequences.tolist(), strict=True):
        # The library fills up with the end token, a padding id of 0 counting as none, so that it seems to have ended.
        ends = [place for place, token in enumerate(mine) if token > 30 and token % 2 == 0]
        stopped += len(ends)
        its = its[: ends[0] + 1] + [0] * (len(its) - ends[0] - 1) if ends else its
        assert mine == its
    assert stopped
    torch.testing.assert_close(ours.sequences_scores, theirs.sequences_scores, rtol=1e-5, atol=1e-5)


def test_prompts_are_continued_as_by_the_library(model, monkeypatch):
    prompt = torch.tensor([[2, 9, 4, 7], [2, 5, 5, 6], [2, 12, 3, 3], [2, 8, 8, 4], [2, 10, 11, 12]])
    assert_same(
        *both(model, monkeypatch, num_beams=3, num_return_sequences=2, decoder_input_ids=prompt, **dictionary())
    )
    ours, _ = both(model, monkeypatch, num_beams=3, decoder_input_ids=prompt)
    assert ours[:, :4].tolist() == prompt.tolist()


def test_what_is_returned_of_each_step_is_what_the_library_returns(model, monkeypatch):
    options = dictionary(output_attentions=True, output_hidden_states=True, output_logits=True)
    for more in ({}, {"decoder_input_ids": torch.tensor([[2, 9, 4]] * 5)}):
        ours, theirs = both(model, monkeypatch, num_beams=3, num_return_sequences=2, **more, **options)
        assert_same(ours, theirs)
        indices = theirs.beam_indices
        torch.testing.assert_close(ours.beam_indices.long(), indices.long())
        names = ("scores", "logits", "decoder_attentions", "cross_attentions", "decoder_hidden_states")
        for name in (*names, "encoder_attentions", "encoder_hidden_states"):
            mine, its = getattr(ours, name), getattr(theirs, name)
            assert len(mine) == len(its), name
            for step, (a, b) in enumerate(zip(mine, its, strict=True)):
                # Rows that no returned hypothesis came from may hold anything: done sentences go on in other ways.
                rows = slice(None) if name.startswith("encoder") else indices[:, step][indices[:, step] >= 0].long()
                for x, y in zip(*([t] if torch.is_tensor(t) else t for t in (a, b)), strict=True):
                    assert x.shape == y.shape, name
                    torch.testing.assert_close(
                        x[rows], y[rows], rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n} {m}"
                    )
        transition = [model.compute_transition_scores(o.sequences, o.scores, o.beam_indices) for o in (ours, theirs)]
        torch.testing.assert_close(*transition, rtol=1e-4, atol=1e-5)


def test_sentences_leave_the_batch_and_change_nothing(model, monkeypatch):
    sizes = []
    step = vt.modeling_vanilla_transformer.BeamSearch._logits

    def counted(search, length):
        sizes.append(len(search.rows))
        return step(search, length)

    monkeypatch.setattr(vt.modeling_vanilla_transformer.BeamSearch, "_logits", counted)
    given = sources()
    together = model.generate(**given, num_beams=4, eos_token_id=[1, 7, 20, 33], max_new_tokens=30)
    assert sizes[0] == 5
    assert sizes[-1] < 5
    for row, (ids, mask) in zip(together, zip(*given.values(), strict=True), strict=True):
        alone = model.generate(ids[None, mask.bool()], num_beams=4, eos_token_id=[1, 7, 20, 33], max_new_tokens=30)[0]
        assert row[: len(alone)].tolist() == alone.tolist()
        assert not row[len(alone) :].any()


# ----------------------------------------------------------------------------------------------- the paper's ranking


def reference(model, source, *, num_beams, alpha, cap, count=1, forbidden=()):
    """Beam search in plain Python and float64, no cache, no batch: all finished hypotheses of at most `cap` tokens.

    Ranked by log P / ((5 + |Y|) / 6)^α. With it comes the number of steps after which the `count` best are certain:
    no running hypothesis, were all its tokens up to the cap certain, would get a score above theirs.
    """
    encoded = model.get_encoder()(torch.tensor([source]))
    running, finished, certain = [((2,), 0.0)], [], None
    for length in range(1, cap + 1):
        candidates = []
        for tokens, score in running:
            with torch.no_grad():
                logits = model(encoder_outputs=encoded, decoder_input_ids=torch.tensor([tokens])).logits[0, -1]
            log_probabilities = logits.double().log_softmax(-1).tolist()
            candidates += [
                ((*tokens, token), score + p) for token, p in enumerate(log_probabilities) if token not in forbidden
            ]
        best = sorted(candidates, key=lambda c: -c[1])[: 2 * num_beams]
        ends = [tokens[-1] == 1 or length == cap for tokens, _ in best]
        divisor = ((5 + length) / 6) ** alpha
        finished += [(t, s / divisor) for (t, s), end in list(zip(best, ends, strict=True))[:num_beams] if end]
        finished = sorted(finished, key=lambda c: -c[1])[:num_beams]
        running = [c for c, end in zip(best, ends, strict=True) if not end][:num_beams]
        reachable = running[0][1] / ((5 + cap) / 6) ** alpha if running else -math.inf
        if certain is None and (not running or (len(finished) >= count and reachable <= finished[count - 1][1])):
            certain = length
        if not running:
            break
    return finished, certain


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("forbidden", [(), (1, 30)])  # a sentence that may not end ends at the cap
def test_the_papers_ranking_equals_the_formula_and_stops_without_losing_anything(model, alpha, forbidden):
    ids, mask = sources().values()
    for count in (1, 3):
        output = model.generate(
            ids, attention_mask=mask, num_beams=3, num_return_sequences=count, gnmt_alpha=alpha, max_new_tokens=9,
            suppress_tokens=list(forbidden) or None, **dictionary(),
        )  # fmt: skip
        rows = list(zip(output.sequences.tolist(), output.sequences_scores.tolist(), strict=True))
        for number, (source, real) in enumerate(zip(ids, mask.bool(), strict=True)):
            source = source[real].tolist()
            want, _ = reference(model, source, num_beams=3, alpha=alpha, cap=9, forbidden=forbidden)
            for (tokens, score), (row, found) in zip(want[:count], rows[number * count :], strict=False):
                assert tuple(row[: len(tokens)]) == tokens
                assert not any(row[len(tokens) :])
                assert found == pytest.approx(score, abs=1e-4)


def test_it_stops_as_soon_as_nothing_better_can_come_and_not_before(monkeypatch):
    steps = []
    step = beam_search.BeamSearch._logits
    monkeypatch.setattr(beam_search.BeamSearch, "_logits", lambda s, n: (steps.append(n), step(s, n))[1])
    found = set()
    for seed, alpha, count in itertools.product(range(6), (0.0, 0.6, 1.5), (1, 2)):
        model = make_model(std=0.2, vocab_size=8, output_bias=True)
        with torch.no_grad():
            model.final_logits_bias[0, 1] = 1.0  # so that sentences end
        source = [3 + seed % 5, 3 + seed % 4, 4, 1]
        want, certain = reference(model, source, num_beams=3, alpha=alpha, cap=25, count=count)
        steps.clear()
        row = model.generate(
            torch.tensor([source]), num_beams=3, num_return_sequences=count, gnmt_alpha=alpha, max_new_tokens=25
        )[0].tolist()
        assert len(steps) == certain
        assert tuple(row[: len(want[0][0])]) == want[0][0]
        found.add(certain)
    assert min(found) < max(found)
    assert min(found) < 25  # else the cap would have done it


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.03)])
def test_scores_are_those_of_forced_decoding(dtype, tolerance):
    # The model's own forward pass in the same type, which rounds other sums: hence the tolerance.
    model = make_model().to(dtype)
    ids, mask = sources().values()
    output = model.generate(ids, attention_mask=mask, num_return_sequences=4, max_length_offset=3, **dictionary())
    for row, score, source, real in zip(
        output.sequences,
        output.sequences_scores,
        ids.repeat_interleave(4, 0),
        mask.repeat_interleave(4, 0),
        strict=True,
    ):
        tokens = row[row != 0]
        with torch.no_grad():
            logits = model(source[None, real.bool()], decoder_input_ids=tokens[None, :-1]).logits[0].float()
        log_probability = logits.log_softmax(-1).gather(1, tokens[1:, None]).sum()
        divisor = ((5 + len(tokens) - 1) / 6) ** 0.6
        assert float(score) == pytest.approx(float(log_probability) / divisor, rel=tolerance, abs=1e-4)


def test_int8_equals_the_librarys_search_on_the_same_layers(monkeypatch):
    # Activations get a scale a call, so that a batch must be the same rows: one sentence, which goes on to the end.
    model = quantize_int8(make_model())
    model.generation_config.eos_token_id = None
    for source in (*SOURCES, [9, 8, 7, 6, 5, 4, 3, 9, 8, 1]):
        options = dictionary(num_beams=4, num_return_sequences=4, max_new_tokens=9, length_penalty=1.0)
        ours = model.generate(torch.tensor([source]), **options)
        with monkeypatch.context() as patch:
            patch.setattr(type(model), "_searches_itself", lambda self, sources: False)
            theirs = model.generate(torch.tensor([source]), **options)
        assert_same(ours, theirs)


# ---------------------------------------------------------------------------------------------------- a trained model


@pytest.fixture(scope="module")
def grammar_model(trained_folder):
    """The quickstart's model, a thousand sentences in batches, and what gives the BLEU of their translations."""
    model = AutoModelForSeq2SeqLM.from_pretrained(trained_folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(trained_folder)
    pairs = sorted(generate_splits().test, key=lambda pair: len(pair[0]))
    assert len(pairs) == 1000
    encoded = [
        dict(tokenizer([source for source, _ in pairs[start : start + 100]], padding=True, return_tensors="pt"))
        for start in range(0, 1000, 100)
    ]

    def score(outputs):
        texts = [text for rows in outputs for text in tokenizer.batch_decode(rows, skip_special_tokens=True)]
        return TranslationScore().compute(predictions=texts, references=[target for _, target in pairs])["bleu"]

    return model, encoded, score


def n_best(model, encoded, **options):
    """Return tokens and score of each hypothesis, sentence by sentence."""
    found = []
    for rows in encoded:
        output = model.generate(
            **rows, num_beams=4, num_return_sequences=4, max_new_tokens=60, **dictionary(), **options
        )
        found += zip(
            (row[row != 0].tolist() for row in output.sequences), output.sequences_scores.tolist(), strict=True
        )
    return found


@pytest.mark.slow
@pytest.mark.parametrize("early_stopping", [True, False, "never"])
def test_a_thousand_sentences_have_the_librarys_n_best_lists(grammar_model, monkeypatch, early_stopping):
    model, encoded, _ = grammar_model
    options = {"length_penalty": 1.0, "early_stopping": early_stopping}
    ours = n_best(model, encoded, **options)
    monkeypatch.setattr(type(model), "_searches_itself", lambda self, sources: False)
    theirs = n_best(model, encoded, **options)
    assert len(ours) == len(theirs) == 4000
    for start in range(0, 4000, 4):
        mine, its = ours[start : start + 4], theirs[start : start + 4]
        torch.testing.assert_close(
            torch.tensor([score for _, score in mine]), torch.tensor([score for _, score in its]), rtol=0, atol=1e-4
        )
        for (tokens, _), (others, score) in zip(mine, its, strict=True):
            # Another order or another hypothesis is right only at a tie.
            tied = [other for other, theirs in its if abs(theirs - score) < 1e-4]
            assert tokens == others or tokens in tied or score - its[-1][1] < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_the_fast_precisions_lose_no_quality_on_a_thousand_sentences(grammar_model, precision):
    model, encoded, score = grammar_model
    fast = copy.deepcopy(model)
    fast = fast.bfloat16() if precision == "bf16" else quantize_int8(fast)
    plain, other = (score([m.generate(**rows) for rows in encoded]) for m in (model, fast))
    assert plain > 80
    assert other > plain - 0.2


# ------------------------------------------------------------------------------------------------------- what rules


def ranking_used(model, monkeypatch, **options):
    seen = []
    search = generation.BeamSearch

    def spy(model, states, mask, prompt, options, prompt_mask):
        seen.append(options.ranking)
        return search(model, states, mask, prompt, options, prompt_mask)

    monkeypatch.setattr(generation, "BeamSearch", spy)
    model.generate(**sources(), max_new_tokens=3, **options)
    return seen[0]


def test_an_explicit_length_penalty_or_no_alpha_selects_the_librarys_ranking(model, monkeypatch):
    assert ranking_used(model, monkeypatch).gnmt_alpha == 0.6
    assert ranking_used(model, monkeypatch, gnmt_alpha=0.9).gnmt_alpha == 0.9
    for options in ({"length_penalty": 1.3}, {"gnmt_alpha": None, "length_penalty": 1.3}):
        ranking = ranking_used(model, monkeypatch, **options)
        assert (ranking.gnmt_alpha, ranking.length_penalty) == (None, 1.3)
    assert ranking_used(model, monkeypatch, gnmt_alpha=None).gnmt_alpha is None
    given = GenerationConfig(num_beams=2, length_penalty=0.7, pad_token_id=0, eos_token_id=1, decoder_start_token_id=2)
    assert ranking_used(model, monkeypatch, generation_config=given).gnmt_alpha is None


def test_alpha_is_saved_loaded_and_can_be_set_on_the_model(tmp_path, monkeypatch):
    model = make_model()
    assert model.generation_config.gnmt_alpha == 0.6
    model.generation_config.gnmt_alpha = 0.25
    model.save_pretrained(tmp_path)
    loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    assert ranking_used(loaded, monkeypatch).gnmt_alpha == 0.25
    loaded.generation_config.length_penalty = 1.0
    assert ranking_used(loaded, monkeypatch).gnmt_alpha is None


@pytest.mark.parametrize("alpha", [-0.1, "0.6", math.nan, True])
def test_an_alpha_without_sense_is_named(model, alpha):
    with pytest.raises(ValueError, match=r"gnmt_alpha=.* is not valid"):
        model.generate(**sources(), gnmt_alpha=alpha)


def test_two_rankings_at_once_are_refused(model):
    with pytest.raises(ValueError, match="give one of them"):
        model.generate(**sources(), gnmt_alpha=0.6, length_penalty=1.0)


OTHERS = {  # for each option a value that our search does not do
    **dict.fromkeys(("do_sample", "low_memory", "synced_gpus", "token_healing"), True),
    **dict.fromkeys(("num_beam_groups", "guidance_scale", "prompt_lookup_num_tokens", "prefill_chunk_size"), 2),
    **dict.fromkeys(("penalty_alpha", "assistant_model", "cache", "past_key_values", "decoder_inputs_embeds"), 0.5),
    **dict.fromkeys(("dola_layers", "cache_implementation", "stop_strings", "streamer", "speculation_type"), "static"),
    "constraints": [[5]],
    "force_words_ids": [[5]],
    "use_cache": False,
    "use_mtp": True,
    "assistant_early_exit": 1,
}


@pytest.mark.parametrize("option", sorted(OTHERS))
def test_other_options_go_to_the_librarys_search_which_is_said(model, monkeypatch, option, caplog):
    if option not in generation._neutral_values():
        pytest.skip("this release does not have it")
    given = []

    def library(self, *arguments, **options):
        given.append(options)
        return torch.tensor([[2, 1]] * 5)

    monkeypatch.setattr(generation.GenerationMixin, "generate", library)
    generation.logger.warning_once.cache_clear()
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    model.generate(**sources(), max_new_tokens=3, **{option: OTHERS[option]})
    assert "custom_generate" not in given[0]
    assert given[0][option] == OTHERS[option]
    assert "ranks by length_penalty" in caplog.text


@pytest.mark.parametrize("options", [{"do_sample": True}, {"use_cache": False}, {"cache_implementation": "static"}])
def test_the_librarys_search_is_really_the_librarys(model, monkeypatch, options):
    monkeypatch.setattr(generation, "BeamSearch", lambda *args: pytest.fail("our search was called"))
    assert len(model.generate(**sources(), max_new_tokens=3, **options)) == 5


@pytest.mark.parametrize("state", ["training", "split over devices"])
def test_a_model_in_another_state_goes_to_the_librarys_search(state, monkeypatch):
    model = make_model()
    assert model._searches_itself([{}])
    assert model._searches_itself([{"token_healing": False, "do_sample": False, "guidance_scale": 1.0}])
    if state == "training":
        model.train()
    else:
        model.hf_device_map = {"model.encoder": "cpu", "model.decoder": "disk"}
    assert not model._searches_itself([{}])


def test_every_option_of_the_library_is_known_or_left_to_it():
    of_the_library = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    left = generation._neutral_values().keys()
    assert not left & generation.SUPPORTED
    assert left <= OTHERS.keys()  # a new one of a new release: is it one of ours?
    known = of_the_library | {"assistant_model", "synced_gpus", "cache", "past_key_values", "streamer"}
    known |= {"decoder_inputs_embeds", "constraints", "force_words_ids", "num_beam_groups"}  # gone in some releases
    known |= {"gnmt_alpha", "max_length_offset"}
    known |= {"assistant_ensemble_weight", "max_cache_len", "continuous_batching_config"}  # newer ones
    assert set(generation.UNSUPPORTED) | generation.SUPPORTED <= known


def test_a_streamer_gets_the_tokens_of_a_greedy_search_and_beams_refuse_it(model):
    class Streamer(BaseStreamer):
        def __init__(self):
            self.tokens, self.ended = [], False

        def put(self, value):
            self.tokens += value.reshape(-1).tolist()

        def end(self):
            self.ended = True

    streamer = Streamer()
    given = {name: tensor[:1] for name, tensor in sources().items()}
    output = model.generate(**given, num_beams=1, streamer=streamer, max_new_tokens=9)
    assert streamer.ended
    assert streamer.tokens == output[0].tolist()
    with pytest.raises(ValueError, match=r"streamer.*cannot be used with beam search"):
        model.generate(**given, streamer=Streamer(), max_new_tokens=9)


def test_a_search_of_ones_own_is_left_alone(model):
    def custom(model, input_ids, **kwargs):
        return input_ids + 5

    assert model.generate(**sources(), custom_generate=custom).max() == 7


class Forbid(LogitsProcessor):
    def __call__(self, input_ids, scores):
        scores = scores.clone()
        scores[:, 11] = -math.inf
        return scores


def test_ones_own_processor_and_half_precision(model):
    output = model.generate(**sources(), logits_processor=LogitsProcessorList([Forbid()]), max_new_tokens=8)
    assert not (output == 11).any()
    half = make_model().to(torch.bfloat16)
    assert half.generate(**sources(), max_new_tokens=8).shape[0] == 5


def test_no_source_token_left_gives_a_result_and_disturbs_nobody(model):
    given = sources()
    alone = model.generate(**given, max_new_tokens=6)
    given["attention_mask"] = given["attention_mask"].clone()
    given["attention_mask"][1] = 0
    output = model.generate(**given, max_new_tokens=6)
    for row in (0, 2, 3, 4):
        width = min(output.shape[1], alone.shape[1])
        assert output[row, :width].tolist() == alone[row, :width].tolist()


def test_a_beam_wider_than_the_vocabulary_still_searches(monkeypatch):
    model = make_model(vocab_size=6)
    model.config.eos_token_id = 1
    given = {"input_ids": torch.tensor([[3, 4, 5, 1]])}
    tokens = model.generate(**given, num_beams=5, num_return_sequences=5, max_new_tokens=4)
    assert len({tuple(row) for row in tokens.tolist()}) == 5
    assert list(itertools.chain(*tokens.tolist()))


@pytest.mark.parametrize("vocab_size", [7, 300, 1500, 10_007])
@pytest.mark.parametrize("count", [2, 8, 20])
def test_the_largest_are_those_of_topk(vocab_size, count):
    torch.manual_seed(vocab_size + count)
    count = min(count, vocab_size)
    for values in (
        torch.randn(3, 4, vocab_size),
        torch.randn(3, 4, vocab_size).masked_fill(torch.rand(3, 4, vocab_size) < 0.999, -torch.inf),
        torch.arange(vocab_size).float().expand(2, 1, -1),  # all of them in the last blocks and the rest
    ):
        found, places = largest(values, count)
        expected = values.topk(count, dim=-1).values
        assert torch.equal(found, expected)
        assert torch.equal(values.gather(-1, places), expected)
        assert all(len(set(row)) == count for row in places.flatten(0, 1).tolist())


@pytest.mark.parametrize("scale", [0.1, 5.0, 60.0])
def test_log_sum_exp_is_that_of_float64(scale):
    torch.manual_seed(0)
    workspace = Workspace()
    for shape in ((3, 4, 1000), (2, 4, 1000), (5, 4, 700)):
        values = scale * torch.randn(shape) + 30.0
        values[0, 0, :-1] = -torch.inf  # but one, all of them excluded
        before = values.clone()
        found = log_sum_exp(values, workspace)
        expected = before.double().logsumexp(dim=-1, keepdim=True).float()
        torch.testing.assert_close(found, expected, rtol=2e-7, atol=2e-6)
        assert torch.equal(values, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_slots_made_room_for_change_nothing(monkeypatch, dtype):
    # Against a decoder with room for all slots from the start, which attends to none that is empty.
    torch.manual_seed(0)
    model = make_model(vocab_size=50).to(dtype)
    model.generation_config.eos_token_id = None
    given = {"input_ids": torch.randint(4, 50, (20, 7))}
    options = {"num_beams": 3, "num_return_sequences": 3, "max_new_tokens": 45}
    options |= {"return_dict_in_generate": True, "output_scores": True}
    found = model.generate(**given, **options)
    monkeypatch.setattr(beam_decoder, "_MORE_SLOTS", 1000)
    create = beam_decoder.SharedBeamDecoder.__init__

    def without_room(self, *arguments):
        create(self, *arguments)
        self.attends_to_room = False

    monkeypatch.setattr(beam_decoder.SharedBeamDecoder, "__init__", without_room)
    expected = model.generate(**given, **options)
    assert dtype == torch.bfloat16 or torch.equal(found.sequences, expected.sequences)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2  # other sums of what is rounded to 16 bits
    torch.testing.assert_close(found.sequences_scores, expected.sequences_scores, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("padded_prompt", [False, True])
def test_clearing_the_cache_changes_nothing(monkeypatch, padded_prompt):
    # Against a search that never drops a slot; here one is dropped after each step that leaves any behind.
    torch.manual_seed(0)
    model = make_model(vocab_size=50)
    model.generation_config.eos_token_id = None
    given = {"input_ids": torch.randint(4, 50, (3, 7))}
    if padded_prompt:
        given["decoder_input_ids"] = torch.tensor([[0, 2, 5], [2, 9, 8], [0, 0, 2]])
        given["decoder_attention_mask"] = torch.tensor([[0, 1, 1], [1, 1, 1], [0, 0, 1]])
    options = dictionary(num_beams=3, num_return_sequences=3, max_new_tokens=30, output_attentions=True)
    kept = []
    keep_slots = beam_decoder.SharedBeamDecoder.keep_slots
    monkeypatch.setattr(
        beam_decoder.SharedBeamDecoder, "keep_slots", lambda self, slots: kept.append(slots) or keep_slots(self, slots)
    )
    monkeypatch.setattr(beam_search, "_STEPS_BETWEEN_CLEARING", 1)
    monkeypatch.setattr(beam_search, "_MOST_IN_USE", 1.0)
    found = model.generate(**given, **options)
    assert len(kept) > 20
    monkeypatch.setattr(beam_search, "_STEPS_BETWEEN_CLEARING", 1000)
    expected = model.generate(**given, **options)
    assert_same(found, expected)
    assert len(found.decoder_attentions) == len(expected.decoder_attentions)
    for step, other in zip(found.decoder_attentions, expected.decoder_attentions, strict=True):
        for mine, its in zip(step, other, strict=True):
            torch.testing.assert_close(mine, its, rtol=1e-5, atol=1e-6)
