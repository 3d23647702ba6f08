"""What of a fairseq checkpoint is no tensor: its options, carried or refused; see `fairseq`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from .reading import with_library_ranking
from .renaming import ConversionError

SIDES = ("encoder", "decoder")
BOS, PAD, EOS = 0, 1, 2  # fairseq's dictionaries begin with these and <unk>

# A stack's sizes in fairseq → the field here.
SIZES = {"layers": "layers", "attention_heads": "attention_heads", "ffn_embed_dim": "ffn_dim"}
# Name in fairseq → in `transformers.activations`. fairseq's "gelu_fast" is an older name of "gelu_accurate".
ACTIVATIONS = {
    **{name: name for name in ("relu", "gelu", "tanh", "linear", "swish")},
    **dict.fromkeys(("gelu_accurate", "gelu_fast"), "gelu_new"),
}
# Options that change the model, or what it was trained to read, and that no field here expresses.
REFUSED = {
    "adaptive_input": "adaptive input embeddings",
    "adaptive_softmax_cutoff": "an adaptive softmax",
    "base_layers": "BASE layers",
    "char_inputs": "characters as input",
    "cross_self_attention": "attention over source and target at once",
    "decoder_langtok": "a language token before the target",
    "decoder_layerdrop": "LayerDrop; it matters in training alone: to go without, set it to 0 in the options",
    "decoder_layers_to_keep": "layers to leave out",
    "decoder_xformers_att_config": "another attention",
    "encoder_langtok": "a language token before the source",
    "encoder_layerdrop": "LayerDrop; it matters in training alone: to go without, set it to 0 in the options",
    "encoder_layers_to_keep": "layers to leave out",
    "encoder_xformers_att_config": "another attention",
    "layernorm_embedding": "a LayerNorm over the embeddings",
    "merge_src_tgt_embed": "embeddings merged from two dictionaries",
    "no_cross_attention": "a decoder that sees no source",
    "no_decoder_final_norm": "pre-norm without a last LayerNorm",
    "no_token_positional_embeddings": "no positions",
    "quant_noise_pq": "quantisation noise",
    "quant_noise_scalar": "quantisation noise",
    "scale_attn": "further LayerNorms",
    "scale_fc": "further LayerNorms",
    "scale_heads": "scaled heads",
    "scale_resids": "scaled residual connections",
}


def options_of(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a checkpoint under the flat names of fairseq's command line.

    Args:
        checkpoint: Has "args", a namespace, or "cfg", a dict of which "model" is a namespace, or a dict with a dict
            for each stack.

    Raises:
        ConversionError: It has neither, or they are of another class.
    """
    if checkpoint.get("args") is not None:
        return _as_dict(checkpoint["args"])
    if checkpoint.get("cfg") is None:
        raise ConversionError("The checkpoint has neither 'args' nor 'cfg', which hold its sizes and options.")
    parts = {name: _as_dict(_as_dict(checkpoint["cfg"]).get(name) or {}) for name in ("criterion", "task", "model")}
    options: dict[str, Any] = {}
    for part in parts.values():
        for name, value in part.items():
            if isinstance(value, Mapping):
                options |= {f"{name}_{inner}": inner_value for inner, inner_value in value.items()}
            else:
                options[name] = value
    options["criterion"] = parts["criterion"].get("_name")
    return options


def _as_dict(options: Any) -> dict[str, Any]:
    if isinstance(options, argparse.Namespace):
        return dict(vars(options))
    if isinstance(options, Mapping):
        return dict(options)
    raise ConversionError(f"Options of the class {type(options).__name__} are not read: {options!r:.80}.")


def fields_of(options: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the fields of our configuration, those on the vocabularies and on sharing left out.

    Args:
        options: What `options_of` gives.
        tensors: The tensors, of which the format's version is read.

    Raises:
        ConversionError: An option is missing, or has no counterpart here.
    """
    for name, meaning in REFUSED.items():
        if options.get(name):
            raise ConversionError(f"{name}={options[name]!r:.80}: {meaning} has no counterpart here.")
    names = [f"{side}_{size}" for side in SIDES for size in ("embed_dim", *SIZES)]
    missing = [name for name in names if not isinstance(options.get(name), int)]
    if missing:
        raise ConversionError(f"The checkpoint's options lack {', '.join(missing)}.")
    for name in ("decoder_embed_dim", "decoder_input_dim", "decoder_output_dim"):
        _equal(options, "encoder_embed_dim", name, options["encoder_embed_dim"])
    is_pre_norm = bool(_equal(options, "encoder_normalize_before", "decoder_normalize_before", False))
    if is_pre_norm:
        _check_last_norms(tensors)
    is_learned = bool(_equal(options, "encoder_learned_pos", "decoder_learned_pos", False))
    positions = options.get("max_source_positions") or 1024
    if is_learned:
        positions = _equal(options, "max_source_positions", "max_target_positions", 1024)
    activation = options.get("activation_fn") or "relu"
    if activation not in ACTIVATIONS:
        raise ConversionError(f"activation_fn={activation!r}: only {', '.join(ACTIVATIONS)} have a counterpart here.")
    is_smoothed = "label_smoothed" in (options.get("criterion") or "label_smoothed")
    return {
        "d_model": options["encoder_embed_dim"],
        **{
            f"{side}_{ours}": options[f"{side}_{size}"]
            for side in ("encoder", "decoder")
            for size, ours in SIZES.items()
        },
        "dropout": 0.1 if options.get("dropout") is None else options["dropout"],
        "attention_dropout": options.get("attention_dropout") or 0.0,
        "activation_dropout": options.get("activation_dropout") or options.get("relu_dropout") or 0.0,
        "activation_function": ACTIVATIONS[activation],
        "label_smoothing": (options.get("label_smoothing") or 0.0) if is_smoothed else 0.0,
        "norm_position": "pre" if is_pre_norm else "post",
        "position_embedding_type": "learned" if is_learned else "sinusoidal_tensor2tensor",
        "position_offset": PAD + 1,
        "max_position_embeddings": positions,
        "scale_embedding": not options.get("no_scale_embedding"),
        "attention_bias": True,
        "layer_norm_eps": 1e-5,  # torch's, which fairseq leaves as it is
        "pad_token_id": PAD,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "decoder_start_token_id": EOS,
    }


def _equal(options: Mapping[str, Any], first: str, second: str, default: Any) -> Any:
    """Return the value of two options that have to agree here."""
    values = [default if options.get(name) is None else options[name] for name in (first, second)]
    if values[0] != values[1]:
        raise ConversionError(f"{first}={values[0]!r} and {second}={values[1]!r}: here the two have to be equal.")
    return values[0]


def _check_last_norms(tensors: Mapping[str, Tensor]) -> None:
    """Raise unless the format's version is one in which fairseq normalises pre-norm stacks at their end."""
    for side, first in (("encoder", 2), ("decoder", 3)):
        version = float(tensors.get(f"{side}.version", torch.ones(1)).reshape(-1)[0])
        if version < first:
            raise ConversionError(
                f"{side}.version={version:g} with {side}_normalize_before=True: before version {first} fairseq did "
                "not normalise at the end of the stack, and pre-norm without that has no counterpart here."
            )


def generation_config_of(options: Mapping[str, Any]) -> GenerationConfig:
    """Return the defaults of fairseq-generate (beam, lenpen, max-len-b, min-len): a checkpoint has none."""
    return with_library_ranking(
        GenerationConfig(
            num_beams=5,
            length_penalty=1.0,
            early_stopping=True,  # a sentence is done when as many hypotheses have ended as there are beams
            max_new_tokens=min(201, options.get("max_target_positions") or 1024),  # 200 and the end
            min_new_tokens=1,  # before the end
            forced_eos_token_id=EOS,
            suppress_tokens=[PAD],
            pad_token_id=PAD,
            bos_token_id=BOS,
            eos_token_id=EOS,
            decoder_start_token_id=EOS,
        )
    )
