"""Smaller models made of trained ones: fewer layers, fewer heads, fewer tokens; each a whole model that trains on.

Each function returns a new model and leaves the one it was given as it was. What is taken away is gone, not masked:
the configuration says the new sizes, and every class, converter and script takes the result as any other model.
"""

from __future__ import annotations

import copy
import itertools
import json
import math
import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from tokenizers import pre_tokenizers
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from .attention_vanilla_transformer import VanillaTransformerAttention
from .configuration_vanilla_transformer import VanillaTransformerConfig
from .modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration

_LAYER = re.compile(r"model\.(encoder|decoder)\.layers\.(\d+)\.(.+)")
# Texts that are encoded together.
_CHUNK = 1000
# Where configurations hold ids of single tokens, or lists of them, and rules made of ids, which are not rewritten.
_ID_FIELDS = (
    "pad_token_id",
    "eos_token_id",
    "bos_token_id",
    "sep_token_id",
    "decoder_start_token_id",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "suppress_tokens",
    "begin_suppress_tokens",
)
_ID_RULES = ("bad_words_ids", "sequence_bias")


# ---------------------------------------------------------------------------------------- layers


def keep_layers(
    model: VanillaTransformerForConditionalGeneration,
    encoder: Sequence[int] | None = None,
    decoder: Sequence[int] | None = None,
) -> VanillaTransformerForConditionalGeneration:
    """Return a copy of a model with some of its layers, as the start of a student.

    A deep encoder under a shallow decoder loses the least for its speed (Kasai et al. 2021, arXiv 2006.10369). Layers
    that are far apart, the first and the last among them, are the better start (Shleifer and Rush 2020,
    arXiv 2010.13002). The copy is no good model before it is trained on.

    Args:
        model: The model to take layers from.
        encoder: Numbers of the encoder layers to keep, counted from 0, ascending; None keeps all.
        decoder: Those of the decoder.

    Raises:
        ValueError: A number is out of range, given twice or out of order, no layer is left or none goes, or the model
            is not a plain one of this package.
    """
    _check_model(model)
    config = copy.deepcopy(model.config)
    kept = {}
    for side, chosen in (("encoder", encoder), ("decoder", decoder)):
        count = getattr(config, f"{side}_layers")
        numbers = list(range(count) if chosen is None else chosen)
        if not numbers or numbers != sorted(set(numbers)) or not set(numbers) <= set(range(count)):
            raise ValueError(
                f"{side}={numbers} are no layers to keep: name one or more of 0 to {count - 1}, each once, ascending."
            )
        kept[side] = {old: new for new, old in enumerate(numbers)}
        setattr(config, f"{side}_layers", len(numbers))
    if (config.encoder_layers, config.decoder_layers) == (model.config.encoder_layers, model.config.decoder_layers):
        raise ValueError("All layers would be kept: name the layers to keep, fewer than the model has.")
    tensors = {}
    for name, tensor in model.state_dict().items():
        layer = _LAYER.fullmatch(name)
        if layer is None:
            tensors[name] = tensor
        elif int(layer[2]) in kept[layer[1]]:
            tensors[f"model.{layer[1]}.layers.{kept[layer[1]][int(layer[2])]}.{layer[3]}"] = tensor
    return _model_of(model, config, tensors)


# ---------------------------------------------------------------------------------------- heads


def head_importance(
    model: VanillaTransformerForConditionalGeneration, batches: Iterable[Mapping[str, Tensor]]
) -> dict[str, Tensor]:
    """Measure how much each attention head matters (Michel et al. 2019, "Are Sixteen Heads Really Better than One?").

        I_h = E_x |∂L(x) / ∂ξ_h|,   ξ_h = 1 a factor on the output of head h before W^O

    L(x) is the negative log-likelihood of sentence x's target, without dropout and label smoothing; the mean is over
    sentences. The paper then divides by the norm of a layer's values, which changes no order within a layer.

    Args:
        model: The model; its mode and its gradients stay as they are.
        batches: Batches with `input_ids`, `attention_mask` and `labels`, as a collator gives them.

    Returns:
        [H] in float64 for each attention, by its name: "model.decoder.layers.0.encoder_attn".

    Raises:
        ValueError: There is no batch, one lacks labels, or the model is not a plain one of this package.
    """
    _check_model(model)
    was_training = model.training
    attentions = _attentions(model)
    gates: dict[str, Tensor] = {}
    hooks = [
        attention.out_proj.register_forward_pre_hook(_gating(gates, name, attention.num_heads))
        for name, attention in attentions.items()
    ]
    total = {name: torch.zeros(attention.num_heads, dtype=torch.float64) for name, attention in attentions.items()}
    sentences = 0
    model.eval()
    try:
        for batch in batches:
            if "labels" not in batch:
                raise ValueError(f"A batch has no labels, only {', '.join(batch)}: importance is that of a loss.")
            with torch.enable_grad():
                # One item: the sum over the tokens, so that a sentence's gradient does not depend on the others.
                tensors = {name: tensor.to(model.device) for name, tensor in batch.items()}
                loss = model(**tensors, num_items_in_batch=1).loss
                slopes = torch.autograd.grad(loss, [gates[name] for name in total])
            for name, slope in zip(total, slopes, strict=True):
                total[name] += slope.flatten(1).abs().sum(0).double().cpu()
            sentences += len(batch["labels"])
    finally:
        for hook in hooks:
            hook.remove()
        model.train(was_training)
    if not sentences:
        raise ValueError("There is no batch to measure importance on: give at least one, with labels.")
    return {name: value / sentences for name, value in total.items()}


def _gating(gates: dict[str, Tensor], name: str, num_heads: int) -> Any:
    """Return a hook that multiplies each sentence's and head's output by a one of its own, left in `gates`."""

    def gate(module: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
        (states,) = inputs  # [B, T, H·d_v]
        gates[name] = states.new_ones(states.shape[0], 1, num_heads, 1).requires_grad_()
        return ((states.unflatten(-1, (num_heads, -1)) * gates[name]).flatten(-2),)

    return gate


def prune_heads(
    model: VanillaTransformerForConditionalGeneration,
    importance: Mapping[str, Tensor],
    *,
    encoder: int = 0,
    decoder: int = 0,
) -> VanillaTransformerForConditionalGeneration:
    """Return a copy of a model without the least important heads of each attention.

    Every attention of a stack loses as many heads, as the configuration has one number for a stack (the decoder's
    self-attention and cross-attention share it); Michel et al. take the least important ones of the whole model.
    d_model, d_k and d_v stay, so that h·d_k is then smaller than d_model.

    Args:
        model: The model.
        importance: [H] for each attention, from `head_importance`.
        encoder: How many heads each attention of the encoder loses.
        decoder: How many each self-attention and each cross-attention of the decoder loses.

    Raises:
        ValueError: A number is out of range or both are 0, importances are missing, of another length or not finite,
            or encoder and decoder have heads of different widths, which one d_k and d_v cannot say.
    """
    _check_model(model)
    config, attentions = copy.deepcopy(model.config), _attentions(model)
    removed = {"encoder": encoder, "decoder": decoder}
    for side, count in removed.items():
        heads = getattr(config, f"{side}_attention_heads")
        if not 0 <= count < heads:
            raise ValueError(f"{side}={count}: of {heads} heads 0 to {heads - 1} can be removed, one has to stay.")
        setattr(config, f"{side}_attention_heads", heads - count)
    if not any(removed.values()):
        raise ValueError("encoder=0 and decoder=0: no head would go. Say how many each attention loses.")
    widths = sorted({(attention.d_k, attention.d_v) for attention in attentions.values()})
    if len(widths) > 1:
        raise ValueError(
            f"encoder and decoder have heads of different widths (d_k, d_v): {widths}. The configuration has one d_k "
            "and one d_v for both, so that heads of such a model cannot be pruned."
        )
    ((config.d_k, config.d_v),) = widths
    _check_importance(importance, attentions)
    tensors = dict(model.state_dict())
    for name, attention in attentions.items():
        left = attention.num_heads - removed[name.split(".")[1]]
        order = importance[name].argsort(descending=True, stable=True)
        _keep_heads(tensors, name, attention, order[:left].sort().values)
    return _model_of(model, config, tensors)


def _check_importance(importance: Mapping[str, Tensor], attentions: Mapping[str, VanillaTransformerAttention]) -> None:
    for name, attention in attentions.items():
        values = importance.get(name)
        if values is None or tuple(values.shape) != (attention.num_heads,) or not bool(values.isfinite().all()):
            found = "nothing" if values is None else values.tolist()
            raise ValueError(
                f"importance has {found} for {name}: {attention.num_heads} finite numbers are needed, as "
                "head_importance(model, batches) gives them for this model."
            )


def _keep_heads(tensors: dict[str, Tensor], name: str, attention: VanillaTransformerAttention, heads: Tensor) -> None:
    """Replace an attention's tensors by the parts that belong to `heads`."""
    for projection, width, axis in (
        ("q_proj", attention.d_k, 0),
        ("k_proj", attention.d_k, 0),
        ("v_proj", attention.d_v, 0),
        ("out_proj", attention.d_v, 1),
    ):
        weight = f"{name}.{projection}.weight"
        rows = (heads[:, None] * width + torch.arange(width)).flatten().to(tensors[weight].device)
        tensors[weight] = tensors[weight].index_select(axis, rows)
        bias = f"{name}.{projection}.bias"
        if bias in tensors and axis == 0:  # the output's bias is of d_model, not of the heads
            tensors[bias] = tensors[bias].index_select(0, rows)


# ---------------------------------------------------------------------------------------- vocabulary


def trim_vocabulary(
    model: VanillaTransformerForConditionalGeneration, tokenizer: PreTrainedTokenizerFast, texts: Iterable[str]
) -> tuple[VanillaTransformerForConditionalGeneration, PreTrainedTokenizerFast]:
    """Return a model and a tokenizer with the tokens that a corpus needs.

    Kept are the tokens of the corpus, those that their merges go through, all special and added tokens, and the 256
    bytes, so that every text still can be written, if in more pieces. The corpus itself is cut as before, and the
    logits of the tokens that are left are what they were. (Their probabilities are not quite: they now sum to 1 among
    fewer.) Ids are new, in the old order.

    Args:
        model: The model.
        tokenizer: Its tokenizer, byte-level BPE as `train_tokenizer` makes it, of source and target.
        texts: The corpus, in both languages, read once and not kept: see `iterate_texts`.

    Raises:
        ValueError: No text, a tokenizer of another kind, source and target vocabularies that differ, or settings that
            hold ids that cannot be rewritten.
    """
    _check_model(model)
    spec = _byte_level_bpe(tokenizer)
    if model.config.vocab_size != model.config.decoder_vocab_size:
        raise ValueError(
            f"The model has {model.config.vocab_size} source and {model.config.decoder_vocab_size} target tokens, and "
            "one tokenizer cannot be trimmed for two vocabularies."
        )
    if max(spec["model"]["vocab"].values()) >= model.config.vocab_size:
        raise ValueError(
            f"The tokenizer has {len(tokenizer)} tokens and the model {model.config.vocab_size}: it is another one's."
        )
    used = _used_ids(tokenizer, texts)
    merges, tokens = _needed_merges(spec, used)
    vocabulary: dict[str, int] = spec["model"]["vocab"]
    added = {entry["id"] for entry in spec["added_tokens"]}
    kept = sorted(added | used | {vocabulary[token] for token in tokens} | _ids_in_settings(model))
    new_id = {old: new for new, old in enumerate(kept)}
    return _with_rows(model, new_id), _with_tokens(tokenizer, spec, new_id, merges)


def _byte_level_bpe(tokenizer: Any) -> dict[str, Any]:
    """Return the content of tokenizer.json, or raise if trimming is not sure to keep its segmentation."""
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ValueError(f"A {type(tokenizer).__name__} cannot be trimmed: a fast tokenizer is needed.")
    spec: dict[str, Any] = json.loads(tokenizer.backend_tokenizer.to_str())
    model, before = spec["model"], spec["pre_tokenizer"] or {}
    kinds = [part["type"] for part in before.get("pretokenizers", [before]) if part]
    if model["type"] != "BPE" or "ByteLevel" not in kinds:
        raise ValueError(
            f"A tokenizer of type {model['type']} with pre-tokenizers {kinds} cannot be trimmed: byte-level BPE is "
            "needed, as train_tokenizer makes it."
        )
    # With any of these a word is not cut by the order of the merges alone.
    for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback", "ignore_merges"):
        if model.get(name):
            raise ValueError(f"A BPE tokenizer with {name}={model[name]!r} cannot be trimmed.")
    missing = set(pre_tokenizers.ByteLevel.alphabet()) - set(model["vocab"])
    if missing:
        raise ValueError(f"The tokenizer lacks {len(missing)} of the 256 bytes: it is no whole byte-level BPE.")
    return spec


def _used_ids(tokenizer: PreTrainedTokenizerFast, texts: Iterable[str]) -> set[int]:
    if isinstance(texts, (str, bytes, Path)):
        raise ValueError(f"texts must be an iterable of strings, got {texts!r:.60}; use iterate_texts(files).")
    used: set[int] = set()
    chunk: list[str] = []

    def encode() -> None:
        if chunk:
            used.update(*tokenizer(chunk, add_special_tokens=False)["input_ids"])
            chunk.clear()

    for text in texts:
        chunk.append(text)
        if len(chunk) == _CHUNK:
            encode()
    encode()
    if not used:
        raise ValueError("There is no text to trim the vocabulary to: the corpus is empty.")
    return used


def _needed_merges(spec: Mapping[str, Any], used: set[int]) -> tuple[list[list[str]], set[str]]:
    """Return the merges that make the used tokens, in their order, and all tokens on the way, the 256 bytes too.

    Enough for the same segmentation: inside what becomes one token the merges are those that make it of its bytes
    alone, as none across its borders is ever done; so these are all merges that are done in the corpus. Of the pairs
    that could be merged next the first in rank is among them, and it is the first among fewer, too.
    """
    merges: list[list[str]] = spec["model"]["merges"]
    rank = {(left, right): number for number, (left, right) in enumerate(merges)}
    added = {entry["id"] for entry in spec["added_tokens"]}
    tokens, needed = set(pre_tokenizers.ByteLevel.alphabet()), set()
    for token, number in spec["model"]["vocab"].items():
        if number not in used or number in added:
            continue
        parts = list(token)
        while len(parts) > 1:
            pairs = list(itertools.pairwise(parts))
            place = min(range(len(pairs)), key=lambda at: rank.get(pairs[at], math.inf))
            if pairs[place] not in rank:
                raise ValueError(f"The tokenizer's merges do not make its token {token!r}: it cannot be trimmed.")
            needed.add(rank[pairs[place]])
            parts[place : place + 2] = ["".join(pairs[place])]
            tokens.add(parts[place])
    return [merges[number] for number in sorted(needed)], tokens


def _ids_in_settings(model: VanillaTransformerForConditionalGeneration) -> set[int]:
    """Return the ids that the configurations name."""
    found: set[int] = set()
    for settings in (model.config, model.generation_config):
        for name in _ID_RULES:
            if getattr(settings, name, None):
                raise ValueError(f"{name} of the generation settings holds ids of the old vocabulary: unset it first.")
        for name in _ID_FIELDS:
            value = getattr(settings, name, None)
            ids = value if isinstance(value, list) else [] if value is None else [value]
            if any(number >= model.config.vocab_size for number in ids):
                raise ValueError(f"{name}={value} is outside the vocabulary of {model.config.vocab_size} tokens.")
            found.update(ids)
    return found


def _with_rows(
    model: VanillaTransformerForConditionalGeneration, new_id: Mapping[int, int]
) -> VanillaTransformerForConditionalGeneration:
    """Return a copy of the model with the rows of these tokens, and their new ids in its settings."""
    config, generation = copy.deepcopy(model.config), copy.deepcopy(model.generation_config)
    config.vocab_size = config.decoder_vocab_size = len(new_id)
    for settings in (config, generation):
        for name in _ID_FIELDS:
            value = getattr(settings, name, None)
            if value is not None:
                setattr(settings, name, [new_id[i] for i in value] if isinstance(value, list) else new_id[value])
    tensors = dict(model.state_dict())
    rows = torch.tensor(list(new_id), device=model.device)
    for name, tensor in tensors.items():
        if name.endswith(("shared.weight", "embed_tokens.weight", "lm_head.weight")):
            tensors[name] = tensor.index_select(0, rows)
        elif name == "final_logits_bias":
            tensors[name] = tensor.index_select(1, rows)
    return _model_of(model, config, tensors, generation)


def _with_tokens(
    tokenizer: PreTrainedTokenizerFast,
    spec: Mapping[str, Any],
    new_id: Mapping[int, int],
    merges: Sequence[Sequence[str]],
) -> PreTrainedTokenizerFast:
    """Return a tokenizer of the same class and settings with these tokens and merges."""
    vocabulary = {token: new_id[old] for token, old in spec["model"]["vocab"].items() if old in new_id}
    trimmed_spec = {
        **spec,
        "truncation": None,  # of the last call
        "padding": None,
        "model": {**spec["model"], "vocab": vocabulary, "merges": merges},
        "added_tokens": [{**entry, "id": new_id[entry["id"]]} for entry in spec["added_tokens"]],
        "post_processor": _post_processor(spec["post_processor"], new_id),
    }
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        Path(folder, "tokenizer.json").write_text(json.dumps(trimmed_spec, ensure_ascii=False), encoding="utf-8")
        path = Path(folder, "tokenizer_config.json")
        settings: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        decoder: dict[str, Any] = settings.get("added_tokens_decoder") or {}
        if decoder:  # the added tokens once more, in files of some releases
            settings["added_tokens_decoder"] = {str(new_id[int(old)]): entry for old, entry in decoder.items()}
            path.write_text(json.dumps(settings, ensure_ascii=False), encoding="utf-8")
        trimmed = type(tokenizer).from_pretrained(folder)
    trimmed.name_or_path = tokenizer.name_or_path
    expected = vocabulary | {entry["content"]: entry["id"] for entry in trimmed_spec["added_tokens"]}
    if trimmed.get_vocab() != expected:
        raise ValueError(f"{type(tokenizer).__name__} does not take a vocabulary of its own, and cannot be trimmed.")
    return cast(PreTrainedTokenizerFast, trimmed)


def _post_processor(spec: dict[str, Any] | None, new_id: Mapping[int, int]) -> dict[str, Any] | None:
    """Return what puts special tokens around a row, with the new ids."""
    kind = None if spec is None else spec["type"]
    if spec is None or kind == "ByteLevel":
        return spec
    if kind == "Sequence":
        return {**spec, "processors": [_post_processor(part, new_id) for part in spec["processors"]]}
    if kind == "TemplateProcessing":
        special = {
            name: {**entry, "ids": [new_id[old] for old in entry["ids"]]}
            for name, entry in spec["special_tokens"].items()
        }
        return {**spec, "special_tokens": special}
    raise ValueError(f"A tokenizer with a post-processor of type {kind} cannot be trimmed.")


# ---------------------------------------------------------------------------------------- what they share


def _check_model(model: Any) -> None:
    if not isinstance(model, VanillaTransformerForConditionalGeneration):
        raise ValueError(
            f"A {type(model).__module__}.{type(model).__name__} cannot be shrunk: a "
            "VanillaTransformerForConditionalGeneration of this package is needed, adapters merged."
        )
    plain = isinstance(model.lm_head, nn.Linear) and all(
        type(parameter.data) is Tensor for parameter in model.parameters()
    )
    if not plain:
        raise ValueError("The model is quantised or sharded: shrink it first, as it was loaded in floating point.")


def _attentions(model: VanillaTransformerForConditionalGeneration) -> dict[str, VanillaTransformerAttention]:
    return {name: part for name, part in model.named_modules() if isinstance(part, VanillaTransformerAttention)}


def _model_of(
    model: VanillaTransformerForConditionalGeneration,
    config: VanillaTransformerConfig,
    tensors: Mapping[str, Tensor],
    generation_config: Any = None,
) -> VanillaTransformerForConditionalGeneration:
    """Return a model of `config` with copies of `tensors`, otherwise as `model` is."""
    config.check()
    with torch.device("meta"):  # no random weights that would be replaced at once
        shrunk = type(model)(config)
    shrunk.load_state_dict({name: tensor.detach().clone() for name, tensor in tensors.items()}, assign=True)
    shrunk.tie_weights()
    shrunk.generation_config = copy.deepcopy(generation_config or model.generation_config)
    shrunk.train(model.training)
    return shrunk
