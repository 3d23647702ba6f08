"""The model card: valid metadata, every fact of the run in it, nothing invented, no edit by hand lost."""

import inspect
import json
import logging
import pickle
import re

import datasets
import pytest
import yaml
from huggingface_hub import ModelCard
from tiny_models import SMALL
from transformers import MarianConfig, MarianMTModel, Trainer

from vanilla_transformer import (
    VanillaTransformerConfig,
    VanillaTransformerForConditionalGeneration,
    VanillaTransformerTrainer,
    VanillaTransformerTrainingArguments,
    __version__,
    train_tokenizer,
)
from vanilla_transformer.model_card import RunFacts, check_metadata, facts_of_run, render_card, write_model_card

TRAINING = {
    "data": "train.en and train.de",
    "pairs used": "29,000",
    "tokenizer": "byte-level BPE of 9,999 tokens",
    "updates": "4,321",
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
SENTENCES = ["the cat sees a dog", "der Hund sieht eine Katze", "a red house", "ein rotes Haus"]


def facts(**changes):
    fields = {
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


def card(text):
    """Return metadata and body."""
    _, block, body = text.split("---\n", 2)
    return yaml.safe_load(block), body


# Filling


def test_every_fact_is_in_the_card(tmp_path):
    text = write_model_card(tmp_path, facts()).read_text(encoding="utf-8")
    for value in (*TRAINING.values(), "2,600,000", "4+4 layers", "beam 4", "34.57", "60.12", "1,000", __version__):
        assert value in text
    for row in ("| updates | 4,321 |", "| test | 1,000 | 34.57 | 60.12 | 12.00 |", "translates en to de"):
        assert row in text
    assert "`nrefs:1|case:mixed`, `nrefs:1|nc:6`" in text
    assert repr("It's a house.") in text
    assert "{{" not in text
    assert "{%" not in text


def test_tables_are_whole(tmp_path):
    # Markdown ends a table at an empty line, and wants one before it.
    lines = render_card(facts(), model_name="m", model_path="p").splitlines()
    rows = [number for number, line in enumerate(lines) if line.startswith("|")]
    starts = [number for number in rows if number - 1 not in rows]
    assert len(rows) == 2 + len(TRAINING) + 3
    assert [lines[number] for number in starts] == ["| | |", "| set | sentences | BLEU | chrF | exact match, % |"]
    assert all(lines[number - 1] == "" for number in starts)


def test_the_metadata_is_what_the_hub_reads(tmp_path):
    data = ModelCard.load(write_model_card(tmp_path, facts(datasets=["owner/corpus"], base_model="owner/base"))).data
    assert data.language == ["en", "de"]
    assert data.license == "mit"
    assert data.pipeline_tag == "translation"
    assert data.library_name == "transformers"
    assert data.datasets == ["owner/corpus"]
    assert data.base_model == "owner/base"
    assert data.metrics == ["bleu", "chrf"]
    assert data.model_name == tmp_path.name
    values = {result.metric_type: result.metric_value for result in data.eval_results}
    assert values == {"bleu": 34.57, "chrf": 60.12}
    assert {result.dataset_name for result in data.eval_results} == {"test of owner/corpus"}


def test_what_is_not_known_is_not_claimed(tmp_path):
    nothing = {"scores": {}, "license": None, "languages": (), "training": {}, "example_source": None}
    path = write_model_card(tmp_path, facts(**nothing))
    data, text = ModelCard.load(path).data, path.read_text(encoding="utf-8")
    assert data.license is None
    assert data.eval_results is None
    assert "Not measured." in text
    assert "Not recorded in this checkpoint." in text
    assert "BLEU" not in text
    assert "| |" not in text
    assert "None" not in text


@pytest.mark.parametrize("synthetic", [True, False])
def test_generated_text_is_called_so(tmp_path, synthetic):
    text = write_model_card(tmp_path, facts(synthetic=synthetic)).read_text(encoding="utf-8")
    assert ("generated grammar" in text) is synthetic


@pytest.mark.parametrize(
    ("languages", "codes"),
    [(("en_XX", "zh-Hant"), ["en", "zh"]), (("deu_Latn", "eng"), ["deu", "eng"]), (("source", "target"), None)],
)
def test_the_hub_gets_codes_that_it_knows(languages, codes):
    metadata, body = card(render_card(facts(languages=languages), model_name="m", model_path="p"))
    assert metadata.get("language") == codes
    assert " to ".join(languages) in body


def test_another_task():
    metadata, body = card(render_card(facts(task="summarization"), model_name="m", model_path="p"))
    assert metadata["pipeline_tag"] == "summarization"
    assert "translation" not in metadata["tags"]
    assert 'pipeline("summarization", model="p")' in body
    with pytest.raises(ValueError, match=r"'dancing'.*translation, summarization"):
        facts(task="dancing")


# What is in the folder already


def test_a_card_edited_by_hand_is_kept(tmp_path, caplog):
    path = write_model_card(tmp_path, facts())
    write_model_card(tmp_path, facts(parameters=7))  # not edited: written anew
    assert "of 7 parameters" in path.read_text(encoding="utf-8")
    edited = path.read_text(encoding="utf-8") + "\nMy own words.\n"
    path.write_text(edited, encoding="utf-8")
    with caplog.at_level(logging.WARNING):
        write_model_card(tmp_path, facts(parameters=8))
        write_model_card(tmp_path, facts(parameters=9))
    assert path.read_text(encoding="utf-8") == edited
    assert caplog.text.count("remove it to have it written") == 2
    path.unlink()
    write_model_card(tmp_path, facts(parameters=10))
    assert "of 10 parameters" in path.read_text(encoding="utf-8")


def test_a_readme_of_somebody_else_is_kept(tmp_path):
    (tmp_path / "README.md").write_text("Mine.\n", encoding="utf-8")
    write_model_card(tmp_path, facts())
    assert (tmp_path / "README.md").read_text(encoding="utf-8") == "Mine.\n"
    assert json.loads((tmp_path / "model_card.json").read_text(encoding="utf-8"))["facts"]["parameters"] == 2_600_000


@pytest.mark.parametrize("content", ["{", "[]", '{"facts": 3}', '{"facts": {"no_such_field": 1}}'])
def test_facts_that_cannot_be_read(tmp_path, content):
    (tmp_path / "model_card.json").write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=r"model_card\.json does not hold the facts"):
        write_model_card(tmp_path, facts())


# Metadata


VALID = {"language": ["en", "de"], "license": "apache-2.0", "library_name": "transformers", "tags": ["translation"]}
RESULT = {
    "task": {"type": "translation"},
    "dataset": {"type": "text", "name": "test"},
    "metrics": [{"type": "bleu", "value": 30.0}],
}


def test_valid_metadata_gives_no_warning():
    assert check_metadata({**VALID, "model-index": [{"name": "m", "results": [RESULT]}], "thumbnail": "x"}) == []
    assert check_metadata({**VALID, "language": "multilingual", "license": "cc-by-4.0"}) == []
    assert check_metadata({**VALID, "license": "other", "license_name": "mine"}) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"language": False}, "language must be text, and is False: put it in quotes"),  # what YAML makes of `no`
        ({"language": ["en", "German"]}, "language 'German' is no ISO 639 code"),
        ({"license": "Apache 2.0"}, "license 'Apache 2.0' is no identifier.*did you mean apache-2.0"),
        ({"pipeline_tag": ["translation"]}, "pipeline_tag must be text"),
        ({"tags": [1]}, "tags must be text, and is 1"),
        ({"datasets": ["a/b/c"]}, "datasets 'a/b/c' is no name of a repository"),
        ({"base_model": "/home/me/model"}, "base_model '/home/me/model' is no name"),
        ({"model-index": [{"name": "m", "results": [{"task": {}}]}]}, "README.md: Invalid `model_index`"),
        ({"model-index": "best"}, "README.md"),
    ],
)
def test_what_the_hub_would_refuse(change, message):
    with pytest.raises(ValueError, match=message):
        check_metadata({**VALID, **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"language": None}, "names no language"),
        ({"license": None}, "names no license.*--license"),
        ({"license": "apache2"}, "may not know the license apache2; did you mean apache-2.0"),
        ({"license": "other"}, "goes with a license_name"),
    ],
)
def test_what_a_reader_would_miss(change, message):
    (warning,) = check_metadata({**VALID, **change})
    assert re.search(message, warning)


# The Trainer's card


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(SENTENCES * 2, vocab_size=290)


def make_trainer(folder, tokenizer, model=None, **arguments):
    """A trainer of 4 pairs for 3 updates."""
    columns = {"input_ids": SENTENCES[::2] * 2, "labels": SENTENCES[1::2] * 2}
    data = datasets.Dataset.from_dict({name: tokenizer(texts).input_ids for name, texts in columns.items()})
    config = VanillaTransformerConfig.tiny(
        vocab_size=len(tokenizer), d_model=16, encoder_layers=1, decoder_layers=1, dropout=0.25
    )
    options = {
        "max_steps": 3,
        "max_tokens_per_batch": 60,
        "warmup_steps": 2,
        "peak_lr": 0.001,
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
        "predict_with_generate": False,
        "disable_tqdm": True,
        "save_strategy": "no",
    }
    return VanillaTransformerTrainer(
        model or VanillaTransformerForConditionalGeneration(config),
        VanillaTransformerTrainingArguments(str(folder), **{**options, **arguments}),
        train_dataset=data,
        eval_dataset=data.select(range(2)),
        processing_class=tokenizer,
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory, tokenizer):
    trainer = make_trainer(tmp_path_factory.mktemp("runs") / "model", tokenizer)
    trainer.train()
    return trainer


def test_the_trainer_knows_its_run(trained, tokenizer):
    found = facts_of_run(trained, data="two sentences", weights="an average")
    rows = found.training
    assert rows["data"] == "two sentences"
    assert rows["pairs used"] == "4"
    assert rows["updates"] == "3"
    assert rows["weights"] == "an average"
    assert rows["tokenizer"] == f"byte-level BPE of {len(tokenizer)} tokens"
    assert rows["batches"].startswith("at most 60 source and 60 target tokens")
    assert rows["optimizer and schedule"] == (
        "Adam, β = (0.9, 0.98), ε = 1e-09, weight decay 0.0; the paper's schedule, 2 warm-up updates, peak rate 0.001"
    )
    assert rows["regularisation"] == "dropout 0.25, label smoothing 0.1"
    assert rows["precision, device"] == "fp32, cpu"
    assert "started from" not in rows
    assert found.parameters == trained.model.config.num_trainable_parameters()
    assert "1+1 layers, d_model 16" in found.architecture
    assert found.decoding == (
        "beam 4, ranked as by Wu et al. 2016 with α = 0.6, at most source length + 50 tokens a sentence"
    )
    assert found.example_source == SENTENCES[0]
    assert found.languages == ()


def test_another_schedule_is_named(tmp_path, tokenizer):
    schedule = {"lr_schedule": "library", "lr_scheduler_type": "cosine", "learning_rate": 0.002, "peak_lr": None}
    trainer = make_trainer(tmp_path, tokenizer, **schedule, weight_decay=0.1)
    trainer.train()
    row = facts_of_run(trainer).training["optimizer and schedule"]
    assert row == (
        "AdamW, β = (0.9, 0.98), ε = 1e-09, weight decay 0.1; cosine schedule, 2 warm-up updates, learning rate 0.002"
    )


def test_before_training_nothing_is_said_of_it(tmp_path, tokenizer):
    found = facts_of_run(make_trainer(tmp_path, tokenizer))
    assert found.training["updates"] == "0"
    assert not {"optimizer and schedule", "time"} & set(found.training)
    assert found.scores == {}


def test_scores_are_those_of_the_weights(tmp_path, tokenizer):
    trainer = make_trainer(tmp_path, tokenizer, eval_strategy="steps", eval_steps=2)
    trainer.train()
    history = trainer.state.log_history
    # Newer releases of the library evaluate after the last update too.
    trainer.state.log_history = [entry for entry in history if not ("eval_loss" in entry and entry["step"] == 3)]
    assert list(facts_of_run(trainer).scores) == ["validation, update 2"]  # older than the weights
    loss = trainer.evaluate()["eval_loss"]
    scores = facts_of_run(trainer).scores
    assert list(scores) == ["validation"]
    assert scores["validation"]["loss"] == pytest.approx(loss)
    assert scores["validation"]["num_sentences"] == 2
    assert f"| validation | 2 | {loss:.2f} |" in render_card(facts_of_run(trainer), model_name="m", model_path="p")


def test_the_best_weights_are_called_so(tmp_path, tokenizer):
    options = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    trainer = make_trainer(
        tmp_path,
        tokenizer,
        **options,
        load_best_model_at_end=True,
        metric_for_best_model="loss",
        greater_is_better=True,  # the first evaluation is the worst, so that the best is not the last
    )
    trainer.train()
    found = facts_of_run(trainer)
    assert trainer.state.best_global_step == 1
    assert found.training["updates"] == "3; the weights are those of update 1"
    logged = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert found.scores["validation"]["loss"] == logged[0]
    assert logged[0] != logged[-1]


def test_fine_tuning_says_what_it_began_with(tmp_path, trained, tokenizer):
    trained.save_model(tmp_path / "begun")
    model = VanillaTransformerForConditionalGeneration.from_pretrained(tmp_path / "begun")
    found = facts_of_run(make_trainer(tmp_path / "on", tokenizer, model=model))
    assert found.training["started from"] == "begun"  # the folder's name, not where it lies
    assert found.base_model is None
    model.name_or_path = "owner/base"
    found = facts_of_run(make_trainer(tmp_path / "on", tokenizer, model=model))
    assert found.training["started from"] == found.base_model == "owner/base"


def test_create_model_card(trained, tmp_path):
    trained.args.output_dir = str(tmp_path)
    trained.create_model_card(
        language=["en", "de"],
        license="mit",
        tags="mine",
        model_name="A name",
        finetuned_from="owner/base",
        dataset_tags="owner/corpus",
        dataset="a corpus",
        dataset_args="de-en",
    )
    metadata, body = card((tmp_path / "README.md").read_text(encoding="utf-8"))
    assert check_metadata(metadata) == []
    assert metadata["language"] == ["en", "de"]
    assert metadata["base_model"] == "owner/base"
    assert metadata["datasets"] == ["owner/corpus"]
    assert "mine" in metadata["tags"]
    for text in ("# A name\n", "| data | a corpus, de-en |", "translates en to de", f'model="{tmp_path}"'):
        assert text in body


def test_create_model_card_takes_what_the_library_does():
    ours, library = (inspect.signature(kind.create_model_card) for kind in (VanillaTransformerTrainer, Trainer))
    assert list(ours.parameters) == list(library.parameters)


def test_another_model_gets_the_library_s_card(tmp_path, tokenizer):
    config = MarianConfig(**SMALL, vocab_size=len(tokenizer), pad_token_id=0, decoder_start_token_id=0)
    trainer = make_trainer(tmp_path, tokenizer, model=MarianMTModel(config), save_strategy="no")
    trainer.create_model_card(license="mit", model_name="other")
    text = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert "license: mit" in text
    assert "generated automatically" in text  # the library's words
    assert "vanilla-transformer" not in text


def test_the_token_is_not_pickled_with_the_arguments(tmp_path):
    # The library saves the arguments as training_args.bin beside the weights, and pushes it.
    arguments = VanillaTransformerTrainingArguments(
        str(tmp_path), hub_token="hf_secret", use_cpu=True, report_to="none"
    )
    assert b"hf_secret" not in pickle.dumps(arguments)
    assert pickle.loads(pickle.dumps(arguments)).output_dir == str(tmp_path)
    assert arguments.hub_token == "hf_secret"
