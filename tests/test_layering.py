"""Dependencies point one way, and the files that ship with a checkpoint stand on their own."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import vanilla_transformer

PACKAGE = Path(vanilla_transformer.__file__).parent
SHIPPED = {path.stem for path in PACKAGE.glob("*_vanilla_transformer.py")}
# What each module of the package may import from it; a new module has to be put in its place here.
ALLOWED = {
    "configuration_vanilla_transformer": set(),
    "beam_decoder_vanilla_transformer": {"attention_vanilla_transformer", "projection_vanilla_transformer"},
    "projection_vanilla_transformer": {"loss_vanilla_transformer"},
    "beam_search_vanilla_transformer": {"beam_decoder_vanilla_transformer", "projection_vanilla_transformer"},
    "length_limits_vanilla_transformer": set(),
    "generation_vanilla_transformer": {"beam_search_vanilla_transformer", "length_limits_vanilla_transformer"},
    "dropout_vanilla_transformer": set(),
    "loss_vanilla_transformer": set(),
    "parallel_vanilla_transformer": set(),
    "pipeline_vanilla_transformer": {"parallel_vanilla_transformer"},
    "attention_vanilla_transformer": {"configuration_vanilla_transformer", "dropout_vanilla_transformer"},
    "pretrained_vanilla_transformer": {"configuration_vanilla_transformer"},
    "modeling_vanilla_transformer": SHIPPED - {"modeling_vanilla_transformer"},
    "registration": SHIPPED,
    "corpus_formats": set(),
    "corpus": {"corpus_formats"},
    "tokenizer_training": {"corpus_formats"},
    "phrase_lexicon": set(),
    "phrase_syntax": {"phrase_lexicon"},
    "phrase_sampling": {"phrase_lexicon", "phrase_syntax"},
    "phrase_grammar": {"phrase_lexicon", "phrase_sampling", "phrase_syntax"},
    "batching": set(),
    "streaming": {"batching", "tokenizer_training"},
    "dataloading": {"batching", "streaming"},
    "optimization": set(),
    "output_folders": set(),
    "quantization": set(),
    "metrics": set(),
    "averaging": {"checkpointing", "output_folders", "training_arguments"},
    "checkpointing": set(),
    "monitoring": set(),
    "training_arguments": set(),
    # No model: it trains any sequence-to-sequence model.
    "trainer": {"batching", "checkpointing", "dataloading", "model_card", "optimization", "training_arguments"},
    "translation": {"corpus_formats", "parallel_vanilla_transformer", "pipeline_vanilla_transformer"},
    "distillation": {"corpus_formats", "translation"},
    "shrinking": {
        "attention_vanilla_transformer",
        "configuration_vanilla_transformer",
        "modeling_vanilla_transformer",
    },
    "model_card": {"vanilla_transformer"},  # for the version
    "hub": {"model_card"},
}

# Converters stand on top: what they may import of the package, and of each other.
CONVERTERS_USE = {
    "attention_vanilla_transformer",
    "configuration_vanilla_transformer",
    "generation_vanilla_transformer",
    "modeling_vanilla_transformer",
    "output_folders",
    "tokenizer_training",
}
CONVERTERS = {
    "renaming": set(),
    "reading": {"renaming"},
    "annotated": {"reading", "renaming"},
    "ctranslate2_file": {"renaming"},
    "ctranslate2_positions": {"renaming"},
    "ctranslate2_reading": {"ctranslate2_file", "ctranslate2_positions", "renaming"},
    "ctranslate2_writing": {"ctranslate2_file", "ctranslate2_positions", "renaming"},
    "ctranslate2": {"ctranslate2_file", "ctranslate2_reading", "ctranslate2_writing", "renaming"},
    "fsmt": {"reading", "renaming"},
    # FSMT is fairseq's model in transformers: its names and its tokenizer serve both.
    "fairseq_dictionaries": {"fsmt", "renaming"},
    "fairseq_options": {"reading", "renaming"},
    "fairseq": {"fairseq_dictionaries", "fairseq_options", "fsmt", "reading", "renaming"},
    "marian_settings": {"renaming"},
    "marian": {"marian_settings", "reading", "renaming"},
    "onnx": {"renaming"},
    "opennmt_vocabulary": {"renaming"},
    "opennmt": {"opennmt_vocabulary", "reading", "renaming"},
    "tensor2tensor_embeddings": {"renaming"},
    "tensor2tensor": {"reading", "renaming", "tensor2tensor_embeddings"},
    "torch_nn_modules": {"renaming"},
    "torch_nn": {"reading", "renaming", "torch_nn_modules"},
    "vanilla": {"reading", "renaming"},
}


def imports(path: Path, *, of_package: bool) -> set[str]:
    """Return the modules that a file imports, inside functions too: of this package, or all others by their root."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            inside = node.level > 0 or (node.module or "").partition(".")[0] == PACKAGE.name
            name = node.module or ""
            if inside and of_package:
                found.add(name.removeprefix(f"{PACKAGE.name}.").partition(".")[0])
            elif not inside and not of_package:
                found.add(name.partition(".")[0])
        elif isinstance(node, ast.Import):
            for alias in node.names:
                root = alias.name.partition(".")[0]
                if (root == PACKAGE.name) == of_package:
                    found.add(root)
    return found


def test_every_module_has_its_place():
    modules = {path.stem for path in PACKAGE.glob("*.py")} - {"__init__"}
    assert modules == set(ALLOWED)


@pytest.mark.parametrize("module", sorted(ALLOWED))
def test_a_module_imports_only_what_stands_below_it(module):
    assert imports(PACKAGE / f"{module}.py", of_package=True) <= ALLOWED[module]


def converter_imports(path: Path) -> tuple[set[str], set[str]]:
    """Return what a module of convert/ imports of the package, and of the modules beside it."""
    package, beside = set(), set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level:
            assert node.level == 1
            beside |= {node.module} if node.module else {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module.partition(".")[0] == PACKAGE.name:
            package.add(node.module.removeprefix(f"{PACKAGE.name}."))
        elif isinstance(node, ast.Import):
            package |= {alias.name for alias in node.names if alias.name.partition(".")[0] == PACKAGE.name}
    return package, beside


def test_every_converter_has_its_place():
    assert {path.stem for path in (PACKAGE / "convert").glob("*.py")} - {"__init__"} == set(CONVERTERS)


@pytest.mark.parametrize("module", sorted(CONVERTERS))
def test_a_converter_imports_the_model_and_its_own_parts(module):
    package, beside = converter_imports(PACKAGE / "convert" / f"{module}.py")
    assert package <= CONVERTERS_USE | ({"model_card"} if module == "vanilla" else set())
    assert beside <= CONVERTERS[module]


@pytest.mark.parametrize("module", sorted({path.stem for path in PACKAGE.glob("*.py")}))
def test_no_other_part_of_the_package_imports_converters(module):
    assert "convert" not in imports(PACKAGE / f"{module}.py", of_package=True)


def test_converters_need_their_system_s_package_only_inside_functions():
    # What is at the top of their files comes with the package.
    allowed = {"safetensors", "torch", "transformers", PACKAGE.name} | set(sys.stdlib_module_names)
    for path in (PACKAGE / "convert").glob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Import):
                assert {alias.name.partition(".")[0] for alias in node.names} <= allowed, path
            elif isinstance(node, ast.ImportFrom) and not node.level:
                assert node.module.partition(".")[0] in allowed, path


@pytest.mark.parametrize("layers", [ALLOWED, CONVERTERS], ids=["package", "converters"])
def test_no_cycle(layers):
    below = {module: set(names) & set(layers) for module, names in layers.items()}
    while below:
        free = {module for module, names in below.items() if not names & set(below)}
        assert free, f"these import each other: {sorted(below)}"
        below = {module: names for module, names in below.items() if module not in free}


@pytest.mark.parametrize("module", sorted(SHIPPED))
def test_shipped_files_import_only_torch_transformers_and_each_other(module):
    path = PACKAGE / f"{module}.py"
    outside = imports(path, of_package=False) - set(sys.stdlib_module_names)
    assert outside <= {"torch", "transformers"}
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level:
            # The library copies files along by this one form of import.
            assert node.level == 1
            assert node.module in SHIPPED


def test_modeling_imports_every_shipped_file():
    # transformers 5.0 copies only what the loaded file imports itself.
    assert imports(PACKAGE / "modeling_vanilla_transformer.py", of_package=True) == SHIPPED - {
        "modeling_vanilla_transformer"
    }


def test_scripts_are_never_imported_by_the_package():
    scripts = {path.stem for path in (PACKAGE.parent / "scripts").glob("*.py")} - {"evaluate"}  # also a library
    for path in PACKAGE.rglob("*.py"):
        assert not imports(path, of_package=False) & (scripts | {"scripts"})


def test_import_touches_torch_and_transformers_alone():
    # Beside what the library's own model of this kind brings along: here no datasets, no accelerate, nothing else.
    program = (
        "from transformers import AutoModelForSeq2SeqLM, MarianMTModel\n"
        "import transformers.pipelines, sys\n"
        "before = set(sys.modules)\n"
        "import vanilla_transformer\n"
        "new = {name.partition('.')[0] for name in set(sys.modules) - before}\n"
        "print(sorted(new - {'vanilla_transformer', 'transformers', 'torch'} - set(sys.stdlib_module_names)))\n"
        "print([name for name in ('datasets', 'evaluate', 'sacrebleu', 'matplotlib') if name in sys.modules])\n"
    )
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert output.split("\n")[:2] == ["[]", "[]"]


@pytest.mark.parametrize("name", vanilla_transformer.__all__)
def test_every_public_name_exists(name):
    assert getattr(vanilla_transformer, name).__doc__
    assert name in dir(vanilla_transformer)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = vanilla_transformer.no_such_thing
