"""Checkpoint folders of this package: what every converter reads into and writes from, by way of a model of ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerFast

from vanilla_transformer.model_card import MODEL_TYPE, RunFacts, facts_of_configs, write_model_card
from vanilla_transformer.modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration
from vanilla_transformer.tokenizer_training import save_tokenizer

from .reading import check_loading_report, check_vocabulary
from .renaming import ConversionError, whole_folder

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def read(path: str | Path) -> tuple[VanillaTransformerForConditionalGeneration, Any]:
    """Read a checkpoint folder of this package, in its own dtype.

    Args:
        path: The folder.

    Returns:
        The model in evaluation mode, and the folder's tokenizer or None.

    Raises:
        ConversionError: The folder holds no whole checkpoint of this package.
    """
    folder = Path(path)
    if not (folder / "config.json").is_file():
        raise ConversionError(f"{folder} has no config.json, so it holds no checkpoint.")
    try:
        kind = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("model_type")
        if kind != MODEL_TYPE:
            raise ConversionError(f"its model_type is {kind!r}, and {MODEL_TYPE!r} is needed")
        model, report = VanillaTransformerForConditionalGeneration.from_pretrained(
            folder, output_loading_info=True, ignore_mismatched_sizes=True
        )
    except Exception as error:  # of many classes, by kind of damage and release
        raise ConversionError(f"{folder} cannot be read as a checkpoint of this package: {error}") from error
    check_loading_report(report, folder)
    tokenizer = read_tokenizer(folder) if any((folder / name).is_file() for name in _TOKENIZER_FILES) else None
    check_vocabulary(tokenizer, model.config)
    return model.eval(), tokenizer


def read_tokenizer(path: str | Path) -> Any:
    """Return the tokenizer in a folder.

    Raises:
        ConversionError: There is none that AutoTokenizer loads.
    """
    if not Path(path).is_dir():
        raise ConversionError(f"{path} is not a folder with a tokenizer.")
    try:
        return AutoTokenizer.from_pretrained(path)
    except Exception as error:  # of many classes, by kind of damage and release
        raise ConversionError(f"The tokenizer in {path} cannot be read: {error}") from error


def write(
    model: VanillaTransformerForConditionalGeneration,
    tokenizer: Any,
    folder: str | Path,
    *,
    converted_from: str | None = None,
) -> None:
    """Write a checkpoint folder that works by itself: weights, configs, code, tokenizer and model card.

    Args:
        model: The model.
        tokenizer: Its tokenizer, or None; without one there is no model card, which shows how to translate.
        folder: Where to; it must not exist, or be empty.
        converted_from: Where the weights come from, for the card.

    Raises:
        ConversionError: There is something in `folder` already, or the tokenizer has ids that the model lacks.
    """
    check_vocabulary(tokenizer, model.config)
    with whole_folder(folder) as scratch:
        model.save_pretrained(scratch)
        if tokenizer is None:
            return
        if isinstance(tokenizer, PreTrainedTokenizerFast):
            save_tokenizer(tokenizer, scratch)
        else:
            tokenizer.save_pretrained(scratch)
        known: dict[str, Any] = facts_of_configs(model.config, model.generation_config)
        training = {"converted from": converted_from} if converted_from else {}
        facts = RunFacts(parameters=model.num_parameters(), training=training, **known)
        write_model_card(scratch, facts, model_name=Path(folder).resolve().name, model_path=str(folder))
