"""FSMT of the transformers library (`facebook/wmt19-*`, `allenai/wmt*`) → this package.

FSMT is the library's port of fairseq's post-norm Transformer: biases in the attention, sinusoids of tensor2tensor,
counted from pad_token_id + 1, and three matrices for source, target and output.

What carries over: all weights, sizes, dropout rates, ids, the activation, the scale of the embeddings, the ε of the
LayerNorms, the settings of `generate()`, with the library's ranking and lengths, and the tokenizer as it is
(FSMTTokenizer: Moses, byte-pair encoding, a dictionary for each side; it needs `sacremoses` wherever it is used).

Where it differs from a copy:
- Matrices that are equal number for number become one: in the published checkpoints they are copies of a matrix that
  fairseq shared. Outputs are the same; further training keeps them one.
- The library (5.0 to 5.24) trains FSMT's sinusoids along in fine-tuning. Tables that are no longer sinusoids are
  carried as learned positions, whose number is limited.
- FSMT rounds the angles of its sinusoids to float32, and here they are float64: at position 1,000 they differ by 1e-4.
- A padding token inside a target, which no trained model writes, is a token like any other here; FSMT skips it in
  counting positions. Padding before or behind a sentence counts for neither.
- FSMTTokenizer encodes a target with the source's dictionary, here as there: where there are two, its
  `text_target=...` gives wrong ids. It is for translating, not for further training.

Refused, by a `ConversionError` that names the field: LayerDrop (`encoder_layerdrop`, `decoder_layerdrop`), LayerNorms
that differ in ε, an odd d_model, tensors that do not fit. Not carried: `init_std` (for fresh weights only), `langs`
(the tokenizer has them).
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, FSMTForConditionalGeneration, FSMTTokenizer

from vanilla_transformer.modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration

from .reading import check_loading_report, make_config, make_model, place_embeddings, with_library_ranking
from .renaming import ConversionError, Table

_LAYER = (
    "self_attn_layer_norm",
    "fc1",
    "fc2",
    "final_layer_norm",
    *(f"self_attn.{x}_proj" for x in ("q", "k", "v", "out")),
)
_CROSS = ("encoder_attn_layer_norm", *(f"encoder_attn.{x}_proj" for x in ("q", "k", "v", "out")))
_LAYERS = [f"model.encoder.layers.{{i}}.{module}" for module in _LAYER]
_LAYERS += [f"model.decoder.layers.{{i}}.{module}" for module in (*_LAYER, *_CROSS)]

# Our names are of the same family, so that most rows change nothing.
TABLE: Table = {
    "model.encoder.embed_tokens.weight": "model.encoder.embed_tokens.weight",
    "model.decoder.embed_tokens.weight": "model.decoder.embed_tokens.weight",
    "model.decoder.output_projection.weight": "lm_head.weight",
    **{f"{module}.{kind}": f"{module}.{kind}" for module in _LAYERS for kind in ("weight", "bias")},
}
# Sinusoids are computed here and left out; rows for tables that were trained.
POSITIONS: Table = {
    f"model.{side}.embed_positions.weight": f"model.{side}.embed_positions.weight" for side in ("encoder", "decoder")
}
# Fields of the same name and sense in both configurations.
_SAME = (
    *("d_model", "encoder_layers", "decoder_layers", "encoder_attention_heads", "decoder_attention_heads"),
    *("encoder_ffn_dim", "decoder_ffn_dim", "dropout", "attention_dropout", "activation_dropout"),
    *("activation_function", "max_position_embeddings", "scale_embedding", "use_cache"),
    *("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"),
)


def from_fsmt(foreign: FSMTForConditionalGeneration) -> VanillaTransformerForConditionalGeneration:
    """Return our model with the weights, the configuration and the generation settings of an FSMT model.

    Args:
        foreign: The model; it is not changed.

    Returns:
        A model in evaluation mode, on the CPU, in the type of `foreign`. For real tokens its logits [B, T, V] are
        FSMT's.

    Raises:
        ConversionError: A field or a tensor that does not fit; the message names it.
    """
    if not isinstance(foreign, FSMTForConditionalGeneration):
        raise ConversionError(f"from_fsmt takes an FSMTForConditionalGeneration, not a {type(foreign).__name__}.")
    tensors, table, sharing = place_embeddings(foreign.state_dict(), TABLE, *list(TABLE)[:3])
    is_learned = _are_positions_trained(foreign)
    config = make_config("FSMT", _fields(foreign, is_learned), sharing)
    table, ignored = ({**table, **POSITIONS}, []) if is_learned else (table, list(POSITIONS))
    model = make_model(config, tensors, table, system="FSMT", ignored=ignored)
    model.generation_config = with_library_ranking(foreign.generation_config)
    return model


def read(path: str | Path) -> tuple[VanillaTransformerForConditionalGeneration, FSMTTokenizer | None]:
    """Read an FSMT checkpoint.

    Args:
        path: The folder.

    Returns:
        Our model, and the checkpoint's tokenizer; None if the folder has no dictionaries.

    Raises:
        ConversionError: The weights file has too few or too many tensors, or something does not fit, see `from_fsmt`.
        ImportError: The checkpoint has dictionaries, and `sacremoses` is not installed.
    """
    if not Path(path, "config.json").is_file():
        raise ConversionError(f"{path} is not a folder with a config.json.")
    kind = AutoConfig.from_pretrained(path).model_type
    if kind != "fsmt":
        raise ConversionError(f"{path} holds a model of type {kind!r}, not 'fsmt'.")
    foreign, found = FSMTForConditionalGeneration.from_pretrained(
        path, output_loading_info=True, ignore_mismatched_sizes=True
    )
    # The library fills up what a file lacks with random numbers. Sinusoids it computes; older files have none.
    check_loading_report(found, path, computed=tuple(POSITIONS))
    tokenizer = None
    if Path(path, "vocab-src.json").is_file():
        require_sacremoses()
        tokenizer = FSMTTokenizer.from_pretrained(path)
    return from_fsmt(foreign), tokenizer


def require_sacremoses() -> None:
    """Raise an ImportError that says what to install, if FSMTTokenizer could not work."""
    if find_spec("sacremoses") is None:
        raise ImportError(
            "FSMTTokenizer splits words as Moses does and needs sacremoses: pip install 'vanilla-transformer[marian]'"
        )


def _fields(foreign: FSMTForConditionalGeneration, is_learned: bool) -> dict[str, Any]:
    theirs = foreign.config
    for name in ("encoder_layerdrop", "decoder_layerdrop"):
        if getattr(theirs, name):
            raise ConversionError(
                f"{name}={getattr(theirs, name)!r}: layers are never dropped here. It matters in training alone: to "
                f"go without, set config.{name} = 0.0 in the FSMT model."
            )
    epsilons = {module.eps for module in foreign.modules() if isinstance(module, nn.LayerNorm)}
    if len(epsilons) != 1:
        raise ConversionError(f"The LayerNorms have different ε, {sorted(epsilons)}, and here there is one for all.")
    if theirs.pad_token_id is None or theirs.decoder_start_token_id is None:
        raise ConversionError("pad_token_id and decoder_start_token_id have to be set in the FSMT configuration.")
    kept = {name: getattr(theirs, name, None) for name in ("prefix", "task_specific_params")}  # what pipelines read
    return {
        **{name: getattr(theirs, name) for name in _SAME},
        **{name: value for name, value in kept.items() if value is not None},
        "vocab_size": theirs.src_vocab_size,
        "decoder_vocab_size": theirs.tgt_vocab_size,
        "label_smoothing": 0.0,  # its loss is plain
        "position_embedding_type": "learned" if is_learned else "sinusoidal_tensor2tensor",
        "position_offset": theirs.pad_token_id + 1,
        "attention_bias": True,
        "layer_norm_eps": epsilons.pop(),
    }


def _are_positions_trained(foreign: FSMTForConditionalGeneration) -> bool:
    """Return whether a table of positions is no longer what FSMT computes for it, in its own type."""
    for side in (foreign.model.encoder, foreign.model.decoder):
        module = side.embed_positions
        table = module.weight.detach().cpu()
        computed = module.get_embedding(*table.shape, module.padding_idx).to(table.dtype)
        if not torch.allclose(table, computed, rtol=0.0, atol=1e-6):
            return True
    return False
