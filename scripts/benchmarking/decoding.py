"""Decoding: our beam search against MarianMT's `generate` and CTranslate2, on the same weights and sentences.

Every contender gets token ids and gives token ids, sorts the sentences by length, and has its best batch size, in one
search after the other or in several side by side.
MarianMT and CTranslate2 get the weights through this package's converters, so that the translations can be compared
token by token.
"""

from __future__ import annotations

import copy
import functools
import gc
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import MarianMTModel

from vanilla_transformer import VanillaTransformerForConditionalGeneration
from vanilla_transformer.convert.marian import to_marian
from vanilla_transformer.parallel_vanilla_transformer import map_in_threads
from vanilla_transformer.quantization import quantize_int8

from . import machine
from .workload import word_tokenizer

BATCH_SIZES = {"cpu": (16, 32, 64, 128), "cuda": (64, 128, 256, 512)}
OURS, PAPER = "vanilla-transformer fp32", "vanilla-transformer fp32, paper's ranking"
HALF, INT8 = "vanilla-transformer bf16", "vanilla-transformer int8"
MARIAN, MARIAN_HALF = "MarianMT fp32", "MarianMT bf16"
MARIAN_THREADS = "MarianMT fp32, by our threads"
CT2, CT2_INT8 = "CTranslate2 fp32", "CTranslate2 int8"
Sentences = list[list[int]]


@dataclass(frozen=True)
class SearchSettings:
    """How a contender decodes.

    Args:
        batch: Sentences a search.
        inter_threads: Searches side by side, each with its share of the threads.
    """

    batch: int
    inter_threads: int = 1

    def __str__(self) -> str:
        return f"{self.inter_threads} x {self.batch}"


Decoder = Callable[[Sentences, SearchSettings], Sentences]


@dataclass(frozen=True)
class Task:
    """What is decoded and how.

    Args:
        sources: Token ids with their end token.
        num_beams: K.
        forced: Decode exactly so many tokens, for models that have learned nothing; None: until the end token, at most
            50 tokens more than the source.
        pad: Padding id.
        eos: End token.
    """

    sources: Sentences
    num_beams: int
    forced: int | None
    pad: int
    eos: int


def by_generate(model: Any, task: Task, **options: Any) -> Decoder:
    """Return a decoder through the model's `generate()`; one length limit a batch, as that is all MarianMT has."""
    if task.forced is not None:
        options |= {"max_new_tokens": task.forced}
        model.generation_config.eos_token_id = None  # cheaper for all than a processor that forbids the end token

    def search(rows: Sentences) -> Sentences:
        width = len(rows[0])
        input_ids = torch.tensor([row + [task.pad] * (width - len(row)) for row in rows], device=model.device)
        limit = {} if task.forced is not None else {"max_new_tokens": width + 50}
        mask = (input_ids != task.pad).long()
        with torch.inference_mode():
            output = model.generate(input_ids, attention_mask=mask, num_beams=task.num_beams, **limit, **options)
        return [until_end(row, task) for row in output[:, 1:].tolist()]

    def decode(sources: Sentences, settings: SearchSettings) -> Sentences:
        order = sorted(range(len(sources)), key=lambda index: -len(sources[index]))
        parts = [order[start : start + settings.batch] for start in range(0, len(order), settings.batch)]
        results: Sentences = [[] for _ in sources]
        batches = ([sources[index] for index in part] for part in parts)
        for part, rows in zip(parts, map_in_threads(search, batches, settings.inter_threads), strict=True):
            for index, row in zip(part, rows, strict=True):
                results[index] = row
        return results

    return decode


def until_end(row: list[int], task: Task) -> list[int]:
    """Return the tokens before the end token and the padding."""
    for end in (task.eos, task.pad):
        row = row[: row.index(end)] if end in row else row
    return row


def by_ctranslate2(model: Any, task: Task, compute_type: str, threads: int) -> Decoder:
    """Return a decoder through CTranslate2 on the CPU; it sorts and batches by itself."""
    import ctranslate2

    from vanilla_transformer.convert.ctranslate2 import to_ctranslate2

    tokenizer = word_tokenizer(model.config.vocab_size)  # its words are only names of ids here
    words = tokenizer.convert_ids_to_tokens(range(model.config.vocab_size))
    ids = {word: token for token, word in enumerate(words)}
    folder = tempfile.TemporaryDirectory()
    to_ctranslate2(model, tokenizer, Path(folder.name, "model"))

    @functools.cache
    def translator(inter_threads: int) -> Any:
        return ctranslate2.Translator(
            str(Path(folder.name, "model")),
            compute_type=compute_type,
            inter_threads=inter_threads,
            intra_threads=max(1, threads // inter_threads),
        )

    options: dict[str, Any] = {"beam_size": task.num_beams, "length_penalty": 1.0}
    if task.forced is not None:
        options |= {"min_decoding_length": task.forced, "max_decoding_length": task.forced}

    def decode(sources: Sentences, settings: SearchSettings) -> Sentences:
        limit = {} if task.forced is not None else {"max_decoding_length": max(map(len, sources)) + 50}
        rows = [[words[token] for token in row] for row in sources]
        output = translator(settings.inter_threads).translate_batch(
            rows, max_batch_size=settings.batch, **options, **limit
        )
        return [[ids[word] for word in result.hypotheses[0]] for result in output]

    return decode


def names(device: str, *, with_ctranslate2: bool) -> list[str]:
    """Return the contenders; ours in fp32 is the first. int8 is for CPUs, where torch brings it."""
    on_cpu = [INT8] if device == "cpu" else []
    return [OURS, PAPER, HALF, *on_cpu, MARIAN, MARIAN_HALF, MARIAN_THREADS] + (
        [CT2, CT2_INT8] if with_ctranslate2 else []
    )


def decoder(name: str, model: Any, task: Task, threads: int) -> Decoder:
    """Return a contender.

    Args:
        name: One of `names`.
        model: Our model in fp32, in evaluation mode.
        task: What to decode.
        threads: Threads for CTranslate2, as many as torch has.

    All rank by log P over length and stop at K finished hypotheses, as CTranslate2 does; ours, too, with the paper's
    ranking.
    """
    library = {"length_penalty": 1.0, "early_stopping": True}
    if name in (CT2, CT2_INT8):
        return by_ctranslate2(model, task, "float32" if name == CT2 else "int8", threads)
    if name in (MARIAN, MARIAN_HALF, MARIAN_THREADS):
        marian: MarianMTModel = to_marian(model, allow_layer_norm_eps=True)
        for module in marian.modules():  # MarianMT's is fixed at 1e-5 in a checkpoint, not in memory
            if isinstance(module, torch.nn.LayerNorm):
                module.eps = model.config.layer_norm_eps
        dtype = torch.bfloat16 if name == MARIAN_HALF else torch.float32
        return by_generate(marian.to(model.device, dtype).eval(), task, **library)
    if name == HALF:
        model = copy.deepcopy(model).bfloat16()
    elif name == INT8:
        model = quantize_int8(copy.deepcopy(model))
    return by_generate(model, task, **({} if name == PAPER else library))


def decoders(model: Any, task: Task, threads: int, *, with_ctranslate2: bool) -> dict[str, Decoder]:
    """Return all contenders by name; the arguments are those of `decoder` and `names`."""
    there = names(model.device.type, with_ctranslate2=with_ctranslate2)
    return {name: decoder(name, model, task, threads) for name in there}


def best_settings(decode: Decoder, sources: Sentences, sizes: Sequence[int], threads: int) -> SearchSettings:
    """Return the settings with which these sentences are decoded soonest.

    Of searches side by side, one a thread, and one after the other; in both the batch grows as long as that is faster.
    """
    found: dict[SearchSettings, float] = {}
    for inter_threads in dict.fromkeys((threads, 1)):
        decode(sources[:16], SearchSettings(max(1, 16 // inter_threads), inter_threads))  # first calls do more
        largest, least = max(1, len(sources) // inter_threads), math.inf
        for size in [size for size in sizes if size <= largest] or [largest]:
            settings = SearchSettings(size, inter_threads)
            found[settings] = machine.timed_once(partial(decode, sources, settings))
            if found[settings] > least:
                break
            least = found[settings]
    return min(found, key=lambda settings: found[settings])


def peak_memory_of(name: str, folder: str, task: Task, settings: SearchSettings, threads: int) -> dict[str, int]:
    """Return the memory of decoding in bytes: its peak, and before a model was made. For a process of its own.

    Args:
        name: The contender.
        folder: Our model.
        task: What to decode.
        settings: The contender's best.
        threads: Threads of CTranslate2.
    """
    before = machine.peak_memory()
    decode = decoder(name, VanillaTransformerForConditionalGeneration.from_pretrained(folder).eval(), task, threads)
    gc.collect()
    machine.reset_peak_memory()  # making the contender out of our model is no part of decoding
    decode(task.sources, settings)
    return {"peak": machine.peak_memory(), "before": before}


def benchmark(
    found: dict[str, Decoder],
    task: Task,
    *,
    rounds: int,
    threads: int,
    device: str = "cpu",
    score: Callable[[Sentences], float] | None = None,
    seconds: float = math.inf,
    trial: int = 256,
) -> list[dict[str, Any]]:
    """Return a row a contender: best batch size, seconds, ratio, same translations as ours in fp32, and BLEU.

    Args:
        found: The contenders, of `decoders`.
        task: What to decode.
        rounds: Rounds; each contender decodes all sentences once in each.
        threads: Threads of torch: as many searches side by side are tried on a CPU.
        device: Where: it decides which batch sizes are tried.
        score: BLEU of translations, if there are references.
        seconds: No further round begins after so many.
        trial: Batch sizes are tried on about so many of the sentences.
    """
    some = task.sources[:: max(1, len(task.sources) // trial)]
    sizes = BATCH_SIZES[device.partition(":")[0]]
    # MarianMT has its own generate, one call after the other; our threads make a row of their own.
    alone = {MARIAN, MARIAN_HALF} if device == "cpu" else set(found)
    chosen = {
        name: best_settings(decode, some, sizes, 1 if name in alone else threads) for name, decode in found.items()
    }
    outputs: dict[str, Sentences] = {}

    def run(name: str) -> float:
        start = time.perf_counter()
        outputs[name] = found[name](task.sources, chosen[name])
        return time.perf_counter() - start

    results = machine.alternate({name: partial(run, name) for name in found}, rounds, seconds)
    tokens = sum(map(len, outputs[OURS])) + len(task.sources)
    return [
        {
            "contender": name,
            "settings": str(chosen[name]),
            "batch": chosen[name].batch,
            "inter_threads": chosen[name].inter_threads,
            "seconds": statistics.median(results[name]),
            "all_rounds": results[name],
            "tokens_per_second": tokens / statistics.median(results[name]),
            "ours_over_this": machine.paired_ratio(results[name], results[OURS]),
            "same_as_ours": sum(a == b for a, b in zip(outputs[name], outputs[OURS], strict=True)),
            "bleu": None if score is None else score(outputs[name]),
        }
        for name in found
    ]


def add_memory(rows: list[dict[str, Any]], model: Any, task: Task, threads: int) -> None:
    """Add to each row of `benchmark` what memory its contender takes, on a CPU."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        for row in rows:
            settings = SearchSettings(row["batch"], row["inter_threads"])
            longest = sorted(task.sources, key=len)[-settings.batch * settings.inter_threads :]  # those that need most
            arguments = (row["contender"], folder, replace(task, sources=longest), settings, threads)
            row["memory"] = machine.in_own_process(peak_memory_of, *arguments)


def latency(found: dict[str, Decoder], task: Task, *, rounds: int) -> list[dict[str, Any]]:
    """Return the median seconds of a sentence decoded alone, a row a contender of `decoders`."""
    sentences = task.sources[:: max(1, len(task.sources) // 12)][:12]
    for decode in found.values():
        decode(sentences[:2], SearchSettings(1))
    runs = {
        name: (lambda d=decode: machine.timed_once(lambda: d(sentences, SearchSettings(1))) / len(sentences))
        for name, decode in found.items()
    }
    results = machine.alternate(runs, rounds)
    return [
        {
            "contender": name,
            "seconds": statistics.median(results[name]),
            "all_rounds": results[name],
            "ours_over_this": machine.paired_ratio(results[name], results[OURS]),
        }
        for name in found
    ]
