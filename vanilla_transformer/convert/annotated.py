"""Models of "The Annotated Transformer" (Rush 2018; Huang et al. 2022) as ours.

The layout is that of the state dict of its `make_model`, which many courses and repositories took over:
`encoder.layers.0.self_attn.linears.0.weight`, `sublayer.0.norm.a_2`, `feed_forward.w_1`, `src_embed.0.lut`,
`generator.proj`. It is a pre-norm model (unlike the paper that it annotates), with interleaved sinusoids, embeddings
times sqrt(d_model), and biases in all projections and on the output.

What carries over: all weights; sizes; which embedding matrices are one. The state dict says neither the number of
heads nor dropout rates nor token ids: the caller gives the first, the others have the values of its example.

What does not: its LayerNorm is a · (x - mean) / (std + ε) + b with the standard deviation of a sample, over D - 1.
Ours divides by sqrt(variance + ε), over D. The factor between the two deviations, sqrt((D - 1) / D), is a constant
and goes into the gain. What remains is where ε stands: with ours next to nothing, the normalised vector is larger by
the factor 1 + ε / std, a relative difference of about 1e-6 where the deviation is about 1. So conversion is refused
with the measured difference of the logits, unless `allow_layer_norm=True` accepts it. Its vocabulary, a pickle of
torchtext over spaCy's words, is not read.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vanilla_transformer.modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration

from .reading import (
    OUTPUT,
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
from .renaming import ConversionError, Table, weight_and_bias

SYSTEM = "Annotated Transformer"
# What the layout means in our config's fields.
_LAYOUT = {
    "activation_function": "relu",
    "norm_position": "pre",
    "position_embedding_type": "sinusoidal",
    "attention_bias": True,
    "output_bias": True,
    "layer_norm_eps": 1e-12,  # so that ours adds nothing; see the docstring of the module
}


def _attention(theirs: str, ours: str) -> dict[str, str]:
    return {
        f"{theirs}.linears.{number}.{kind}": f"{ours}.{name}_proj.{kind}"
        for number, name in enumerate(("q", "k", "v", "out"))
        for kind in ("weight", "bias")
    }


def _norm(theirs: str, ours: str) -> dict[str, str]:
    return {f"{theirs}.a_2": f"{ours}.weight", f"{theirs}.b_2": f"{ours}.bias"}


_ENCODER, _DECODER = "encoder.layers.{i}", "decoder.layers.{i}"
_OUR_ENCODER, _OUR_DECODER = "model.encoder.layers.{i}", "model.decoder.layers.{i}"
TABLE: Table = {
    "src_embed.0.lut.weight": SOURCE,
    **_attention(f"{_ENCODER}.self_attn", f"{_OUR_ENCODER}.self_attn"),
    **_norm(f"{_ENCODER}.sublayer.0.norm", f"{_OUR_ENCODER}.self_attn_layer_norm"),
    **weight_and_bias(f"{_ENCODER}.feed_forward.w_1", f"{_OUR_ENCODER}.fc1"),
    **weight_and_bias(f"{_ENCODER}.feed_forward.w_2", f"{_OUR_ENCODER}.fc2"),
    **_norm(f"{_ENCODER}.sublayer.1.norm", f"{_OUR_ENCODER}.final_layer_norm"),
    **_norm("encoder.norm", "model.encoder.layer_norm"),
    "tgt_embed.0.lut.weight": TARGET,
    **_attention(f"{_DECODER}.self_attn", f"{_OUR_DECODER}.self_attn"),
    **_norm(f"{_DECODER}.sublayer.0.norm", f"{_OUR_DECODER}.self_attn_layer_norm"),
    **_attention(f"{_DECODER}.src_attn", f"{_OUR_DECODER}.encoder_attn"),
    **_norm(f"{_DECODER}.sublayer.1.norm", f"{_OUR_DECODER}.encoder_attn_layer_norm"),
    **weight_and_bias(f"{_DECODER}.feed_forward.w_1", f"{_OUR_DECODER}.fc1"),
    **weight_and_bias(f"{_DECODER}.feed_forward.w_2", f"{_OUR_DECODER}.fc2"),
    **_norm(f"{_DECODER}.sublayer.2.norm", f"{_OUR_DECODER}.final_layer_norm"),
    **_norm("decoder.norm", "model.decoder.layer_norm"),
    "generator.proj.weight": OUTPUT,
    "generator.proj.bias": "final_logits_bias",
}
# Tables of sinusoids: computed by our model, and checked against it.
_POSITIONS = ("src_embed.1.pe", "tgt_embed.1.pe")
# Exceptions to the table, made by `_adapt` before renaming:
# - "*.a_2" [D] · sqrt((D - 1) / D): their deviation is a sample's;
# - "generator.proj.bias" [V] → [1, V];
# - matrices that are one are kept once (`place_embeddings`).


def from_annotated(
    state_dict: Mapping[str, Tensor],
    *,
    heads: int,
    allow_layer_norm: bool = False,
    layer_norm_eps: float = 1e-6,
    dropout: float = 0.1,
    attention_dropout: float = 0.1,
    pad_token_id: int = 2,
    eos_token_id: int = 1,
    bos_token_id: int = 0,
    decoder_start_token_id: int = 0,
    **config: Any,
) -> VanillaTransformerForConditionalGeneration:
    """Convert the state dict of an Annotated Transformer.

    Args:
        state_dict: Its tensors by name.
        heads: Number of heads h, in all attentions; the state dict does not say it.
        allow_layer_norm: Accept the remaining difference of the LayerNorms; it is measured, and a warning says it.
        layer_norm_eps: ε of its LayerNorms, 1e-6 there.
        dropout: Its `dropout`, on sublayers, positions and inside the feed-forward layers.
        attention_dropout: Dropout on attention weights; `make_model` leaves it at 0.1.
        pad_token_id: Its "<blank>", 2 in its translation example.
        eos_token_id: Its "</s>".
        bos_token_id: Its "<s>".
        decoder_start_token_id: What decoding starts with, "<s>" there.
        **config: Further fields of `VanillaTransformerConfig`, such as `label_smoothing`.

    Returns:
        The model, in the tensors' dtype.

    Raises:
        ConversionError: Unknown, missing or misshapen tensors, other positions, a number of heads that does not fit,
            or `allow_layer_norm` is False.
    """
    tensors, table, sharing = place_embeddings(
        state_dict, TABLE, "src_embed.0.lut.weight", "tgt_embed.0.lut.weight", "generator.proj.weight"
    )
    read = {
        **_LAYOUT,
        **_sizes(state_dict),
        **sharing,
        "encoder_attention_heads": heads,
        "decoder_attention_heads": heads,
        "dropout": dropout,
        "attention_dropout": attention_dropout,
        "activation_dropout": dropout,
        "pad_token_id": pad_token_id,
        "eos_token_id": eos_token_id,
        "bos_token_id": bos_token_id,
        "decoder_start_token_id": decoder_start_token_id,
    }
    our_config = make_config(SYSTEM, read, config)
    for name in _POSITIONS:
        if name in tensors:
            check_positions(tensors[name], name, our_config)
    model = make_model(our_config, _adapt(tensors), table, system=SYSTEM, ignored=_POSITIONS)
    _report_layer_norms(model, layer_norm_eps, allow_layer_norm)
    return model


def read(path: str | Path, **options: Any) -> tuple[VanillaTransformerForConditionalGeneration, None]:
    """Read a state dict that `torch.save` or safetensors wrote; the options are those of `from_annotated`.

    Returns:
        The model, and None: the tokens are spaCy's words, for which there is no stock tokenizer.

    Raises:
        ConversionError: As `from_annotated`, or the file is no state dict; nothing in it is executed.
    """
    return from_annotated(load_state_dict_file(path), **options), None


def _sizes(state_dict: Mapping[str, Tensor]) -> dict[str, int]:
    vocab_size, d_model = shape_of(state_dict, "src_embed.0.lut.weight")
    return {
        "vocab_size": vocab_size,
        "decoder_vocab_size": shape_of(state_dict, "tgt_embed.0.lut.weight")[0],
        "d_model": d_model,
        "encoder_layers": count_layers(state_dict, "encoder.layers."),
        "decoder_layers": count_layers(state_dict, "decoder.layers."),
        "encoder_ffn_dim": shape_of(state_dict, "encoder.layers.0.feed_forward.w_1.weight")[0],
        "decoder_ffn_dim": shape_of(state_dict, "decoder.layers.0.feed_forward.w_1.weight")[0],
    }


def _adapt(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    adapted = dict(tensors)
    for name, tensor in tensors.items():
        if name.endswith(".a_2"):
            adapted[name] = tensor * _deviation_factor(tensor.shape[-1])
        elif name == "generator.proj.bias":
            adapted[name] = tensor[None]
    return adapted


def _deviation_factor(d_model: int) -> float:
    """Deviation over D divided by deviation over D - 1."""
    return math.sqrt((d_model - 1) / d_model)


class _AnnotatedLayerNorm(nn.Module):
    """Its formula, on the weights of a converted LayerNorm."""

    def __init__(self, norm: nn.LayerNorm, eps: float) -> None:
        super().__init__()
        self.gain = norm.weight.detach() / _deviation_factor(norm.weight.shape[0])
        self.bias, self.eps = norm.bias.detach(), eps

    def forward(self, x: Tensor) -> Tensor:
        deviation = x.std(-1, keepdim=True)  # of a sample, over D - 1
        return self.gain * (x - x.mean(-1, keepdim=True)) / (deviation + self.eps) + self.bias


@torch.no_grad()
def layer_norm_difference(model: VanillaTransformerForConditionalGeneration, eps: float = 1e-6) -> tuple[float, float]:
    """Measure what the place of ε changes, in float64 on four random sentences of 16 tokens.

    Args:
        model: A converted model.
        eps: ε of its LayerNorms in the other system.

    Returns:
        The largest difference of a logit to the same model with their LayerNorms, and the largest logit.
    """
    ours = copy.deepcopy(model).double().eval()
    theirs = copy.deepcopy(ours)
    for parent in list(theirs.modules()):
        for name, child in parent.named_children():
            if isinstance(child, nn.LayerNorm):
                setattr(parent, name, _AnnotatedLayerNorm(child, eps))
    generator = torch.Generator().manual_seed(0)
    batch = {
        "input_ids": torch.randint(model.config.vocab_size, (4, 16), generator=generator),
        "decoder_input_ids": torch.randint(model.config.decoder_vocab_size, (4, 16), generator=generator),
    }
    expected, logits = theirs(**batch).logits, ours(**batch).logits
    return float((logits - expected).abs().max()), float(expected.abs().max())


def _report_layer_norms(model: VanillaTransformerForConditionalGeneration, eps: float, is_allowed: bool) -> None:
    difference, largest = layer_norm_difference(model, eps)
    measured = (
        f"on random sentences the logits of the converted model differ by {difference:.1e} at most (they reach "
        f"{largest:.3g}), because its LayerNorm adds ε={eps:g} to the standard deviation and ours to the variance"
    )
    if not is_allowed:
        raise ConversionError(
            f"layer_norm: this class cannot express the LayerNorm of the Annotated Transformer exactly: {measured}. "
            "If that is good enough, pass allow_layer_norm=True."
        )
    warnings.warn(f"Annotated Transformer: {measured}.", stacklevel=3)
