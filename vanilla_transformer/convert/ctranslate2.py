"""CTranslate2: its folder of model.bin, config.json and vocabularies, from our model and back.

Carried both ways: all sizes, post- and pre-norm, biases or none, separate and tied matrices, the scale of the
embeddings, every kind of position, the activation, the LayerNorm ε, start, end, beginning and padding token. Written
are float32, bfloat16, float16, int16 and int8 matrices; read are all of these, as the float32 they stand for.

Not in their files, so not carried: dropout, label smoothing and how to decode. Ours read from them has our defaults.
CTranslate2 ranks by log P / |Y|^length_penalty, as our `generate(length_penalty=...)` does, and not by the paper's α.

Refused when writing: d_k ≠ d_v, several end tokens, activations that CTranslate2 lacks, a vocabulary larger than the
model's. Refused when reading: what only newer Transformers have (relative, rotary or ALiBi positions, a norm after the
embeddings, gated feed-forward layers, RMSNorm, shared key heads, several source features), and parts of it that the
two stacks do not have alike.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from vanilla_transformer.configuration_vanilla_transformer import VanillaTransformerConfig
from vanilla_transformer.modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration
from vanilla_transformer.tokenizer_training import save_tokenizer

from .ctranslate2_file import FolderSettings, read_model_file, read_settings
from .ctranslate2_reading import config_from
from .ctranslate2_writing import blank_spec, set_vocabularies
from .renaming import ConversionError, Table, invert, load_own_tensors, rename, their_name, whole_folder

SYSTEM = "CTranslate2"
QUANTIZATIONS = ("float32", "bfloat16", "float16", "int16", "int8", "int8_float32", "int8_float16", "int8_bfloat16")

# Theirs → ours. Matrices lie alike, [out, in]. In brackets: the part of a fused matrix, see FUSED.
TABLE: Table = {
    "encoder/embeddings_0/weight": "model.encoder.embed_tokens.weight",
    "encoder/position_encodings/encodings": "model.encoder.embed_positions.weight",
    "encoder/layer_{i}/self_attention/layer_norm/gamma": "model.encoder.layers.{i}.self_attn_layer_norm.weight",
    "encoder/layer_{i}/self_attention/layer_norm/beta": "model.encoder.layers.{i}.self_attn_layer_norm.bias",
    "encoder/layer_{i}/self_attention/linear_0[query]/weight": "model.encoder.layers.{i}.self_attn.q_proj.weight",
    "encoder/layer_{i}/self_attention/linear_0[query]/bias": "model.encoder.layers.{i}.self_attn.q_proj.bias",
    "encoder/layer_{i}/self_attention/linear_0[key]/weight": "model.encoder.layers.{i}.self_attn.k_proj.weight",
    "encoder/layer_{i}/self_attention/linear_0[key]/bias": "model.encoder.layers.{i}.self_attn.k_proj.bias",
    "encoder/layer_{i}/self_attention/linear_0[value]/weight": "model.encoder.layers.{i}.self_attn.v_proj.weight",
    "encoder/layer_{i}/self_attention/linear_0[value]/bias": "model.encoder.layers.{i}.self_attn.v_proj.bias",
    "encoder/layer_{i}/self_attention/linear_1/weight": "model.encoder.layers.{i}.self_attn.out_proj.weight",
    "encoder/layer_{i}/self_attention/linear_1/bias": "model.encoder.layers.{i}.self_attn.out_proj.bias",
    "encoder/layer_{i}/ffn/layer_norm/gamma": "model.encoder.layers.{i}.final_layer_norm.weight",
    "encoder/layer_{i}/ffn/layer_norm/beta": "model.encoder.layers.{i}.final_layer_norm.bias",
    "encoder/layer_{i}/ffn/linear_0/weight": "model.encoder.layers.{i}.fc1.weight",
    "encoder/layer_{i}/ffn/linear_0/bias": "model.encoder.layers.{i}.fc1.bias",
    "encoder/layer_{i}/ffn/linear_1/weight": "model.encoder.layers.{i}.fc2.weight",
    "encoder/layer_{i}/ffn/linear_1/bias": "model.encoder.layers.{i}.fc2.bias",
    "encoder/layer_norm/gamma": "model.encoder.layer_norm.weight",
    "encoder/layer_norm/beta": "model.encoder.layer_norm.bias",
    "decoder/embeddings/weight": "model.decoder.embed_tokens.weight",
    "decoder/position_encodings/encodings": "model.decoder.embed_positions.weight",
    "decoder/layer_{i}/self_attention/layer_norm/gamma": "model.decoder.layers.{i}.self_attn_layer_norm.weight",
    "decoder/layer_{i}/self_attention/layer_norm/beta": "model.decoder.layers.{i}.self_attn_layer_norm.bias",
    "decoder/layer_{i}/self_attention/linear_0[query]/weight": "model.decoder.layers.{i}.self_attn.q_proj.weight",
    "decoder/layer_{i}/self_attention/linear_0[query]/bias": "model.decoder.layers.{i}.self_attn.q_proj.bias",
    "decoder/layer_{i}/self_attention/linear_0[key]/weight": "model.decoder.layers.{i}.self_attn.k_proj.weight",
    "decoder/layer_{i}/self_attention/linear_0[key]/bias": "model.decoder.layers.{i}.self_attn.k_proj.bias",
    "decoder/layer_{i}/self_attention/linear_0[value]/weight": "model.decoder.layers.{i}.self_attn.v_proj.weight",
    "decoder/layer_{i}/self_attention/linear_0[value]/bias": "model.decoder.layers.{i}.self_attn.v_proj.bias",
    "decoder/layer_{i}/self_attention/linear_1/weight": "model.decoder.layers.{i}.self_attn.out_proj.weight",
    "decoder/layer_{i}/self_attention/linear_1/bias": "model.decoder.layers.{i}.self_attn.out_proj.bias",
    "decoder/layer_{i}/attention/layer_norm/gamma": "model.decoder.layers.{i}.encoder_attn_layer_norm.weight",
    "decoder/layer_{i}/attention/layer_norm/beta": "model.decoder.layers.{i}.encoder_attn_layer_norm.bias",
    "decoder/layer_{i}/attention/linear_0/weight": "model.decoder.layers.{i}.encoder_attn.q_proj.weight",
    "decoder/layer_{i}/attention/linear_0/bias": "model.decoder.layers.{i}.encoder_attn.q_proj.bias",
    "decoder/layer_{i}/attention/linear_1[key]/weight": "model.decoder.layers.{i}.encoder_attn.k_proj.weight",
    "decoder/layer_{i}/attention/linear_1[key]/bias": "model.decoder.layers.{i}.encoder_attn.k_proj.bias",
    "decoder/layer_{i}/attention/linear_1[value]/weight": "model.decoder.layers.{i}.encoder_attn.v_proj.weight",
    "decoder/layer_{i}/attention/linear_1[value]/bias": "model.decoder.layers.{i}.encoder_attn.v_proj.bias",
    "decoder/layer_{i}/attention/linear_2/weight": "model.decoder.layers.{i}.encoder_attn.out_proj.weight",
    "decoder/layer_{i}/attention/linear_2/bias": "model.decoder.layers.{i}.encoder_attn.out_proj.bias",
    "decoder/layer_{i}/ffn/layer_norm/gamma": "model.decoder.layers.{i}.final_layer_norm.weight",
    "decoder/layer_{i}/ffn/layer_norm/beta": "model.decoder.layers.{i}.final_layer_norm.bias",
    "decoder/layer_{i}/ffn/linear_0/weight": "model.decoder.layers.{i}.fc1.weight",
    "decoder/layer_{i}/ffn/linear_0/bias": "model.decoder.layers.{i}.fc1.bias",
    "decoder/layer_{i}/ffn/linear_1/weight": "model.decoder.layers.{i}.fc2.weight",
    "decoder/layer_{i}/ffn/linear_1/bias": "model.decoder.layers.{i}.fc2.bias",
    "decoder/layer_norm/gamma": "model.decoder.layer_norm.weight",
    "decoder/layer_norm/beta": "model.decoder.layer_norm.bias",
    "decoder/projection/weight": "lm_head.weight",
    "decoder/projection/bias": "final_logits_bias",
}
# Exception to the table: CTranslate2 stacks the projections that have one input, in this order.
FUSED: Mapping[str, tuple[str, ...]] = {
    "/self_attention/linear_0": ("query", "key", "value"),
    "/attention/linear_1": ("key", "value"),
}
# Exception: our shared matrix is the encoder's, which is written. (Equal matrices are one in their file too.)
COPIES = ("model.shared.weight",)
_INVERSE = invert(TABLE)
_REVISIONS = range(5, 8)  # of TransformerSpec: 5 gave each stack its own settings, 7 is CTranslate2 4.8's


# ---------------------------------------------------------------------------------------- ours → CTranslate2


def to_ctranslate2(
    model: VanillaTransformerForConditionalGeneration,
    tokenizer: PreTrainedTokenizerBase | None,
    output_dir: str | Path,
    quantization: str = "float32",
    target_tokenizer: PreTrainedTokenizerBase | None = None,
    num_positions: int = 2048,
) -> None:
    """Write a model as a folder that `ctranslate2.Translator` loads, with the tokenizer's own files beside.

    CTranslate2 takes tokens and not ids: `tokenizer.convert_ids_to_tokens(tokenizer(text).input_ids)`, end token
    included, and `tokenizer.convert_tokens_to_string` makes a text of its output. Its beam search is that of our
    `generate(length_penalty=..., early_stopping=True)`; `max_decoding_length`, 256 by default, is one cap for all
    sentences, and `min_decoding_length`, 1 by default, leaves out empty translations, which ours may be.

    Args:
        model: The model; it is not changed.
        tokenizer: Of the source, and of the target too unless that has its own. CTranslate2 needs its tokens.
        output_dir: A folder that is empty or not there.
        quantization: One of `QUANTIZATIONS`, the type of the stored matrices; `Translator(compute_type=...)` may
            compute in another.
        target_tokenizer: Of the target, for a model whose vocabularies are separate. Saved in "target_tokenizer".
        num_positions: Most tokens of a source or a target, where sinusoids are stored as a table. Without effect on
            learned positions, and on those that CTranslate2 computes ("sinusoidal_tensor2tensor" in halves from 1).

    Raises:
        ImportError: ctranslate2 is not installed.
        ConversionError: What CTranslate2 can't express, named; nothing is written then.
    """
    if quantization not in QUANTIZATIONS:
        raise ConversionError(f"quantization={quantization!r} is not one of {', '.join(QUANTIZATIONS)}.")
    with whole_folder(output_dir) as folder:
        spec = to_spec(model, tokenizer, target_tokenizer, num_positions)
        spec.optimize(quantization)
        spec.save(str(folder))
        for place, saved in ((folder, tokenizer), (folder / "target_tokenizer", target_tokenizer)):
            if saved is not None and saved.is_fast:
                save_tokenizer(saved, place)
            elif saved is not None:
                saved.save_pretrained(str(place))


write = to_ctranslate2


def to_spec(
    model: VanillaTransformerForConditionalGeneration,
    tokenizer: PreTrainedTokenizerBase | None,
    target_tokenizer: PreTrainedTokenizerBase | None = None,
    num_positions: int = 2048,
) -> Any:
    """Return a model as a `ctranslate2.specs.TransformerSpec` in float32; arguments and errors: `to_ctranslate2`'s."""
    spec = blank_spec(model.config, num_positions)
    set_vocabularies(spec, model.config, tokenizer, target_tokenizer)
    for name, tensor in _fuse(_their_tensors(model)).items():
        _set(spec, name, tensor)
    spec.validate()
    return spec


def _their_tensors(model: VanillaTransformerForConditionalGeneration) -> dict[str, Tensor]:
    """Return the model's tensors by CTranslate2's names, in float32 and in memory of their own."""

    def adapted(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        tensors = dict(state)
        for stack in ("encoder", "decoder"):  # theirs start at position 0
            name = f"model.{stack}.embed_positions.weight"
            if name in tensors:
                tensors[name] = tensors[name][model.config.position_offset :]
        if "final_logits_bias" in tensors:  # ours is [1, V]
            tensors["final_logits_bias"] = tensors["final_logits_bias"].reshape(-1)
        return tensors

    shapes = {their_name(name, TABLE): tensor.shape for name, tensor in adapted(_blank_state(model.config)).items()}
    renamed = rename(adapted(model.state_dict()), _INVERSE, shapes, system=SYSTEM, ignored=COPIES)
    return {name: tensor.detach().to("cpu", torch.float32, copy=True) for name, tensor in renamed.items()}


def _blank_state(config: VanillaTransformerConfig) -> dict[str, Tensor]:
    """Return the tensors that a model of this config has, without memory behind them; copies left out."""
    with torch.device("meta"):
        state = VanillaTransformerForConditionalGeneration(config).state_dict()
    return {name: tensor for name, tensor in state.items() if name not in COPIES}


def _fuse(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    fused = {name: tensor for name, tensor in tensors.items() if "[" not in name}
    for name in tensors:
        scope, _, rest = name.partition("[")
        parts = next((parts for end, parts in FUSED.items() if rest and scope.endswith(end)), ())
        kind = rest.partition("]")[2]
        if parts and scope + kind not in fused:
            fused[scope + kind] = torch.cat([tensors[f"{scope}[{part}]{kind}"] for part in parts])
    return fused


def _set(spec: Any, name: str, tensor: Tensor) -> None:
    """Put a tensor to its place: "decoder/layer_2/ffn/linear_0/bias" is spec.decoder.layer[2].ffn.linear_0.bias."""
    *scopes, last = name.split("/")
    for scope in scopes:
        stem, _, number = scope.rpartition("_")
        spec = getattr(spec, scope) if hasattr(spec, scope) else getattr(spec, stem)[int(number)]
    setattr(spec, last, tensor)


# ---------------------------------------------------------------------------------------- CTranslate2 → ours


def from_ctranslate2(
    folder: str | Path,
) -> tuple[VanillaTransformerForConditionalGeneration, PreTrainedTokenizerBase | None]:
    """Read a CTranslate2 folder of an encoder-decoder Transformer; ctranslate2 itself is not needed.

    Quantised matrices become the float32 ones that they stand for. Where their vocabularies have no padding token, or
    decoding starts from a zero embedding (Marian), a token is added for it: with zero embeddings and a logit of -100.

    Args:
        folder: The folder, with model.bin, config.json and vocabularies.

    Returns:
        The model in evaluation mode, and the tokenizer if its files are there (those of `to_ctranslate2` are).
        Otherwise ids are places in the vocabulary files, and how a text is cut into tokens is the original's matter.

    Raises:
        ConversionError: What our class can't express, named, or a damaged file.
    """
    folder = Path(folder)
    settings = read_settings(folder)
    file = read_model_file(folder / "model.bin")
    if file.specification != "TransformerSpec" or file.revision not in _REVISIONS:
        raise ConversionError(
            f"{folder} holds a {file.specification} of revision {file.revision}: encoder-decoder models, "
            f"TransformerSpec of revisions {_REVISIONS[0]} to {_REVISIONS[-1]}, can be read."
        )
    weights = {name: tensor for name, tensor in file.variables.items() if tensor.dim()}
    attributes = {name: tensor for name, tensor in file.variables.items() if not tensor.dim()}
    config = config_from(settings, weights, attributes)
    shapes = {name: tuple(tensor.shape) for name, tensor in _blank_state(config).items()}
    tensors = rename(_split(weights), TABLE, shapes, system=SYSTEM)
    model = VanillaTransformerForConditionalGeneration(config)
    load_own_tensors(model, tensors)
    return model.eval(), _read_tokenizer(folder, settings)


def _split(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    tensors = {}
    for name, tensor in weights.items():
        scope, _, kind = name.rpartition("/")
        parts = next((parts for end, parts in FUSED.items() if scope.endswith(end)), None)
        if parts is None:
            tensors[name] = tensor
        elif len(tensor) % len(parts):
            raise ConversionError(f"{name} has {len(tensor)} rows, which are not {' + '.join(parts)} of one size.")
        else:
            pieces = tensor.chunk(len(parts))
            tensors.update({f"{scope}[{part}]/{kind}": piece for part, piece in zip(parts, pieces, strict=True)})
    return tensors


def _read_tokenizer(folder: Path, settings: FolderSettings) -> PreTrainedTokenizerBase | None:
    if any(settings.added):
        begin, end = (repr(token) if token else "nothing" for token in settings.added)
        warnings.warn(
            f"CTranslate2 puts {begin} before and {end} behind every source of this model, by its config.json: the "
            "tokenizer has to do that now.",
            stacklevel=3,
        )
    if not (folder / "tokenizer_config.json").is_file():
        return None
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(str(folder))
    for token, number in tokenizer.get_vocab().items():
        if number >= len(settings.source) or settings.source[number] != token:
            raise ConversionError(
                f"The tokenizer in {folder} has {token!r} as {number}, the source vocabulary has not."
            )
    return tokenizer


read = from_ctranslate2
