r"""Convert models between this package and other systems; what does not fit is refused, and nothing is written.

    python scripts/convert.py --from marian --to vanilla opus-mt-en-de runs/opus-en-de
    python scripts/convert.py --from vanilla --to ctranslate2 --quantization int8 runs/en-de runs/en-de-ct2
    python scripts/convert.py --from fairseq --to vanilla --source_dictionary dict.en.txt \
        --target_dictionary dict.de.txt --bpe_codes bpecodes model.pt runs/fairseq-en-de
    python scripts/convert.py --from torch_nn --to vanilla --heads 8 --norm_position pre model.pth runs/tutorial
    python scripts/convert.py --from tensor2tensor --to vanilla --hparams transformer_base --target_space_id 8 \
        variables.npz runs/t2t-en-de
    python scripts/convert.py --from ctranslate2 --to marian ct2-folder marian-folder

From: annotated, ctranslate2, fairseq, fsmt, marian, opennmt, tensor2tensor, torch_nn, vanilla. To: ctranslate2,
marian, onnx, torch_nn, vanilla. The way from one other system to another leads through a model of this package.
"vanilla" is a checkpoint folder like those of train.py: give it to evaluate.py, translate.py or the Auto classes, or
train it on. docs/interop.md says for each format what carries over.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

sys.path.append(sys.path.pop(0))  # this folder last: its evaluate.py must not hide the library of that name

from arguments import YAML_SUFFIXES, clear_errors, parse

# Options → the formats that have them. What a format has not is refused, never ignored.
READ_OPTIONS = {
    "heads": ("annotated", "torch_nn"),
    "norm_position": ("torch_nn",),
    "allow_layer_norm": ("annotated",),
    "source_dictionary": ("fairseq",),
    "target_dictionary": ("fairseq",),
    "bpe_codes": ("fairseq",),
    "moses": ("fairseq",),
    "hparams": ("tensor2tensor",),
    "target_space_id": ("tensor2tensor",),
    "source_vocab_size": ("tensor2tensor",),
    "scope": ("tensor2tensor",),
    "fields": ("annotated", "opennmt", "tensor2tensor", "torch_nn"),
}
WRITE_OPTIONS = {
    "quantization": ("ctranslate2", "onnx"),
    "num_positions": ("ctranslate2",),
    "target_tokenizer": ("ctranslate2",),
    "allow_layer_norm_eps": ("marian",),
}
# What --from has to be given.
NEEDED = {"annotated": ("heads",), "tensor2tensor": ("hparams",)}


@dataclass
class ConvertArguments:
    """What to convert, from what to what."""

    source_format: str = field(metadata={"aliases": ["--from"], "help": "What SOURCE is."})
    target_format: str = field(metadata={"aliases": ["--to"], "help": "What to write."})
    source: str = field(metadata={"help": "File or folder to read; may stand without its flag."})
    output_dir: str = field(metadata={"help": "Folder to write, new or empty; may stand second without its flag."})
    tokenizer: str | None = field(
        default=None, metadata={"help": "Folder of the model's tokenizer, where SOURCE has none."}
    )
    heads: int | None = field(
        default=None,
        metadata={"help": "From annotated and torch_nn: number of heads, which no tensor says."},
    )
    norm_position: str | None = field(default=None, metadata={"help": "From torch_nn: pre or post."})
    allow_layer_norm: bool = field(
        default=False, metadata={"help": "From annotated: accept that its LayerNorm adds ε elsewhere."}
    )
    source_dictionary: str | None = field(default=None, metadata={"help": "From fairseq: dict.<language>.txt."})
    target_dictionary: str | None = field(default=None, metadata={"help": "From fairseq: that of the target."})
    bpe_codes: str | None = field(default=None, metadata={"help": "From fairseq: codes of subword-nmt or fastBPE."})
    moses: bool = field(default=False, metadata={"help": "From fairseq: a tokenizer that splits words as Moses does."})
    hparams: str | None = field(
        default=None, metadata={"help": "From tensor2tensor: hparams.json, or a name such as transformer_base."}
    )
    target_space_id: int | None = field(
        default=None, metadata={"help": "From tensor2tensor: the problem's target space, such as 8 for German."}
    )
    source_vocab_size: int | None = field(
        default=None, metadata={"help": "From tensor2tensor: needed where two vocabularies have a matrix each."}
    )
    scope: str | None = field(
        default=None, metadata={"help": "From tensor2tensor: scope around the variables; transformer if not given."}
    )
    fields: str | None = field(
        default=None,
        metadata={
            "help": "From annotated, opennmt, tensor2tensor, torch_nn: further fields of the configuration, which "
            "SOURCE does not say, as JSON: '{\"pad_token_id\": 0}'."
        },
    )
    quantization: str | None = field(
        default=None,
        metadata={
            "help": "To ctranslate2: float32 (if not given), bfloat16, float16, int16, int8, int8_float32, ...; to "
            "onnx: int8."
        },
    )
    num_positions: int | None = field(
        default=None, metadata={"help": "To ctranslate2: rows of its table of sinusoids, 2048 if not given."}
    )
    target_tokenizer: str | None = field(
        default=None, metadata={"help": "To ctranslate2: folder of the target's tokenizer, if it has its own."}
    )
    allow_layer_norm_eps: bool = field(
        default=False, metadata={"help": "To marian: accept its LayerNorm ε of 1e-5 in place of the model's."}
    )


def main() -> None:
    """Convert, and say what was read and where it is."""
    (arguments,) = parse(with_flags(sys.argv[1:]), __doc__, [ConvertArguments])
    with clear_errors(), warnings.catch_warnings():
        warnings.showwarning = lambda message, *_: print(f"warning: {message}", file=sys.stderr)
        check_arguments(arguments)
        try:
            model, has_tokenizer = convert(arguments)
        except ImportError as problem:  # says which extra to install
            raise ValueError(str(problem)) from problem
    print(
        f"{model.num_parameters():,} parameters, {'with its' if has_tokenizer else 'without a'} tokenizer, from "
        f"{arguments.source} ({arguments.source_format}) to {arguments.output_dir} ({arguments.target_format})"
    )


def with_flags(argv: Sequence[str]) -> list[str]:
    """Return a command line in which the source and the output have their flags, wherever they stood."""
    switches = {"h", "help", *(option.name for option in fields(ConvertArguments) if option.type == "bool")}
    words, flags, places = list(argv), [], []
    if words and words[0].endswith(YAML_SUFFIXES):
        flags.append(words.pop(0))
    while words:
        word = words.pop(0)
        if not word.startswith("-"):
            places.append(word)
            continue
        flags.append(word)
        is_switch = word.lstrip("-").replace("-", "_") in switches
        if words and "=" not in word and (not is_switch or words[0].lower() in ("true", "false")):
            flags.append(words.pop(0))
    for flag, place in zip(("--source", "--output_dir"), places, strict=False):
        flags += [flag, place]
    return flags + places[2:]


def check_arguments(arguments: Any) -> None:
    """Refuse formats that there are not, options that the chosen ones do not have, and paths that are not usable."""
    from vanilla_transformer.convert import FORMATS
    from vanilla_transformer.convert.renaming import check_is_free

    source, target = arguments.source_format, arguments.target_format
    reading = [name for name, entry in FORMATS.items() if entry.reads]
    writing = [name for name, entry in FORMATS.items() if entry.writes]
    for flag, name, known in (("--from", source, reading), ("--to", target, writing)):
        if name not in known:
            raise ValueError(f"{flag} {name} is unknown: choose one of {', '.join(known)}")
    if source == target == "vanilla":
        raise ValueError("--from vanilla --to vanilla: there is nothing to convert, copy the folder")
    for flag, chosen, options in (("--from", source, READ_OPTIONS), ("--to", target, WRITE_OPTIONS)):
        for name, formats in options.items():
            if is_given(arguments, name) and chosen not in formats:
                raise ValueError(f"--{name} is for {flag} {' and '.join(formats)}, not for {flag} {chosen}")
    for name in NEEDED.get(source, ()):
        if getattr(arguments, name) is None:
            raise ValueError(f"--from {source} needs --{name}, which its files do not say")
    for name in ("source", "source_dictionary", "target_dictionary", "bpe_codes", "tokenizer", "target_tokenizer"):
        path = getattr(arguments, name)
        if path is not None and not Path(path).exists():
            raise ValueError(f"--{name} {path}: no such file or folder")
    check_is_free(arguments.output_dir)


def convert(arguments: Any) -> tuple[Any, bool]:
    """Read, write, and return the model and whether it has a tokenizer."""
    from transformers.utils import logging

    from vanilla_transformer.convert import FORMATS
    from vanilla_transformer.convert.reading import check_vocabulary
    from vanilla_transformer.convert.vanilla import read_tokenizer

    logging.disable_progress_bar()
    reading, writing = options_for(arguments, READ_OPTIONS), options_for(arguments, WRITE_OPTIONS)
    reading |= more_fields(reading.pop("fields", None), reading)
    model, tokenizer = FORMATS[arguments.source_format].load().read(arguments.source, **reading)
    if arguments.tokenizer is not None:
        if tokenizer is not None:
            raise ValueError(f"--tokenizer {arguments.tokenizer}: {arguments.source} has its own, leave it out")
        tokenizer = read_tokenizer(arguments.tokenizer)
        check_vocabulary(tokenizer, model.config)
    if "target_tokenizer" in writing:
        writing["target_tokenizer"] = read_tokenizer(writing["target_tokenizer"])
    if arguments.target_format == "vanilla":
        name = Path(arguments.source).resolve().name
        writing["converted_from"] = f"{name}, in the format {arguments.source_format}"
    FORMATS[arguments.target_format].load().write(model, tokenizer, arguments.output_dir, **writing)
    return model, tokenizer is not None


def options_for(arguments: Any, options: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Return what was given of `options`."""
    return {name: getattr(arguments, name) for name in options if is_given(arguments, name)}


def is_given(arguments: Any, name: str) -> bool:
    """Return whether an option has another value than that of leaving it out; 0 is one."""
    value = getattr(arguments, name)
    return value is not None and value is not False


def more_fields(text: str | None, given: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that --fields holds."""
    if text is None:
        return {}
    try:
        found = json.loads(text)
    except ValueError as problem:
        raise ValueError(f"--fields {text} is not JSON: {problem}") from None
    if not isinstance(found, dict):
        raise ValueError(f"--fields {text} must be JSON of names and values, such as '{{\"pad_token_id\": 0}}'")
    twice = sorted(set(found) & set(given))
    if twice:
        raise ValueError(f"{', '.join(twice)}: give it by its own flag or in --fields, not in both")
    return found


if __name__ == "__main__":
    main()
