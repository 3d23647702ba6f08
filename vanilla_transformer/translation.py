"""Translating many sentences: sorted by length, in batches, the results in the order of the input."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .corpus_formats import check_text


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
    n_best: int = 1,
    with_scores: bool = False,
    show_progress: bool = False,
    **generate_kwargs: Any,
) -> list[list[Hypothesis]]:
    """Return the `n_best` translations of each sentence, best first, in the order of `sentences`.

    Sentences are sorted by length for the batches, so that little of a batch is padding. An empty sentence (nothing
    but whitespace) gives empty translations without asking the model.

    Args:
        model: Any sequence-to-sequence model, on the device where it shall run.
        tokenizer: Its tokenizer.
        sentences: Source sentences.
        batch_size: Sentences a batch.
        n_best: Translations a sentence; at most the number of beams.
        with_scores: Return the scores of a beam search too. The library then keeps every step's scores of a batch,
            batch_size · num_beams · vocabulary numbers a step: choose a smaller `batch_size`.
        show_progress: Show a progress bar of sentences.
        **generate_kwargs: For `model.generate`, such as `num_beams`.

    Raises:
        ValueError: A bad `batch_size` or `n_best`, or a text that cannot be encoded.
    """
    beams = generate_kwargs.get("num_beams", model.generation_config.num_beams) or 1
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size} must be at least 1.")
    if n_best < 1 or (n_best > beams and not generate_kwargs.get("do_sample")):
        raise ValueError(f"n_best={n_best} must lie between 1 and num_beams={beams}: raise num_beams or lower n_best.")
    for number, sentence in enumerate(sentences, 1):
        check_text(sentence, f"sentence {number}")
    was_training = model.training
    model.eval()
    results: list[list[Hypothesis]] = [[Hypothesis("", None)] * n_best for _ in sentences]
    wanted = [index for index, sentence in enumerate(sentences) if sentence.strip()]
    lengths = [len(ids) for ids in tokenizer([sentences[i] for i in wanted])["input_ids"]] if wanted else []
    # Longest first: if a batch does not fit into memory, that shows at once.
    order = [index for _, index in sorted(zip(lengths, wanted, strict=True), key=lambda pair: (-pair[0], pair[1]))]
    with tqdm(total=len(order), unit=" sentences", desc="Translating", disable=not show_progress) as bar:
        for start in range(0, len(order), batch_size):
            batch = order[start : start + batch_size]
            texts = [sentences[index] for index in batch]
            translations = _translate_batch(model, tokenizer, texts, n_best, with_scores, generate_kwargs)
            for index, hypotheses in zip(batch, translations, strict=True):
                results[index] = hypotheses
            bar.update(len(batch))
    model.train(was_training)
    return results


@torch.no_grad()
def _translate_batch(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: list[str],
    n_best: int,
    with_scores: bool,
    generate_kwargs: dict[str, Any],
) -> list[list[Hypothesis]]:
    inputs = tokenizer(texts, padding=True, return_tensors="pt").to(model.device)
    output = model.generate(
        **inputs,
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
