"""What several scripts load or pass on: a checkpoint, the embedded text, columns, decoding options."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

DTYPES = ("float32", "bfloat16", "float16", "int8")


def load_model(name: str, device: str, dtype: str, trust_remote_code: bool) -> tuple[Any, Any]:
    """Return a checkpoint's model, in evaluation mode on `device`, and its tokenizer.

    Args:
        name: Folder or Hub id.
        device: "auto", or what `torch.device` takes.
        dtype: One of `DTYPES`; int8 means the linear layers, see `quantize_int8`.
        trust_remote_code: Run code that comes with the checkpoint.

    Raises:
        ValueError: The folder holds no checkpoint, or device or dtype are not usable.
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
    return model, tokenizer


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
