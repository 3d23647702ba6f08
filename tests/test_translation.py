"""Translating many sentences: order, batches, empty lines, scores."""

import pytest
import torch

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
