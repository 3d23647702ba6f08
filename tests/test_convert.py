"""What all converters share: the rename tables, whole folders, the lazy exports, and the script from end to end."""

from __future__ import annotations

import inspect
import json
import re
import shlex
import subprocess
import sys
import warnings

import pytest
import torch
import transformers
from packaging.version import Version
from safetensors.torch import load_file, save_file
from script_modules import SCRIPTS, load
from test_convert_marian import ENGLISH, make_marian_folder
from tiny_models import SHARING, batch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, pipeline

import vanilla_transformer as vt
from vanilla_transformer import convert
from vanilla_transformer.convert import FORMATS, reading, torch_nn, vanilla
from vanilla_transformer.convert.renaming import (
    ConversionError,
    invert,
    listed,
    load_own_tensors,
    own_shapes,
    own_tensors,
    rename,
    their_name,
    whole_folder,
)
from vanilla_transformer.hub import self_check

# ---------------------------------------------------------------------------------------- rename tables

TABLE = {
    "emb": "embed.weight",
    "enc_{i}.w": "encoder.layers.{i}.fc1.weight",
    "enc_{i}.b": "encoder.layers.{i}.fc1.bias",
}
SHAPES = {
    "embed.weight": (5, 3),
    **{f"encoder.layers.{i}.fc1.weight": (4, 3) for i in (0, 10)},
    **{f"encoder.layers.{i}.fc1.bias": (4,) for i in (0, 10)},
}


def theirs():
    return {
        "emb": torch.ones(5, 3),
        **{f"enc_{i}.w": torch.full((4, 3), float(i)) for i in (0, 10)},
        **{f"enc_{i}.b": torch.full((4,), 0.5 + i) for i in (0, 10)},
    }


def test_tensors_get_the_names_of_the_other_side_and_go_back():
    ours = rename(theirs(), TABLE, SHAPES, system="Theirs")
    assert list(ours) == list(SHAPES)
    assert ours["encoder.layers.10.fc1.weight"][0, 0] == 10
    assert ours["encoder.layers.10.fc1.bias"][0] == 10.5
    back = rename(ours, invert(TABLE), {name: tuple(t.shape) for name, t in theirs().items()}, system="Theirs")
    assert all(torch.equal(back[name], tensor) for name, tensor in theirs().items())
    assert their_name("encoder.layers.10.fc1.bias", TABLE) == "enc_10.b"
    assert their_name("no.row", TABLE) == "no.row"


def test_names_are_no_patterns():
    with pytest.raises(ConversionError, match=r"unknown: enc_0xw"):
        rename({"enc_0xw": torch.ones(1)}, TABLE, {}, system="Theirs")


def test_one_error_lists_all_that_does_not_fit():
    tensors = theirs()
    tensors["stray"] = tensors.pop("enc_0.w")
    tensors["enc_10.b"] = torch.ones(7)
    tensors["enc_3.w"] = torch.ones(4, 3)
    with pytest.raises(ConversionError) as error:
        rename(tensors, TABLE, SHAPES, system="Theirs")
    assert str(error.value).splitlines()[1:] == [
        "  unknown: stray",
        "  missing: enc_0.w",
        "  no place for: enc_3.w (the configuration has no encoder.layers.3.fc1.weight)",
        "  wrong shape: enc_10.b is [7], [4] is needed",
    ]
    assert "Theirs" in str(error.value)


def test_what_is_ignored_is_named():
    tensors = {**theirs(), "positions_4": torch.ones(1)}
    assert rename(tensors, TABLE, SHAPES, system="Theirs", ignored=["positions_{i}"]).keys() == SHAPES.keys()
    with pytest.raises(ConversionError, match="unknown: positions_4"):
        rename(tensors, TABLE, SHAPES, system="Theirs", ignored=["positions"])


def test_of_many_problems_the_first_are_shown_and_the_others_counted():
    lines = listed([f"problem {n}" for n in range(30)]).splitlines()
    assert lines[0] == "problem 0"
    assert lines[-1] == "  and 18 more"
    assert listed(["one"]) == "one"


def test_a_table_with_two_rows_for_one_tensor_has_no_inverse():
    with pytest.raises(ValueError, match="no inverse"):
        invert({"a": "x", "b": "x"})


@pytest.mark.parametrize("sharing", SHARING)
def test_each_matrix_is_read_and_loaded_once(make_model, sharing):
    model, other = (make_model(seed=seed, **SHARING[sharing]) for seed in (0, 1))
    tensors = own_tensors(model)
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == own_shapes(model)
    assert sum(tensor.numel() for tensor in tensors.values()) == model.num_parameters()
    load_own_tensors(other, tensors)
    assert torch.equal(other(**batch()).logits, model(**batch()).logits)


# ---------------------------------------------------------------------------------------- whole folders


def test_a_folder_appears_whole(tmp_path):
    (tmp_path / "new").mkdir()  # empty, so that it may be taken
    with whole_folder(tmp_path / "new") as scratch:
        (scratch / "file").write_text("text")
        assert not any((tmp_path / "new").iterdir())
    assert [path.name for path in tmp_path.rglob("*")] == ["new", "file"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_of_an_interrupted_folder_nothing_stays(tmp_path, error):
    def interrupted():
        with whole_folder(tmp_path / "parent" / "new") as scratch:
            (scratch / "file").write_text("text")
            raise error

    with pytest.raises(error):
        interrupted()
    assert not list(tmp_path.iterdir())
    (tmp_path / "parent").mkdir()
    with pytest.raises(error):
        interrupted()
    assert list(tmp_path.rglob("*")) == [tmp_path / "parent"]  # what was there before stays


def test_what_a_killed_conversion_left_is_cleared(tmp_path):
    left = tmp_path / ".new.incomplete"
    left.mkdir()
    (left / "half").touch()
    with whole_folder(tmp_path / "new") as scratch:
        (scratch / "file").touch()
    assert [path.name for path in tmp_path.rglob("*")] == ["new", "file"]


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_what_exists_is_never_written_over(tmp_path, kind):
    place = tmp_path / "there"
    if kind == "folder":
        place.mkdir()
        (place / "file").write_text("text")
    else:
        place.write_text("text")
    with pytest.raises(ConversionError, match="choose another place"), whole_folder(place):
        pass
    assert (place / "file" if kind == "folder" else place).read_text() == "text"
    assert list(tmp_path.iterdir()) == [place]


# ---------------------------------------------------------------------------------------- the package


@pytest.mark.parametrize("name", convert.__all__)
def test_every_public_name_exists(name):
    assert getattr(convert, name).__doc__
    assert name in dir(convert)


def test_every_function_of_the_modules_is_exported():
    found = set()
    for entry in FORMATS.values():
        module = entry.load()
        names = {f"from_{entry.module}", f"to_{entry.module}"}
        found |= {name for name in names if hasattr(module, name)}
        assert (hasattr(module, "read"), hasattr(module, "write")) == (entry.reads, entry.writes)
    assert found == {name for name in convert.__all__ if name.startswith(("from_", "to_"))}


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="from_nowhere"):
        _ = convert.from_nowhere


def test_the_docstring_s_table_has_each_format():
    rows = dict(re.findall(r"^\| (\w+) \| .* \| ([\w, ]+) \|$", convert.__doc__, flags=re.MULTILINE))
    rows.pop("format")
    ways = {name: [("read", entry.reads), ("write", entry.writes)] for name, entry in FORMATS.items()}
    assert rows == {name: ", ".join(way for way, goes in both if goes) for name, both in ways.items()}


def test_nothing_is_loaded_before_it_is_used():
    # Transformers 5.0's own argument parser imports torch.
    heavy = [] if Version(transformers.__version__) < Version("5.1") else ["torch", "vanilla_transformer"]
    program = (
        "import runpy, sys\n"
        f"sys.argv = ['convert.py', '--help']\n"
        f"sys.path.insert(0, {str(SCRIPTS)!r})\n"
        "try:\n"
        f"    runpy.run_path({str(SCRIPTS / 'convert.py')!r}, run_name='__main__')\n"
        "except SystemExit as end:\n"
        f"    print('LOADED', end.code, [name for name in {heavy!r} if name in sys.modules])\n"
        "import vanilla_transformer\n"
        "print([name for name in sys.modules if name.startswith('vanilla_transformer.convert')])\n"
        "import vanilla_transformer.convert\n"
        "print([name for name in sys.modules if name.startswith('vanilla_transformer.convert.')])\n"
    )
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert "python scripts/convert.py --from marian --to vanilla" in output
    assert output.splitlines()[-3:] == ["LOADED 0 []", "[]", "[]"]


def test_a_field_that_the_configuration_lacks_is_refused():
    with pytest.raises(ConversionError, match="dropuot: the configuration has no such field"):
        reading.make_config("Theirs", {"d_model": 16}, {"dropuot": 0.1})


# ---------------------------------------------------------------------------------------- our own folders


@pytest.fixture
def folder(make_model, tmp_path):
    """A checkpoint of ours with a tokenizer."""
    tokenizer = vt.train_tokenizer(ENGLISH, vocab_size=265)
    vanilla.write(
        make_model(vocab_size=270, norm_position="pre"), tokenizer, tmp_path / "ours", converted_from="a test"
    )
    return tmp_path / "ours"


def test_our_folder_is_read_as_it_was_written(folder, make_model):
    model, tokenizer = vanilla.read(folder)
    assert torch.equal(model(**batch()).logits, make_model(vocab_size=270, norm_position="pre")(**batch()).logits)
    assert tokenizer.decode(tokenizer(ENGLISH[0])["input_ids"], skip_special_tokens=True) == ENGLISH[0]
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert "| converted from | a test |" in card
    assert f"{model.num_parameters():,}" in card
    assert "converted by\n[vanilla-transformer]" in card
    assert "trained with" not in card
    assert ".incomplete" not in card


@pytest.mark.parametrize("damage", ["missing", "unknown", "wrong shape"])
def test_weights_that_do_not_fit_their_config_are_refused(folder, damage):
    tensors = load_file(folder / "model.safetensors")
    bias = tensors.pop("model.encoder.layers.0.fc1.bias")
    if damage == "unknown":
        tensors |= {"model.encoder.layers.0.fc1.bias": bias, "model.stray": torch.ones(2)}
    elif damage == "wrong shape":
        tensors["model.encoder.layers.0.fc1.bias"] = torch.ones(3)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConversionError, match=f"{damage}: model.(encoder.layers.0.fc1.bias|stray)"):
        vanilla.read(folder)


def test_a_folder_of_another_kind_is_refused(folder, tmp_path):
    (folder / "config.json").write_text('{"model_type": "marian"}')
    with pytest.raises(ConversionError, match="'marian', and 'vanilla_transformer' is needed"):
        vanilla.read(folder)
    with pytest.raises(ConversionError, match=r"has no config\.json"):
        vanilla.read(tmp_path)


def test_a_tokenizer_with_more_ids_than_the_model_is_refused(make_model, tmp_path):
    with pytest.raises(ConversionError, match="ids up to 259, and the model's vocab_size is 50"):
        vanilla.write(make_model(), vt.train_tokenizer(ENGLISH, vocab_size=260), tmp_path / "new")
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------------------------------- the script


@pytest.fixture
def call(monkeypatch, capsys):
    """Return a function that calls a script's `main` and gives its exit status, and what it printed."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(SCRIPTS)])

    def run(script: str, *words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", [f"{script}.py", *map(str, words)])
        status = 0
        capsys.readouterr()
        try:
            load(script).main()
        except SystemExit as end:
            status = end.code
        return status, *capsys.readouterr()

    return run


def test_a_marian_checkpoint_becomes_ours_and_that_becomes_ctranslate2_s(tmp_path, call):
    make_marian_folder(tmp_path / "marian", separate=False)
    ours = tmp_path / "new" / "ours"
    status, output, _ = call("convert", "--from", "marian", "--to", "vanilla", tmp_path / "marian", ours)
    assert status == 0
    assert "with its tokenizer" in output
    expected, found = (
        pipeline("translation", model=str(path), device="cpu")(ENGLISH) for path in (tmp_path / "marian", ours)
    )
    assert found == expected
    assert self_check(ours, ENGLISH[0]) == expected[0]["translation_text"]
    assert "marian, in the format marian" in (ours / "README.md").read_text(encoding="utf-8")

    (tmp_path / "test.en").write_text("\n".join(ENGLISH))
    (tmp_path / "test.de").write_text("\n".join(record["translation_text"] for record in expected))
    status, output, error = call(
        "evaluate", "--model", ours, "--test_file", tmp_path / "test.en", tmp_path / "test.de", "--device", "cpu"
    )
    assert status == 0, error
    assert "exact match 100.0%" in output

    ctranslate2 = pytest.importorskip("ctranslate2", reason="reads the result: pip install -e '.[ctranslate2]'")
    target = tmp_path / "ct2"
    status, output, error = call(
        "convert", ours, "--to", "ctranslate2", target, "--quantization", "int8", "--from=vanilla"
    )
    assert status == 0, error
    convert.to_ctranslate2(*vanilla.read(ours), tmp_path / "same", quantization="int8")
    convert.to_ctranslate2(*vanilla.read(ours), tmp_path / "float", quantization="float32")
    files = {name: (tmp_path / name / "model.bin").read_bytes() for name in ("ct2", "same", "float")}
    assert files["ct2"] == files["same"] != files["float"]
    tokenizer = AutoTokenizer.from_pretrained(target)
    row = tokenizer.convert_ids_to_tokens(tokenizer(ENGLISH[0])["input_ids"])
    assert ctranslate2.Translator(str(target), intra_threads=1).translate_batch([row])[0].hypotheses[0]


def test_a_state_dict_becomes_ours_with_what_the_flags_say(make_model, folder, tmp_path, call):
    model = make_model(
        **{"vocab_size": 270, "norm_position": "pre", "decoder_attention_heads": 4, "layer_norm_eps": 1e-5},
        **{"dropout": 0.3, "attention_dropout": 0.1, "activation_dropout": 0.1, "label_smoothing": 0.0},
        pad_token_id=5,
    )
    torch_nn.write(model, None, tmp_path / "torch")
    state = next((tmp_path / "torch").glob("*.safetensors"))
    flags = {"pad_token_id": 5, "bos_token_id": 2, "eos_token_id": 1, "dropout": 0.3}
    status, output, error = call(
        *("convert", "--from", "torch_nn", "--to", "vanilla", "--heads", 4, "--norm-position", "pre"),
        *("--tokenizer", folder, "--fields", json.dumps(flags), "--source", state, "--output_dir", tmp_path / "new"),
    )
    assert status == 0, error
    assert "with its tokenizer" in output
    found, report = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "new", output_loading_info=True)
    assert not any(report.values())
    different = {k for k, v in model.config.to_dict().items() if found.config.to_dict().get(k) != v}
    assert different <= {"_name_or_path", "architectures", "auto_map", "dtype"}
    assert torch.equal(found.eval()(**batch()).logits, model(**batch()).logits)
    assert AutoTokenizer.from_pretrained(tmp_path / "new")("the cat") == AutoTokenizer.from_pretrained(folder)(
        "the cat"
    )

    status, _, error = call("convert", "--from", "vanilla", "--to", "torch_nn", tmp_path / "new", tmp_path / "back")
    assert status == 0, error
    back = load_file(tmp_path / "back" / state.name)
    assert all(torch.equal(tensor, back[name]) for name, tensor in load_file(state).items())


def test_a_model_without_a_tokenizer_has_no_card(make_model, tmp_path, call):
    torch_nn.write(make_model(norm_position="pre"), None, tmp_path / "torch")
    status, output, error = call(
        "convert", "--from", "torch_nn", "--to", "vanilla", tmp_path / "torch", tmp_path / "new"
    )
    assert status == 0, error
    assert "without a tokenizer" in output
    assert not (tmp_path / "new" / "README.md").exists()


def test_warnings_are_lines(make_model, tmp_path, call):
    vanilla.write(make_model(layer_norm_eps=1e-5), None, tmp_path / "ours")
    status, _, error = call("convert", "--from", "vanilla", "--to", "marian", tmp_path / "ours", tmp_path / "marian")
    assert status == 0, error
    assert re.search(r"^warning: MarianMT has no place for ", error, flags=re.MULTILINE)
    assert warnings.showwarning.__module__ != "script_convert"


WAY = "--from vanilla --to marian"
REFUSED = {
    "an unknown source": (
        "--from moses --to vanilla {ours} {new}",
        "--from moses is unknown: choose one of annotated",
    ),
    "an unknown target": ("--from vanilla --to moses {ours} {new}", "--to moses is unknown"),
    "a target that is only read": ("--from vanilla --to fsmt {ours} {new}", "choose one of ctranslate2, marian, "),
    "one format": ("--from vanilla --to vanilla {ours} {new}", "nothing to convert"),
    "no format": ("{ours} {new}", "required: --source_format/--source-format/--from"),
    "no output": (f"{WAY} {{ours}}", "required: --output_dir"),
    "a third place": (f"{WAY} {{ours}} {{new}} more", "unknown argument more"),
    "a missing source": (f"{WAY} {{tmp}}/nowhere {{new}}", "nowhere: no such file"),
    # Reading would fail too: the place is looked at first.
    "an output with something in it": ("--from marian --to vanilla {ours} {tmp}/full", "choose another place"),
    "an option of another source": (
        f"{WAY} --heads 4 {{ours}} {{new}}",
        "--heads is for --from annotated and torch_nn",
    ),
    "an option of another target": (f"{WAY} --quantization int8 {{ours}} {{new}}", "--quantization is for --to ctran"),
    "an option whose value is 0": (f"{WAY} --num_positions 0 {{ours}} {{new}}", "--num_positions is for --to ctran"),
    "a switch of another source": (f"{WAY} --moses {{ours}} {{new}}", "--moses is for --from fairseq"),
    "fields of another source": (f"{WAY} --fields {{{{}}}} {{ours}} {{new}}", "--fields is for --from annotated"),
    "a needed option": ("--from annotated --to vanilla {ours} {new}", "--from annotated needs --heads"),
    "fields that are no JSON": ("--from torch_nn --to vanilla --fields a=1 {ours} {new}", "--fields a=1 is not JSON"),
    "fields without names": ("--from torch_nn --to vanilla --fields [1] {ours} {new}", "JSON of names and values"),
    "an unknown field": (
        '--from torch_nn --to vanilla --heads 4 --norm_position pre --fields {{"dropuot":0.1}} {torch} {new}',
        "dropuot: the configuration has no such field",
    ),
    "a field given twice": (
        '--from torch_nn --to vanilla --norm_position pre --fields {{"norm_position":"pre"}} {torch} {new}',
        "not in both",
    ),
    "a second tokenizer": (f"{WAY} --tokenizer {{ours}} {{ours}} {{new}}", "has its own, leave it out"),
    "a tokenizer that is none": (
        "--from torch_nn --to vanilla --tokenizer {tmp}/full {torch} {new}",
        "cannot be read",
    ),
    "a tokenizer of another model": (
        "--from torch_nn --to vanilla --tokenizer {ours} {torch} {new}",
        "they are no pair",
    ),
    "a source of another kind": ("--from marian --to vanilla {ours} {new}", "not of the model type 'marian'"),
    "a model that does not go there": (f"{WAY} {{ours}} {{new}}", "norm_position='pre': MarianMT has 'post'"),
    "an unknown quantization": (
        "--from vanilla --to ctranslate2 --quantization int3 {ours} {new}",
        "quantization='int3' is not one of",
    ),
    "no flag at all": (f"{WAY} --quantisation int8 {{ours}} {{new}}", "did you mean --quantization?"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_the_script_refuses_and_leaves_nothing(case, folder, make_model, tmp_path, call):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    torch_nn.write(make_model(norm_position="pre"), None, tmp_path / "torch")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    words, message = REFUSED[case]
    places = {"ours": folder, "torch": tmp_path / "torch", "tmp": tmp_path, "new": tmp_path / "new"}
    status, output, error = call("convert", *words.format(**places).split())
    assert status == 2
    assert message in error
    assert "Traceback" not in error
    assert error.count("error: ") == 1
    assert not output
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_a_missing_extra_is_one_line(folder, tmp_path, call, monkeypatch):
    monkeypatch.setitem(sys.modules, "ctranslate2.specs", None)  # importing it fails
    status, _, error = call("convert", "--from", "vanilla", "--to", "ctranslate2", folder, tmp_path / "new")
    assert status == 2
    assert "pip install 'vanilla-transformer[ctranslate2]'" in error
    assert "Traceback" not in error
    assert not (tmp_path / "new").exists()


def test_of_an_interrupted_conversion_nothing_stays(make_model, tmp_path, call, monkeypatch):
    torch_nn.write(make_model(norm_position="pre"), None, tmp_path / "torch")
    save = vt.VanillaTransformerForConditionalGeneration.save_pretrained

    def interrupted(model, place, **options):
        save(model, place, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(vt.VanillaTransformerForConditionalGeneration, "save_pretrained", interrupted)
    with pytest.raises(KeyboardInterrupt):
        call("convert", "--from", "torch_nn", "--to", "vanilla", tmp_path / "torch", tmp_path / "new")
    assert list(tmp_path.iterdir()) == [tmp_path / "torch"]


def test_the_script_has_each_option_of_each_format():
    script = load("convert")
    for name, entry in FORMATS.items():
        module = entry.load()
        for way, options in (("read", script.READ_OPTIONS), ("write", script.WRITE_OPTIONS)):
            if not hasattr(module, way):
                continue
            parameters = dict(inspect.signature(getattr(module, way)).parameters)
            taken = set(list(parameters)[1 if way == "read" else 3 :]) - {"converted_from"}
            offered = {option for option, formats in options.items() if name in formats}
            if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
                assert "fields" in offered
                inner = inspect.signature(getattr(module, f"from_{name}")).parameters
                known = {*inner, *vars(vt.VanillaTransformerConfig()), *taken} | (
                    {"heads"} if name == "torch_nn" else set()
                )
                assert offered - {"fields"} <= known
            else:
                assert offered == taken
    assert {f for formats in (*script.READ_OPTIONS.values(), *script.WRITE_OPTIONS.values()) for f in formats} <= set(
        FORMATS
    )


def test_the_script_s_help_names_every_format():
    text = " ".join(load("convert").__doc__.split())
    readable, writable = re.search(r"From: ([\w, ]+)\. To: ([\w, ]+)\.", text).groups()
    assert readable.split(", ") == [name for name, entry in FORMATS.items() if entry.reads]
    assert writable.split(", ") == [name for name, entry in FORMATS.items() if entry.writes]


def commands() -> list[str]:
    """The commands that the documentation and the script's help show."""
    texts = [(SCRIPTS.parent / "docs" / "interop.md").read_text(encoding="utf-8"), load("convert").__doc__]
    joined = "\n".join(texts).replace("\\\n", " ")
    return re.findall(r"^    python scripts/convert\.py (--from (?!FORMAT).*)$", joined, flags=re.MULTILINE)


def test_each_shown_command_is_right_up_to_the_files_that_are_not_here(tmp_path, call, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert len(commands()) > 15
    for command in commands():
        status, _, error = call("convert", *shlex.split(command))
        assert status == 2
        assert "no such file or folder" in error, command
