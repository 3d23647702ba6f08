"""Transformer checkpoints of tensor2tensor, the paper authors' own system, as ours.

TensorFlow is not needed here: the variables come as a mapping of names to arrays, or as an `.npz` file of it, made
where TensorFlow is:

    reader = tf.train.load_checkpoint(folder)
    numpy.savez("variables.npz", **{n: reader.get_tensor(n) for n in reader.get_variable_to_shape_map()})

What carries over: all weights, embedding matrices put together from their shards, one or separate vocabularies, and
from the hyperparameters heads, norms, dropout rates, label smoothing. `transformer_base_v1` is post-norm, as the paper
is (nothing before a sublayer, "dan" behind it: dropout, add, norm); `transformer_base_v2`, `transformer_base_v3` (now
`transformer_base`) and `transformer_big` are pre-norm ("n" before, "da" behind). Positions are the timing signal
with the sines first and timescales from 1 to 10,000, both included.

What has no place of its own and is folded into matrices, so that the function stays the same: the embedding of the
target space, which tensor2tensor adds to every source position (`target_space_id` says which), goes into the source
embeddings; and id 0, which starts the target and is embedded as zeros, gets a row of zeros in the target embeddings.
Matrices that are one there become separate ones by that, as far as their values then differ.

What cannot be expressed and is refused: other layers, attentions, norms and positions than these, see `_EXPRESSIBLE`.
Not carried: the optimiser's variables, and the subword vocabulary, whose way to split words no stock tokenizer has.
Its label smoothing spreads over V - 1 classes, ours over V.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vanilla_transformer.modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration

from .reading import OUTPUT, SOURCE, TARGET, count_layers, make_config, make_model, place_embeddings, shape_of
from .renaming import ConversionError, Table
from .tensor2tensor_embeddings import TARGET_SPACE, join_shards

SYSTEM = "tensor2tensor"

_PRE_NORM = {"layer_preprocess_sequence": "n", "layer_postprocess_sequence": "da"}
_BASE_V1 = {
    "num_heads": 8,
    "layer_preprocess_sequence": "none",
    "layer_postprocess_sequence": "dan",
    "layer_prepostprocess_dropout": 0.1,
    "label_smoothing": 0.1,
}
_BASE = {**_BASE_V1, **_PRE_NORM, "attention_dropout": 0.1, "relu_dropout": 0.1}
HPARAMS: dict[str, dict[str, Any]] = {
    "transformer_base_v1": _BASE_V1,
    "transformer_base_v2": _BASE,
    "transformer_base_v3": _BASE,
    "transformer_base": _BASE,
    "transformer_big": {**_BASE, "num_heads": 16, "layer_prepostprocess_dropout": 0.3},
}
"""The registered hyperparameter sets that can be named; any other goes in as a mapping."""

# Hyperparameters with the values that this class can express, the first of them tensor2tensor's own default.
_EXPRESSIBLE: dict[str, tuple[Any, ...]] = {
    "norm_type": ("layer",),
    "pos": ("timing",),
    "self_attention_type": ("dot_product",),
    "ffn_layer": ("dense_relu_dense",),
    "proximity_bias": (False,),
    "causal_decoder_self_attention": (True,),
    "unidirectional_encoder": (False,),
    "attention_variables_3d": (False,),
    "prepend_mode": ("none",),
    "symbol_dropout": (0.0,),
    "num_area_layers": (0,),
    "hard_attention_k": (0,),
    "recurrent_memory_by_layer": (None,),
}


def _norm(theirs: str, ours: str) -> dict[str, str]:
    norm = f"{theirs}/layer_prepostprocess/layer_norm/layer_norm"
    return {f"{norm}_scale": f"{ours}.weight", f"{norm}_bias": f"{ours}.bias"}


def _attention(theirs: str, ours: str) -> dict[str, str]:
    names = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "output_transform": "out_proj"}
    return {f"{theirs}/multihead_attention/{t}/kernel": f"{ours}.{o}.weight" for t, o in names.items()}


def _ffn(theirs: str, ours: str) -> dict[str, str]:
    return {
        f"{theirs}/ffn/conv{number}/{kind}": f"{ours}.fc{number}.{our_kind}"
        for number in (1, 2)
        for kind, our_kind in (("kernel", "weight"), ("bias", "bias"))
    }


_ENCODER, _DECODER = "body/encoder/layer_{i}", "body/decoder/layer_{i}"
_OUR_ENCODER, _OUR_DECODER = "model.encoder.layers.{i}", "model.decoder.layers.{i}"
# Names without the scope "transformer/" around all of them.
TABLE: Table = {
    "source_embedding": SOURCE,
    **_norm(f"{_ENCODER}/self_attention", f"{_OUR_ENCODER}.self_attn_layer_norm"),
    **_attention(f"{_ENCODER}/self_attention", f"{_OUR_ENCODER}.self_attn"),
    **_norm(f"{_ENCODER}/ffn", f"{_OUR_ENCODER}.final_layer_norm"),
    **_ffn(_ENCODER, _OUR_ENCODER),
    **_norm("body/encoder", "model.encoder.layer_norm"),
    "target_embedding": TARGET,
    **_norm(f"{_DECODER}/self_attention", f"{_OUR_DECODER}.self_attn_layer_norm"),
    **_attention(f"{_DECODER}/self_attention", f"{_OUR_DECODER}.self_attn"),
    **_norm(f"{_DECODER}/encdec_attention", f"{_OUR_DECODER}.encoder_attn_layer_norm"),
    **_attention(f"{_DECODER}/encdec_attention", f"{_OUR_DECODER}.encoder_attn"),
    **_norm(f"{_DECODER}/ffn", f"{_OUR_DECODER}.final_layer_norm"),
    **_ffn(_DECODER, _OUR_DECODER),
    **_norm("body/decoder", "model.decoder.layer_norm"),
    "softmax": OUTPUT,
}
# Exceptions to the table:
# - post-norm models (v1) have their norms in ".../layer_postprocess/layer_norm", and none behind a stack;
# - kernels are [in, out], ours [out, in]; releases that made them by convolution have axes of size 1 before these;
# - the three embedding rows are put together from shards of rows, "symbol_modality_V_D/.../weights_0, ..._1, ...":
#   of "shared" (one matrix for all), or of "input_emb", "target_emb" and "softmax"; see `join_shards`;
# - "body/target_space_embedding/kernel" [32, D] goes into the source embeddings.
# Variables of the training: the step, the optimiser's, running averages of losses.
_OF_TRAINING = re.compile(r"global_step|(training|losses_avg|train_stats)/.*|beta\d_power|.*/(Adam|Adam_1|Adafactor)")


def from_tensor2tensor(
    variables: Mapping[str, Any],
    hparams: str | Mapping[str, Any],
    *,
    target_space_id: int | None = None,
    source_vocab_size: int | None = None,
    scope: str = "transformer",
    **config: Any,
) -> VanillaTransformerForConditionalGeneration:
    """Convert the variables of a tensor2tensor Transformer.

    Args:
        variables: Arrays (or tensors) by the variables' names.
        hparams: A name of `HPARAMS`, or hyperparameters by name, as in the model folder's `hparams.json`.
        target_space_id: The problem's target space, such as 3 for English, 6 for French, 8 for German tokens; needed
            where the checkpoint has embeddings of target spaces.
        source_vocab_size: Size of the source vocabulary; needed where there are two "shared" matrices.
        scope: Scope around all variables of the model.
        **config: Further fields of `VanillaTransformerConfig`.

    Returns:
        The model, in the arrays' dtype. Ids as there: padding and start 0, end 1.

    Raises:
        ConversionError: Unknown, missing or misshapen variables, or hyperparameters that cannot be expressed.
    """
    values = _checked_hparams(hparams)
    tensors = _model_tensors(variables, scope)
    fields = _fields(values, tensors)
    is_pre_norm = fields["norm_position"] == "pre"
    table = {
        theirs if is_pre_norm else theirs.replace("layer_prepostprocess", "layer_postprocess"): ours
        for theirs, ours in TABLE.items()
    }
    scale = fields["d_model"] ** 0.5 if fields["scale_embedding"] else 1.0
    tensors = join_shards(tensors, scale, target_space_id, source_vocab_size)
    fields["vocab_size"] = len(tensors["source_embedding"])
    fields["decoder_vocab_size"] = len(tensors["target_embedding"])
    placed, table, sharing = place_embeddings(tensors, table, "source_embedding", "target_embedding", "softmax")
    return make_model(make_config(SYSTEM, {**fields, **sharing}, config), placed, table, system=SYSTEM)


def read(
    path: str | Path, *, hparams: str | Path | Mapping[str, Any], **options: Any
) -> tuple[VanillaTransformerForConditionalGeneration, None]:
    """Read variables from an `.npz` file; nothing in it is executed.

    Args:
        path: The file.
        hparams: A name of `HPARAMS`, a mapping, or the path of an `hparams.json`.
        **options: Those of `from_tensor2tensor`.

    Returns:
        The model, and None: its subword vocabulary is not read.

    Raises:
        ConversionError: As `from_tensor2tensor`, or a file is not what it should be.
    """
    import numpy as np

    if isinstance(hparams, (str, Path)) and hparams not in HPARAMS:
        try:
            hparams = json.loads(Path(hparams).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConversionError(
                f"hparams={str(hparams)!r} is none of {', '.join(HPARAMS)} and no JSON file of them: {error}."
            ) from error
    try:
        with np.load(path, allow_pickle=False) as archive:
            variables = {name: archive[name] for name in archive.files}
    except Exception as error:  # by kind of damage an OSError, a ValueError, a BadZipFile, ...
        raise ConversionError(
            f"{path} was not read as an .npz file of arrays, and nothing in it was executed: {error}."
        ) from error
    return from_tensor2tensor(variables, str(hparams) if isinstance(hparams, Path) else hparams, **options), None


def _checked_hparams(hparams: str | Mapping[str, Any]) -> Mapping[str, Any]:
    if isinstance(hparams, str):
        if hparams not in HPARAMS:
            raise ConversionError(f"hparams={hparams!r} is none of {', '.join(HPARAMS)}: give a mapping.")
        hparams = HPARAMS[hparams]
    if not isinstance(hparams, Mapping):
        raise ConversionError(f"hparams must be a name or a mapping, got a {type(hparams).__name__}.")
    for name in ("num_heads", "layer_preprocess_sequence", "layer_postprocess_sequence"):
        if name not in hparams:
            raise ConversionError(f"hparams has no {name}, which no variable says.")
    for name, allowed in _EXPRESSIBLE.items():
        if hparams.get(name, allowed[0]) not in allowed:
            raise ConversionError(
                f"{name}={hparams[name]!r} cannot be expressed: this class has {' or '.join(map(repr, allowed))} only."
            )
    return hparams


def _model_tensors(variables: Mapping[str, Any], scope: str) -> dict[str, Tensor]:
    """Return the model's variables without their scope, kernels as [out, in]."""
    tensors = {}
    for name, array in variables.items():
        if _OF_TRAINING.fullmatch(name):
            continue
        try:
            tensor = torch.as_tensor(array)
        except (TypeError, ValueError) as error:
            raise ConversionError(f"{name} is no array of numbers: {error}.") from error
        inner = name.removeprefix(f"{scope}/")
        if name.endswith("/kernel") and inner != TARGET_SPACE:
            while tensor.dim() > 2 and tensor.shape[0] == 1:
                tensor = tensor[0]
            tensor = tensor.mT if tensor.dim() == 2 else tensor
        tensors[inner if inner != name else f"{name} (outside of {scope}/)"] = tensor
    return tensors


def _fields(hparams: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    sequences = hparams["layer_preprocess_sequence"], hparams["layer_postprocess_sequence"]
    norms = {("none", "dan"): "post", ("", "dan"): "post", ("n", "da"): "pre"}
    if sequences not in norms:
        raise ConversionError(
            f"layer_preprocess_sequence={sequences[0]!r} with layer_postprocess_sequence={sequences[1]!r} cannot be "
            'expressed: this class has "none" with "dan" (post-norm) and "n" with "da" (pre-norm).'
        )
    attention = "body/encoder/layer_0/self_attention/multihead_attention"
    heads = hparams["num_heads"]
    keys, d_model = shape_of(tensors, f"{attention}/q/kernel")
    values = shape_of(tensors, f"{attention}/v/kernel")[0]
    if not isinstance(heads, int) or heads < 1 or keys % heads or values % heads:
        raise ConversionError(f"num_heads={heads!r} does not divide keys of {keys} and values of {values} channels.")
    layers = {side: count_layers(tensors, f"body/{side}/layer_") for side in ("encoder", "decoder")}
    ffn = {side: shape_of(tensors, f"body/{side}/layer_0/ffn/conv1/kernel")[0] for side in layers}
    stated = {
        "hidden_size": {d_model},
        "filter_size": set(ffn.values()),
        "attention_key_channels": {keys, 0},
        "attention_value_channels": {values, 0},
        "num_encoder_layers": {layers["encoder"], 0},
        "num_decoder_layers": {layers["decoder"], 0},
    }
    for name, found in stated.items():
        if hparams.get(name) is not None and hparams[name] not in found:
            raise ConversionError(f"{name}={hparams[name]!r}, and the variables say {max(found)}.")
    return {
        "d_model": d_model,
        "d_k": None if keys == d_model else keys // heads,
        "d_v": None if values == d_model else values // heads,
        **{f"{side}_layers": number for side, number in layers.items()},
        **{f"{side}_ffn_dim": width for side, width in ffn.items()},
        **{f"{side}_attention_heads": heads for side in layers},
        "norm_position": norms[sequences],
        "layer_norm_eps": hparams.get("norm_epsilon", 1e-6),
        "dropout": hparams.get("layer_prepostprocess_dropout", 0.1),
        "attention_dropout": hparams.get("attention_dropout", 0.0),
        "activation_dropout": hparams.get("relu_dropout", 0.0),
        "label_smoothing": hparams.get("label_smoothing", 0.1),
        "activation_function": "relu",
        "position_embedding_type": "sinusoidal_tensor2tensor",
        "scale_embedding": hparams.get("multiply_embedding_mode", "sqrt_depth") == "sqrt_depth",
        **{"attention_bias": False, "output_bias": False},
        **{"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None, "decoder_start_token_id": 0},
    }
