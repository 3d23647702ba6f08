"""What converters from other systems share: files read without running code, sizes, ties, and the finished model."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from vanilla_transformer.attention_vanilla_transformer import sinusoids
from vanilla_transformer.configuration_vanilla_transformer import VanillaTransformerConfig
from vanilla_transformer.modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration

from .renaming import ConversionError, Table, listed, load_own_tensors, own_shapes, rename

# Names of our embedding matrices; which of them a model has depends on what it shares.
SOURCE, TARGET, SHARED, OUTPUT = (
    "model.encoder.embed_tokens.weight",
    "model.decoder.embed_tokens.weight",
    "model.shared.weight",
    "lm_head.weight",
)
_POSITION_TOLERANCE = 2e-3  # a float32 angle of 5,000 is off by up to 3e-4, and a half-precision buffer by 1e-3


def load_torch_file(path: str | Path, allowed: Sequence[type] = ()) -> Any:
    """Read a file of `torch.save` on the CPU; nothing in it is executed.

    Args:
        path: The file.
        allowed: Classes that may appear in it beside tensors and plain containers. They must be inert: what the file
            says is stored in them, or passed to them.

    Raises:
        ConversionError: There is no such file, it is damaged, or it holds anything else than data.
    """
    if not Path(path).is_file():
        raise ConversionError(f"{path} is not a file.")
    try:
        with torch.serialization.safe_globals(list(allowed)):
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # an UnpicklingError, a RuntimeError of the zip reader or others, by kind of damage
        named = re.search(r"GLOBAL ([\w.]+)", str(error))
        if named:
            reason = f"it asks for {named[1]}, which is code and not data"
        else:
            reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"
        raise ConversionError(f"{path} was not read, and nothing in it was executed: {reason}.") from error


def load_state_dict_file(path: str | Path) -> dict[str, Tensor]:
    """Read a state dict from a `.safetensors` file or one of `torch.save`; nothing in it is executed.

    Raises:
        ConversionError: As `load_torch_file`, or the file holds something else than tensors by name.
    """
    if Path(path).suffix == ".safetensors":
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            return dict(load_file(path))
        except (OSError, SafetensorError) as error:
            raise ConversionError(f"{path} cannot be read: {error}.") from error
    state = load_torch_file(path)
    if not is_state_dict(state):
        raise ConversionError(
            f"{path} holds a {type(state).__name__} and no state dict: save `model.state_dict()`, or pass the part "
            "that is one to the function for models in memory."
        )
    return dict(state)


def is_state_dict(value: object) -> bool:
    """Return whether `value` is a mapping of names to tensors, and not empty."""
    return (
        isinstance(value, Mapping)
        and bool(value)
        and all(isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in value.items())
    )


def shape_of(tensors: Mapping[str, Tensor], name: str, dims: int = 2) -> tuple[int, ...]:
    """Return the shape of a tensor that sizes are read from.

    Raises:
        ConversionError: There is no tensor of this name, or it has another number of axes.
    """
    if name not in tensors:
        raise ConversionError(f"There is no {name}, from which sizes are read; nothing was converted.")
    shape = tuple(tensors[name].shape)
    if len(shape) != dims:
        raise ConversionError(f"{name} is {list(shape)}, and {dims} axes are needed; nothing was converted.")
    return shape


def count_layers(names: Iterable[str], prefix: str) -> int:
    """Return how many layers are named `prefix` + number.

    Raises:
        ConversionError: None, or the numbers have a gap.
    """
    found = {int(match[1]) for match in (re.match(re.escape(prefix) + r"(\d+)\b", name) for name in names) if match}
    if not found or found != set(range(len(found))):
        raise ConversionError(
            f"Layers are counted by the names {prefix}0, {prefix}1, ...; these numbers were found: {sorted(found)}."
        )
    return len(found)


def place_embeddings(
    tensors: Mapping[str, Tensor], table: Table, source: str, target: str, output: str
) -> tuple[dict[str, Tensor], dict[str, str], dict[str, bool]]:
    """Find out which of the three embedding matrices are one, and keep each once.

    A state dict has a tied matrix under each of its names; equal values are one matrix.

    Args:
        tensors: The foreign tensors.
        table: Rename table in which the three have rows.
        source: Foreign name of the source embeddings [V, D].
        target: Foreign name of the target embeddings [V, D].
        output: Foreign name of the output projection [V, D].

    Returns:
        The tensors without copies, the table for them, and the config's fields on sharing.
    """
    tensors, table = dict(tensors), dict(table)
    for name in (source, target, output):
        shape_of(tensors, name)
    is_shared = torch.equal(tensors[source], tensors[target])
    is_tied = torch.equal(tensors[target], tensors[output])
    if is_tied:
        del tensors[output]
    if is_shared:
        del tensors[target]
        table[source] = SHARED
    return tensors, table, {"share_encoder_decoder_embeddings": is_shared, "tie_word_embeddings": is_tied}


def check_positions(buffer: Tensor, name: str, config: VanillaTransformerConfig) -> None:
    """Check a foreign table of sinusoids, with any axes of size 1, against those that our model computes.

    Raises:
        ConversionError: They differ by more than the rounding of the buffer.
    """
    rows = buffer.squeeze().double()
    expected = sinusoids(torch.arange(len(rows)) + config.position_offset, config)
    if rows.shape != expected.shape or not torch.allclose(rows, expected, rtol=0.0, atol=_POSITION_TOLERANCE):
        raise ConversionError(
            f"{name} {list(buffer.shape)} does not hold the {config.position_embedding_type} position encodings "
            f"({config.sinusoid_layout}) of d_model={config.d_model} that this model computes; nothing was converted."
        )


def make_config(system: str, read: Mapping[str, Any], given: Mapping[str, Any]) -> VanillaTransformerConfig:
    """Return the config of the fields that were read and those that the caller gave.

    Raises:
        ConversionError: A field is in both, there is no such field, or it does not fit.
    """
    unknown = sorted(set(given) - set(vars(VanillaTransformerConfig())))
    if unknown:
        raise ConversionError(f"{', '.join(unknown)}: the configuration has no such field.")
    twice = sorted(set(read) & set(given))
    if twice:
        raise ConversionError(f"{', '.join(twice)}: this is read from the {system} model and cannot be given.")
    try:
        return VanillaTransformerConfig(**read, **given)
    except ValueError as error:
        raise ConversionError(f"The {system} model cannot be expressed: {error}") from error


def make_model(
    config: VanillaTransformerConfig,
    tensors: Mapping[str, Tensor],
    table: Table,
    *,
    system: str,
    ignored: Sequence[str] = (),
) -> VanillaTransformerForConditionalGeneration:
    """Return a model of `config` with foreign tensors, in their dtype (the widest of them), in evaluation mode.

    Raises:
        ConversionError: Unknown, missing or misshapen tensors, see `rename`.
    """
    with torch.device("meta"):
        shapes = own_shapes(VanillaTransformerForConditionalGeneration(config))
    renamed = rename(tensors, table, shapes, system=system, ignored=ignored)
    wrong = {str(tensor.dtype) for tensor in renamed.values() if not tensor.is_floating_point()}
    if wrong:
        raise ConversionError(
            f"Tensors of the {system} model are {', '.join(sorted(wrong))}, and floating-point ones are needed."
        )
    dtype = functools.reduce(torch.promote_types, {tensor.dtype for tensor in renamed.values()})
    model = VanillaTransformerForConditionalGeneration(config).to(dtype)
    load_own_tensors(model, renamed)
    return model.eval()


def with_library_ranking(theirs: GenerationConfig) -> GenerationConfig:
    """Return generation settings under which the library's ranking and lengths hold; what is open stays open."""
    settings = copy.deepcopy(theirs)
    settings.gnmt_alpha = settings.max_length_offset = None
    settings._from_model_config = False  # the library's own mark: with True, fields that it does not know are dropped
    return settings


def check_loading_report(report: Mapping[str, Any], folder: str | Path, computed: Sequence[str] = ()) -> None:
    """Raise unless `from_pretrained` found in a folder just the tensors that its model has.

    The library itself fills up with random numbers what a file lacks.

    Args:
        report: What it gives with `output_loading_info=True, ignore_mismatched_sizes=True`.
        folder: The folder.
        computed: Names that a file may lack, since the model computes what they hold.

    Raises:
        ConversionError: Unknown, missing or misshapen tensors, all of them in one message.
    """
    problems = [f"missing: {name}" for name in sorted(report["missing_keys"]) if name not in computed]
    problems += [f"unknown: {name}" for name in sorted(report["unexpected_keys"])]
    problems += [
        f"wrong shape: {name} is {list(there)}, {list(needed)} is needed"
        for name, there, needed in sorted(report["mismatched_keys"])
    ]
    if problems:
        raise ConversionError(
            f"The weights in {folder} do not fit its config.json; nothing was converted:\n  {listed(problems)}"
        )


def check_vocabulary(tokenizer: Any, config: VanillaTransformerConfig) -> None:
    """Raise if a tokenizer has ids that the model has no embedding for."""
    if tokenizer is None:
        return
    vocabularies = [("vocab_size", tokenizer.get_vocab())]
    if getattr(tokenizer, "separate_vocabs", False):
        vocabularies.append(("decoder_vocab_size", tokenizer.target_encoder))
    for name, vocabulary in vocabularies:
        largest, size = max(vocabulary.values()), getattr(config, name)
        if largest >= size:
            raise ConversionError(
                f"The tokenizer has ids up to {largest}, and the model's {name} is {size}: they are no pair."
            )
