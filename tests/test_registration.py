"""What the library knows after `import vanilla_transformer`; what works without it is in `test_round_trips.py`."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import textwrap
import warnings

import pytest
from tiny_models import SMALL, randomise
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForSeq2SeqLM,
    MarianConfig,
    MarianMTModel,
    PreTrainedTokenizerFast,
    pipeline,
    pipelines,
)
from transformers.pipelines import PIPELINE_REGISTRY
from transformers.pipelines.base import get_default_model_and_revision

import vanilla_transformer as vt
from vanilla_transformer import registration

TASKS = ["translation", "summarization", "text2text-generation"]
TEXTS = ["hello", "abc de"]


@pytest.fixture(scope="module")
def tokenizer():
    specials = ["<pad>", "</s>", "<s>"]
    vocab = {token: index for index, token in enumerate([*specials, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="</s>", bos_token="<s>", model_max_length=64
    )


@pytest.fixture(scope="module")
def model(tokenizer):
    config = vt.VanillaTransformerConfig.tiny(vocab_size=len(tokenizer), **SMALL)
    model = randomise(vt.VanillaTransformerForConditionalGeneration(config))
    model.generation_config.max_length_offset = 2
    return model


@pytest.fixture(scope="module")
def folder(model, tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved") / "my.check-point"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def want(model, tokenizer):
    texts = [result["translation_text"] for result in pipeline("translation", model=model, tokenizer=tokenizer)(TEXTS)]
    assert len(set(texts)) == len(TEXTS)
    return texts


def test_the_auto_classes_know_the_model(folder):
    config = AutoConfig.for_model("vanilla_transformer", **SMALL)
    assert type(config) is vt.VanillaTransformerConfig
    assert type(AutoModel.from_config(config)) is vt.VanillaTransformerModel
    assert type(AutoModelForSeq2SeqLM.from_config(config)) is vt.VanillaTransformerForConditionalGeneration
    assert type(AutoConfig.from_pretrained(folder)) is vt.VanillaTransformerConfig
    assert type(AutoModel.from_pretrained(folder)) is vt.VanillaTransformerModel
    assert type(AutoModelForSeq2SeqLM.from_pretrained(folder)) is vt.VanillaTransformerForConditionalGeneration


def test_registering_again_and_reloading_changes_nothing(caplog):
    before = {task: PIPELINE_REGISTRY.supported_tasks[task].copy() for task in TASKS}
    check_task = PIPELINE_REGISTRY.check_task
    vt.register()
    importlib.reload(registration).register()
    assert {task: PIPELINE_REGISTRY.supported_tasks[task] for task in TASKS} == before
    assert PIPELINE_REGISTRY.check_task is check_task
    assert caplog.text == ""
    assert not hasattr(check_task.__wrapped__, "__wrapped__"), "wrapped twice"


@pytest.mark.parametrize(
    ("task", "pair"),
    [
        ("translation", None),
        ("translation_en_to_de", ("en", "de")),
        ("translation_eng_Latn_to_deu_Latn", ("eng_Latn", "deu_Latn")),
        ("translation_to_to_en", ("to", "en")),  # Tongan
    ],
)
def test_translation_tasks_resolve(task, pair):
    name, entry, options = pipelines.check_task(task)
    assert (name, options) == ("translation", pair)
    assert entry["impl"] is registration.TranslationPipeline
    assert entry["pt"] == (AutoModelForSeq2SeqLM,)


@pytest.mark.parametrize(
    "task", ["translation_", "translation_en", "translation_en_de", "translation_to_de", "translations"]
)
def test_malformed_translation_tasks_are_named(task, folder):
    with pytest.raises(
        KeyError, match=f"Invalid translation task {task}, use 'translation' or 'translation_XX_to_YY'"
    ):
        pipelines.check_task(task)
    with pytest.raises(KeyError, match="Invalid translation task"):
        pipeline(task, model=str(folder))


def test_other_tasks_are_left_alone():
    assert pipelines.check_task("sentiment-analysis")[0] == "text-classification"
    with pytest.raises(KeyError, match="Unknown task nonsense"):
        pipelines.check_task("nonsense")
    assert set(TASKS) < set(pipelines.get_supported_tasks())
    if hasattr(pipelines, "REMOVED_TASKS"):
        assert not set(TASKS) & set(pipelines.REMOVED_TASKS)
        with pytest.raises(KeyError, match="question-answering has been removed"):
            pipelines.check_task("question-answering")


def test_a_task_that_someone_else_registered_keeps_its_name():
    entry = {"impl": registration.TranslationPipeline, "pt": (), "type": "text"}
    PIPELINE_REGISTRY.supported_tasks["translation_memory"] = entry
    try:
        assert pipelines.check_task("translation_memory") == ("translation_memory", entry, None)
    finally:
        del PIPELINE_REGISTRY.supported_tasks["translation_memory"]


def test_default_models_are_those_of_version_4():
    # transformers 4.57, SUPPORTED_TASKS in pipelines/__init__.py.
    for task, want in (
        ("translation_en_to_de", ("google-t5/t5-base", "a9723ea")),
        ("translation_en_to_fr", ("google-t5/t5-base", "a9723ea")),
        ("translation_en_to_ro", ("google-t5/t5-base", "a9723ea")),
        ("text2text-generation", ("google-t5/t5-base", "a9723ea")),
        ("summarization", ("sshleifer/distilbart-cnn-12-6", "a4f8f3e")),
    ):
        _, entry, options = pipelines.check_task(task)
        assert get_default_model_and_revision(entry, options) == want
    for task in ("translation", "translation_de_to_en"):
        _, entry, options = pipelines.check_task(task)
        with pytest.raises(ValueError, match="default"):
            get_default_model_and_revision(entry, options)


def test_pipelines_load_our_checkpoint_without_trust(folder, want):
    for task, key in (
        ("translation", "translation_text"),
        ("translation_en_to_de", "translation_text"),
        ("summarization", "summary_text"),
        ("text2text-generation", "generated_text"),
    ):
        pipe = pipeline(task, model=str(folder))
        assert type(pipe.model) is vt.VanillaTransformerForConditionalGeneration
        assert [result[key] for result in pipe(TEXTS, batch_size=2)] == want
    config = AutoConfig.from_pretrained(folder)
    assert pipeline("translation", model=str(folder), config=config)("hello") == [{"translation_text": want[0]}]


def test_a_saved_pipeline_of_another_model_does_not_ask_for_trust(tokenizer, tmp_path):
    config = MarianConfig(vocab_size=len(tokenizer), pad_token_id=0, eos_token_id=1, decoder_start_token_id=0, **SMALL)
    pipe = pipeline("translation", model=randomise(MarianMTModel(config)), tokenizer=tokenizer, max_length=9)
    pipe.save_pretrained(tmp_path)
    assert "custom_pipelines" not in json.loads((tmp_path / "config.json").read_text())
    assert list(tmp_path.glob("*.py")) == []
    assert pipeline("translation", model=str(tmp_path), max_length=9)(TEXTS) == pipe(TEXTS)


def test_saving_our_pipeline_equals_saving_its_model(model, tokenizer, folder, tmp_path):
    pipeline("summarization", model=model, tokenizer=tokenizer).save_pretrained(tmp_path)
    names = {path.name for path in folder.iterdir()}
    assert {path.name for path in tmp_path.iterdir()} == names
    assert (tmp_path / "config.json").read_text() == (folder / "config.json").read_text()


def test_one_warning_for_a_newer_minor_release():
    registration.warn_if_untested.cache_clear()
    major, minor = registration.NEWEST_TESTED.split(".")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for version in (f"{major}.{minor}", f"{major}.{minor}.9", f"{major}.0.0", "4.57.1", f"{major}.{minor}.0.dev0"):
            registration.warn_if_untested(version)
    newer = (
        f"{major}.{int(minor) + 1}.0",
        f"{major}.{int(minor) + 1}.0.dev0",
        f"{major}.{int(minor) + 1}rc1",
        "6.0.0",
    )
    for version in newer:
        with pytest.warns(UserWarning, match=f"up to {registration.NEWEST_TESTED}, and {version} is newer"):
            registration.warn_if_untested(version)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        registration.warn_if_untested(newer[0])


def test_an_older_release_is_refused_in_one_line():
    code = """
        import transformers
        transformers.__version__ = "4.57.6"
        import vanilla_transformer
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "ImportError: vanilla-transformer needs transformers 5.0 or newer, and 4.57.6 is installed: "
        'pip install "transformers>=5.0,<6"'
    )
