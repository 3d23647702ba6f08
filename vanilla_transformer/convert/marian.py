"""MarianMT of transformers, the class of the Helsinki-NLP translation models, to ours and back.

MarianMT is the paper's post-norm Transformer with other details, and ours has a field for each, so that logits are
equal, and with them the tokens of greedy and beam search:

- sinusoids with all sines before all cosines: `sinusoid_layout="halves"`; biases in the attention: `attention_bias`;
- `final_logits_bias`: `output_bias`. There it is a buffer and stays as it is, here training changes it;
- LayerNorm with ε 1e-5; embeddings scaled or not; any activation; source and target vocabularies that are shared or
  separate, output projections that are tied or not;
- the padding token starts the decoder; a training loss without smoothing (`label_smoothing=0`);
- all generation settings. `gnmt_alpha` and `max_length_offset` become None: the library's ranking and lengths;
- the tokenizer: it stays a `MarianTokenizer`, which AutoTokenizer loads from a folder of ours too.

What differs and shows in no logit: Marian's inputs end at `max_position_embeddings`; its padding row gets no gradient
as an embedding; its encoder takes scaled `inputs_embeds`; padding on the left moves its positions.

Refused from Marian: an odd d_model, layer dropout, tables that are not its sinusoids, and old checkpoints that ask for
what `MarianMTModel` does not do (`normalize_before`, ...).

To Marian the paper's interleaved sinusoids go exactly as well: one permutation of the d_model axis, of all that meets
the residual stream, makes halves of them. Refused: pre-norm, other positions, an offset, d_k or d_v other than
d_model / h, and an ε other than 1e-5, which Marian's files cannot hold (`allow_layer_norm_eps=True` takes the
difference, whose size the refusal tells). The paper's ranking and length limit have no place there: the nearest that
the library has is set, with a warning. Embeddings shared beside an untied projection become two equal matrices.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import MarianConfig, MarianMTModel, PreTrainedTokenizerFast

from vanilla_transformer.attention_vanilla_transformer import sinusoids
from vanilla_transformer.configuration_vanilla_transformer import VanillaTransformerConfig
from vanilla_transformer.modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration
from vanilla_transformer.tokenizer_training import save_tokenizer

from .marian_settings import (
    LAYER_NORM_EPS,
    check_expressible,
    config_from_marian,
    config_to_marian,
    generation_config_to_marian,
    read_tokenizer,
)
from .reading import check_loading_report, check_vocabulary, with_library_ranking
from .renaming import ConversionError, Table, invert, load_own_tensors, own_shapes, rename, whole_folder

# Marian's names → ours. Ours were chosen to be the same; the table says which there are.
_ATTENTION = [f"{name}_proj.{part}" for name in ("q", "k", "v", "out") for part in ("weight", "bias")]
_LAYER = [
    *(f"self_attn.{name}" for name in _ATTENTION),
    *(
        f"{name}.{part}"
        for name in ("self_attn_layer_norm", "fc1", "fc2", "final_layer_norm")
        for part in ("weight", "bias")
    ),
]
_CROSS = [
    *(f"encoder_attn.{name}" for name in _ATTENTION),
    "encoder_attn_layer_norm.weight",
    "encoder_attn_layer_norm.bias",
]
TABLE: Table = {
    name: name
    for name in (
        "model.shared.weight",
        "model.encoder.embed_tokens.weight",
        "model.decoder.embed_tokens.weight",
        *(f"model.encoder.layers.{{i}}.{name}" for name in _LAYER),
        *(f"model.decoder.layers.{{i}}.{name}" for name in (*_LAYER, *_CROSS)),
        "lm_head.weight",
        "final_logits_bias",
    )
}
# Marian's sinusoids, computed here. They are compared with ours in `_check_positions`, and then carry nothing.
POSITIONS = ("model.encoder.embed_positions.weight", "model.decoder.embed_positions.weight")
# By the last two parts of a name: the axis of d_model, along which a tensor meets the residual stream. The others (the
# biases of q, k, v and fc1, the output's bias) do not meet it.
STREAM_AXIS = {
    **dict.fromkeys(("shared.weight", "embed_tokens.weight", "lm_head.weight"), 1),
    **dict.fromkeys(("q_proj.weight", "k_proj.weight", "v_proj.weight", "fc1.weight"), 1),
    **dict.fromkeys(("out_proj.weight", "out_proj.bias", "fc2.weight", "fc2.bias"), 0),
    **{
        f"{name}_layer_norm.{part}": 0
        for name in ("self_attn", "encoder_attn", "final")
        for part in ("weight", "bias")
    },
}


def from_marian(foreign: MarianMTModel) -> VanillaTransformerForConditionalGeneration:
    """Return our model with the weights and settings of a MarianMT model, in its dtype and on its device.

    Args:
        foreign: The model; it stays as it is.

    Returns:
        A model in evaluation mode, of equal logits [B, T, V]. `save_pretrained` writes it as a folder of ours.

    Raises:
        ConversionError: Something that our class does not express; the message says what. Or unknown, missing or
            misshapen tensors, all of them in one message.
    """
    if not isinstance(foreign, MarianMTModel):
        raise ConversionError(f"A MarianMTModel is needed, and this is a {type(foreign).__name__}.")
    stacks = (foreign.model.encoder, foreign.model.decoder)
    matrices = [*(stack.embed_tokens.weight for stack in stacks), foreign.lm_head.weight]
    # As the matrices are, whatever the config's two fields say: releases of the library read them differently.
    config = config_from_marian(foreign, shared=matrices[0] is matrices[1], tied=matrices[1] is matrices[2])
    for stack in stacks:
        _check_positions(stack.embed_positions.weight, config)
    model = VanillaTransformerForConditionalGeneration(config).to(device=foreign.device, dtype=foreign.dtype)
    tensors = foreign.state_dict()
    # The forward pass reads the stacks' own `embed_tokens`; "shared" is the same matrix, or one that nobody reads.
    tensors.pop("model.shared.weight", None)
    if config.share_encoder_decoder_embeddings:
        tensors["model.shared.weight"] = tensors["model.encoder.embed_tokens.weight"]
    tensors = {name: tensor for name, tensor in tensors.items() if name not in model.all_tied_weights_keys}
    load_own_tensors(model, rename(tensors, TABLE, own_shapes(model), system="MarianMT", ignored=POSITIONS))
    model.generation_config = with_library_ranking(foreign.generation_config)
    return model.eval()


def to_marian(
    model: VanillaTransformerForConditionalGeneration, *, allow_layer_norm_eps: bool = False
) -> MarianMTModel:
    """Return a MarianMT model with the weights and settings of ours, in its dtype and on its device.

    Args:
        model: The model; it stays as it is.
        allow_layer_norm_eps: Convert a model whose `layer_norm_eps` is not Marian's 1e-5, and take that its logits
            differ a little.

    Returns:
        A model in evaluation mode, of equal logits [B, T, V]. `save_pretrained` writes it as a folder of Marian.

    Raises:
        ConversionError: Something that MarianMT does not express; the message says what.
    """
    if not isinstance(model, VanillaTransformerForConditionalGeneration):
        raise ConversionError(
            f"A VanillaTransformerForConditionalGeneration is needed, and this is a {type(model).__name__}."
        )
    check_expressible(model.config)
    foreign = MarianMTModel(config_to_marian(model)).to(device=model.device, dtype=model.dtype)
    shapes = {name: shape for name, shape in own_shapes(foreign).items() if name not in POSITIONS}
    tensors = dict(model.state_dict())
    if not foreign.config.share_encoder_decoder_embeddings:
        tensors.pop("model.shared.weight", None)  # each stack has its own, maybe equal, matrix under its own name
    for name in set(shapes) - set(tensors):
        if name.endswith("bias"):  # Marian has all biases; those that ours lacks are zero
            tensors[name] = torch.zeros(shapes[name])
    tensors = {name: tensor for name, tensor in tensors.items() if name not in foreign.all_tied_weights_keys}
    renamed = rename(tensors, invert(TABLE), shapes, system="MarianMT")
    if model.config.sinusoid_layout == "interleaved":
        renamed = {name: _reorder(name, tensor) for name, tensor in renamed.items()}
    load_own_tensors(foreign, renamed)
    foreign.generation_config = generation_config_to_marian(model)
    foreign.eval()
    eps = model.config.layer_norm_eps
    if eps != LAYER_NORM_EPS and not allow_layer_norm_eps:
        difference, largest = _logit_difference(model, foreign)
        raise ConversionError(
            f"layer_norm_eps={eps:g}: MarianMT has {LAYER_NORM_EPS:g}, and its files cannot say otherwise. On random "
            f"tokens its logits would differ from this model's by up to {difference:.1e} (the largest is "
            f"{largest:.1f}). If you accept that, pass allow_layer_norm_eps=True."
        )
    return foreign


def read(folder: str | Path) -> tuple[VanillaTransformerForConditionalGeneration, Any]:
    """Read a checkpoint folder of MarianMT.

    Args:
        folder: A folder with config.json and weights, as downloaded from the Hub or saved by the library.

    Returns:
        Our model, and the folder's tokenizer or None. Both have `save_pretrained`.

    Raises:
        ConversionError: The folder is no whole MarianMT checkpoint, or something in it does not fit; see
            `from_marian`. Pickled code in a weights file counts as such, and is not run.
        ImportError: Its tokenizer needs sentencepiece, which is not installed.
    """
    path = Path(folder)
    if not (path / "config.json").is_file():
        raise ConversionError(
            f"{path} has no config.json. A model of the Hub has to be downloaded first: "
            "hf download Helsinki-NLP/opus-mt-en-de --local-dir FOLDER"
        )
    try:
        fields = json.loads((path / "config.json").read_text(encoding="utf-8"))
        if not isinstance(fields, dict) or fields.get("model_type") != "marian":
            raise ConversionError("config.json is not of the model type 'marian'")
        config = MarianConfig.from_pretrained(path)
        # 5.0 takes another field for it, and would then fill a projection that the file leaves out at random.
        config.tie_word_embeddings = bool(fields.get("tie_word_embeddings", True))
        asked = {"output_loading_info": True, "ignore_mismatched_sizes": True}  # refused below, with their names
        foreign, report = MarianMTModel.from_pretrained(path, config=config, **asked)
    except Exception as error:  # of many classes, by kind of damage and release
        raise ConversionError(f"{path} cannot be read as a checkpoint of MarianMT: {error}") from error
    check_loading_report(report, path)
    model, tokenizer = from_marian(foreign), read_tokenizer(path)
    check_vocabulary(tokenizer, model.config)
    return model, tokenizer


def write(
    model: VanillaTransformerForConditionalGeneration,
    tokenizer: Any,
    folder: str | Path,
    *,
    allow_layer_norm_eps: bool = False,
) -> None:
    """Write a model of ours as a checkpoint folder of MarianMT, whole or not at all.

    Args:
        model: The model.
        tokenizer: Its tokenizer, a `MarianTokenizer` or a stock fast one (AutoTokenizer then finds the latter), or
            None for none.
        folder: Where to; it must not exist, or be empty.
        allow_layer_norm_eps: See `to_marian`.

    Raises:
        ConversionError: See `to_marian`; or there is something in `folder` already.
    """
    with whole_folder(folder) as scratch:
        check_vocabulary(tokenizer, model.config)
        to_marian(model, allow_layer_norm_eps=allow_layer_norm_eps).save_pretrained(scratch)
        if isinstance(tokenizer, PreTrainedTokenizerFast):
            save_tokenizer(tokenizer, scratch)
        elif tokenizer is not None:
            tokenizer.save_pretrained(scratch)


# ---------------------------------------------------------------------------------------- from Marian


def _check_positions(table: Tensor, config: VanillaTransformerConfig) -> None:
    """Raise unless a table of positions [P, D] is what our model computes."""
    expected = sinusoids(torch.arange(len(table), device=table.device), config)
    if expected.shape == table.shape:
        tolerance = max(1e-6, torch.finfo(table.dtype).eps)  # they come from numpy, in float64, rounded
        if torch.allclose(table.to(expected.dtype), expected, rtol=0.0, atol=tolerance):
            return
    raise ConversionError(
        "The positions (embed_positions) are not Marian's sinusoids, sines before cosines: they were trained or come "
        "from another system, and this conversion would lose them."
    )


# ---------------------------------------------------------------------------------------- to Marian


def _reorder(name: str, tensor: Tensor) -> Tensor:
    """Bring d_model from sine, cosine, sine, ... to all sines, then all cosines."""
    axis = STREAM_AXIS.get(".".join(name.split(".")[-2:]))
    if axis is None:
        return tensor
    order = torch.arange(tensor.shape[axis], device=tensor.device).view(-1, 2).T.flatten()  # 0, 2, 4, ..., 1, 3, 5
    return tensor.index_select(axis, order)


@torch.no_grad()
def _logit_difference(
    model: VanillaTransformerForConditionalGeneration, foreign: MarianMTModel
) -> tuple[float, float]:
    """Return the largest difference of two models' logits on random tokens, and the largest logit."""
    generator, config = torch.Generator().manual_seed(0), model.config
    shape = (8, min(32, config.max_position_embeddings))
    sizes = (config.vocab_size, config.decoder_vocab_size)
    source, target = (torch.randint(size, shape, generator=generator).to(model.device) for size in sizes)
    was_training = model.training
    model.eval()
    try:
        ours, theirs = (x(input_ids=source, decoder_input_ids=target).logits.float() for x in (model, foreign))
    finally:
        model.train(was_training)
    return float((ours - theirs).abs().max()), float(ours.abs().max())
