"""Translating many sentences: sorted by length, in batches, the results in the order of the input."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from tqdm.auto import tqdm
from transformers import DataCollatorWithPadding, PreTrainedModel, PreTrainedTokenizerBase

from .corpus_formats import check_text
from .parallel_vanilla_transformer import check_inter_threads, choose_inter_threads, generation_setting, map_in_threads
from .pipeline_vanilla_transformer import length_sorted_batches


class Hypothesis(NamedTuple):
    """A translation and its score: log-probability over length penalty, None where decoding keeps no score."""

    text: str
    score: float | None


def translate_sentences(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sentences: Sequence[str],
    *,
    batch_size: int = 64,
    max_tokens_per_batch: int | None = 4096,
    inter_threads: int | None = None,
    n_best: int = 1,
    with_scores: bool = False,
    show_progress: bool = False,
    **generate_kwargs: Any,
) -> list[list[Hypothesis]]:
    """Return the `n_best` translations of each sentence, best first, in the order of `sentences`.

    Sentences are sorted by length for the batches, longest first, so that little of a batch is padding. An empty
    sentence (nothing but whitespace) gives empty translations without asking the model.

    Args:
        model: Any sequence-to-sequence model, on the device where it shall run.
        tokenizer: Its tokenizer.
        sentences: Source sentences.
        batch_size: Most sentences a batch.
        max_tokens_per_batch: Most source tokens a batch, padding included: of long sentences fewer are decoded
            together. None is no such limit. A single longer sentence is a batch of its own.
        inter_threads: Batches decoded at a time on a CPU, each by its share of torch's threads; None: as many as torch
            has threads, 8 at most, where all is known to allow it (see `choose_inter_threads`), else one. It changes
            speed, and memory by as many times, but no result.
        n_best: Translations a sentence; at most the number of beams.
        with_scores: Return the scores of a beam search too. The library then keeps every step's scores of a batch,
            batch_size · num_beams · vocabulary numbers a step, for each batch decoded at the time: choose a smaller
            `batch_size`.
        show_progress: Show a progress bar of sentences.
        **generate_kwargs: For `model.generate`, such as `num_beams`.

    Raises:
        ValueError: A bad `batch_size`, `max_tokens_per_batch`, `inter_threads` or `n_best`, or a text that cannot be
            encoded.
    """
    beams = generation_setting("num_beams", generate_kwargs, model) or 1
    check_inter_threads(inter_threads)
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size} must be at least 1.")
    if max_tokens_per_batch is not None and max_tokens_per_batch < 1:
        raise ValueError(
            f"max_tokens_per_batch={max_tokens_per_batch} must be at least 1, or None for batches of batch_size."
        )
    if n_best < 1 or (n_best > beams and not generation_setting("do_sample", generate_kwargs, model)):
        raise ValueError(f"n_best={n_best} must lie between 1 and num_beams={beams}: raise num_beams or lower n_best.")
    for number, sentence in enumerate(sentences, 1):
        check_text(sentence, f"sentence {number}")
    results: list[list[Hypothesis]] = [[Hypothesis("", None)] * n_best for _ in sentences]
    wanted = [index for index, sentence in enumerate(sentences) if sentence.strip()]
    if not wanted:
        return results
    encoded = tokenizer([sentences[index] for index in wanted])
    lengths = [len(ids) for ids in encoded["input_ids"]]
    pad = DataCollatorWithPadding(tokenizer)
    batches = list(length_sorted_batches(lengths, batch_size, max_tokens_per_batch or math.inf))

    padded = (pad([{name: values[row] for name, values in encoded.items()} for row in batch]) for batch in batches)
    translate = functools.partial(
        _translate_batch, model, tokenizer, n_best=n_best, with_scores=with_scores, generate_kwargs=generate_kwargs
    )
    was_training = model.training
    model.eval()
    inter_threads = min(choose_inter_threads(inter_threads, model, generate_kwargs), len(batches))
    try:
        with tqdm(total=len(wanted), unit=" sentences", desc="Translating", disable=not show_progress) as bar:
            for batch, translations in zip(batches, map_in_threads(translate, padded, inter_threads), strict=True):
                for row, hypotheses in zip(batch, translations, strict=True):
                    results[wanted[row]] = hypotheses
                bar.update(len(batch))
    finally:
        model.train(was_training)
    return results


@torch.no_grad()
def _translate_batch(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    inputs: Mapping[str, torch.Tensor],
    n_best: int,
    with_scores: bool,
    generate_kwargs: dict[str, Any],
) -> list[list[Hypothesis]]:
    output = model.generate(
        **{name: tensor.to(model.device) for name, tensor in inputs.items()},
        **generate_kwargs,
        num_return_sequences=n_best,
        return_dict_in_generate=True,
        output_scores=with_scores,
    )
    decoded = tokenizer.batch_decode(output.sequences, skip_special_tokens=True)
    scores = output.get("sequences_scores")
    values = [None] * len(decoded) if scores is None else scores.tolist()
    flat = [Hypothesis(text, value) for text, value in zip(decoded, values, strict=True)]
    return [flat[i : i + n_best] for i in range(0, len(flat), n_best)]
