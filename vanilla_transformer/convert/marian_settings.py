"""What of MarianMT is no tensor: configuration, generation settings, tokenizer, carried or refused; see `marian`."""

from __future__ import annotations

import copy
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import nn
from transformers import AutoTokenizer, GenerationConfig, MarianConfig, MarianMTModel, MarianTokenizer

from vanilla_transformer.configuration_vanilla_transformer import VanillaTransformerConfig
from vanilla_transformer.generation_vanilla_transformer import gnmt_alpha, length_offset
from vanilla_transformer.modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration

from .renaming import ConversionError

# Fields of the same name and sense in both configurations.
_SAME = (
    *("vocab_size", "d_model", "encoder_layers", "decoder_layers", "encoder_attention_heads"),
    *("decoder_attention_heads", "encoder_ffn_dim", "decoder_ffn_dim", "dropout", "attention_dropout"),
    *("activation_dropout", "activation_function", "max_position_embeddings", "scale_embedding", "use_cache"),
    *("pad_token_id", "eos_token_id", "bos_token_id", "decoder_start_token_id"),
)
# What pipelines read, and our loss, which MarianMT keeps as a field that it does not use.
_KEPT = ("prefix", "task_specific_params", "label_smoothing")
# Fields that `MarianMTModel` reads in training alone, or that older releases wrote; anything else is not its model.
_NEUTRAL = {
    **dict.fromkeys(("encoder_layerdrop", "decoder_layerdrop"), 0.0),
    **dict.fromkeys(("normalize_before", "normalize_embedding", "add_final_layer_norm", "add_bias_logits"), False),
    **{"static_position_embeddings": True, "is_decoder": False, "is_encoder_decoder": True},
}
LAYER_NORM_EPS = 1e-5  # of torch's LayerNorm, which MarianMT leaves as it is


def config_from_marian(foreign: MarianMTModel, *, shared: bool, tied: bool) -> VanillaTransformerConfig:
    """Return our configuration of a MarianMT model.

    Args:
        foreign: The model.
        shared: Whether source and target embeddings are one matrix.
        tied: Whether the target embeddings and the output projection are one matrix.

    Raises:
        ConversionError: A field, or what it asks for, has no counterpart here.
    """
    theirs = foreign.config
    for name, neutral in _NEUTRAL.items():
        value = getattr(theirs, name, neutral)
        if value != neutral and name.endswith("layerdrop"):
            raise ConversionError(
                f"{name}={value!r}: layers are never dropped here. It matters in training alone: to go without, set "
                f"config.{name} = 0.0 in the MarianMT model."
            )
        if value != neutral:
            raise ConversionError(
                f"{name}={value!r} is not what MarianMTModel computes, which is {name}={neutral!r}: the checkpoint is "
                "of another architecture."
            )
    epsilons = {module.eps for module in foreign.modules() if isinstance(module, nn.LayerNorm)}
    if len(epsilons) != 1:
        raise ConversionError(f"The LayerNorms have different ε, {sorted(epsilons)}, and here there is one for all.")
    fields = {name: getattr(theirs, name) for name in _SAME}
    fields["label_smoothing"] = 0.0
    fields |= {name: getattr(theirs, name) for name in _KEPT if getattr(theirs, name, None) is not None}
    try:
        return VanillaTransformerConfig(
            **fields,
            decoder_vocab_size=theirs.decoder_vocab_size,
            share_encoder_decoder_embeddings=shared,
            tie_word_embeddings=tied,
            sinusoid_layout="halves",
            attention_bias=True,
            output_bias=True,
            layer_norm_eps=epsilons.pop(),
        )
    except ValueError as error:
        raise ConversionError(f"The MarianMT configuration does not fit: {error}") from error


def check_expressible(config: VanillaTransformerConfig) -> None:
    """Raise a ConversionError that names the first field of ours that MarianMT does not express."""
    for name, value in (("norm_position", "post"), ("position_embedding_type", "sinusoidal"), ("position_offset", 0)):
        if getattr(config, name) != value:
            raise ConversionError(f"{name}={getattr(config, name)!r}: MarianMT has {value!r} and nothing else.")
    if config.has_final_norm:
        raise ConversionError("final_norm=True: MarianMT has no LayerNorm behind its stacks.")
    for side in ("encoder", "decoder"):
        heads = getattr(config, f"{side}_attention_heads")
        if any(width * heads != config.d_model for width in config.head_dims(heads)):
            widths = " and ".join(map(str, config.head_dims(heads)))
            raise ConversionError(
                f"The {side}'s heads have d_k and d_v {widths}: MarianMT has d_model / h = {config.d_model} / {heads} "
                "and nothing else."
            )


def config_to_marian(model: VanillaTransformerForConditionalGeneration) -> MarianConfig:
    """Return the MarianMT configuration of a model that `check_expressible` has passed."""
    ours = model.config
    kept = {name: getattr(ours, name) for name in _KEPT if getattr(ours, name, None) is not None}
    shared = ours.share_encoder_decoder_embeddings and ours.tie_word_embeddings  # all three, or (5.0) none
    return MarianConfig(
        **{name: getattr(ours, name) for name in _SAME},
        **kept,
        decoder_vocab_size=ours.decoder_vocab_size,
        share_encoder_decoder_embeddings=shared,
        tie_word_embeddings=ours.tie_word_embeddings,
        forced_eos_token_id=model.generation_config.forced_eos_token_id,  # its own default is the id 0
    )


def generation_config_to_marian(model: VanillaTransformerForConditionalGeneration) -> GenerationConfig:
    """Return our settings for MarianMT, with a warning of what has no place there and the nearest in its place."""
    settings = copy.deepcopy(model.generation_config)
    alpha, offset = gnmt_alpha([vars(settings)]), length_offset([vars(settings)])
    for name in ("gnmt_alpha", "max_length_offset"):
        vars(settings).pop(name, None)
    lost = []
    if alpha is not None and (settings.num_beams or 1) > 1:
        settings.length_penalty, settings.early_stopping = float(alpha), "never"
        lost.append(f"gnmt_alpha={alpha} (set instead: length_penalty={float(alpha)}, early_stopping='never')")
    if offset is not None:
        settings.max_length = model.config.max_position_embeddings
        lost.append(f"max_length_offset={offset} (set instead: max_length={settings.max_length})")
    if lost:
        warnings.warn(
            f"MarianMT has no place for {' and '.join(lost)}: generate() may choose other tokens there.",
            UserWarning,
            stacklevel=3,
        )
    return settings


def read_tokenizer(folder: Path) -> Any:
    """Return the tokenizer of a checkpoint folder of MarianMT, Marian's own or any other, or None.

    Raises:
        ImportError: It is Marian's, and sentencepiece is not installed.
    """
    if (folder / "source.spm").is_file():  # the tokenizer_config.json of older checkpoints names no class
        if find_spec("sentencepiece") is None:
            raise ImportError(
                "Marian's tokenizer needs sentencepiece (and for the same pieces as in training also sacremoses): "
                "pip install 'vanilla-transformer[marian]'"
            )
        return MarianTokenizer.from_pretrained(folder)
    has_other = any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json"))
    return AutoTokenizer.from_pretrained(folder) if has_other else None
