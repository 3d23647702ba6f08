"""The parts of a CTranslate2 model beside its matrices, made from a configuration and tokenizers of ours."""

from __future__ import annotations

import importlib
from typing import Any

from transformers import PreTrainedTokenizerBase

from vanilla_transformer.configuration_vanilla_transformer import VanillaTransformerConfig

from .ctranslate2_file import ACTIVATIONS
from .ctranslate2_positions import position_table
from .renaming import ConversionError


def blank_spec(config: VanillaTransformerConfig, num_positions: int) -> Any:
    """Return a `ctranslate2.specs.TransformerSpec` with all settings of a model and none of its matrices.

    Raises:
        ImportError: ctranslate2 is not installed.
        ConversionError: CTranslate2 can't express the model.
    """
    specs = _specs()
    if num_positions < 1:
        raise ConversionError(f"num_positions={num_positions} is not valid: at least 1 is needed.")
    _check_writable(config)
    options = {"pre_norm": config.norm_position == "pre", "activation": specs.Activation(_activation(config))}
    heads = (config.encoder_attention_heads, config.decoder_attention_heads)
    if config.d_k is not None and any(config.d_k * h != config.d_model for h in heads):
        options["head_dim"] = config.d_k
    try:
        encoder = specs.TransformerEncoderSpec(config.encoder_layers, heads[0], **options)
        decoder = specs.TransformerDecoderSpec(config.decoder_layers, heads[1], **options)
    except TypeError as error:
        raise ConversionError(
            f"d_k={config.d_k}: the installed ctranslate2 has heads of d_model / h only ({error}); update it."
        ) from error
    for stack in (encoder, decoder):
        stack.scale_embeddings = config.scale_embedding
        if config.position_embedding_type != "learned":
            table = position_table(config, num_positions)
            if table is not None:
                stack.position_encodings.encodings = table
    return specs.TransformerSpec(encoder, decoder)


def _specs() -> Any:
    try:
        return importlib.import_module("ctranslate2.specs")
    except ImportError as error:
        raise ImportError(
            "Writing CTranslate2 models needs ctranslate2: pip install 'vanilla-transformer[ctranslate2]'"
        ) from error


def _check_writable(config: VanillaTransformerConfig) -> None:
    for side in ("encoder", "decoder"):
        d_k, d_v = config.head_dims(getattr(config, f"{side}_attention_heads"))
        if d_k != d_v:
            raise ConversionError(f"d_k={d_k} and d_v={d_v} can't be converted: CTranslate2's heads have one width.")
    if config.has_final_norm != (config.norm_position == "pre"):
        raise ConversionError(
            f"final_norm={config.final_norm} with norm_position={config.norm_position!r} can't be converted: "
            "CTranslate2 has a last LayerNorm with pre-norm, and only there."
        )
    _end_token_id(config)


def _end_token_id(config: VanillaTransformerConfig) -> int:
    if not isinstance(config.eos_token_id, int):
        raise ConversionError(
            f"eos_token_id={config.eos_token_id} can't be converted: CTranslate2's config.json has one end token."
        )
    return config.eos_token_id


def _activation(config: VanillaTransformerConfig) -> int:
    """Return CTranslate2's number of the activation, or raise a ConversionError."""
    for number, names in enumerate(ACTIVATIONS):
        if config.activation_function in names:
            return number
    known = ", ".join(name for names in ACTIVATIONS for name in names)
    raise ConversionError(
        f"activation_function={config.activation_function!r} can't be converted: CTranslate2 has {known}."
    )


def set_vocabularies(
    spec: Any,
    config: VanillaTransformerConfig,
    tokenizer: PreTrainedTokenizerBase | None,
    target_tokenizer: PreTrainedTokenizerBase | None,
) -> None:
    """Give a spec its vocabularies, the names of its special tokens, and ε.

    Raises:
        ConversionError: The tokenizers do not fit to the model.
    """
    if tokenizer is None:
        raise ConversionError("A CTranslate2 model has a vocabulary of its own: give the tokenizer too.")
    shared, sizes = config.share_encoder_decoder_embeddings, (config.vocab_size, config.decoder_vocab_size)
    if (shared and target_tokenizer is not None) or (target_tokenizer is None and sizes[0] != sizes[1]):
        raise ConversionError(
            f"share_encoder_decoder_embeddings={shared}, vocab_size={sizes[0]}, decoder_vocab_size={sizes[1]}: a "
            "target_tokenizer is for separate vocabularies, and those of unequal sizes need one."
        )
    target = tokenizer if target_tokenizer is None else target_tokenizer
    source_tokens = _tokens(tokenizer, config.vocab_size, "vocab_size")
    target_tokens = _tokens(target, config.decoder_vocab_size, "decoder_vocab_size")
    spec.register_source_vocabulary(source_tokens)
    spec.register_target_vocabulary(target_tokens)
    ids = {
        "decoder_start_token": config.decoder_start_token_id,
        "bos_token": config.decoder_start_token_id if config.bos_token_id is None else config.bos_token_id,
        "eos_token": _end_token_id(config),
        "pad_token": config.pad_token_id,  # they need none; for the way back
    }
    for role, number in ids.items():
        if number >= len(target_tokens):
            raise ConversionError(
                f"{role}_id={number} is outside the target vocabulary of {len(target_tokens)} tokens."
            )
        spec.config.add_attribute(role, target_tokens[number])
    # What CTranslate2 takes for a token that it does not know; a name that a vocabulary lacks it would add to it,
    # beyond the matrix. A byte-level vocabulary has no such token and needs none: padding is harmless there.
    names = (tokenizer.unk_token, spec.config.pad_token, spec.config.eos_token, *source_tokens)
    common = set(source_tokens) & set(target_tokens)
    unknown = next((name for name in names if name in common), None)
    if unknown is None:
        raise ConversionError("The two vocabularies have no token in common: CTranslate2 needs one for unknown ones.")
    spec.config.unk_token = unknown
    spec.config.layer_norm_epsilon = config.layer_norm_eps


def _tokens(tokenizer: PreTrainedTokenizerBase, size: int, field: str) -> list[str]:
    """Return the vocabulary by id; rows of the matrix that no token has (a rounded-up size) get a name."""
    by_id = {number: token for token, number in tokenizer.get_vocab().items()}
    if max(by_id, default=0) >= size:
        raise ConversionError(
            f"The tokenizer has ids up to {max(by_id)}, and {field}={size}: they do not fit together."
        )
    tokens = [by_id.get(number, f"<unused{number}>") for number in range(size)]
    if len(set(tokens)) < size:
        raise ConversionError("The tokenizer has tokens named <unused...> and ids without a token: name those first.")
    return tokens
