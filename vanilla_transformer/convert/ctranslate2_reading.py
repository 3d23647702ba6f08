"""What a CTranslate2 folder says beside its matrices, as a configuration of ours."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from vanilla_transformer.configuration_vanilla_transformer import VanillaTransformerConfig

from .ctranslate2_file import ACTIVATIONS, FolderSettings
from .ctranslate2_positions import position_fields
from .renaming import ConversionError

_PAD_NAMES = ("<pad>", "<blank>", "[PAD]", "<PAD>")  # CTranslate2 names no padding token; most vocabularies have one
_SOURCE, _TARGET, _PROJECTION = (
    f"{name}/weight" for name in ("encoder/embeddings_0", "decoder/embeddings", "decoder/projection")
)
_BIAS = "decoder/projection/bias"
_ATTENTION = re.compile(r"((?:encoder|decoder)/layer_\d+/(?:self_)?attention)/linear_0/weight")
_IDLE = (
    "encoder/embeddings_merge",
    "decoder/alibi_use_positive_positions",
    "decoder/scale_alibi",
    "decoder/alignment_layer",
    "decoder/alignment_heads",
)
_NEVER = -100.0  # logit of a token that is in no vocabulary: its probability is 0 in float32, and its loss is finite


# ---------------------------------------------------------------------------------------- attributes of the stacks


def stack_fields(attributes: dict[str, Tensor], attentions: Sequence[str], d_model: int) -> dict[str, Any]:
    """Return our fields for the numbers beside the matrices; takes what it understands out of `attributes`.

    Args:
        attributes: Scalars by name.
        attentions: Names of the attentions that the matrices make, "encoder/layer_0/self_attention" and so on.
        d_model: Width of the model.

    Raises:
        ConversionError: The stacks differ in what ours have in common, or a number is left that has no place here.
    """
    fields: dict[str, Any] = {}
    common: dict[str, list[Any]] = {}
    for stack in ("encoder", "decoder"):
        fields[f"{stack}_attention_heads"] = _integer(attributes, f"{stack}/num_heads", 8)
        activation = _integer(attributes, f"{stack}/activation", 0)
        if not 0 <= activation < len(ACTIVATIONS):
            raise ConversionError(f"{stack}/activation={activation} is unknown.")
        scale = attributes.pop(f"{stack}/scale_embeddings", torch.tensor(1, dtype=torch.int8))
        is_pre_norm = _integer(attributes, f"{stack}/pre_norm", 1)
        common.setdefault("norm_position", []).append("pre" if is_pre_norm else "post")
        common.setdefault("activation_function", []).append(ACTIVATIONS[activation][0])
        common.setdefault("scale_embedding", []).append(_is_scaled(scale, d_model, stack))
    for name, values in common.items():
        if values[0] != values[1]:
            raise ConversionError(f"Encoder and decoder differ in {name}, {values[0]} and {values[1]}: ours have one.")
        fields[name] = values[0]
    fields.update(_head_fields(attributes, attentions, fields, d_model))
    # The merge counts with several source features, the two of ALiBi with ALiBi; which heads are returned as
    # alignments is chosen at each call here.
    for name in _IDLE:
        attributes.pop(name, None)
    for name in ("encoder/multi_query_attention", "decoder/alibi"):
        if name in attributes and not attributes[name]:
            del attributes[name]
    if attributes:
        listed = ", ".join(f"{name}={value.item()}" for name, value in sorted(attributes.items())[:12])
        raise ConversionError(f"This CTranslate2 model has settings that our class can't express: {listed}.")
    return fields


def _integer(attributes: dict[str, Tensor], name: str, default: int) -> int:
    value = attributes.pop(name, torch.tensor(default))
    if value.is_floating_point():
        raise ConversionError(f"{name}={float(value)} is not an integer.")
    return int(value)


def _is_scaled(scale: Tensor, d_model: int, stack: str) -> bool:
    """The attribute is a flag or the factor itself."""
    if scale.dtype == torch.int8:
        return bool(scale)
    for value, scaled in ((1.0, False), (d_model**0.5, True)):
        if abs(float(scale) - value) <= 1e-3 * value:  # float16 in some files
            return scaled
    raise ConversionError(
        f"{stack}/scale_embeddings={float(scale)} can't be converted: ours multiply by sqrt({d_model}) or not at all."
    )


def _head_fields(
    attributes: dict[str, Tensor], attentions: Sequence[str], fields: Mapping[str, Any], d_model: int
) -> dict[str, Any]:
    widths = set()
    for name in attentions:
        given = _integer(attributes, f"{name}/head_dim", 0)
        widths.add(given or None)
        width = given or d_model // max(fields[f"{name.partition('/')[0]}_attention_heads"], 1)
        expected = max(width, 1) ** -0.5
        scale = float(attributes.pop(f"{name}/queries_scale", torch.tensor(expected)))
        if not abs(scale - expected) <= 1e-3 * expected:
            raise ConversionError(f"{name}/queries_scale={scale} can't be converted: ours is 1/sqrt({width}).")
    if len(widths) > 1:
        raise ConversionError(f"The attentions' head_dim differ, {sorted(map(str, widths))}: ours have one.")
    width = widths.pop() if widths else None
    return {"d_k": width, "d_v": width}


def count_layers(names: Sequence[str], stack: str) -> int:
    """Return the number of a stack's layers; a gap shows when the tensors are renamed."""
    found = [int(match[1]) for match in (re.match(rf"{stack}/layer_(\d+)/", name) for name in names) if match]
    if not found:
        raise ConversionError(f"The {stack} has no layers.")
    return max(found) + 1


# ---------------------------------------------------------------------------------------- the configuration


def config_from(
    settings: FolderSettings, weights: dict[str, Tensor], attributes: dict[str, Tensor]
) -> VanillaTransformerConfig:
    """Return our configuration; makes the exceptions to the rename table in `weights`.

    Args:
        settings: What the small files say.
        weights: Matrices and vectors by CTranslate2's names.
        attributes: Numbers by CTranslate2's names; emptied.

    Raises:
        ConversionError: What our class can't express.
    """
    embeddings = [_matrix(weights, name) for name in (_SOURCE, _TARGET, _PROJECTION)]
    for tensor, tokens, side in zip(
        embeddings, (settings.source, settings.target), ("source", "target"), strict=False
    ):
        if len(tensor) != len(tokens):
            raise ConversionError(f"The {side} vocabulary has {len(tokens)} tokens, its matrix {len(tensor)} rows.")
    source, target, projection = embeddings
    attentions = sorted({match[1] for match in map(_ATTENTION.match, weights) if match})
    starts_from_zero = bool(_integer(attributes, "decoder/start_from_zero_embedding", 0))
    fields: dict[str, Any] = {
        "d_model": source.shape[1],
        "layer_norm_eps": settings.layer_norm_eps,
        "attention_bias": any(name.endswith("/bias") for name in weights if "attention/linear" in name),
        "share_encoder_decoder_embeddings": settings.source == settings.target and _same(source, target),
        "tie_word_embeddings": _same(projection, target),
        **{f"{stack}_layers": count_layers(list(weights), stack) for stack in ("encoder", "decoder")},
        **{
            f"{stack}_ffn_dim": len(_matrix(weights, f"{stack}/layer_0/ffn/linear_0/weight"))
            for stack in ("encoder", "decoder")
        },
        **stack_fields(attributes, attentions, source.shape[1]),
        **position_fields([weights.get(f"{stack}/position_encodings/encodings") for stack in ("encoder", "decoder")]),
    }
    if fields["position_embedding_type"] != "learned":  # ours are computed
        for stack in ("encoder", "decoder"):
            weights.pop(f"{stack}/position_encodings/encodings", None)
    fields.update(_token_fields(settings, weights, starts_from_zero))
    if "decoder/projection/bias" in weights:  # ours is [1, V]
        fields["output_bias"] = True
        weights["decoder/projection/bias"] = weights["decoder/projection/bias"].reshape(1, -1)
    fields.update(vocab_size=len(weights[_SOURCE]), decoder_vocab_size=len(weights[_TARGET]))
    try:
        return VanillaTransformerConfig(**fields)
    except ValueError as error:
        raise ConversionError(f"This CTranslate2 model is none of our class: {error}") from error


def _token_fields(settings: FolderSettings, weights: dict[str, Tensor], starts_from_zero: bool) -> dict[str, Any]:
    pad = None if starts_from_zero else _pad_id(settings)
    if pad is None:
        pad = _add_padding_token(weights)
    eos, bos, start = (_token_id(settings, role) for role in ("eos_token", "bos_token", "decoder_start_token"))
    if starts_from_zero:
        start = pad
    for role, number in (("eos_token", eos), ("decoder_start_token", start)):
        if number is None:
            raise ConversionError(
                f"{role}={settings.names[role]!r} of config.json is no token of the target vocabulary."
            )
    return {"pad_token_id": pad, "eos_token_id": eos, "bos_token_id": bos, "decoder_start_token_id": start}


def _pad_id(settings: FolderSettings) -> int | None:
    """The padding token's id, or None where no token of such a name has the same id in both vocabularies."""
    named = settings.names["pad_token"]
    for name in [named] if named is not None else _PAD_NAMES:
        if name in settings.source and name in settings.target:
            place = settings.source.index(name)
            if place == settings.target.index(name):
                return place
    return None


def _token_id(settings: FolderSettings, role: str) -> int | None:
    name = settings.names[role]
    return settings.target.index(name) if name in settings.target else None


def _add_padding_token(weights: dict[str, Tensor]) -> int:
    """Add a token to both vocabularies, with the same id in both: zero embeddings, and never the output."""
    pad = max(len(weights[_SOURCE]), len(weights[_TARGET]))
    old = len(weights[_TARGET])
    for name in (_SOURCE, _TARGET, _PROJECTION):
        weights[name] = torch.nn.functional.pad(weights[name], (0, 0, 0, pad + 1 - len(weights[name])))
    bias = weights.get(_BIAS, torch.zeros(old))
    weights[_BIAS] = torch.nn.functional.pad(bias, (0, pad + 1 - len(bias)), value=_NEVER)
    return pad


def _matrix(weights: Mapping[str, Tensor], name: str) -> Tensor:
    tensor = weights.get(name)
    if tensor is None or tensor.dim() != 2:
        raise ConversionError(f"model.bin has no matrix {name}: this is no Transformer that can be read.")
    return tensor


def _same(one: Tensor, other: Tensor) -> bool:
    return one is other or torch.equal(one, other)
