"""What a stranger's checkpoint, or one of ours, can do to the machine that loads it."""

from __future__ import annotations

import ast
import json
import pickle
import sys
from pathlib import Path

import pytest
import torch
import transformers
from tiny_models import SMALL, TINY
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    MarianConfig,
    MarianMTModel,
    PreTrainedConfig,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    pipeline,
)

import vanilla_transformer as vt
from vanilla_transformer.configuration_vanilla_transformer import check_missing_weights

ROOT = Path(vt.__file__).parents[1]
SOURCES = sorted([*(ROOT / "vanilla_transformer").rglob("*.py"), *(ROOT / "scripts").rglob("*.py")])


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint of a few thousand parameters with a tokenizer."""
    folder = tmp_path_factory.mktemp("saved")
    vt.VanillaTransformerForConditionalGeneration(vt.VanillaTransformerConfig(**TINY)).save_pretrained(folder)
    vt.train_tokenizer(["a b"], vocab_size=259).save_pretrained(folder)
    return folder


@pytest.fixture
def with_config(saved, tmp_path):
    """Return a function that makes a copy of the checkpoint with some fields of its config.json replaced."""

    def copy(**fields) -> Path:
        for path in saved.iterdir():
            (tmp_path / path.name).write_bytes(path.read_bytes())
        config = json.loads((saved / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({**config, **fields}))
        return tmp_path

    return copy


@pytest.fixture
def little_memory():
    """Allow this process one GB more than it has, so that what is tested here can fail and do no harm."""
    if sys.platform != "linux":
        yield
        return
    import resource

    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (now + 2**30, hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


# ------------------------------------------------------------------------------------------------ hostile configs

HUGE = 10**12
HOSTILE = [
    # Sizes.
    *[
        {name: HUGE}
        for name in (
            *("vocab_size", "d_model", "encoder_layers", "decoder_layers", "encoder_attention_heads"),
            *("decoder_attention_heads", "d_k", "d_v", "encoder_ffn_dim", "decoder_ffn_dim"),
            *("max_position_embeddings", "position_offset"),
        )
    ],
    {"encoder_layers": 10**9},
    {"decoder_layers": 1_001},
    {"vocab_size": -1},
    {"d_model": 10**400},
    {"num_labels": 10**9},
    {"num_labels": "many"},
    # Ids.
    {"pad_token_id": HUGE},
    {"pad_token_id": -1},
    {"eos_token_id": HUGE},
    {"eos_token_id": [1, HUGE]},
    {"eos_token_id": {"1": 2}},
    {"bos_token_id": 10**30},
    {"decoder_start_token_id": 50},
    # Types and values.
    {"d_model": "512"},
    {"d_model": [512]},
    {"d_model": {"value": 512}},
    {"d_model": float("nan")},
    {"vocab_size": 1e12},
    {"dropout": float("nan")},
    {"dropout": "0.1"},
    {"layer_norm_eps": float("inf")},
    {"layer_norm_eps": 10**400},
    {"activation_function": "__class__"},
    {"activation_function": {"relu": 1}},
    {"norm_position": None},
    {"use_cache": "no"},
    {"is_encoder_decoder": False},
    {"dtype": "load"},
    {"dtype": "nonsense"},
    {"dtype": "int8"},
    {"dtype": 5},
    {"torch_dtype": ["float32"]},
    {"id2label": "abc"},
    {"id2label": {"first": "a"}},
    {"quantization_config": 5},
    {"task_specific_params": "translation"},
    {"prefix": 5},
    {"auto_map": "modeling.Model"},
    {"auto_map": {"AutoModel": 5}},
    {"custom_pipelines": "pipeline.Pipeline"},
    {"custom_pipelines": {"translation": 5}},
    # Names that are not fields: methods, tables and private state of the class.
    {"check": 5},
    {"to_dict": None},
    {"head_dims": 1},
    {"num_trainable_parameters": 1},
    {"attribute_map": {"d_model": "x"}},
    {"use_return_dict": True},
    {"__class__": "x"},
    {"__init__": 1},
    {"_foreign_pipelines": {"translation": {"impl": "evil.Pipeline"}}},
    # Code of the Hub as an attention: transformers 5.0 would fetch it, and run it without asking.
    {"attn_implementation": "evil/kernel"},
    {"attn_implementation": {"": "evil/kernel"}},
    {"experts_implementation": "evil/kernel"},
    {"_attn_implementation": "evil/kernel"},
    {"_attn_implementation_internal": "evil/kernel"},
]


@pytest.mark.parametrize("fields", HOSTILE, ids=lambda fields: f"{fields!s:.60}")
def test_a_hostile_config_is_one_error_that_names_the_field(fields, with_config, little_memory):
    (name,) = fields
    with pytest.raises(ValueError, match=rf"\b{name}=") as refusal:
        AutoConfig.from_pretrained(with_config(**fields))
    assert len(str(refusal.value)) < 1500


@pytest.mark.parametrize("name", ["hidden_size", "num_hidden_layers", "num_attention_heads"])
def test_the_librarys_names_are_no_way_round(name, with_config):
    ours = vt.VanillaTransformerConfig.attribute_map[name]
    with pytest.raises(ValueError, match=f"^{ours}={HUGE} is "):
        AutoConfig.from_pretrained(with_config(**{name: HUGE}))


def test_sizes_that_fit_one_by_one_are_counted_together(with_config):
    sizes = {"vocab_size": 10**6, "decoder_vocab_size": 10**6, "d_model": 2**17}
    with pytest.raises(ValueError, match=r"vocab_size=1000000, .*d_model=131072, .* make [\d,]{15} parameters"):
        AutoModel.from_pretrained(with_config(**sizes))


def test_what_the_library_chokes_on_is_a_value_error_too(monkeypatch):
    # As `per_layer_config=5` and `layer_types=5` do in 5.24; older releases do not know these fields, and keep them.
    def choke(self, **fields):
        raise TypeError("'int' object is not iterable")

    monkeypatch.setattr(PreTrainedConfig, "__init__", choke)
    message = "one of the fields is_encoder_decoder, layer_types: TypeError: 'int' object is not iterable"
    with pytest.raises(ValueError, match=message):
        vt.VanillaTransformerConfig(layer_types=5)


def test_unknown_fields_are_kept_and_do_nothing(with_config):
    fields = {"corpus": {"a": [1, {"b": None}]}, "max_layers": 10**9, "max_parameters": 1, "model_max_length": HUGE}
    config = AutoConfig.from_pretrained(with_config(**fields))
    assert {name: getattr(config, name) for name in fields} == fields
    AutoModelForSeq2SeqLM.from_config(config)
    with pytest.raises(ValueError, match="encoder_layers=1001 is more than the 1,000 layers"):
        AutoConfig.from_pretrained(with_config(**fields, encoder_layers=1_001))


def chain(error: BaseException | None) -> list[str]:
    """Return the messages of an error and of those it came from."""
    return [] if error is None else [str(error), *chain(error.__cause__ or error.__context__)]


GIANTS = [
    {"vocab_size": 10**9, "decoder_vocab_size": 10**9},
    {"encoder_ffn_dim": 10**9},
    {"position_embedding_type": "learned", "sinusoid_layout": None, "max_position_embeddings": 10**9},
    {"encoder_layers": 100, "encoder_ffn_dim": 10**7},
]


@pytest.mark.parametrize("auto", [AutoModel, AutoModelForSeq2SeqLM])
@pytest.mark.parametrize("fields", GIANTS, ids=lambda fields: next(iter(fields)))
def test_a_giant_with_small_weights_is_refused_before_it_is_allocated(fields, auto, with_config, little_memory):
    folder = with_config(**fields)
    # Where shapes differ, newer releases end with their own RuntimeError whatever happens before; nothing may.
    with pytest.raises((ValueError, RuntimeError)) as refusal:
        auto.from_pretrained(folder)
    messages = chain(refusal.value)
    assert any("config.json asks for a model of" in message for message in messages), messages
    assert not any("allocate" in message for message in messages), messages


def test_a_config_that_became_huge_makes_no_model(make_config):
    config = make_config()
    config.encoder_layers = 1_001
    with pytest.raises(ValueError, match=r"^encoder_layers=1001 is more than"):
        AutoModel.from_config(config)


@pytest.mark.parametrize(("missing", "held"), [(10**8, 0), (4 * 10**9, 10**9)])
def test_how_much_a_weights_file_may_lack(missing, held):
    check_missing_weights(missing, held)
    total = f"{missing + held + 1:,}"
    with pytest.raises(ValueError, match=f"a model of {total} parameters, and the weights file holds {held:,} of"):
        check_missing_weights(missing + 1, held)


def test_what_fine_tuners_do_to_sizes_is_allowed(saved):
    assert AutoModelForSeq2SeqLM.from_pretrained(saved, encoder_layers=12).config.encoder_layers == 12
    grown = AutoModelForSeq2SeqLM.from_pretrained(saved, vocab_size=5_000, ignore_mismatched_sizes=True)
    assert grown.get_input_embeddings().weight.shape == (5_000, TINY["d_model"])


# ------------------------------------------------------------------------------------------------ nothing is unpickled


@pytest.mark.parametrize("shards", [{}, {"max_shard_size": "20KB"}], ids=["whole", "sharded"])
def test_a_checkpoint_holds_no_weights_but_safetensors(shards, make_model, tmp_path):
    make_model().save_pretrained(tmp_path, **shards)
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".py", ".safetensors"}
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == bool(shards)


def test_a_trainers_checkpoint_holds_no_weights_but_safetensors(make_model, tmp_path):
    model = make_model()
    tokenizer = vt.train_tokenizer(["a b"], vocab_size=259)
    arguments = Seq2SeqTrainingArguments(tmp_path, max_steps=1, save_steps=1, use_cpu=True, report_to=[])
    rows = [{"input_ids": [5, 6, 1], "labels": [7, 8, 1]}] * 8
    collator = DataCollatorForSeq2Seq(tokenizer, model=model)
    Seq2SeqTrainer(model, arguments, collator, rows).train()
    names = {path.name for path in (tmp_path / "checkpoint-1").iterdir() if path.suffix not in {".json", ".py"}}
    # The rest is the state of the run, which the library reads with `weights_only`, and a note that nothing reads.
    assert names == {"model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin"}


class Bomb:
    """Unpickled, it writes a file."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self):
        return Path.write_text, (self.target, "went off")


def test_pickled_weights_run_no_code(with_config, tmp_path_factory):
    folder, mark = with_config(), tmp_path_factory.mktemp("bomb") / "mark"
    (folder / "model.safetensors").unlink()
    torch.save({"model.shared.weight": Bomb(mark)}, folder / "pytorch_model.bin")
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        AutoModelForSeq2SeqLM.from_pretrained(folder)
    assert not mark.exists()


UNPICKLERS = {"pickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__", "os.system", "os.popen", "yaml.load", "yaml.unsafe_load"}
FORBIDDEN_KEYWORDS = {("trust_remote_code", "True"), ("shell", "True")}
ONLY_KEYWORDS = {"weights_only": "True", "allow_pickle": "False"}


def dangers(source: str) -> list[str]:
    """Return the places of a source that unpickle, run text as code, or trust a stranger's code unasked."""
    found = []
    for node in ast.walk(ast.parse(source)):
        wrong = False
        if isinstance(node, ast.Import):
            wrong = any(alias.name.partition(".")[0] in UNPICKLERS for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            wrong = module in UNPICKLERS or (module == "torch" and any(alias.name == "load" for alias in node.names))
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            wrong = (
                name in FORBIDDEN_CALLS
                or name.endswith(("read_pickle", "torch.hub.load"))
                or (name == "torch.load" and "weights_only" not in keywords)
                or bool(FORBIDDEN_KEYWORDS & set(keywords.items()))
                or any(keywords.get(key, value) != value for key, value in ONLY_KEYWORDS.items())
            )
        elif isinstance(node, (ast.AnnAssign, ast.arg)):  # a default that trusts
            wrong = ast.unparse(node).startswith("trust_remote_code") and ast.unparse(node).endswith("= True")
        if wrong:
            found.append(ast.unparse(node))
    return found


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "def f():\n    from joblib import load",
        "from torch import load",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "torch.load(path, weights_only=flag)",
        "np.load(path, allow_pickle=True)",
        "pd.read_pickle(path)",
        "yaml.load(text)",
        "exec(text)",
        "subprocess.run(command, shell=True)",
        "AutoModel.from_pretrained(name, trust_remote_code=True)",
        "trust_remote_code: bool = True",
    ],
)
def test_the_search_for_dangers_finds_them(line):
    assert len(dangers(line)) == 1


@pytest.mark.parametrize(
    "line",
    [
        "torch.load(path, weights_only=True)",
        "np.load(path)",
        "re.compile(pattern)",
        "model.eval()",
        "AutoModel.from_pretrained(name, trust_remote_code=arguments.trust_remote_code)",
        "trust_remote_code: bool = field(default=False)",
    ],
)
def test_the_search_for_dangers_finds_nothing_else(line):
    assert dangers(line) == []


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_package_and_scripts_neither_unpickle_nor_trust_unasked(path):
    assert dangers(path.read_text(encoding="utf-8")) == []


# ------------------------------------------------------------------------------------------------ a stranger's code


@pytest.mark.parametrize("trust", [None, False, True])
def test_the_imported_package_runs_no_code_of_a_checkpoint(trust, with_config, tmp_path_factory):
    if trust and tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 6):
        pytest.skip("before 5.6 the library prefers a trusted checkpoint's code")
    folder, mark = with_config(vocab_size=50), tmp_path_factory.mktemp("code") / "mark"
    for path in folder.glob("*.py"):
        path.write_text(f"open({str(mark)!r}, 'w').close()\n")
    assert type(AutoConfig.from_pretrained(folder, trust_remote_code=trust)) is vt.VanillaTransformerConfig
    assert type(AutoModel.from_pretrained(folder, trust_remote_code=trust)) is vt.VanillaTransformerModel
    AutoTokenizer.from_pretrained(folder, trust_remote_code=trust)
    pipe = pipeline("translation", model=str(folder), trust_remote_code=trust)
    assert type(pipe.model) is vt.VanillaTransformerForConditionalGeneration
    assert not mark.exists()


def test_code_of_another_repository_is_not_fetched(with_config):
    elsewhere = {name: f"evil/repo--evil.{name}" for name in ("AutoConfig", "AutoModel", "AutoModelForSeq2SeqLM")}
    folder = with_config(auto_map=elsewhere)
    model = AutoModelForSeq2SeqLM.from_pretrained(folder)
    assert type(model) is vt.VanillaTransformerForConditionalGeneration
    # Saved again, it points to the files beside it, and to nothing else.
    model.save_pretrained(folder)
    assert "evil" not in (folder / "config.json").read_text()


def test_a_pipeline_of_a_stranger_is_refused_without_trust(with_config):
    ours = json.loads((with_config() / "config.json").read_text())["custom_pipelines"]
    theirs = {"impl": "evil.Pipeline", "pt": ["AutoModel"], "type": "text"}
    folder = with_config(custom_pipelines={**ours, "scoring": theirs})
    with pytest.raises(ValueError, match="requires you to execute the code"):
        pipeline("scoring", model=str(folder))
    pipeline("translation", model=str(folder))


def test_marian_beside_us_asks_for_no_trust(tmp_path):
    config = MarianConfig(vocab_size=260, pad_token_id=0, eos_token_id=1, decoder_start_token_id=0, **SMALL)
    MarianMTModel(config).save_pretrained(tmp_path)
    vt.train_tokenizer(["a b"], vocab_size=259).save_pretrained(tmp_path)
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".safetensors"}
    assert type(pipeline("translation_en_to_de", model=str(tmp_path)).model) is MarianMTModel
