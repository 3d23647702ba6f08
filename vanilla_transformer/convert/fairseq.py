"""fairseq checkpoints of translation Transformers (`model.pt`, `checkpoint_best.pt`) → this package.

A checkpoint is a pickle of `{"model": tensors, "args": argparse.Namespace | None, "cfg": dict | None, ...}`. It is
read with `weights_only`: whatever it names beside tensors and plain containers is refused before it runs, except
`argparse.Namespace` and fairseq's meters of training speed, for which empty stand-ins are taken. OmegaConf containers,
which fairseq wrote for a while in 2020, are refused too: make plain ones of them where fairseq is installed,
`OmegaConf.to_container(cfg, resolve=True, enum_to_str=True)`, as fairseq itself does since.

What carries over: all weights, also under older names (packed `in_proj_weight`, `embed_out`, `layer_norms.0`); post-
and pre-norm; sinusoids of tensor2tensor and learned positions, both counted from 2; embeddings that are separate, tied
or all one; their scale, activations, dropout rates, label smoothing (newer releases of fairseq spread it over V - 1
tokens, here it is V); the ids `<s>` 0, `<pad>` 1 and `</s>` 2, which also starts the target. A checkpoint says nothing
of decoding: `generate()` gets the defaults of fairseq-generate, with the library's ranking and at most 200 tokens.
Dictionaries and codes become a tokenizer, see `fairseq_dictionaries`.

Refused, by a `ConversionError` that names the option: all of `fairseq_options.REFUSED`; encoder and decoder that
differ in width, norm position, kind or number of positions; pre-norm without a last LayerNorm; other activations;
tensors that do not fit. Not carried: the optimizer's state and the course of the training.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from vanilla_transformer.modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration

from . import fsmt
from .fairseq_dictionaries import fast_tokenizer, moses_tokenizer, read_bpe_codes, read_dictionary
from .fairseq_options import SIDES, fields_of, generation_config_of, options_of
from .reading import is_state_dict, load_torch_file, make_config, make_model, place_embeddings, shape_of
from .renaming import ConversionError, Table

_SOURCE, _TARGET, _OUTPUT = (
    "encoder.embed_tokens.weight",
    "decoder.embed_tokens.weight",
    "decoder.output_projection.weight",
)

# FSMT took fairseq's names over, behind "model."; the last LayerNorms are those of pre-norm, which FSMT has not.
TABLE: Table = {
    **{theirs.removeprefix("model."): ours for theirs, ours in fsmt.TABLE.items()},
    **{
        f"{side}.layer_norm.{kind}": f"model.{side}.layer_norm.{kind}" for side in SIDES for kind in ("weight", "bias")
    },
}
# Only learned positions are parameters; very old files hold the sinusoids, as "weights".
POSITIONS: Table = {f"{side}.embed_positions.weight": f"model.{side}.embed_positions.weight" for side in SIDES}
_SINUSOIDS = [f"{side}.embed_positions.{name}" for side in SIDES for name in ("_float_tensor", "weights")]
# The format's version, see `fairseq_options`.
_VERSIONS = [f"{side}.version" for side in SIDES]

# Beginning of an older name → of today's.
OLD_NAMES: Table = {
    "decoder.embed_out": "decoder.output_projection.weight",
    "encoder.layers.{i}.layer_norms.0": "encoder.layers.{i}.self_attn_layer_norm",
    "encoder.layers.{i}.layer_norms.1": "encoder.layers.{i}.final_layer_norm",
    "decoder.layers.{i}.layer_norms.0": "decoder.layers.{i}.self_attn_layer_norm",
    "decoder.layers.{i}.layer_norms.1": "decoder.layers.{i}.encoder_attn_layer_norm",
    "decoder.layers.{i}.layer_norms.2": "decoder.layers.{i}.final_layer_norm",
}


def from_fairseq(
    checkpoint: Mapping[str, Any], *, source_rows: Sequence[int] | None = None
) -> VanillaTransformerForConditionalGeneration:
    """Return our model with the weights and the configuration of a fairseq checkpoint.

    Args:
        checkpoint: What `load_checkpoint` gives: "model", a dict of tensors, and "args" or "cfg".
        source_rows: For a tokenizer with another order than the source's dictionary: of each of its ids the
            dictionary's id, whose embedding it gets. See `fairseq_dictionaries.fast_tokenizer`.

    Returns:
        A model in evaluation mode, on the CPU, in the type of the checkpoint's tensors.

    Raises:
        ConversionError: An option or a tensor that does not fit; the message names it.
    """
    options, tensors = options_of(checkpoint), _with_todays_names(checkpoint["model"])
    shape_of(tensors, _SOURCE), shape_of(tensors, _TARGET)
    is_shared = bool(options.get("share_all_embeddings"))
    is_tied = is_shared or bool(options.get("share_decoder_input_output_embed"))
    if is_tied:
        tensors.setdefault(_OUTPUT, tensors[_TARGET])  # older files have a tied matrix once
    for is_one, name in ((is_shared, _SOURCE), (is_tied, _OUTPUT)):
        if is_one and not tensors[name].equal(tensors[_TARGET]):
            raise ConversionError(f"By the checkpoint's options {name} is {_TARGET}, and the two differ.")
    if source_rows is not None and list(source_rows) != list(range(len(tensors[_SOURCE]))):
        tensors[_SOURCE] = tensors[_SOURCE][list(source_rows)]
    sizes = {"vocab_size": len(tensors[_SOURCE]), "decoder_vocab_size": len(tensors[_TARGET])}
    tensors, table, sharing = place_embeddings(tensors, TABLE, _SOURCE, _TARGET, _OUTPUT)
    config = make_config("fairseq", {**fields_of(options, tensors), **sizes}, sharing)
    is_learned = config.position_embedding_type == "learned"
    table, ignored = ({**table, **POSITIONS}, _VERSIONS) if is_learned else (table, [*_VERSIONS, *_SINUSOIDS])
    model = make_model(config, tensors, table, system="fairseq", ignored=ignored)
    model.generation_config = generation_config_of(options)
    return model


def read(
    path: str | Path,
    *,
    source_dictionary: str | Path | None = None,
    target_dictionary: str | Path | None = None,
    bpe_codes: str | Path | None = None,
    moses: bool = False,
) -> tuple[VanillaTransformerForConditionalGeneration, Any | None]:
    """Read a fairseq checkpoint and, with its dictionaries and codes, its tokenizer.

    Args:
        path: The `.pt` file.
        source_dictionary: `dict.<language>.txt` of the source.
        target_dictionary: That of the target; the same file where the dictionary is joined.
        bpe_codes: Codes of subword-nmt or fastBPE.
        moses: Give an FSMTTokenizer, for text as people write it; it needs `sacremoses`. Otherwise a fast tokenizer,
            for text whose words are split by spaces already. For the latter the source's embeddings get a row, equal
            to that of `<unk>`, for each symbol that the source's dictionary lacks; where source and target share their
            embeddings they are then two matrices. See `fairseq_dictionaries`.

    Returns:
        Our model, and the tokenizer; None without dictionaries and codes.

    Raises:
        ConversionError: The file holds code, or something does not fit, see `from_fairseq`; one of the tokenizer's
            files is missing or damaged.
        ImportError: `moses` without `sacremoses`.
    """
    if source_dictionary is None or target_dictionary is None or bpe_codes is None:
        if moses or not source_dictionary == target_dictionary == bpe_codes:
            raise ConversionError(
                "A tokenizer is made of source_dictionary, target_dictionary and bpe_codes: give all three, or none."
            )
        return from_fairseq(load_checkpoint(path)), None
    source, target = read_dictionary(source_dictionary), read_dictionary(target_dictionary)
    merges = read_bpe_codes(bpe_codes)
    checkpoint = load_checkpoint(path)
    for name, symbols in ((_SOURCE, source), (_TARGET, target)):
        rows = shape_of(checkpoint["model"], name)[0]
        if rows != len(symbols):
            raise ConversionError(
                f"{name} has {rows} rows, and its dictionary {len(symbols)} entries, the four special ones included: "
                "the files do not belong together, or fairseq's task added tokens."
            )
    if not moses:
        tokenizer, source_rows = fast_tokenizer(source, target, merges)
        return from_fairseq(checkpoint, source_rows=source_rows), tokenizer
    options = options_of(checkpoint)
    languages = [options[name] for name in ("source_lang", "target_lang") if isinstance(options.get(name), str)]
    if len(languages) != 2:
        raise ConversionError(f"Moses has rules for each language, and of two the checkpoint names {languages}.")
    return from_fairseq(checkpoint), moses_tokenizer(source, target, merges, languages)


class _Meter:
    """Stands in for fairseq's meters, which hold how long a training took; keeps nothing."""

    def __setstate__(self, state: Any) -> None:
        pass


# The allow-list goes by a class's own module and name.
_METERS = [
    type(name, (_Meter,), {"__module__": module, "__qualname__": name})
    for module in ("fairseq.meters", "fairseq.logging.meters")
    for name in ("AverageMeter", "TimeMeter", "StopwatchMeter")
]


def load_checkpoint(path: str | Path) -> dict[str, Any]:
    """Read a fairseq `.pt`; nothing in it is executed.

    Args:
        path: The file.

    Returns:
        The checkpoint as fairseq saved it, its meters empty.

    Raises:
        ConversionError: The file holds more than tensors, plain containers, `argparse.Namespace` and fairseq's meters,
            or is no checkpoint.
    """
    checkpoint = load_torch_file(path, [argparse.Namespace, *_METERS])
    if not isinstance(checkpoint, dict) or not is_state_dict(checkpoint.get("model")):
        raise ConversionError(f"{path} is no fairseq checkpoint: it has no dict of tensors under 'model'.")
    return checkpoint


def _with_todays_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors under the names of newer checkpoints, packed projections split into W^Q, W^K and W^V."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        packed = re.fullmatch(r"(.+_attn\.)in_proj_(weight|bias)", name)
        names = [f"{packed[1]}{letter}_proj.{packed[2]}" for letter in "qkv"] if packed else [_todays_name(name)]
        for new, part in zip(names, tensor.tensor_split(3) if packed else [tensor], strict=True):
            if new in found:
                raise ConversionError(f"The checkpoint has {new} under its name and under an older one.")
            found[new] = part
    return found


def _todays_name(name: str) -> str:
    for old, new in OLD_NAMES.items():
        match = re.fullmatch(re.escape(old).replace(r"\{i\}", r"(?P<i>\d+)") + r"(?P<rest>\.\w+)?", name)
        if match:
            return new.replace("{i}", match.groupdict().get("i", "")) + (match["rest"] or "")
    return name
