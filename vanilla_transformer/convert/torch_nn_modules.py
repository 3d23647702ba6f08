"""The modules of `torch.nn.Transformer`: what they say of a model, how to make them, and how their tensors are cut."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .renaming import ConversionError


@dataclass
class TorchTransformer:
    """A `torch.nn.Transformer` and what is around it.

    Attributes:
        transformer: The two stacks, `batch_first=True`.
        source_embedding: [V, D].
        target_embedding: [V of the target, D]; the same tensor as the source's where they are shared.
        output_weight: [V of the target, D]; the same tensor as the target's embedding where they are tied.
        output_bias: [V of the target], or None.
    """

    transformer: nn.Transformer
    source_embedding: Tensor
    target_embedding: Tensor
    output_weight: Tensor
    output_bias: Tensor | None = None


def layout_of(transformer: nn.Transformer) -> dict[str, Any]:
    """Return the config's fields that the modules say and their tensors do not."""
    _expect_type("transformer", transformer, nn.Transformer)
    _expect_type("custom_encoder", transformer.encoder, nn.TransformerEncoder)
    _expect_type("custom_decoder", transformer.decoder, nn.TransformerDecoder)
    values: dict[str, set[Any]] = {}

    def note(name: str, value: Any) -> None:
        values.setdefault(name, set()).add(value)

    for side, stack, kind in (
        ("encoder", transformer.encoder, nn.TransformerEncoderLayer),
        ("decoder", transformer.decoder, nn.TransformerDecoderLayer),
    ):
        if stack.norm is not None and not isinstance(stack.norm, nn.Identity):
            _expect_type(f"{side}.norm", stack.norm, nn.LayerNorm)
            note("layer_norm_eps", stack.norm.eps)
        for number, layer in enumerate(stack.layers):
            _expect_type(f"{side}.layers.{number}", layer, kind)
            note("norm_position", "pre" if layer.norm_first else "post")
            note("activation_function", _activation_name(layer.activation))
            note("activation_dropout", layer.dropout.p)
            for part, child in layer.named_children():
                if part.endswith("_attn"):
                    _check_attention(f"{side}.layers.{number}.{part}", child)
                    note(f"{side}_attention_heads", child.num_heads)
                    note("attention_dropout", child.dropout)
                elif part.startswith("norm"):
                    note("layer_norm_eps", child.eps)
                elif part in ("dropout1", "dropout2", "dropout3"):
                    note("dropout", child.p)
    different = {name: sorted(map(str, found)) for name, found in values.items() if len(found) > 1}
    if different:
        raise ConversionError(f"The layers differ, and this class has one value for all: {different}.")
    return {name: next(iter(found)) for name, found in values.items()}


def _expect_type(name: str, module: object, kind: type) -> None:
    if type(module) is not kind:  # a subclass can compute something else
        raise ConversionError(
            f"{name} is a {type(module).__name__}: only a plain torch.nn.{kind.__name__} is known to compute what "
            "this class computes."
        )


def _check_attention(name: str, attention: nn.MultiheadAttention) -> None:
    _expect_type(name, attention, nn.MultiheadAttention)
    width = attention.embed_dim
    for field, value, needed in (
        ("kdim", attention.kdim, width),
        ("vdim", attention.vdim, width),
        ("add_bias_kv", attention.bias_k is not None, False),
        ("add_zero_attn", attention.add_zero_attn, False),
    ):
        if value != needed:
            raise ConversionError(f"{name}: {field}={value} cannot be expressed, {needed} is needed.")


def _activation_name(activation: Any) -> str:
    if activation in (nn.functional.relu, torch.relu) or isinstance(activation, nn.ReLU):
        return "relu"
    is_exact_gelu = isinstance(activation, nn.GELU) and activation.approximate == "none"
    if activation is nn.functional.gelu or is_exact_gelu:
        return "gelu"
    raise ConversionError(f"activation={activation!r:.80} is not known here: relu and gelu are converted.")


def check_expressible(config: Any) -> None:
    """Raise a ConversionError for what a config has and `nn.Transformer` lacks."""
    for side in ("encoder", "decoder"):
        heads = getattr(config, f"{side}_attention_heads")
        d_k, d_v = config.head_dims(heads)
        if not d_k * heads == d_v * heads == config.d_model:
            raise ConversionError(
                f"d_k={d_k}, d_v={d_v} with {side}_attention_heads={heads}: nn.MultiheadAttention has heads of "
                f"d_model / h = {config.d_model / heads:g} only."
            )
    if config.activation_function not in ("relu", "gelu"):
        raise ConversionError(
            f"activation_function={config.activation_function!r}: nn.Transformer knows relu and gelu by name."
        )
    if config.position_embedding_type == "learned":
        raise ConversionError("position_embedding_type='learned': position tables have no place beside the stacks.")


def empty_transformer(config: Any) -> nn.Transformer:
    """Return stacks for the weights of a model of `config`, which `check_expressible` has passed."""
    stacks = {}
    kinds: tuple[tuple[str, Any, Any], ...] = (
        ("encoder", nn.TransformerEncoderLayer, nn.TransformerEncoder),
        ("decoder", nn.TransformerDecoderLayer, nn.TransformerDecoder),
    )
    for side, layer_class, stack_class in kinds:
        heads = getattr(config, f"{side}_attention_heads")
        layer = layer_class(
            config.d_model,
            heads,
            getattr(config, f"{side}_ffn_dim"),
            dropout=config.dropout,
            activation=config.activation_function,
            layer_norm_eps=config.layer_norm_eps,
            batch_first=True,
            norm_first=config.norm_position == "pre",
        )
        layer.dropout.p = config.activation_dropout
        for name in [name for name, _ in layer.named_children() if name.endswith("_attn")]:
            attention = nn.MultiheadAttention(
                config.d_model, heads, config.attention_dropout, bias=config.attention_bias, batch_first=True
            )
            setattr(layer, name, attention)
        norm = nn.LayerNorm(config.d_model, config.layer_norm_eps) if config.has_final_norm else None
        nested = {"enable_nested_tensor": False} if side == "encoder" else {}  # it would warn of pre-norm
        stacks[side] = stack_class(layer, getattr(config, f"{side}_layers"), norm, **nested)
    return nn.Transformer(
        config.d_model,
        config.encoder_attention_heads,
        custom_encoder=stacks["encoder"],
        custom_decoder=stacks["decoder"],
        batch_first=True,
    )


def split_projections(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors with each "in_proj_weight" [3D, D] as "in_proj_weight[q]", "[k]", "[v]"; biases likewise."""
    split: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name.endswith((".in_proj_weight", ".in_proj_bias")):
            if len(tensor) % 3:
                raise ConversionError(f"{name} {list(tensor.shape)} cannot be split into queries, keys and values.")
            split |= {f"{name}[{part}]": rows for part, rows in zip("qkv", tensor.chunk(3), strict=True)}
        else:
            split[name] = tensor
    return split


def join_projections(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Undo `split_projections`."""
    joined = {name: tensor for name, tensor in tensors.items() if not name.endswith("]")}
    for name in tensors:
        if name.endswith("[q]"):
            whole = name.removesuffix("[q]")
            joined[whole] = torch.cat([tensors[f"{whole}[{part}]"] for part in "qkv"])
    return joined


def fill_missing_biases(tensors: dict[str, Tensor], attention_bias: bool) -> None:
    """Add zeros for the biases of modules made with `bias=False`, where ours have biases: the sums are the same.

    Only where a stack has none at all in its attentions, in the rest of its layers, or in its final norm; a single
    missing bias stays missing.

    Args:
        tensors: Split tensors, added to.
        attention_bias: Whether our attentions have biases.
    """
    weights = {name: _bias_group(name) for name in tensors if "weight" in name and _bias_group(name)}
    with_bias = {_bias_group(name) for name in tensors if "bias" in name}
    for name, group in weights.items():
        if group not in with_bias and (attention_bias or "attention" not in group):
            tensors[name.replace("weight", "bias")] = tensors[name].new_zeros(len(tensors[name]))


def _bias_group(name: str) -> str:
    side, _, rest = name.partition(".")
    if side not in ("encoder", "decoder"):
        return ""
    part = "attention" if "_attn." in rest else "layers" if rest.startswith("layers.") else "norm"
    return f"{side} {part}"
