"""The pipelines against direct calls of the library's own `model.generate` on single, unpadded sentences."""

from __future__ import annotations

import copy
import json
import logging
import threading

import datasets
import pytest
import torch
from tiny_models import SMALL, randomise
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    M2M100Config,
    M2M100ForConditionalGeneration,
    M2M100Tokenizer,
    MarianConfig,
    MarianMTModel,
    MarianTokenizer,
    MBartConfig,
    MBartForConditionalGeneration,
    MBartTokenizer,
    NllbTokenizer,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
    pipeline,
)
from transformers.pipelines.pt_utils import KeyDataset

import vanilla_transformer as vt
from vanilla_transformer.pipeline_vanilla_transformer import (
    SummarizationPipeline,
    Text2TextGenerationPipeline,
    TranslationPipeline,
)
from vanilla_transformer.quantization import quantize_int8

TEXTS = ["hello", "a much longer text", "abc de", "Zyx!"]
SPECIAL = ["<pad>", "</s>", "<s>", ">>xx<<", ">>yy<<"]


def byte_tokenizer(**kwargs):
    """One token a byte; pad 0, end 1, start 2, two language tags; never reads a special token from the text."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([*SPECIAL, *letters])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    options = {"pad_token": "<pad>", "eos_token": "</s>", "bos_token": "<s>", "split_special_tokens": True}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **{**options, **kwargs})


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


@pytest.fixture(scope="module")
def ours(tokenizer):
    config = vt.VanillaTransformerConfig.tiny(vocab_size=len(tokenizer), **SMALL)
    model = randomise(vt.VanillaTransformerForConditionalGeneration(config))
    model.generation_config.num_beams = 2
    model.generation_config.max_length_offset = 2
    return model


@pytest.fixture(scope="module")
def marian(tokenizer):
    config = MarianConfig(
        vocab_size=len(tokenizer),
        pad_token_id=0,
        eos_token_id=1,
        decoder_start_token_id=0,
        forced_eos_token_id=None,
        **SMALL,
    )
    model = randomise(MarianMTModel(config))
    model.final_logits_bias[0, 1] = 1.5  # so that sentences end, and at different lengths
    model.final_logits_bias[0, 0] = -100.0
    model.generation_config = GenerationConfig(
        decoder_start_token_id=0, pad_token_id=0, eos_token_id=1, max_length=10, num_beams=2
    )
    return model


@pytest.fixture
def t5(tokenizer):
    config = T5Config(
        vocab_size=len(tokenizer),
        d_model=16,
        d_kv=8,
        d_ff=32,
        num_layers=1,
        num_heads=2,
        pad_token_id=0,
        eos_token_id=1,
        decoder_start_token_id=0,
        task_specific_params={
            "summarization": {"prefix": "summarize: ", "max_length": 8, "min_length": 5, "num_beams": 2},
            "translation_en_to_de": {
                "prefix": "translate English to German: ",
                "max_length": 9,
                "num_beams": 3,
                "early_stopping": True,
                "not_a_generation_argument": 1,
            },
        },
    )
    return randomise(T5ForConditionalGeneration(config))


@pytest.fixture(scope="module")
def translator(marian, tokenizer):
    return pipeline("translation", model=marian, tokenizer=tokenizer, device="cpu")


def direct(model, tokenizer, text, **kwargs):
    """Ids of the library's `generate` for one sentence, without what follows the end token."""
    rows = model.generate(**tokenizer(text, return_tensors="pt", return_token_type_ids=False), **kwargs)
    cut = []
    for row in rows.tolist():
        end = row.index(1, 1) + 1 if 1 in row[1:] else len(row)
        cut.append(row[:end])
    return cut


def texts_of(results, key="translation_text"):
    return [result[key] for result in results]


class Recorder:
    """Stands in for `model.generate`; keeps the arguments of each call."""

    def __init__(self, model, monkeypatch):
        self.calls = []
        self.generate = model.generate
        monkeypatch.setattr(model, "generate", self)

    def __call__(self, **kwargs):
        self.calls.append(kwargs)
        return self.generate(**kwargs)


# ------------------------------------------------------------------------------------------------ shapes and keys


@pytest.mark.parametrize(
    ("task", "name", "kind"),
    [
        ("translation", "translation", TranslationPipeline),
        ("translation_en_to_de", "translation", TranslationPipeline),
        ("summarization", "summary", SummarizationPipeline),
        ("text2text-generation", "generated", Text2TextGenerationPipeline),
    ],
)
def test_each_task_has_its_class_and_its_version_4_keys(task, name, kind, marian, tokenizer):
    pipe = pipeline(task, model=marian, tokenizer=tokenizer)
    assert type(pipe) is kind
    [ids] = direct(marian, tokenizer, "hello")
    assert pipe("hello") == [{f"{name}_text": tokenizer.decode(ids, skip_special_tokens=True)}]
    [result] = pipe("hello", return_tensors=True)
    assert list(result) == [f"{name}_token_ids"]
    assert result[f"{name}_token_ids"].tolist() == ids


def test_models_of_this_package_and_of_the_library_give_what_generate_gives(ours, marian, t5, tokenizer):
    # BART starts the decoder with its end token.
    ids = {
        "pad_token_id": 0,
        "bos_token_id": 2,
        "eos_token_id": 1,
        "decoder_start_token_id": 1,
        "vocab_size": len(tokenizer),
    }
    bart = BartForConditionalGeneration(BartConfig(**ids, max_position_embeddings=64, forced_eos_token_id=1, **SMALL))
    for model in (ours, marian, t5, randomise(bart)):
        pipe = pipeline("text2text-generation", model=model, tokenizer=tokenizer)
        got = pipe(TEXTS, max_new_tokens=7, num_beams=2, return_tensors=True)
        want = [direct(model, tokenizer, text, max_new_tokens=7, num_beams=2)[0] for text in TEXTS]
        assert [result["generated_token_ids"].tolist() for result in got] == want
        assert len({tuple(ids) for ids in want}) > 2, "the model's outputs do not depend on its inputs"


def test_a_list_with_one_sequence_each_is_flat_and_with_more_is_nested(translator, marian, tokenizer):
    assert translator([]) == []
    assert translator(("hello",)) == translator("hello")
    assert translator(TEXTS) == [translator(text)[0] for text in TEXTS]
    results = translator(TEXTS, num_return_sequences=2, return_tensors=True)
    assert [len(result) for result in results] == [2] * len(TEXTS)
    for text, result in zip(TEXTS, results, strict=True):
        want = direct(marian, tokenizer, text, num_return_sequences=2)
        assert [record["translation_token_ids"].tolist() for record in result] == want
    assert len(translator("hello", num_return_sequences=2)) == 2


def test_texts_and_ids_come_together_when_both_are_asked_for(translator):
    [record] = translator("hello", return_tensors=True, return_text=True)
    assert sorted(record) == ["translation_text", "translation_token_ids"]
    with pytest.raises(ValueError, match="return_text=False leaves nothing"):
        translator("hello", return_text=False)


def test_generators_and_datasets_come_back_in_order_and_lazily(translator):
    want = [[result] for result in translator(TEXTS)]
    pulled = []

    def stream():
        for text in TEXTS:
            pulled.append(text)
            yield text

    results = translator(stream())
    assert not isinstance(results, list)
    assert next(iter(results)) == want[0]
    assert len(pulled) <= 2, "a generator is read ahead of need"
    assert list(translator(stream(), batch_size=4)) == want
    assert list(translator(iter(TEXTS))) == want
    table = datasets.Dataset.from_dict({"source": TEXTS, "target": TEXTS})
    assert list(translator(KeyDataset(table, "source"), batch_size=2)) == want
    assert list(translator(table.to_iterable_dataset()["source"])) == want
    assert translator(table["source"]) == [result for [result] in want]
    assert translator(table[:]["source"], batch_size=5) == [result for [result] in want]
    assert list(translator(KeyDataset(table.select([]), "source"))) == []


@pytest.mark.parametrize("padding_side", ["right", "left"])
@pytest.mark.parametrize("num_beams", [1, 2])
def test_batch_size_order_and_padding_side_change_nothing(num_beams, padding_side, ours, marian, t5):
    tokenizer = byte_tokenizer(padding_side=padding_side)
    for model in (ours, marian, t5):
        pipe = pipeline("text2text-generation", model=model, tokenizer=tokenizer)
        options = {
            "return_tensors": True,
            "return_text": True,
            "num_beams": num_beams,
            "num_return_sequences": num_beams,
        }
        if model is t5:
            options["max_length"] = 6
        alone = [pipe(text, **options) for text in TEXTS]
        assert len({record["generated_text"] for [record, *_] in alone}) > 2
        for order, batch_size in ((TEXTS, 4), (TEXTS[::-1], 2), (TEXTS, 64)):
            batched = pipe(order, batch_size=batch_size, **options)
            batched = batched if num_beams > 1 else [[record] for record in batched]
            for text, records in zip(order, batched, strict=True):
                for one, other in zip(records, alone[TEXTS.index(text)], strict=True):
                    assert one["generated_text"] == other["generated_text"]
                    assert one["generated_token_ids"].tolist() == other["generated_token_ids"].tolist()


def test_batch_size_can_be_given_to_the_constructor(marian, tokenizer, monkeypatch):
    pipe = pipeline("translation", model=marian, tokenizer=tokenizer, batch_size=3)
    recorder = Recorder(marian, monkeypatch)
    pipe(TEXTS)
    assert [len(call["input_ids"]) for call in recorder.calls] == [3, 1]


MIXED = ["", *("xyzabc"[n % 5 :] * (n % 7) + "q" * (n * n % 11) + "!" for n in range(23)), "b" * 70, " "]


class Words(torch.utils.data.IterableDataset):
    """Texts without a length, read from the start each time; counts how many were read."""

    def __init__(self, texts):
        self.texts = texts
        self.read = 0

    def __iter__(self):
        for text in self.texts:
            self.read += 1
            yield text


def longest_first(shapes):
    return [width for _, width in shapes] == sorted((width for _, width in shapes), reverse=True)


@pytest.mark.parametrize("options", [{"batch_size": 4}, {"max_tokens_per_batch": 60, "batch_size": 5}], ids=str)
def test_batches_are_of_like_lengths_and_the_results_in_order(options, ours, tokenizer, monkeypatch):
    pipe = pipeline("translation", model=ours, tokenizer=tokenizer, num_return_sequences=2, max_new_tokens=5)
    want = [pipe(text) for text in MIXED]
    assert len({result[0]["translation_text"] for result in want}) > 8
    recorder = Recorder(ours, monkeypatch)
    table = datasets.Dataset.from_dict({"source": MIXED})
    column = KeyDataset(table, "source")
    for inputs in (MIXED, tuple(MIXED), table["source"], column, (text for text in MIXED), Words(MIXED)):
        recorder.calls.clear()
        assert list(pipe(inputs, **options)) == want
        shapes = [tuple(call["input_ids"].shape) for call in recorder.calls]
        assert longest_first(shapes)
        assert sum(rows for rows, _ in shapes) == len(MIXED) - 2, "the blank ones are not for the model"
        assert max(rows for rows, _ in shapes) == options["batch_size"]
        real = sum(len(tokenizer(text).input_ids) for text in MIXED if text.strip())
        assert sum(rows * width for rows, width in shapes) < 1.3 * real
    results = pipe(column, **options)
    assert (len(results), next(iter(results))) == (len(MIXED), want[0])
    assert list(results) == list(results) == want, "results can be read again, as those of the base class"


def test_source_tokens_of_a_batch_stay_within_the_budget(marian, tokenizer, monkeypatch):
    recorder = Recorder(marian, monkeypatch)
    texts = [text for text in MIXED if text.strip()]
    # It replaces the constructor's arguments for `generate`, but not the sizes of batches.
    config = GenerationConfig(
        decoder_start_token_id=0, pad_token_id=0, eos_token_id=1, max_new_tokens=5, num_beams=2, max_length=None
    )
    want = pipeline("translation", model=marian, tokenizer=tokenizer)(texts, generation_config=config)
    longest = len(tokenizer("b" * 70).input_ids)
    for of_pipe, of_call, budget, most in (
        ({}, {"max_tokens_per_batch": 60}, 60, 60),
        ({"max_tokens_per_batch": 60}, {}, 60, 60),
        ({"max_tokens_per_batch": 9}, {"max_tokens_per_batch": 200}, 200, 200),
        ({"batch_size": 3}, {"max_tokens_per_batch": 60}, 60, 3),
        ({}, {"max_tokens_per_batch": 60, "batch_size": 2}, 60, 2),
        ({}, {"max_tokens_per_batch": 60, "batch_size": 1}, 60, 1),
        ({}, {"max_tokens_per_batch": 1}, 1, 1),
    ):
        recorder.calls.clear()
        pipe = pipeline("translation", model=marian, tokenizer=tokenizer, **of_pipe)
        assert pipe(texts, generation_config=config, **of_call) == want
        shapes = [tuple(call["input_ids"].shape) for call in recorder.calls]
        assert sum(rows for rows, _ in shapes) == len(texts)
        if most > 1:
            assert shapes[0] == (max(1, budget // longest), longest)
            # Within both limits, and with one row more it would not be.
            assert all(rows == 1 or rows * width <= budget for rows, width in shapes)
            assert all(rows == most or (rows + 1) * width > budget for rows, width in shapes[:-1])
        assert max(rows for rows, _ in shapes) <= most
    assert pipe("hello", max_tokens_per_batch=2) == pipe("hello")


def test_a_stream_is_read_some_batches_ahead(marian, tokenizer, monkeypatch):
    pipe = pipeline("translation", model=marian, tokenizer=tokenizer, max_new_tokens=2)
    texts = ["ab" * (11 - n * 7 % 12) + "c" for n in range(100)]
    want = [[result] for result in pipe(texts)]
    recorder = Recorder(marian, monkeypatch)
    lengths = [len(tokenizer(text).input_ids) for text in texts]
    of_40_tokens = next(n for n in range(100) if sum(lengths[:n]) >= 3 * 40)
    for window_batches, options, ahead in (
        (16, {"batch_size": 2}, 32),
        (3, {"batch_size": 5}, 15),
        (1, {"batch_size": 4}, 4),
        (3, {"max_tokens_per_batch": 40}, of_40_tokens),
        (3, {"max_tokens_per_batch": 40, "batch_size": 2}, 6),
    ):
        pipe.window_batches = window_batches
        source = Words(texts)
        for inputs in (source, iter(source)):
            source.read = 0
            recorder.calls.clear()
            results = iter(pipe(inputs, **options))
            assert source.read == 0
            assert next(results) == want[0]
            assert source.read == ahead
            decoded = sum(len(call["input_ids"]) for call in recorder.calls)
            assert window_batches == 1 or decoded < ahead, "the first result waits for batches that it does not need"
            assert [next(results) for _ in range(ahead - 1)] == want[1:ahead]
            assert source.read == ahead
            assert list(results) == want[ahead:]


def test_what_a_stream_gave_before_a_fault_is_translated(translator):
    want = [[result] for result in translator(TEXTS)]
    results = iter(translator(iter([*TEXTS, None, "never read"]), batch_size=3))
    assert [next(results) for _ in TEXTS] == want
    with pytest.raises(ValueError, match="of type NoneType, not a string"):
        next(results)


def test_lists_and_streams_can_be_tokenised_by_processes(translator):
    want = translator(TEXTS)
    assert translator(TEXTS, num_workers=2, batch_size=3) == want
    results = translator(Words(TEXTS), num_workers=1, batch_size=3)
    assert list(results) == list(results) == [[result] for result in want]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens_per_batch": 0}, "max_tokens_per_batch=0 is not a whole number of at least 1"),
        ({"max_tokens_per_batch": -4, "batch_size": 2}, "max_tokens_per_batch=-4 is not"),
        ({"max_tokens_per_batch": 1.5}, "max_tokens_per_batch=1.5 is not"),
        ({"max_tokens_per_batch": True}, "max_tokens_per_batch=True is not"),
        ({"max_tokens_per_batch": "many"}, "max_tokens_per_batch='many' is not"),
        ({"batch_size": 0}, "batch_size=0 is not a whole number of at least 1"),
        ({"batch_size": 2.0}, "batch_size=2.0 is not"),
    ],
)
def test_sizes_that_no_batch_can_have_are_refused(options, message, translator, marian, tokenizer, monkeypatch):
    recorder = Recorder(marian, monkeypatch)
    for inputs in (TEXTS, iter(TEXTS)):
        with pytest.raises(ValueError, match=message):
            translator(inputs, **options)
    with pytest.raises(ValueError, match=message):
        pipeline("translation", model=marian, tokenizer=tokenizer, **options)(TEXTS)
    assert recorder.calls == []


def test_a_tokenizer_without_padding_token_is_refused_before_any_work(marian, monkeypatch):
    pipe = pipeline("translation", model=marian, tokenizer=byte_tokenizer(pad_token=None))
    assert len(pipe(TEXTS[:1])) == 1
    recorder = Recorder(marian, monkeypatch)
    with pytest.raises(ValueError, match="without pad_token cannot do batching"):
        pipe(TEXTS, batch_size=2)
    assert recorder.calls == []


# ------------------------------------------------------------------------------------------------ inputs


@pytest.mark.parametrize("bad", [None, 7, 1.5, b"bytes", ["a", "b"], {"source": "a"}])
def test_what_is_not_text_is_named_before_any_work(bad, translator, marian, monkeypatch):
    recorder = Recorder(marian, monkeypatch)
    with pytest.raises(ValueError, match=f"Input 2 of 3 .* of type {type(bad).__name__}, not a string"):
        translator(["fine", "fine too", bad])
    assert recorder.calls == []
    with pytest.raises(ValueError, match=f"of type {type(bad).__name__}, not a string"):
        list(translator(item for item in [bad]))
    if not isinstance(bad, list):
        with pytest.raises(ValueError, match=f"of type {type(bad).__name__}, not a string"):
            translator(bad)


def test_a_whole_dataset_is_refused_with_the_remedy(translator):
    with pytest.raises(ValueError, match=r"pass the column, for example dataset\['source'\]"):
        translator(datasets.Dataset.from_dict({"source": TEXTS}))


def test_blank_text_has_a_blank_result_and_the_model_is_not_asked(translator, marian, tokenizer, monkeypatch):
    want = translator(TEXTS)
    recorder = Recorder(marian, monkeypatch)
    assert translator("") == [{"translation_text": ""}]
    assert translator([" \n", ""], batch_size=2, num_return_sequences=2) == [[{"translation_text": ""}] * 2] * 2
    assert translator("", return_tensors=True)[0]["translation_token_ids"].tolist() == [0, 1]
    assert pipeline("summarization", model=marian, tokenizer=tokenizer)("\t") == [{"summary_text": ""}]
    assert recorder.calls == []
    mixed = [*TEXTS[:1], "", *TEXTS[1:], "\t"]
    blank = {"translation_text": ""}
    for batch_size in (1, 3, 8):
        assert translator(mixed, batch_size=batch_size) == [want[0], blank, *want[1:], blank]
    assert sum(len(call["input_ids"]) for call in recorder.calls) == 3 * len(TEXTS)


def test_text2text_generation_may_write_from_nothing(ours, marian, tokenizer):
    pipe = pipeline("text2text-generation", model=marian, tokenizer=tokenizer)
    [ids] = direct(marian, tokenizer, "")
    assert pipe("", return_tensors=True)[0]["generated_token_ids"].tolist() == ids
    # A tokenizer that gives an empty text no token at all, not even an end token.
    bare = byte_tokenizer()
    bare.backend_tokenizer.post_processor = processors.TemplateProcessing(single="$A", special_tokens=[])
    assert bare("").input_ids == []
    assert pipeline("text2text-generation", model=marian, tokenizer=bare)("") == pipe("")


def test_a_mask_is_made_where_the_tokenizer_gives_none(ours, tokenizer):
    maskless = byte_tokenizer(model_input_names=["input_ids"])
    assert "attention_mask" not in maskless("a")
    want = pipeline("translation", model=ours, tokenizer=tokenizer)(TEXTS)
    assert pipeline("translation", model=ours, tokenizer=maskless)(TEXTS, batch_size=6) == want


def test_too_long_a_text_is_never_cut_unless_asked(marian, monkeypatch, caplog):
    short = byte_tokenizer(model_max_length=6)
    pipe = pipeline("translation", model=marian, tokenizer=short)
    recorder = Recorder(marian, monkeypatch)
    # The library's loggers do not propagate, so listen on the one of the tokenizers.
    log = logging.getLogger("transformers.tokenization_utils_base")
    log.addHandler(caplog.handler)
    try:
        pipe("a much longer sentence")
    finally:
        log.removeHandler(caplog.handler)
    assert "longer than the specified maximum sequence length" in caplog.text
    pipe("a much longer sentence", truncation=True)
    pipe("a much longer sentence", truncation="longest_first")
    pipe("a much longer sentence", truncation="do_not_truncate")
    pipe("a much longer sentence", truncation=False)
    rows = [call["input_ids"][0].tolist() for call in recorder.calls]
    full = short("a much longer sentence").input_ids
    cut = [*full[:5], 1]
    assert rows == [full, cut, cut, full, full]
    with pytest.raises(ValueError, match="not a valid TruncationStrategy"):
        pipe("a", truncation="sometimes")
    by_default = pipeline("translation", model=marian, tokenizer=short, truncation=True)
    by_default("a much longer sentence")
    assert recorder.calls[-1]["input_ids"][0].tolist() == cut


# ------------------------------------------------------------------------------------------------ decoding options


def test_generation_arguments_reach_generate_from_call_constructor_and_dict(marian, tokenizer):
    pipe = pipeline("translation", model=marian, tokenizer=tokenizer, num_beams=1, max_new_tokens=4)
    for text in TEXTS:
        assert pipe(text, return_tensors=True)[0]["translation_token_ids"].tolist() in direct(
            marian, tokenizer, text, num_beams=1, max_new_tokens=4
        )
    [want] = direct(marian, tokenizer, "hello", num_beams=4, max_new_tokens=6, no_repeat_ngram_size=1)
    options = {"num_beams": 4, "no_repeat_ngram_size": 1}
    for got in (
        pipe("hello", max_new_tokens=6, return_tensors=True, **options),
        pipe("hello", max_new_tokens=6, return_tensors=True, generate_kwargs=options),
    ):
        assert got[0]["translation_token_ids"].tolist() == want
    assert want not in direct(marian, tokenizer, "hello", num_beams=1, max_new_tokens=4)
    with pytest.raises(ValueError, match="num_beams is given both directly and in generate_kwargs"):
        pipe("hello", num_beams=2, generate_kwargs={"num_beams": 2})
    with pytest.raises(ValueError, match="is not a dict of arguments"):
        pipe("hello", generate_kwargs=["num_beams"])


def test_an_unknown_argument_is_refused_by_generate(translator):
    with pytest.raises(ValueError, match="nonsense"):
        translator("hello", nonsense=1)


def test_a_generation_config_replaces_what_was_set_before_and_takes_further_arguments(marian, t5, tokenizer):
    config = GenerationConfig(num_beams=2, max_new_tokens=5, decoder_start_token_id=0, pad_token_id=0, eos_token_id=1)
    before = copy.deepcopy(config)
    for model, task, prefix in ((marian, "translation", ""), (t5, "summarization", "summarize: ")):
        pipe = pipeline(task, model=model, tokenizer=tokenizer, num_beams=1, max_new_tokens=3, return_tensors=True)
        [want] = direct(model, tokenizer, prefix + "abc de", num_beams=2, max_new_tokens=5)
        [[got]] = [record.values() for record in pipe("abc de", generation_config=config)]
        assert got.tolist() == want
        assert len(pipe("abc de", generation_config=config, num_return_sequences=2)) == 2
    assert config == before


def test_a_model_in_training_mode_translates_without_dropout_and_stays_in_it(marian, tokenizer):
    pipe = pipeline("translation", model=marian, tokenizer=tokenizer)
    want = pipe(TEXTS)
    marian.train()
    try:
        assert [pipe(TEXTS), pipe(TEXTS)] == [want, want]
        assert all(module.training for module in marian.modules())
    finally:
        marian.eval()


def test_sequences_are_taken_from_a_dictionary_result(translator):
    assert translator(TEXTS, return_dict_in_generate=True, output_scores=True, batch_size=2) == translator(TEXTS)


def test_the_last_defaults_are_those_of_version_4_only_where_the_model_has_none(
    ours, marian, t5, tokenizer, monkeypatch
):
    # transformers 4.57: Text2TextGenerationPipeline._default_generation_config, max_new_tokens=256 and num_beams=4.
    defaults = {"num_beams": 4, "max_new_tokens": 256}
    for model, settings in ((t5, defaults), (marian, {}), (ours, {})):
        pipe = pipeline("text2text-generation", model=model, tokenizer=tokenizer)
        seen = []
        monkeypatch.setattr(model, "generate", lambda seen=seen, **kwargs: seen.append(kwargs) or kwargs["input_ids"])
        pipe("hello")
        pipe("hello", max_length=5)
        asked = [{key: call[key] for key in call.keys() - {"input_ids", "attention_mask"}} for call in seen]
        beams = {key: value for key, value in settings.items() if key == "num_beams"}
        assert asked == [settings, {**beams, "max_length": 5}]


def test_the_length_cap_of_our_model_is_its_own_and_holds_for_each_sentence(ours, tokenizer):
    pipe = pipeline("translation", model=ours, tokenizer=tokenizer, num_beams=1, return_tensors=True)
    for offset in (0, 3):
        results = pipe(TEXTS, batch_size=4, max_length_offset=offset)
        for result, text in zip(results, TEXTS, strict=True):
            ids = result["translation_token_ids"].tolist()
            # Without the start token; the source has its end token.
            assert len(ids) - 1 == (len(text) + 1 + offset if 1 not in ids else ids.index(1))


@pytest.mark.parametrize("beams", [1, 4])
def test_stop_sequence_ends_the_text(ours, tokenizer, beams):
    pipe = pipeline("text2text-generation", model=ours, tokenizer=tokenizer, num_beams=beams, max_new_tokens=20)
    full = pipe("a much longer sentence")[0]["generated_text"]
    stop = full[3:5]  # two tokens of this tokenizer
    cut = pipe("a much longer sentence", stop_sequence=stop)[0]["generated_text"]
    assert cut == full[: full.index(stop) + 2]
    assert len(cut) < len(full)


def test_cleaning_up_spaces_is_off_unless_asked(marian, tokenizer, monkeypatch):
    pipe = pipeline("translation", model=marian, tokenizer=tokenizer)
    seen = []
    decode = tokenizer.decode
    monkeypatch.setattr(
        tokenizer, "decode", lambda ids, **kwargs: seen.append(kwargs["clean_up_tokenization_spaces"]) or decode(ids)
    )
    pipe("hello")
    pipe("hello", clean_up_tokenization_spaces=True)
    assert seen == [False, True]


def test_warnings_about_lengths(translator, marian, tokenizer, caplog):
    translator("a sentence of some length", max_length=7)
    pipeline("summarization", model=marian, tokenizer=tokenizer)("short", max_length=12, min_length=0)
    assert "source has 26 tokens, and max_length is 7" in caplog.text
    assert "consider max_length=3" in caplog.text


# ------------------------------------------------------------------------------------------------ T5


def test_t5_takes_prefix_and_settings_of_the_task_and_stays_as_it_was(t5, tokenizer, monkeypatch):
    recorder = Recorder(t5, monkeypatch)
    config, generation_config = t5.config.to_json_string(), t5.generation_config.to_json_string()
    for task, text, settings in (
        ("summarization", "summarize: hello", {"max_length": 8, "min_length": 5, "num_beams": 2}),
        (
            "translation_en_to_de",
            "translate English to German: hello",
            {"max_length": 9, "num_beams": 3, "early_stopping": True},
        ),
        ("translation_en_to_fr", "hello", {"max_new_tokens": 256, "num_beams": 4}),
    ):
        pipe = pipeline(task, model=t5, tokenizer=tokenizer)
        short = {} if "max_length" in settings else {"max_length": 7}
        pipe("hello", **short)
        call = recorder.calls.pop()
        assert tokenizer.decode(call.pop("input_ids")[0], skip_special_tokens=True) == text
        del call["attention_mask"]
        want = {key: value for key, value in settings.items() if not (short and key == "max_new_tokens")}
        assert call == {**want, **short}
    pipe = pipeline("summarization", model=t5, tokenizer=tokenizer, num_beams=1)
    pipe("hello", max_new_tokens=6)
    call = recorder.calls.pop()
    assert (call["num_beams"], call["max_new_tokens"], "max_length" in call) == (1, 6, False)
    assert t5.config.to_json_string() == config
    assert t5.generation_config.to_json_string() == generation_config


def test_t5_without_a_named_pair_takes_the_languages_or_the_first_pair(t5, tokenizer, monkeypatch, recwarn, caplog):
    t5.config.task_specific_params["translation_en_to_fr"] = {"prefix": "translate English to French: "}
    recorder = Recorder(t5, monkeypatch)

    def encoded(pipe):
        pipe("hello", max_new_tokens=3)
        return tokenizer.decode(recorder.calls.pop()["input_ids"][0], skip_special_tokens=True)

    pipe = pipeline("translation", model=t5, tokenizer=tokenizer, src_lang="en", tgt_lang="fr")
    assert encoded(pipe) == "translate English to French: hello"
    assert not [warning for warning in recwarn if "for 'translation' the first is taken" in str(warning.message)]
    assert caplog.text == ""
    with pytest.warns(
        UserWarning, match="translation_en_to_de, translation_en_to_fr; for 'translation' the first is taken"
    ):
        pipe = pipeline("translation", model=t5, tokenizer=tokenizer)
    assert encoded(pipe) == "translate English to German: hello"


def test_prefix_of_the_config(marian, tokenizer, monkeypatch):
    monkeypatch.setattr(marian.config, "prefix", "say: ", raising=False)
    pipe = pipeline("translation", model=marian, tokenizer=tokenizer)
    assert pipe.prefix == "say: "
    recorder = Recorder(marian, monkeypatch)
    pipe("hello")
    assert tokenizer.decode(recorder.calls[0]["input_ids"][0], skip_special_tokens=True) == "say: hello"


# ------------------------------------------------------------------------------------------------ languages


def test_a_language_tag_goes_in_front_by_its_id_and_never_from_the_text(ours, tokenizer, monkeypatch):
    recorder = Recorder(ours, monkeypatch)
    plain = tokenizer("hi").input_ids
    pipe = pipeline("translation", model=ours, tokenizer=tokenizer, max_new_tokens=3)
    pipe("hi", tgt_lang="xx")
    pipe(["hi", ">>yy<< hi"], tgt_lang="yy", batch_size=2)
    pipe(">>xx<<")
    pipeline("translation_en_to_xx", model=ours, tokenizer=tokenizer, max_new_tokens=3)("hi")
    pipeline("translation_en_to_xx", model=ours, tokenizer=tokenizer, max_new_tokens=3)("hi", tgt_lang="yy")
    pipeline("translation", model=ours, tokenizer=tokenizer, tgt_lang="yy", max_new_tokens=3)("hi")
    # The longest of a batch comes first.
    rows = [row[row != 0].tolist() for call in recorder.calls for row in reversed(call["input_ids"])]
    text = tokenizer(">>yy<< hi").input_ids
    assert 4 not in text
    assert rows == [
        [3, *plain],
        [4, *plain],
        [4, *text],
        tokenizer(">>xx<<").input_ids,
        [3, *plain],
        [4, *plain],
        [4, *plain],
    ]


def test_a_language_tag_counts_in_truncation(ours, monkeypatch):
    short = byte_tokenizer(model_max_length=5)
    pipe = pipeline("translation", model=ours, tokenizer=short, tgt_lang="xx", max_new_tokens=3)
    recorder = Recorder(ours, monkeypatch)
    pipe("abcdefgh", truncation=True)
    pipe("abcdefgh")
    a, b, c = short("abc").input_ids[:3]
    assert recorder.calls[0]["input_ids"].tolist() == [[3, a, b, c, 1]]
    assert recorder.calls[1]["input_ids"].tolist() == [[3, *short("abcdefgh").input_ids]]


def test_languages_without_effect_are_said_once_and_only_if_asked_for(marian, tokenizer, caplog):
    plain = pipeline("translation_en_to_zz", model=marian, tokenizer=tokenizer)
    want = plain(TEXTS[:2])
    assert caplog.text == ""
    pipe = pipeline("translation", model=marian, tokenizer=tokenizer, src_lang="en", tgt_lang="zz")
    assert pipe(TEXTS[:2]) == want
    assert caplog.text.count("No effect with this model: src_lang, tgt_lang") == 1
    with pytest.raises(ValueError, match="tgt_lang=7 is not a language code"):
        pipe("hello", tgt_lang=7)


def sentencepiece_model(folder, name="spm"):
    """Train a small sentencepiece model; the sentences are made here."""
    import sentencepiece

    words = ["hello", "world", "good", "morning", "house", "green", "river", "night", "small", "tree"]
    sentences = [f"{a} {b} {c}" for a in words for b in words for c in words if a != b]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences),
        model_prefix=str(folder / name),
        vocab_size=50,
        hard_vocab_limit=False,
        minloglevel=2,
        bos_id=-1,
        eos_id=-1,
        pad_id=-1,
        unk_id=0,
    )
    return folder / f"{name}.model"


def pieces_of(model_file):
    import sentencepiece

    processor = sentencepiece.SentencePieceProcessor(model_file=str(model_file))
    return [processor.id_to_piece(index) for index in range(1, processor.get_piece_size())]


@pytest.fixture(scope="module")
def spm(tmp_path_factory):
    return sentencepiece_model(tmp_path_factory.mktemp("spm"))


def test_marian_with_its_own_tokenizer_and_its_language_tags(spm, tmp_path, monkeypatch):
    tokens = ["</s>", "<unk>", ">>fr<<", *pieces_of(spm), "<pad>"]
    vocab_file = tmp_path / "vocab.json"
    vocab_file.write_text(json.dumps({token: index for index, token in enumerate(tokens)}))
    tokenizer = MarianTokenizer(source_spm=str(spm), target_spm=str(spm), vocab=str(vocab_file))
    pad = len(tokens) - 1
    config = MarianConfig(
        vocab_size=len(tokens),
        pad_token_id=pad,
        eos_token_id=0,
        decoder_start_token_id=pad,
        forced_eos_token_id=0,
        **SMALL,
    )
    model = randomise(MarianMTModel(config))
    pipe = pipeline("translation_en_to_fr", model=model, tokenizer=tokenizer, max_length=12)
    sentences = ["hello green world", "good night", "small tree"]
    encoded = [tokenizer(f">>fr<< {sentence}", return_tensors="pt") for sentence in sentences]
    assert all(item.input_ids[0, 0] == 2 for item in encoded)
    rows = [model.generate(**item, max_length=12, num_beams=4)[0] for item in encoded]
    want = [tokenizer.decode(row, skip_special_tokens=True) for row in rows]
    assert texts_of(pipe(sentences, batch_size=3)) == want
    assert len(set(want)) > 1
    # In 4.x users wrote the tag themselves; it is not put there twice.
    recorder = Recorder(model, monkeypatch)
    pipe([f">>fr<< {sentence}" for sentence in sentences])
    assert [call["input_ids"].tolist() for call in recorder.calls] == [item.input_ids.tolist() for item in encoded]


def check_multilingual(model, tokenizer, source, target, target_id, monkeypatch):
    """The pipeline's inputs equal those made by hand by the recipe of the model's documentation."""
    recorder = Recorder(model, monkeypatch)
    pipe = pipeline("translation", model=model, tokenizer=tokenizer, max_length=9, num_beams=2)
    sentences = ["hello world", "good", "green river night"]
    batched = pipe(sentences, src_lang=source, tgt_lang=target, batch_size=3)
    assert all(call["forced_bos_token_id"] == target_id for call in recorder.calls)
    tokenizer.src_lang = source
    want = [
        tokenizer.decode(
            recorder.generate(
                **tokenizer(sentence, return_tensors="pt"), forced_bos_token_id=target_id, max_length=9, num_beams=2
            )[0],
            skip_special_tokens=True,
        )
        for sentence in sentences
    ]
    assert texts_of(batched) == want
    named = pipeline(f"translation_{source}_to_{target}", model=model, tokenizer=tokenizer, max_length=9, num_beams=2)
    assert texts_of(named(sentences)) == want
    with pytest.raises(ValueError, match="needs src_lang and tgt_lang, and src_lang is missing"):
        pipe("hello", tgt_lang=target)
    with pytest.raises(ValueError, match=r"tgt_lang='klingon' is not a language of"):
        pipe("hello", src_lang=source, tgt_lang="klingon")
    with pytest.raises(ValueError, match=r"src_lang='klingon' is not a language of"):
        pipe("hello", src_lang="klingon", tgt_lang=target)
    pipe("hello", src_lang=source, tgt_lang=target, forced_bos_token_id=5)
    assert recorder.calls[-1]["forced_bos_token_id"] == 5, "an explicit argument has to win"


def test_mbart(spm, monkeypatch):
    from transformers.models.mbart.tokenization_mbart import FAIRSEQ_LANGUAGE_CODES

    names = ["<s>", "<pad>", "</s>", "<unk>", *pieces_of(spm), *FAIRSEQ_LANGUAGE_CODES, "<mask>"]
    tokenizer = MBartTokenizer(vocab=[(name, -float(index)) for index, name in enumerate(names)])
    config = MBartConfig(vocab_size=len(tokenizer), max_position_embeddings=64, **SMALL)
    model = randomise(MBartForConditionalGeneration(config))
    check_multilingual(model, tokenizer, "en_XX", "ro_RO", tokenizer.convert_tokens_to_ids("ro_RO"), monkeypatch)


def test_nllb(spm, monkeypatch):
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    vocab = {name: index for index, name in enumerate(["<s>", "<pad>", "</s>", "<unk>", "▁", *letters])}
    tokenizer = NllbTokenizer(vocab=vocab, merges=[])
    config = M2M100Config(vocab_size=len(tokenizer), max_position_embeddings=64, **SMALL)
    model = randomise(M2M100ForConditionalGeneration(config))
    target_id = tokenizer.convert_tokens_to_ids("deu_Latn")
    check_multilingual(model, tokenizer, "eng_Latn", "deu_Latn", target_id, monkeypatch)


def test_m2m100(spm, tmp_path, monkeypatch):
    vocab_file = tmp_path / "vocab.json"
    names = ["<s>", "<pad>", "</s>", "<unk>", *pieces_of(spm)]
    vocab_file.write_text(json.dumps({name: index for index, name in enumerate(names)}))
    tokenizer = M2M100Tokenizer(vocab_file=str(vocab_file), spm_file=str(spm))
    config = M2M100Config(vocab_size=max(tokenizer.lang_token_to_id.values()) + 1, max_position_embeddings=64, **SMALL)
    model = randomise(M2M100ForConditionalGeneration(config))
    check_multilingual(model, tokenizer, "en", "de", tokenizer.get_lang_id("de"), monkeypatch)


# ------------------------------------------------------------------------------------------------ the pipeline's own


def test_a_decoder_only_model_and_a_missing_tokenizer_are_refused(marian, tokenizer):
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), n_embd=16, n_layer=1, n_head=2))
    with pytest.raises(
        ValueError, match="needs an encoder-decoder model that can generate, and GPT2LMHeadModel is none"
    ):
        pipeline("translation", model=gpt2, tokenizer=tokenizer)
    with pytest.raises(ValueError, match="needs a tokenizer"):
        TranslationPipeline(model=marian)


def test_device_and_dtype_of_a_loaded_checkpoint(ours, tokenizer, tmp_path):
    pipeline("translation", model=ours, tokenizer=tokenizer).save_pretrained(tmp_path)
    pipe = pipeline("translation", model=str(tmp_path), dtype=torch.bfloat16, device="cpu")
    assert (pipe.model.dtype, pipe.device.type) == (torch.bfloat16, "cpu")
    assert len(pipe(TEXTS, batch_size=3, max_new_tokens=4)) == len(TEXTS)
    [record] = pipe("hello", return_tensors=True, max_new_tokens=4)
    assert record["translation_token_ids"].device.type == "cpu"
    again = pipeline("translation", model=str(tmp_path))
    assert again.model.dtype == torch.float32
    assert again.model.generation_config.max_length_offset == 2
    assert again(TEXTS) == pipeline("translation", model=ours, tokenizer=tokenizer)(TEXTS)


@pytest.mark.parametrize("fast", ["int8", "compiled"])
def test_a_model_made_faster_serves_as_any_other(ours, tokenizer, fast):
    """What a pipeline gives is what `generate` of the same model gives, sentence by sentence."""
    model = copy.deepcopy(ours)
    batch_size = 3
    if fast == "int8":
        quantize_int8(model)
        batch_size = 1  # its activations get one scale a call
    else:
        model.get_encoder().compile(dynamic=True, backend="aot_eager")  # without a C++ compiler
    pipe = pipeline("translation", model=model, tokenizer=tokenizer)
    found = [record["translation_text"] for record in pipe(TEXTS, batch_size=batch_size)]
    expected = [tokenizer.decode(model.generate(**tokenizer(text, return_tensors="pt"))[0], True) for text in TEXTS]
    assert found == expected


def test_batches_side_by_side_change_no_result(ours, marian, tokenizer, four_threads, monkeypatch):
    texts = [text[: 1 + number % 9] for number, text in enumerate(TEXTS * 8)]
    threads = set()
    for model in (ours, marian):
        pipe = pipeline("translation", model=model, tokenizer=tokenizer, max_new_tokens=6)
        expected = [pipe(text)[0] for text in texts]
        generate = model.generate
        monkeypatch.setattr(
            model, "generate", lambda g=generate, **kwargs: threads.add(threading.get_ident()) or g(**kwargs)
        )
        for options, count in (({}, 4 if model is ours else 1), ({"inter_threads": 2}, 2), ({"inter_threads": 1}, 1)):
            for inputs in (texts, iter(texts)):
                threads.clear()
                results = list(pipe(inputs, batch_size=3, **options))
                assert [one[0] if isinstance(one, list) else one for one in results] == expected
                assert len(threads) == 1 if count == 1 else 1 < len(threads) <= count * 2  # a stream has two windows
        chosen = pipeline("translation", model=model, tokenizer=tokenizer, max_new_tokens=6, inter_threads=2)
        assert chosen(texts, batch_size=3) == expected
        assert chosen(texts[0]) == [expected[0]]
        model.train()  # each batch would switch it: one at a time
        threads.clear()
        assert chosen(texts, batch_size=3) == expected
        assert len(threads) == 1
        assert model.training
        model.eval()
    with pytest.raises(ValueError, match="inter_threads=0 is not a whole number"):
        pipe(texts, inter_threads=0)
