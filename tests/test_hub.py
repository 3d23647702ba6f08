"""The model card: valid metadata, every fact of the run in it, nothing invented."""

import pytest
from huggingface_hub import ModelCard

from vanilla_transformer import __version__
from vanilla_transformer.hub import RunFacts, write_model_card

TRAINING = {
    "data": "train.en and train.de",
    "pairs": "29,000",
    "tokenizer": "byte-level BPE of 9,999 tokens",
    "updates": "4,321",
    "batches": "at most 4,096 tokens",
    "optimizer": "Adam",
    "regularisation": "dropout 0.3",
    "device": "fp32, cpu",
    "time": "12.5 minutes",
    "software": "transformers 5",
}
SCORES = {
    "test": {
        "bleu": 34.5678,
        "chrf": 60.1234,
        "exact_match": 12.0,
        "num_sentences": 1000,
        "bleu_signature": "nrefs:1|case:mixed",
        "chrf_signature": "nrefs:1|nc:6",
    }
}


def facts(**changes):
    fields = {
        "task_sentence": "This model translates en to de.",
        "parameters": 2_600_000,
        "architecture": "4+4 layers",
        "decoding": "beam 4",
        "training": TRAINING,
        "example_source": "It's a house.",
        "scores": SCORES,
        "languages": ("en", "de"),
        "license": "mit",
    }
    return RunFacts(**{**fields, **changes})


def test_every_fact_is_in_the_card(tmp_path):
    text = write_model_card(tmp_path, facts()).read_text(encoding="utf-8")
    for value in (*TRAINING.values(), "2,600,000", "4+4 layers", "beam 4", "34.57", "60.12", "1,000", __version__):
        assert value in text
    assert "nrefs:1|case:mixed" in text
    assert repr("It's a house.") in text
    assert "{{" not in text
    assert "{%" not in text


def test_the_metadata_is_what_the_hub_reads(tmp_path):
    card = ModelCard.load(write_model_card(tmp_path, facts(dataset="owner/corpus")))
    assert card.data.language == ["en", "de"]
    assert card.data.license == "mit"
    assert card.data.pipeline_tag == "translation"
    assert card.data.library_name == "transformers"
    assert card.data.datasets == ["owner/corpus"]
    values = {result.metric_type: result.metric_value for result in card.data.eval_results}
    assert values == {"bleu": 34.57, "chrf": 60.12}


def test_what_is_not_known_is_not_claimed(tmp_path):
    path = write_model_card(tmp_path, facts(scores={}, license=None, languages=()))
    card = ModelCard.load(path)
    assert card.data.license is None
    assert card.data.eval_results is None
    assert "Not measured" in path.read_text(encoding="utf-8")
    assert "BLEU" not in path.read_text(encoding="utf-8")


@pytest.mark.parametrize("synthetic", [True, False])
def test_generated_text_is_called_so(tmp_path, synthetic):
    text = write_model_card(tmp_path, facts(synthetic=synthetic)).read_text(encoding="utf-8")
    assert ("generated grammar" in text) is synthetic
