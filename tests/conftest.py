"""What all tests share: no network, no progress bars, one thread, and factories of tiny models."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch
import transformers
from script_modules import SCRIPTS
from tiny_models import TINY
from transformers import AutoModelForSeq2SeqLM

from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration

transformers.utils.logging.disable_progress_bar()
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def library_verbosity() -> Iterator[None]:
    """Undo what a script that runs inside a test does to the library's logging, for the tests after it."""
    level = transformers.utils.logging.get_verbosity()
    yield
    transformers.utils.logging.set_verbosity(level)


@pytest.fixture
def four_threads() -> Iterator[None]:
    """Let torch have four threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def make_config() -> Callable[..., VanillaTransformerConfig]:
    """Return a factory of a config of a few thousand parameters."""
    return lambda **fields: VanillaTransformerConfig(**{**TINY, **fields})


@pytest.fixture
def make_model(make_config) -> Callable[..., VanillaTransformerForConditionalGeneration]:
    """Return a factory of a tiny model in evaluation mode; biases and norms are random too, so that each counts."""

    def make(attn_implementation: str = "sdpa", seed: int = 0, dtype: torch.dtype = torch.float32, **fields):
        torch.manual_seed(seed)
        model = AutoModelForSeq2SeqLM.from_config(make_config(**fields), attn_implementation=attn_implementation)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("bias") or "layer_norm" in name:
                    parameter.add_(0.2 * torch.randn_like(parameter))
        return model.to(dtype).eval()

    return make


@pytest.fixture(scope="session")
def trained_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a model trained by the quickstart recipe; for slow tests, it takes minutes."""
    folder = tmp_path_factory.mktemp("trained") / "model"
    recipe = SCRIPTS / "recipes" / "phrase_grammar.yaml"
    command = [sys.executable, SCRIPTS / "train.py", recipe, "--output_dir", folder]
    subprocess.run(command, check=True, timeout=3600)
    return folder
