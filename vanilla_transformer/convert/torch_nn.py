"""`torch.nn.Transformer` with embeddings beside it, both ways.

`nn.Transformer` is the two stacks alone; embeddings, positions and the output projection are the user's own. Here they
are tensors beside it (`TorchTransformer`), with our reading of what is around the stacks: embeddings times
sqrt(d_model) unless `scale_embedding=False`, sinusoids, then the stacks, then a linear layer.

What carries over: all weights (`in_proj_weight` is split), with or without biases; heads, widths and numbers of
layers, which may differ between the stacks; dropout rates; relu and gelu; ε; pre-norm and post-norm; which embedding
matrices are one. `batch_first` says nothing about weights: both converted ways are `batch_first=True`.

The final LayerNorms, which `nn.Transformer(...)` adds by default behind post-norm layers too and the paper does not
have, become `final_norm`.

What does not carry over, and is refused: a final LayerNorm of one stack only; a custom encoder, decoder, layer or
attention class; `kdim` and `vdim` other than d_model; `add_bias_kv`, `add_zero_attn`; other activations; layers that
differ from each other. In the other direction d_k or d_v other than d_model / h, learned positions, and activations
other than relu and gelu.

On disk (`read`, `write`): tensors under the names of PyTorch's translation tutorial (`transformer.`,
`src_tok_emb.embedding.weight`, `tgt_tok_emb.embedding.weight`, `generator.`), in a `.safetensors` file or one of
`torch.save`, and the rest, which a state dict does not say, as options or in `torch_nn.json`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from vanilla_transformer.modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration

from .reading import (
    OUTPUT,
    SHARED,
    SOURCE,
    TARGET,
    check_positions,
    count_layers,
    load_state_dict_file,
    make_config,
    make_model,
    place_embeddings,
    shape_of,
)
from .renaming import ConversionError, Table, invert, own_tensors, rename, weight_and_bias, whole_folder
from .torch_nn_modules import (
    TorchTransformer,
    check_expressible,
    empty_transformer,
    fill_missing_biases,
    join_projections,
    layout_of,
    split_projections,
)

SYSTEM = "torch.nn.Transformer"
_LAYOUT_FILE, _WEIGHTS_FILE = "torch_nn.json", "model.safetensors"


def _attention(theirs: str, ours: str) -> dict[str, str]:
    rows: dict[str, str] = {}
    for kind in ("weight", "bias"):
        rows |= {f"{theirs}.in_proj_{kind}[{name}]": f"{ours}.{name}_proj.{kind}" for name in "qkv"}
        rows[f"{theirs}.out_proj.{kind}"] = f"{ours}.out_proj.{kind}"
    return rows


_ENCODER, _DECODER = "encoder.layers.{i}", "decoder.layers.{i}"
_OUR_ENCODER, _OUR_DECODER = "model.encoder.layers.{i}", "model.decoder.layers.{i}"
TABLE: Table = {
    "source_embedding": SOURCE,
    **_attention(f"{_ENCODER}.self_attn", f"{_OUR_ENCODER}.self_attn"),
    **weight_and_bias(f"{_ENCODER}.norm1", f"{_OUR_ENCODER}.self_attn_layer_norm"),
    **weight_and_bias(f"{_ENCODER}.linear1", f"{_OUR_ENCODER}.fc1"),
    **weight_and_bias(f"{_ENCODER}.linear2", f"{_OUR_ENCODER}.fc2"),
    **weight_and_bias(f"{_ENCODER}.norm2", f"{_OUR_ENCODER}.final_layer_norm"),
    **weight_and_bias("encoder.norm", "model.encoder.layer_norm"),
    "target_embedding": TARGET,
    **_attention(f"{_DECODER}.self_attn", f"{_OUR_DECODER}.self_attn"),
    **weight_and_bias(f"{_DECODER}.norm1", f"{_OUR_DECODER}.self_attn_layer_norm"),
    **_attention(f"{_DECODER}.multihead_attn", f"{_OUR_DECODER}.encoder_attn"),
    **weight_and_bias(f"{_DECODER}.norm2", f"{_OUR_DECODER}.encoder_attn_layer_norm"),
    **weight_and_bias(f"{_DECODER}.linear1", f"{_OUR_DECODER}.fc1"),
    **weight_and_bias(f"{_DECODER}.linear2", f"{_OUR_DECODER}.fc2"),
    **weight_and_bias(f"{_DECODER}.norm3", f"{_OUR_DECODER}.final_layer_norm"),
    **weight_and_bias("decoder.norm", "model.decoder.layer_norm"),
    "output_weight": OUTPUT,
    "output_bias": "final_logits_bias",
}
# Exceptions to the table:
# - "*.in_proj_weight" [3D, D] is W^Q, W^K and W^V, one below the other: "[q]", "[k]", "[v]" here;
# - "output_bias" [V] ↔ [1, V];
# - biases that a model made with `bias=False` lacks, where ours always has them, are zeros;
# - matrices that are one are kept once.
_AROUND = (SHARED, SOURCE, TARGET, OUTPUT, "final_logits_bias")


# ---------------------------------------------------------------------------------------- theirs → ours


def from_torch_nn(
    transformer: nn.Transformer,
    source_embedding: Tensor,
    target_embedding: Tensor | None = None,
    output_weight: Tensor | None = None,
    output_bias: Tensor | None = None,
    **config: Any,
) -> VanillaTransformerForConditionalGeneration:
    """Convert a `torch.nn.Transformer` and the embeddings around it.

    Args:
        transformer: Stacks of the library's own layers.
        source_embedding: Source embeddings [V, D].
        target_embedding: Target embeddings [V, D]; None: the source's.
        output_weight: Output projection [V, D]; None: the target embeddings.
        output_bias: Its bias [V], or None.
        **config: What the stacks do not say: token ids, `scale_embedding`, `position_embedding_type`,
            `label_smoothing`, ... (fields of `VanillaTransformerConfig`).

    Returns:
        The model, in the tensors' dtype.

    Raises:
        ConversionError: Something that this class has no place for; the module's docstring lists it.
    """
    fields = layout_of(transformer)
    tensors = {name: tensor.detach() for name, tensor in transformer.state_dict().items()}
    target = source_embedding if target_embedding is None else target_embedding
    tensors["source_embedding"] = source_embedding.detach()
    tensors["target_embedding"] = target.detach()
    tensors["output_weight"] = (target if output_weight is None else output_weight).detach()
    if output_bias is not None:
        tensors["output_bias"] = output_bias.detach()
    return _convert(tensors, fields, config)


def _convert(
    tensors: Mapping[str, Tensor], fields: Mapping[str, Any], config: Mapping[str, Any]
) -> VanillaTransformerForConditionalGeneration:
    split = split_projections(tensors)
    has_final_norm = [f"{side}.norm.weight" in split for side in ("encoder", "decoder")]
    if has_final_norm[0] != has_final_norm[1]:
        raise ConversionError(
            f"norm: encoder.norm and decoder.norm are there: {has_final_norm}; this class has both or none."
        )
    attention_bias = any(name.endswith("in_proj_bias[q]") for name in split)
    fill_missing_biases(split, attention_bias)
    placed, table, sharing = place_embeddings(split, TABLE, "source_embedding", "target_embedding", "output_weight")
    if "output_bias" in placed:
        placed["output_bias"] = placed["output_bias"].reshape(1, -1)
    vocab_size, d_model = shape_of(split, "source_embedding")
    read = {
        **fields,
        **sharing,
        "final_norm": None if has_final_norm[0] == (fields["norm_position"] == "pre") else has_final_norm[0],
        "vocab_size": vocab_size,
        "decoder_vocab_size": shape_of(split, "target_embedding")[0],
        "d_model": d_model,
        "encoder_layers": count_layers(split, "encoder.layers."),
        "decoder_layers": count_layers(split, "decoder.layers."),
        "encoder_ffn_dim": shape_of(split, "encoder.layers.0.linear1.weight")[0],
        "decoder_ffn_dim": shape_of(split, "decoder.layers.0.linear1.weight")[0],
        "attention_bias": attention_bias,
        "output_bias": "output_bias" in split,
    }
    return make_model(make_config(SYSTEM, read, config), placed, table, system=SYSTEM)


# ---------------------------------------------------------------------------------------- ours → theirs


def to_torch_nn(model: VanillaTransformerForConditionalGeneration) -> TorchTransformer:
    """Convert one of our models to a `torch.nn.Transformer` with embeddings beside it.

    Args:
        model: Any whose heads are d_model / h wide, with sinusoidal positions.

    Returns:
        The stacks and matrices, copies in the model's dtype; the stacks in evaluation mode. The caller multiplies
        embeddings by sqrt(d_model) if `model.config.scale_embedding`, and adds the positions of the config.

    Raises:
        ConversionError: `nn.Transformer` cannot express the model; the message names field, value and reason.
    """
    config = model.config
    check_expressible(config)
    own = own_tensors(model)
    transformer = empty_transformer(config).to(model.dtype).eval()
    inverse = invert(TABLE)
    if SHARED in own:
        inverse[SHARED] = inverse.pop(SOURCE)
        del inverse[TARGET]
    shapes = {name: tensor.shape for name, tensor in split_projections(transformer.state_dict()).items()}
    shapes |= {inverse[name]: own[name].shape for name in _AROUND if name in own}
    theirs = rename(own, inverse, shapes, system=SYSTEM)
    source = theirs.pop("source_embedding").clone()
    target = theirs.pop("target_embedding").clone() if "target_embedding" in theirs else source
    output = theirs.pop("output_weight").clone() if "output_weight" in theirs else target
    bias = theirs.pop("output_bias").flatten().clone() if "output_bias" in theirs else None
    transformer.load_state_dict(join_projections(theirs))
    return TorchTransformer(transformer, source, target, output, bias)


# ---------------------------------------------------------------------------------------- files

_FILE_NAMES = {
    "source_embedding": "src_tok_emb.embedding.weight",
    "target_embedding": "tgt_tok_emb.embedding.weight",
    "output_weight": "generator.weight",
    "output_bias": "generator.bias",
}
_FILE_POSITIONS = "positional_encoding.pos_embedding"  # sinusoids: computed by our model, and checked against it
# Fields of our config that no tensor says, with the values of `nn.Transformer` and the tutorial; None: must be given.
_STATED: dict[str, Any] = {
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads", "norm_position")),
    **{"activation_function": "relu", "layer_norm_eps": 1e-5},
    **dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), 0.1),
    **{"pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 3, "decoder_start_token_id": 2},
    **{"scale_embedding": True, "position_embedding_type": "sinusoidal", "sinusoid_layout": "interleaved"},
    **{"position_offset": 0, "label_smoothing": 0.0},
}


def read(path: str | Path, **options: Any) -> tuple[VanillaTransformerForConditionalGeneration, Any]:
    """Read a folder that `write` made, or a state dict in the layout of PyTorch's translation tutorial.

    Args:
        path: The folder, or a `.safetensors` file or one of `torch.save`.
        **options: Fields of `VanillaTransformerConfig` that no tensor says. For a file `encoder_attention_heads`,
            `decoder_attention_heads` (`heads` gives both) and `norm_position` are needed; the others have the values
            of `nn.Transformer` and of the tutorial (ids: padding 1, start 2, end 3).

    Returns:
        The model, and the folder's tokenizer or None.

    Raises:
        ConversionError: As `from_torch_nn`, an option is missing, or the file is no state dict; nothing in it is
            executed.
    """
    path, stated, tokenizer = Path(path), dict(_STATED), None
    if path.is_dir():
        if not (path / _LAYOUT_FILE).is_file():
            raise ConversionError(f"{path} has no {_LAYOUT_FILE}: name the file of the state dict itself.")
        stated |= json.loads((path / _LAYOUT_FILE).read_text(encoding="utf-8"))
        if (path / "tokenizer_config.json").is_file():
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(path)
        path = path / _WEIGHTS_FILE
    if "heads" in options:
        stated |= dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), options.pop("heads"))
    stated |= options
    missing = [name for name, value in stated.items() if value is None and _STATED.get(name, 0) is None]
    if missing:
        raise ConversionError(f"A state dict does not say {', '.join(missing)}: give them as options.")
    state = load_state_dict_file(path)
    positions = state.pop(_FILE_POSITIONS, None)
    names = {theirs: ours for ours, theirs in _FILE_NAMES.items()}
    tensors = {names.get(name, name.removeprefix("transformer.")): tensor for name, tensor in state.items()}
    fields = {name: stated.pop(name) for name in ("norm_position", "activation_function", "layer_norm_eps")}
    model = _convert(tensors, fields, stated)
    if positions is not None:
        check_positions(positions, _FILE_POSITIONS, model.config)
    return model, tokenizer


def write(model: VanillaTransformerForConditionalGeneration, tokenizer: Any, folder: str | Path) -> None:
    """Write the tensors of `to_torch_nn` under the tutorial's names, the rest as JSON, and the tokenizer.

    Args:
        model: The model.
        tokenizer: Its tokenizer, or None.
        folder: A folder that does not exist or is empty.

    Raises:
        ConversionError: As `to_torch_nn`, or the folder is not empty; nothing is written then.
    """
    from safetensors.torch import save_file

    converted = to_torch_nn(model)
    tensors = {f"transformer.{name}": tensor for name, tensor in converted.transformer.state_dict().items()}
    around = {theirs: getattr(converted, ours) for ours, theirs in _FILE_NAMES.items()}
    # A copy of each: the file format has no shared tensors, and equal ones are found to be one when they are read.
    tensors |= {name: tensor.clone() for name, tensor in around.items() if tensor is not None}
    with whole_folder(folder) as scratch:
        save_file(tensors, scratch / _WEIGHTS_FILE, metadata={"format": "pt"})
        stated = {name: getattr(model.config, name) for name in _STATED}
        (scratch / _LAYOUT_FILE).write_text(json.dumps(stated, indent=2) + "\n", encoding="utf-8")
        if tokenizer is not None:
            tokenizer.save_pretrained(scratch)
