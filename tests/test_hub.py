"""What of a folder is pushed, what is refused before any work, and the check that a checkpoint works by itself."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from vanilla_transformer import VanillaTransformerForConditionalGeneration, save_tokenizer, train_tokenizer
from vanilla_transformer.hub import card_for_hub, facts_of_checkpoint, push_checkpoint, self_check
from vanilla_transformer.model_card import check_metadata, split_card, write_model_card

TOKEN = "hf_" + "a" * 34


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint whose output depends on its input, without a card."""
    folder = tmp_path_factory.mktemp("hub") / "saved"
    tokenizer = train_tokenizer(["the cat sees a dog", "der Hund sieht eine Katze"] * 2, vocab_size=290)
    config = VanillaTransformerForConditionalGeneration.config_class.tiny(
        vocab_size=len(tokenizer), d_model=16, encoder_layers=1, decoder_layers=1
    )
    torch.manual_seed(0)
    VanillaTransformerForConditionalGeneration(config).save_pretrained(folder)
    save_tokenizer(tokenizer, folder)
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    """A copy to spoil."""
    return shutil.copytree(saved, tmp_path / "copy")


@pytest.fixture
def unchecked(monkeypatch):
    """Leave out the self-check, which takes seconds."""
    monkeypatch.setattr("vanilla_transformer.hub.self_check", lambda folder, sentence, task: "checked")


def edit(path, change):
    content = json.loads(path.read_text(encoding="utf-8"))
    change(content)
    path.write_text(json.dumps(content), encoding="utf-8")


# The files


def test_only_the_weights_that_are_read_are_pushed(folder, unchecked):
    # Shards of an earlier save beside a single file: from_pretrained takes the file.
    (folder / "model-00001-of-00002.safetensors").write_bytes(b"")
    (folder / "model.safetensors.index.json").write_text("{}", encoding="utf-8")
    (folder / "pytorch_model.bin").write_bytes(b"")
    push = push_checkpoint(folder, "me/model", dry_run=True)
    assert [name for name in push.files if "model" in name and not name.endswith(".py")] == ["model.safetensors"]
    assert {"pytorch_model.bin", "model-00001-of-00002.safetensors", "model.safetensors.index.json"} <= set(
        push.left_out
    )


def test_shards_are_pushed_with_their_index(folder, unchecked):
    model = VanillaTransformerForConditionalGeneration.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="10KB")
    names = {path.name for path in folder.glob("model*.safetensors*")}
    assert len(names) > 2
    assert names <= set(push_checkpoint(folder, "me/model", dry_run=True).files)
    gone = sorted(folder.glob("model-*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(ValueError, match=f"lacks {gone.name}"):
        push_checkpoint(folder, "me/model", dry_run=True)


def test_a_licence_goes_along_and_further_files_if_asked_for(folder, unchecked):
    for name in ("LICENSE", "metrics.json", "figures/a.png", "figures/b.txt"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("text", encoding="utf-8")
    push = push_checkpoint(folder, "me/model", include=["metrics.json", "figures/*.png"], dry_run=True)
    assert {"LICENSE", "metrics.json", "figures/a.png"} <= set(push.files)
    assert push.left_out == ["figures/"]


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("*.none", "fits no file"),
        ("../*", "must be a pattern of files inside the folder"),
        ("/etc/*", "must be a pattern of files inside the folder"),
        ("checkpoint-2/*", r"fits checkpoint-2/optimizer\.pt: nothing that has to be unpickled"),
    ],
)
def test_what_cannot_be_included(folder, pattern, message):
    (folder / "checkpoint-2").mkdir()
    (folder / "checkpoint-2" / "optimizer.pt").write_bytes(b"")
    with pytest.raises(ValueError, match=message):
        push_checkpoint(folder, "me/model", include=[pattern], dry_run=True)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: shutil.rmtree(folder), "no such folder"),
        (lambda folder: (folder / "config.json").unlink(), r"has no config\.json"),
        (lambda folder: (folder / "config.json").write_text("{"), r"config\.json cannot be read"),
        (lambda folder: (folder / "config.json").write_text("[]"), r"config\.json cannot be read"),
        (lambda folder: (folder / "model.safetensors").unlink(), "no weights in the safetensors format"),
        (lambda folder: (folder / "tokenizer.json").unlink(), r"lacks tokenizer\.json"),
        (
            lambda folder: (folder / "modeling_vanilla_transformer.py").unlink(),
            r"lacks modeling_vanilla_transformer\.py",
        ),
        (lambda folder: edit(folder / "config.json", lambda c: c.update(model_type="marian")), "of the type 'marian'"),
        (lambda folder: edit(folder / "config.json", lambda c: c.pop("auto_map")), "has no auto_map"),
        (lambda folder: (folder / "README.md").write_text("---\na: [\n---\n"), "metadata block is not YAML"),
        (
            lambda folder: (folder / "README.md").write_text(f"Mine: {TOKEN}"),
            r"README\.md holds what looks like an access",
        ),
        (lambda folder: (folder / "LICENSE").write_text(TOKEN), "LICENSE holds what looks like an access token"),
    ],
)
def test_what_is_no_whole_checkpoint(folder, spoil, message):
    spoil(folder)
    with pytest.raises(ValueError, match=message) as problem:
        push_checkpoint(folder, "me/model", dry_run=True)
    assert TOKEN not in str(problem.value)


@pytest.mark.parametrize(
    ("repo_id", "message"),
    [
        ("model", "must be owner/name"),
        ("a/b/c", "is no name of a repository"),
        ("me/my model", "is no name of a repo"),
    ],
)
def test_what_is_no_name_of_a_repository(folder, repo_id, message):
    with pytest.raises(ValueError, match=message):
        push_checkpoint(folder, repo_id, dry_run=True)


def test_a_licence_that_is_none(folder):
    with pytest.raises(ValueError, match=r"license 'Apache 2\.0' is no identifier.*did you mean apache-2\.0"):
        push_checkpoint(folder, "me/model", license="Apache 2.0", dry_run=True)


def test_without_a_token(folder, monkeypatch):
    monkeypatch.setattr("vanilla_transformer.hub.get_token", lambda: None)
    with pytest.raises(ValueError, match="No token for the Hub: log in by `hf auth login`"):
        push_checkpoint(folder, "me/model")


# The card


def test_without_a_card_it_is_filled_from_the_facts(folder):
    facts = facts_of_checkpoint(folder)
    facts.training, facts.languages = {"updates": "77"}, ("en", "de")
    write_model_card(folder, facts).unlink()
    text, warnings = card_for_hub(folder, "me/model", "mit")
    assert warnings == []
    for part in ("| updates | 77 |", "# model\n", 'model="me/model"', "license: mit"):
        assert part in text
    assert not (folder / "README.md").exists()


def test_without_facts_it_says_what_the_checkpoint_does(folder):
    text, warnings = card_for_hub(folder, "me/model")
    model = VanillaTransformerForConditionalGeneration.from_pretrained(folder)
    assert f"of {model.num_parameters():,} parameters" in text
    assert "Not recorded in this checkpoint." in text
    assert any("from the checkpoint alone" in warning for warning in warnings)
    assert check_metadata(split_card(text)[0])


def test_a_card_with_what_the_hub_wants_stays_byte_for_byte(folder):
    own = (
        "---\n# a comment\nlicense:   mit\nlanguage: [en, de]\nlibrary_name: transformers\npipeline_tag: translation\n"
        "---\nMine, all mine.  \n"
    )
    (folder / "README.md").write_text(own, encoding="utf-8")
    assert card_for_hub(folder, "me/model") == (own, [])


def test_a_card_without_metadata_gets_them(folder):
    (folder / "README.md").write_text("# Mine\n", encoding="utf-8")
    text, _ = card_for_hub(folder, "me/model")
    metadata, _, body = split_card(text)
    assert metadata["library_name"] == "transformers"
    assert metadata["pipeline_tag"] == "translation"
    assert body == "# Mine\n"


def test_an_address_that_is_not_the_repository_s_is_named(folder):
    path = write_model_card(folder, facts_of_checkpoint(folder), model_path="runs/one")
    path.write_text(path.read_text(encoding="utf-8").replace("runs/one", "runs/two", 1), encoding="utf-8")
    text, warnings = card_for_hub(folder, "me/model")
    assert 'model="me/model"' in text
    assert any("shows how to load runs/two, not me/model" in warning for warning in warnings)


# The self-check; what a good checkpoint gives is in test_push_to_hub.py


ALONE = """import os
import torch
try:
    import vanilla_transformer
except ImportError:
    raise RuntimeError(f"it is not there, and the token {os.environ.get('HF_TOKEN')}")
"""


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("import torch\n", ALONE, "without this package: .*it is not there, and the token None"),
        ("self.lm_head(", "-self.lm_head(", "the folder's Python files are of another version"),
    ],
)
def test_code_that_does_not_do_the_same(folder, monkeypatch, old, new, message):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    path = folder / "modeling_vanilla_transformer.py"
    code = path.read_text(encoding="utf-8")
    assert old in code
    path.write_text(code.replace(old, new), encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        self_check(folder, "the cat sees a dog")


def test_weights_that_are_not_all_there(folder):
    weights = load_file(folder / "model.safetensors")
    name = next(name for name in weights if name.endswith("fc1.weight"))
    del weights[name]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=f"weights do not fit the code beside them: missing_keys .*{name}"):
        self_check(folder, "the cat sees a dog")
