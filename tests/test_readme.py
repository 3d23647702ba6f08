"""Every code block of the README is run, on a small corpus and a checkpoint of a few updates."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from vanilla_transformer.phrase_grammar import generate_splits
from vanilla_transformer.tokenizer_training import save_tokenizer, train_tokenizer

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)
# What takes hours is made to take seconds; everything else runs as printed.
SHORTER = {
    "--max_steps 8000": "--max_steps 2 --use_cpu",
    "--eval_steps 1000": "--eval_steps 2 --generation_max_length 4",
}


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A folder like a clone in which quickstart has run: scripts, a corpus, and runs/quickstart."""
    folder = tmp_path_factory.mktemp("clone")
    shutil.copytree(ROOT / "scripts", folder / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "Makefile", folder)
    shutil.copy(ROOT / "constraints.txt", folder)
    shutil.copy(ROOT / "pyproject.toml", folder)
    splits = generate_splits(train_size=4000, valid_size=10, test_size=10)
    for name, pairs in (("train", splits.train), ("val", splits.valid), ("test", splits.test)):
        for side, language in enumerate(("en", "de")):
            text = "".join(pair[side] + "\n" for pair in pairs)
            (folder / f"{name}.{language}").write_text(text, encoding="utf-8")
    tokenizer = train_tokenizer((text for pair in splits.train for text in pair), vocab_size=400)
    model = VanillaTransformerForConditionalGeneration(VanillaTransformerConfig.tiny(vocab_size=len(tokenizer)))
    model.save_pretrained(folder / "runs" / "quickstart")
    save_tokenizer(tokenizer, folder / "runs" / "quickstart")
    return folder


def run(command: list[str], folder: Path) -> str:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize("block", [code for language, code in BLOCKS if language == "python"])
def test_python_blocks(block, clone):
    run([sys.executable, "-c", block], clone)


@pytest.mark.parametrize("block", [code for language, code in BLOCKS if language == "bash" and "make " not in code])
def test_shell_blocks(block, clone):
    for long, short in SHORTER.items():
        block = block.replace(long, short)
    run(["bash", "-euo", "pipefail", "-c", block], clone)


@pytest.mark.parametrize("block", [code for language, code in BLOCKS if language == "bash" and "make " in code])
def test_make_blocks_name_targets(block, clone):
    # Making an environment would need the network: make prints what it would do.
    printed = run(["bash", "-c", block.replace("make ", "make --dry-run ")], clone)
    assert "pip install" in printed
    if "TORCH_INDEX=" in block:
        assert "--index-url https://download.pytorch.org/whl/cpu torch==" in printed.replace(
            "$(grep '^torch==' constraints.txt)", "torch=="
        )


def test_no_block_is_left_out():
    assert {language for language, _ in BLOCKS} <= {"python", "bash", "text"}


def test_files_that_the_readme_links_to_exist():
    for target in re.findall(r"\]\((?!https?://)([^)#]+)", README):
        assert (ROOT / target).exists(), target
