"""Translating many sentences: order, batches, empty lines, scores."""

import threading

import pytest
import torch
from tiny_models import randomise

from vanilla_transformer.quantization import quantize_int8
from vanilla_transformer.tokenizer_training import train_tokenizer
from vanilla_transformer.translation import Hypothesis, translate_sentences

SENTENCES = ["a b c", "", "c c c c a b", "b", "   ", "a a b b c c a a", "c b"]


@pytest.fixture
def tokenizer():
    return train_tokenizer(SENTENCES * 3, vocab_size=262)


@pytest.fixture
def model(make_model, tokenizer):
    return make_model(vocab_size=len(tokenizer))


def test_equals_generate_for_each_sentence_alone(model, tokenizer):
    found = translate_sentences(model, tokenizer, SENTENCES, batch_size=3, max_new_tokens=9)
    assert len(found) == len(SENTENCES)
    for sentence, hypotheses in zip(SENTENCES, found, strict=True):
        if not sentence.strip():
            assert hypotheses == [Hypothesis("", None)]
            continue
        alone = model.generate(**tokenizer(sentence, return_tensors="pt"), max_new_tokens=9)
        assert hypotheses[0].text == tokenizer.decode(alone[0], skip_special_tokens=True)


@pytest.fixture
def shapes(model, monkeypatch):
    """Rows and columns of the source of each call of `model.generate`."""
    found = []
    generate = model.generate

    def spy(**kwargs):
        found.append(tuple(kwargs["input_ids"].shape))
        return generate(**kwargs)

    monkeypatch.setattr(model, "generate", spy)
    return found


def test_batches_keep_to_both_limits_and_results_to_the_order(model, tokenizer, shapes):
    sentences = [" ".join("abc"[(n * n + i) % 3] for i in range(n)) for n in (3, 1, 9, 30, 2, 9, 1, 14, 3, 6, 2, 1)]
    lengths = [len(tokenizer(sentence).input_ids) for sentence in sentences]
    longest = max(lengths)
    randomise(model)  # so that the output depends on the input
    alone = [translate_sentences(model, tokenizer, [sentence], max_new_tokens=9)[0] for sentence in sentences]
    assert len({hypothesis.text for [hypothesis] in alone}) > 3
    for batch_size, budget in ((64, 20), (3, 20), (64, 1), (5, None), (64, None)):
        shapes.clear()
        options = {"batch_size": batch_size, "max_tokens_per_batch": budget, "max_new_tokens": 9}
        assert translate_sentences(model, tokenizer, sentences, **options) == alone
        assert sum(rows for rows, _ in shapes) == len(sentences)
        assert [width for _, width in shapes] == sorted((width for _, width in shapes), reverse=True)
        assert shapes[0][1] == longest
        assert all(rows <= batch_size for rows, _ in shapes)
        assert budget is None or all(rows == 1 or rows * width <= budget for rows, width in shapes)
        # One more row would have been too much.
        assert all(rows == batch_size or (budget and (rows + 1) * width > budget) for rows, width in shapes[:-1])
    assert shapes == [(len(sentences), longest)]


def test_long_sentences_are_few_a_batch_by_default(model, tokenizer, shapes):
    sentences = ["a", *["c " * 1500] * 3]
    assert 2 * len(tokenizer(sentences[1]).input_ids) <= 4096 < 3 * len(tokenizer(sentences[1]).input_ids)
    translate_sentences(model, tokenizer, sentences, max_new_tokens=1)
    assert [rows for rows, _ in shapes] == [2, 2]


def test_the_text_is_tokenised_once(model, tokenizer, monkeypatch):
    seen = []
    encode = type(tokenizer).__call__

    def spy(self, text, *args, **kwargs):
        seen.extend(text)
        return encode(self, text, *args, **kwargs)

    monkeypatch.setattr(type(tokenizer), "__call__", spy)
    translate_sentences(model, tokenizer, SENTENCES, batch_size=2, max_new_tokens=2)
    assert seen == [sentence for sentence in SENTENCES if sentence.strip()]


def test_n_best_come_with_the_library_s_scores(model, tokenizer):
    [found] = translate_sentences(
        model, tokenizer, ["a b c"], n_best=3, with_scores=True, num_beams=4, max_new_tokens=6
    )
    expected = model.generate(
        **tokenizer("a b c", return_tensors="pt"),
        num_beams=4,
        num_return_sequences=3,
        max_new_tokens=6,
        return_dict_in_generate=True,
        output_scores=True,
    )
    assert [hypothesis.score for hypothesis in found] == expected.sequences_scores.tolist()
    assert [hypothesis.text for hypothesis in found] == tokenizer.batch_decode(
        expected.sequences, skip_special_tokens=True
    )


def test_greedy_has_no_score(model, tokenizer):
    [[hypothesis]] = translate_sentences(model, tokenizer, ["a b"], num_beams=1, with_scores=True, max_new_tokens=3)
    assert hypothesis.score is None


def test_leaves_the_model_in_its_mode(model, tokenizer):
    model.train()
    translate_sentences(model, tokenizer, ["a"], max_new_tokens=2)
    assert model.training
    assert torch.is_grad_enabled()


def test_nothing_to_translate(model, tokenizer):
    assert translate_sentences(model, tokenizer, []) == []
    assert translate_sentences(model, tokenizer, ["", " "], n_best=2) == [[Hypothesis("", None)] * 2] * 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size=0"),
        ({"max_tokens_per_batch": 0}, "max_tokens_per_batch=0 must be at least 1, or None"),
        ({"inter_threads": 0}, "inter_threads=0 is not a whole number"),
        ({"n_best": 0}, "n_best=0"),
        ({"n_best": 3, "num_beams": 2}, "num_beams=2"),
    ],
)
def test_refuses(model, tokenizer, options, message):
    with pytest.raises(ValueError, match=message):
        translate_sentences(model, tokenizer, ["a"], **options)


def test_a_lone_surrogate_is_named(model, tokenizer):
    with pytest.raises(ValueError, match="sentence 2"):
        translate_sentences(model, tokenizer, ["a", "b \ud800"])


@pytest.fixture
def threads(model, monkeypatch):
    """The threads in which `model.generate` was called."""
    found = set()
    generate = model.generate

    def spy(**kwargs):
        found.add(threading.get_ident())
        return generate(**kwargs)

    monkeypatch.setattr(model, "generate", spy)
    return found


@pytest.mark.parametrize("inter_threads", [1, 2, 5, None])
@pytest.mark.parametrize("options", [{}, {"n_best": 2, "with_scores": True}, {"num_beams": 1}], ids=str)
def test_batches_side_by_side_change_no_result(model, tokenizer, threads, four_threads, inter_threads, options):
    randomise(model)
    sentences = [" ".join("abc"[(n * n + i) % 3] for i in range(n % 9 + 1)) for n in range(40)]
    options = {"max_new_tokens": 9, **options}
    expected = [translate_sentences(model, tokenizer, [sentence], **options)[0] for sentence in sentences]
    assert len({hypotheses[0].text for hypotheses in expected}) > 3
    assert threads == {threading.get_ident()}
    found = translate_sentences(model, tokenizer, sentences, batch_size=4, inter_threads=inter_threads, **options)
    assert [[h.text for h in row] for row in found] == [[h.text for h in row] for row in expected]
    if "with_scores" in options:
        scores = [[[h.score for h in row] for row in rows] for rows in (found, expected)]
        torch.testing.assert_close(torch.tensor(scores[0]), torch.tensor(scores[1]), rtol=1e-4, atol=1e-5)
    assert (len(threads - {threading.get_ident()}) > 1) == (inter_threads != 1)
    assert not model.training


@pytest.mark.parametrize("fast", ["int8", "bfloat16"])
def test_side_by_side_the_fast_precisions_give_what_they_give_one_after_the_other(model, tokenizer, threads, fast):
    randomise(model)
    model = quantize_int8(model) if fast == "int8" else model.bfloat16()
    found = [
        translate_sentences(model, tokenizer, SENTENCES * 4, batch_size=3, inter_threads=count, max_new_tokens=9)
        for count in (1, 3)
    ]
    assert found[0] == found[1]
    assert len(threads) > 1


def test_sampled_translations_repeat_with_the_seed(model, tokenizer, threads, four_threads):
    found = []
    for _ in range(2):
        torch.manual_seed(5)
        found.append(
            translate_sentences(model, tokenizer, SENTENCES * 4, batch_size=2, do_sample=True, max_new_tokens=5)
        )
    assert found[0] == found[1]
    assert threads == {threading.get_ident()}


def test_an_error_in_a_batch_leaves_the_model_as_it_was(model, tokenizer):
    model.train()
    with pytest.raises(ValueError, match="no_such_option"):
        translate_sentences(model, tokenizer, SENTENCES, no_such_option=1)
    assert model.training
