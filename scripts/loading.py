"""What several scripts load or pass on: a checkpoint, the embedded text, columns, decoding options."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

DTYPES = ("float32", "bfloat16", "float16", "int8")


def load_model(
    name: str, device: str, dtype: str, trust_remote_code: bool, torch_compile: bool = False
) -> tuple[Any, Any]:
    """Return a checkpoint's model, in evaluation mode on `device`, and its tokenizer.

    Args:
        name: Folder or Hub id.
        device: "auto", or what `torch.device` takes.
        dtype: One of `DTYPES`; int8 means the linear layers, see `quantize_int8`.
        trust_remote_code: Run code that comes with the checkpoint.
        torch_compile: Compile encoder and decoder, see `compile_stacks`.

    Raises:
        ValueError: The folder holds no checkpoint, device or dtype are not usable, or torch cannot compile.
        OSError: The Hub has no such checkpoint, or cannot be reached.
    """
    import torch
    import transformers

    import vanilla_transformer  # noqa: F401 - registers the model

    if dtype not in DTYPES:
        raise ValueError(f"--dtype {dtype} is unknown: choose one of {', '.join(DTYPES)}")
    if Path(name).is_dir() and not Path(name, "config.json").is_file():
        raise ValueError(f"--model {name}: the folder has no config.json, so it holds no checkpoint")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as problem:
        raise ValueError(f"--device {device} cannot be used: {str(problem).splitlines()[0]}") from None
    if torch_compile and dtype == "int8" and torch.device(device).type == "cpu":
        raise ValueError("--torch_compile true: torch cannot compile its int8 layers for CPUs; choose another --dtype")
    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(
        name,
        dtype=torch.float32 if dtype == "int8" else getattr(torch, dtype),
        trust_remote_code=trust_remote_code,
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    model = model.to(device).eval()
    if dtype == "int8":
        from vanilla_transformer.quantization import quantize_int8

        quantize_int8(model)
    if torch_compile:
        compile_stacks(model)
    return model, tokenizer


def load_model_of(arguments: Any) -> tuple[Any, Any]:
    """Return the model and tokenizer that `arguments` name, by `load_model`."""
    return load_model(
        arguments.model,
        arguments.device,
        arguments.dtype,
        arguments.trust_remote_code,
        torch_compile=getattr(arguments, "torch_compile", False),  # not every script has the switch
    )


def compile_stacks(model: Any) -> None:
    """Have encoder and decoder compiled by torch, in place, each when it is first called, for all lengths.

    This package's beam search takes the decoder apart and does not call it: there the encoder alone is compiled. A
    batch of one sentence is compiled apart from larger ones.

    Raises:
        ValueError: torch finds no compiler for the model's device.
    """
    import torch

    try:
        # One line, so that a missing compiler shows here and not in the midst of the first batch.
        torch.compile(torch.neg)(torch.zeros(2, device=model.device))
    except RuntimeError as problem:
        reason = next((line for line in str(problem).splitlines() if line.strip()), type(problem).__name__)
        raise ValueError(
            f"--torch_compile true cannot be used on {model.device.type}, leave it out: {reason}"
        ) from None
    for stack in (model.get_encoder(), model.get_decoder()):
        stack.compile(dynamic=True)


def column_options(arguments: Any) -> dict[str, Any]:
    """Return how `arguments` say that the columns of a corpus are found, for the readers of `corpus`."""
    names = ("source_lang", "target_lang", "source_column", "target_column", "on_bad_pair")
    return {name: getattr(arguments, name) for name in names}


def decoding_options(arguments: Any) -> dict[str, Any]:
    """Return what `arguments` set of the decoding, for `generate`; the rest is the checkpoint's."""
    options = {name: getattr(arguments, name) for name in ("num_beams", "max_new_tokens")}
    return {name: value for name, value in options.items() if value is not None}


@functools.cache
def grammar_splits(seed: int | None) -> Any:
    """Return the embedded grammar's splits; made once a process, as that takes seconds. None is the default seed."""
    from vanilla_transformer.phrase_grammar import generate_splits

    return generate_splits() if seed is None else generate_splits(seed)
