"""Transformer checkpoints of OpenNMT-py (1, 2 and 3) as ours.

A checkpoint is a `.pt` file of {"model", "generator", "vocab", "opt"}. It is read with `weights_only` and a list of
inert classes that may be in it (the options' `Namespace`; in versions 1 and 2 the vocabularies' classes of torchtext,
in whose place stand classes that only keep what they are given), so nothing in it is executed.

OpenNMT-py's Transformer is pre-norm with a final norm behind each stack, embeddings times sqrt(d_model), sinusoids
from position 0 (its buffer ends at 5,000, ours does not end), and an output bias. What carries over: all weights,
sizes, heads, ε, activation, dropout rates (its feed-forward layers drop out inside too), label smoothing, the ids of
its special tokens, and which embedding matrices are one. What this class cannot express is refused by the option's
name, see `_EXPRESSIBLE`; so are source features, copy attention and LoRA or quantised layers.

Vocabularies: where source and target have the same one, it becomes a tokenizer that takes text already cut into
subwords, as OpenNMT-py's own translation does with files; whatever cut them (SentencePiece, BPE, ...) is not in the
checkpoint. Sources there have no end token, and neither do this tokenizer's rows: append "</s>" to labels yourself
when training on. Of two vocabularies no stock tokenizer can be made: `vocabularies` gives the lists. Beam size and
length penalty are no part of a checkpoint; the model has our defaults.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from vanilla_transformer.configuration_vanilla_transformer import VanillaTransformerConfig
from vanilla_transformer.modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration

from .opennmt_vocabulary import STAND_INS, make_tokenizer, special_ids, vocabularies
from .reading import (
    OUTPUT,
    SOURCE,
    TARGET,
    check_positions,
    count_layers,
    is_state_dict,
    load_state_dict_file,
    load_torch_file,
    make_config,
    make_model,
    place_embeddings,
    shape_of,
)
from .renaming import ConversionError, Table, weight_and_bias

SYSTEM = "OpenNMT-py"

# Options with the values that this class can express, the first of them what a checkpoint without the option means.
_EXPRESSIBLE: dict[str, tuple[Any, ...]] = {
    "model_type": ("text",),
    "model_task": ("seq2seq",),
    "encoder_type": (None, "transformer"),
    "decoder_type": (None, "transformer"),
    "position_encoding": (None, True),
    "position_encoding_type": ("SinusoidalInterleaved", "SinusoidalConcat"),
    "pos_ffn_activation_fn": ("relu", "gelu"),
    "self_attn_type": ("scaled-dot", "scaled-dot-flash"),
    "layer_norm": ("standard",),
    "max_relative_positions": (0,),
    "relative_positions_buckets": (0,),
    "num_kv": (0,),
    "multiquery": (False,),
    "parallel_residual": (False,),
    "shared_layer_norm": (False,),
    "sliding_window": (0,),
    "num_experts": (0,),
    "copy_attn": (False,),
    "coverage_attn": (False,),
    "generator_function": ("softmax",),
    "lora_layers": ([],),
    "lora_embedding": (False,),
    "quant_layers": ([],),
    "n_src_feats": (0,),
}
_REQUIRED = ("encoder_type", "decoder_type", "position_encoding", "heads")


def _attention(theirs: str, ours: str) -> dict[str, str]:
    names = {"linear_query": "q_proj", "linear_keys": "k_proj", "linear_values": "v_proj", "final_linear": "out_proj"}
    rows: dict[str, str] = {}
    for their_name, our_name in names.items():
        rows |= weight_and_bias(f"{theirs}.{their_name}", f"{ours}.{our_name}")
    return rows


_ENCODER, _DECODER = "encoder.transformer.{i}", "decoder.transformer_layers.{i}"
_OUR_ENCODER, _OUR_DECODER = "model.encoder.layers.{i}", "model.decoder.layers.{i}"
_SOURCE_TABLE, _TARGET_TABLE = (
    f"{side}.embeddings.make_embedding.emb_luts.0.weight" for side in ("encoder", "decoder")
)
TABLE: Table = {
    _SOURCE_TABLE: SOURCE,
    **_attention(f"{_ENCODER}.self_attn", f"{_OUR_ENCODER}.self_attn"),
    **weight_and_bias(f"{_ENCODER}.layer_norm", f"{_OUR_ENCODER}.self_attn_layer_norm"),
    **weight_and_bias(f"{_ENCODER}.feed_forward.layer_norm", f"{_OUR_ENCODER}.final_layer_norm"),
    **weight_and_bias(f"{_ENCODER}.feed_forward.w_1", f"{_OUR_ENCODER}.fc1"),
    **weight_and_bias(f"{_ENCODER}.feed_forward.w_2", f"{_OUR_ENCODER}.fc2"),
    **weight_and_bias("encoder.layer_norm", "model.encoder.layer_norm"),
    _TARGET_TABLE: TARGET,
    **_attention(f"{_DECODER}.self_attn", f"{_OUR_DECODER}.self_attn"),
    **weight_and_bias(f"{_DECODER}.layer_norm_1", f"{_OUR_DECODER}.self_attn_layer_norm"),
    **_attention(f"{_DECODER}.context_attn", f"{_OUR_DECODER}.encoder_attn"),
    **weight_and_bias(f"{_DECODER}.layer_norm_2", f"{_OUR_DECODER}.encoder_attn_layer_norm"),
    **weight_and_bias(f"{_DECODER}.feed_forward.layer_norm", f"{_OUR_DECODER}.final_layer_norm"),
    **weight_and_bias(f"{_DECODER}.feed_forward.w_1", f"{_OUR_DECODER}.fc1"),
    **weight_and_bias(f"{_DECODER}.feed_forward.w_2", f"{_OUR_DECODER}.fc2"),
    **weight_and_bias("decoder.layer_norm", "model.decoder.layer_norm"),
    "generator.weight": OUTPUT,
    "generator.bias": "final_logits_bias",
}
# Tables of sinusoids: computed by our model, and checked against it.
_POSITIONS = tuple(f"{side}.embeddings.make_embedding.pe.pe" for side in ("encoder", "decoder"))
# Exceptions to the table, made by `_tensors`:
# - the generator's "0.weight" of versions 1 and 2 is "weight" in 3;
# - "generator.bias" [V] → [1, V];
# - biases of feed-forward layers made without (`add_ffnbias` of version 3) are zeros: ours always have them;
# - matrices that are one are kept once.


def from_opennmt(checkpoint: Mapping[str, Any], **config: Any) -> VanillaTransformerForConditionalGeneration:
    """Convert a checkpoint of OpenNMT-py.

    Args:
        checkpoint: {"model", "generator": tensors by name, "vocab": vocabularies, "opt": options as a `Namespace` or a
            mapping}, as `torch.load` gives it.
        **config: Further fields of `VanillaTransformerConfig`.

    Returns:
        The model, in the tensors' dtype.

    Raises:
        ConversionError: Unknown, missing or misshapen tensors, or an option that cannot be expressed.
    """
    missing = [part for part in ("model", "generator", "vocab", "opt") if checkpoint.get(part) is None]
    if missing:
        raise ConversionError(f"The checkpoint has no {', '.join(missing)}: it has {', '.join(map(str, checkpoint))}.")
    for part in ("model", "generator"):
        if not is_state_dict(checkpoint[part]):
            raise ConversionError(f"{part!r} of the checkpoint holds no tensors by name.")
    options = _checked_options(checkpoint["opt"])
    tensors = _tensors(checkpoint["model"], checkpoint["generator"])
    fields = _fields(options, tensors)
    fields |= special_ids(checkpoint["vocab"], fields["vocab_size"], fields["decoder_vocab_size"])
    placed, table, sharing = place_embeddings(tensors, TABLE, _SOURCE_TABLE, _TARGET_TABLE, "generator.weight")
    our_config = make_config(SYSTEM, {**fields, **sharing}, config)
    _check_positions(placed, our_config)
    return make_model(our_config, placed, table, system=SYSTEM, ignored=_POSITIONS)


def read(path: str | Path, **config: Any) -> tuple[VanillaTransformerForConditionalGeneration, Any]:
    """Read a `.pt` checkpoint, with its `.safetensors` file beside it where the weights are there (version 3).

    Args:
        path: The `.pt` file.
        **config: Further fields of `VanillaTransformerConfig`.

    Returns:
        The model, and a tokenizer for text cut into subwords, or None where source and target have vocabularies of
        their own.

    Raises:
        ConversionError: As `from_opennmt`, or the file holds more than data; nothing in it is executed.
    """
    checkpoint = load_torch_file(path, allowed=(Namespace, *STAND_INS))
    if not isinstance(checkpoint, Mapping):
        raise ConversionError(f"{path} holds a {type(checkpoint).__name__} and no checkpoint of {SYSTEM}.")
    checkpoint = dict(checkpoint)
    weights = Path(path).with_suffix(".safetensors")
    if "model" not in checkpoint and weights.is_file():
        state = load_state_dict_file(weights)
        prefix = "generator."
        checkpoint["generator"] = {n.removeprefix(prefix): t for n, t in state.items() if n.startswith(prefix)}
        checkpoint["model"] = {name: tensor for name, tensor in state.items() if not name.startswith(prefix)}
    model = from_opennmt(checkpoint, **config)
    source, target = vocabularies(checkpoint["vocab"])
    return model, make_tokenizer(source, target[model.config.bos_token_id]) if source == target else None


def _checked_options(options: Any) -> dict[str, Any]:
    values = dict(vars(options)) if isinstance(options, Namespace) else options
    if not isinstance(values, Mapping):
        raise ConversionError(f"'opt' of the checkpoint is a {type(options).__name__} and no set of options.")
    for name in _REQUIRED:
        if values.get(name) is None:
            raise ConversionError(f"'opt' of the checkpoint has no {name}, which no tensor says.")
    for name, allowed in _EXPRESSIBLE.items():
        value = values.get(name, allowed[0])
        if value not in allowed and not (value is None and allowed[0] in (0, False, [])):
            needed = " or ".join(repr(choice) for choice in allowed if choice is not None)
            raise ConversionError(f"{name}={value!r} cannot be expressed: this class has {needed} only.")
    return dict(values)


def _tensors(model: Mapping[str, Tensor], generator: Mapping[str, Tensor]) -> dict[str, Tensor]:
    tensors = dict(model)
    for name, tensor in generator.items():
        tensors[f"generator.{name.removeprefix('0.')}"] = tensor
    if "generator.bias" in tensors:
        tensors["generator.bias"] = tensors["generator.bias"].reshape(1, -1)
    if not any(".w_1.bias" in name or ".w_2.bias" in name for name in tensors):
        weights = [name for name in tensors if name.endswith((".w_1.weight", ".w_2.weight"))]
        tensors |= {name.replace("weight", "bias"): tensors[name].new_zeros(len(tensors[name])) for name in weights}
    return tensors


def _fields(options: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    vocab_size, d_model = shape_of(tensors, _SOURCE_TABLE)
    dropout = _rate(options.get("dropout", 0.3))
    is_concat = options.get("position_encoding_type") == "SinusoidalConcat"
    fields = {
        "vocab_size": vocab_size,
        "decoder_vocab_size": shape_of(tensors, _TARGET_TABLE)[0],
        "d_model": d_model,
        "encoder_layers": count_layers(tensors, "encoder.transformer."),
        "decoder_layers": count_layers(tensors, "decoder.transformer_layers."),
        "encoder_attention_heads": options["heads"],
        "decoder_attention_heads": options["heads"],
        "encoder_ffn_dim": shape_of(tensors, "encoder.transformer.0.feed_forward.w_1.weight")[0],
        "decoder_ffn_dim": shape_of(tensors, "decoder.transformer_layers.0.feed_forward.w_1.weight")[0],
        "attention_bias": any(name.endswith(".linear_query.bias") for name in tensors),
        "output_bias": "generator.bias" in tensors,
        "norm_position": "pre",
        "layer_norm_eps": options.get("norm_eps", 1e-6),
        "activation_function": options.get("pos_ffn_activation_fn", "relu"),
        "position_embedding_type": "sinusoidal_tensor2tensor" if is_concat else "sinusoidal",
        "dropout": dropout,
        "activation_dropout": dropout,
        "attention_dropout": _rate(options.get("attention_dropout", dropout)),  # older ones have one rate
        "label_smoothing": options.get("label_smoothing", 0.0),
    }
    stated = {"enc_layers": fields["encoder_layers"], "dec_layers": fields["decoder_layers"]}
    for name, found in stated.items():
        if options.get(name, found) != found:
            raise ConversionError(f"{name}={options[name]!r}, and the tensors have {found} layers.")
    return fields


def _rate(value: Any) -> Any:
    """Return a dropout rate; a list is a schedule, and its last rate the one that the training ended with."""
    return value[-1] if isinstance(value, Sequence) and not isinstance(value, str) and value else value


def _check_positions(tensors: Mapping[str, Tensor], config: VanillaTransformerConfig) -> None:
    for name in _POSITIONS:
        if name in tensors:
            check_positions(tensors[name], name, config)
