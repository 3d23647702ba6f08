"""Ours → ONNX, for onnxruntime and whatever else runs such graphs: no torch, no transformers where it is used.

A folder gets three graphs, named and with the names of inputs and outputs that Optimum's seq2seq export has, so that
runners of that layout find them; all lengths and the batch are free:

- encoder_model.onnx: input_ids, attention_mask → last_hidden_state.
- decoder_model.onnx, the first step: input_ids, encoder_hidden_states, encoder_attention_mask → logits and
  present.N.{decoder,encoder}.{key,value}.
- decoder_with_past_model.onnx, each later step: input_ids, encoder_attention_mask and
  past_key_values.N.{decoder,encoder}.{key,value} → logits and present.N.decoder.{key,value}. What the source's keys
  and values are the first step said.

config.json, generation_config.json and the tokenizer lie beside them. Everything that our class computes carries over,
in float32. What stays behind: training (dropout, the loss), beam search (`greedy_search` is the loop that a caller
writes), and a mask of target padding: rows of target tokens are to be padded on the right, or not at all. Learned
positions end where they ended; the runner then complains of an index. Models of int8 layers (`quantize`) are refused:
write the float model with `quantization="int8"`.

Made by `torch.onnx.export(dynamo=True)`. Seen with torch 2.13, onnx 1.23, onnxscript 0.7 and onnxruntime 1.32.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import logging
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedTokenizerBase

from vanilla_transformer.attention_vanilla_transformer import CACHE_NAME
from vanilla_transformer.configuration_vanilla_transformer import VanillaTransformerConfig
from vanilla_transformer.modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration

from .renaming import ConversionError, whole_folder

ENCODER = "encoder_model.onnx"
FIRST_STEP = "decoder_model.onnx"
NEXT_STEP = "decoder_with_past_model.onnx"

# Sizes of the example that is traced; they differ, so that none is taken for another.
_BATCH, _SOURCE, _TARGET, _PAST = 2, 9, 3, 5


def to_onnx(
    model: VanillaTransformerForConditionalGeneration,
    tokenizer: PreTrainedTokenizerBase | None,
    folder: str | Path,
    *,
    quantization: str | None = None,
) -> None:
    """Write a model as ONNX graphs; the model itself stays as it is.

    Args:
        model: The model; of another type than float32 it is written in float32.
        tokenizer: Its tokenizer, saved beside the graphs; None leaves it out.
        folder: Where to write: a new or empty folder, complete or absent afterwards.
        quantization: None, or "int8": weights of matrix products and embeddings in 8 bits, activations quantised as
            they come (`onnxruntime.quantization.quantize_dynamic`).

    Raises:
        ImportError: onnx, onnxscript or, for "int8", onnxruntime is not installed.
        ConversionError: `folder` is not empty, `quantization` is unknown, or the model has layers of int8 already.
    """
    if quantization not in (None, "int8"):
        raise ConversionError(f"quantization={quantization!r} is not valid: choose None or 'int8'.")
    for package in ("onnx", "onnxscript", *(["onnxruntime"] if quantization else [])):
        _import(package)
    _check_layers(model)
    with whole_folder(folder) as scratch:
        plain = copy.deepcopy(model).float().cpu().eval()
        plain.config.dtype = torch.float32
        plain.set_attn_implementation("eager")  # the formula itself, whose operators every runner has
        if quantization:  # a matrix that is embedding too would stay a product in float32, unpacked at each step
            plain.lm_head.weight = nn.Parameter(plain.lm_head.weight.detach().clone())
        for name, (module, arguments) in _graphs(plain).items():
            _export(module, arguments, scratch / name)
            if quantization:
                _quantize(scratch / name)
        plain._forget_library_defaults()  # of a trainer, as where the model itself is saved
        plain.config.save_pretrained(scratch)
        plain.generation_config.save_pretrained(scratch)
        if tokenizer is not None:
            tokenizer.save_pretrained(str(scratch))


write = to_onnx


def greedy_search(folder: str | Path, input_ids: Any, attention_mask: Any, max_length_offset: int = 50) -> Any:
    """Translate with the files of `to_onnx`; gives the tokens of `model.generate(num_beams=1)`.

    Written with onnxruntime and numpy alone, to be copied to where there is no torch. A server keeps the sessions.

    Args:
        folder: What `to_onnx` wrote.
        input_ids: Source tokens, integers of 64 bits [B, S].
        attention_mask: 1 for real tokens, 0 for padding, likewise [B, S].
        max_length_offset: Each sentence gets at most as many tokens as its source has, and these on top.

    Returns:
        The start token, the translation and its end token, padding behind it: a numpy array [B, T].

    Raises:
        ImportError: onnxruntime is not installed.
    """
    import json
    from pathlib import Path

    import numpy as np

    try:
        import onnxruntime
    except ImportError as error:
        raise ImportError("Running ONNX files needs onnxruntime: pip install 'vanilla-transformer[onnx]'") from error

    def run(session: Any, inputs: dict[str, Any]) -> dict[str, Any]:
        names = [output.name for output in session.get_outputs()]
        return dict(zip(names, session.run(names, inputs)))  # noqa: B905

    config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    graphs = ("encoder_model", "decoder_model", "decoder_with_past_model")
    encoder, first_step, next_step = (onnxruntime.InferenceSession(f"{folder}/{name}.onnx") for name in graphs)
    ends = [] if config["eos_token_id"] is None else config["eos_token_id"]
    caps = attention_mask.sum(axis=1) + max_length_offset

    encoded = run(encoder, {"input_ids": input_ids, "attention_mask": attention_mask})
    tokens = np.full((len(input_ids), 1), config["decoder_start_token_id"], dtype=np.int64)
    mask = {"encoder_attention_mask": attention_mask}
    outputs = run(first_step, {"input_ids": tokens, **mask, "encoder_hidden_states": encoded["last_hidden_state"]})
    past: dict[str, Any] = {}
    done = np.zeros(len(tokens), dtype=bool)
    while True:
        best = outputs.pop("logits")[:, -1].argmax(axis=-1)
        best = np.where(done, config["pad_token_id"], best)[:, None]
        tokens = np.concatenate([tokens, best], axis=1)
        done |= np.isin(best[:, 0], ends) | (tokens.shape[1] - 1 >= caps)
        if done.all():
            return tokens
        past |= {name.replace("present", "past_key_values"): value for name, value in outputs.items()}
        outputs = run(next_step, {"input_ids": best, **mask, **past})


# ---------------------------------------------------------------------------------------- what is traced


class _Graph(nn.Module):
    def __init__(self, model: VanillaTransformerForConditionalGeneration) -> None:
        super().__init__()
        self.model = model


class _Encoder(_Graph):
    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.model.model.encoder(input_ids, attention_mask).last_hidden_state


class _FirstStep(_Graph):
    def forward(
        self, input_ids: Tensor, encoder_attention_mask: Tensor, encoder_hidden_states: Tensor
    ) -> tuple[Tensor, ...]:
        outputs = self.model(
            attention_mask=encoder_attention_mask,
            decoder_input_ids=input_ids,
            encoder_outputs=(encoder_hidden_states,),
            use_cache=True,
        )
        return outputs.logits, *_tensors_of(outputs[CACHE_NAME], ("decoder", "encoder"))


class _NextStep(_Graph):
    def forward(self, input_ids: Tensor, encoder_attention_mask: Tensor, past: Sequence[Tensor]) -> tuple[Tensor, ...]:
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        for layer in range(len(past) // 4):
            key, value, source_key, source_value = past[4 * layer : 4 * layer + 4]
            cache.self_attention_cache.update(key, value, layer)
            cache.cross_attention_cache.update(source_key, source_value, layer)
            cache.is_updated[layer] = True
        outputs = self.model(
            attention_mask=encoder_attention_mask,
            decoder_input_ids=input_ids,
            encoder_outputs=(past[2],),  # not read: its keys and values are in the cache
            use_cache=True,
            **{CACHE_NAME: cache},
        )
        return outputs.logits, *_tensors_of(outputs[CACHE_NAME], ("decoder",))


def _tensors_of(cache: EncoderDecoderCache, sides: Sequence[str]) -> list[Tensor]:
    """Return keys and values in the order of `_cache_names`."""
    parts = {"decoder": cache.self_attention_cache.layers, "encoder": cache.cross_attention_cache.layers}
    depth = len(cache.self_attention_cache.layers)
    return [tensor for i in range(depth) for side in sides for tensor in (parts[side][i].keys, parts[side][i].values)]


def _cache_names(prefix: str, config: VanillaTransformerConfig, sides: Sequence[str]) -> list[str]:
    return [
        f"{prefix}.{layer}.{side}.{kind}"
        for layer in range(config.decoder_layers)
        for side in sides
        for kind in ("key", "value")
    ]


def _graphs(model: VanillaTransformerForConditionalGeneration) -> dict[str, tuple[nn.Module, dict[str, Any]]]:
    """Return, by file name, a module and the arguments of `torch.onnx.export`: examples, names, free axes."""
    config = model.config
    batch, source, target = Dim("batch_size"), Dim("encoder_sequence_length"), Dim("decoder_sequence_length")
    past = Dim("past_decoder_sequence_length")
    source_ids, target_ids = (torch.ones(_BATCH, length, dtype=torch.long) for length in (_SOURCE, _TARGET))
    mask = torch.ones_like(source_ids)
    heads = config.decoder_attention_heads
    cache, cache_axes = [], []
    for _ in range(config.decoder_layers):
        for length, axis in ((_PAST, past), (_SOURCE, source)):
            for width in config.head_dims(heads):
                cache.append(torch.zeros(_BATCH, heads, length, width))
                cache_axes.append({0: batch, 2: axis})
    both = ("decoder", "encoder")
    encoder = {
        "args": (source_ids, mask),
        "dynamic_shapes": ({0: batch, 1: source}, {0: batch, 1: source}),
        "input_names": ["input_ids", "attention_mask"],
        "output_names": ["last_hidden_state"],
    }
    first = {
        "args": (target_ids, mask, torch.zeros(_BATCH, _SOURCE, config.d_model)),
        "dynamic_shapes": ({0: batch, 1: target}, {0: batch, 1: source}, {0: batch, 1: source}),
        "input_names": ["input_ids", "encoder_attention_mask", "encoder_hidden_states"],
        "output_names": ["logits", *_cache_names("present", config, both)],
    }
    following = {
        "args": (target_ids, mask, cache),
        "dynamic_shapes": ({0: batch, 1: target}, {0: batch, 1: source}, cache_axes),
        "input_names": ["input_ids", "encoder_attention_mask", *_cache_names("past_key_values", config, both)],
        "output_names": ["logits", *_cache_names("present", config, ("decoder",))],
    }
    return {
        ENCODER: (_Encoder(model), encoder),
        FIRST_STEP: (_FirstStep(model), first),
        NEXT_STEP: (_NextStep(model), following),
    }


def _check_layers(model: VanillaTransformerForConditionalGeneration) -> None:
    is_float = all(type(parameter) is nn.Parameter for parameter in model.parameters())
    if not is_float or not isinstance(model.lm_head, nn.Linear):
        raise ConversionError(
            f"The output projection is a {type(model.lm_head).__name__} of "
            f"{type(getattr(model.lm_head, 'weight', None)).__name__}: only a float model can be written. Load it "
            "again without int8 layers and pass quantization='int8', or merge its adapters."
        )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep back what the exporters say about themselves, and of torchvision, which nothing here needs."""
    loggers = [logging.getLogger("torch.onnx"), logging.getLogger()]  # onnxruntime.quantization uses the root
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _export(module: nn.Module, arguments: dict[str, Any], path: Path) -> None:
    with torch.no_grad(), _quiet():
        program = torch.onnx.export(module, dynamo=True, verbose=False, **arguments)
    if program is None:  # only without `dynamo`
        raise ConversionError(f"{path.name} could not be exported.")
    program.save(path)


def _quantize(path: Path) -> None:
    quantization = importlib.import_module("onnxruntime.quantization")
    large = path.with_name(f"{path.name}.data").exists()  # torch put the weights there: beyond one file's 2 GB
    with _quiet():
        quantization.quantize_dynamic(
            str(path), str(path), weight_type=quantization.QuantType.QInt8, use_external_data_format=large
        )


def _import(package: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ImportError(f"Writing ONNX files needs {package}: pip install 'vanilla-transformer[onnx]'") from error
