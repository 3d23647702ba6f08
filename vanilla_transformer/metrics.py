"""BLEU and chrF by sacreBLEU, as an `evaluate` metric that needs no network and as a Trainer's `compute_metrics`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import datasets
import evaluate
import numpy as np
import numpy.typing as npt
from sacrebleu.metrics import BLEU, CHRF

if TYPE_CHECKING:
    from transformers import EvalPrediction, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_DESCRIPTION = "Corpus BLEU and chrF by sacreBLEU, with the signatures that make them reproducible, and exact match."

_CITATION = """\
@inproceedings{post-2018-call,
    title = "A Call for Clarity in Reporting {BLEU} Scores",
    author = "Post, Matt",
    booktitle = "Proceedings of the Third Conference on Machine Translation: Research Papers",
    year = "2018",
    url = "https://aclanthology.org/W18-6319",
}
"""

_INPUTS = """
Args:
    predictions: One translation a sentence, detokenised.
    references: For each translation one reference, or a list of references (their number may differ).
    tokenize: sacreBLEU's tokenizer for BLEU: "13a" (default), "intl", "zh", "ja-mecab", "ko-mecab", "flores200",
        "char", or "none" for text that is already tokenised.
    lowercase: Whether BLEU, chrF and exact match ignore case.
    chrf_word_order: 0 for chrF (default), 2 for chrF++.

Returns:
    A dictionary with "bleu", "chrf" and "exact_match" (each 0 to 100), "bleu_signature", "chrf_signature",
    "brevity_penalty" (0 to 1), "hypothesis_length" and "reference_length" (tokens of `tokenize`), "num_sentences".
"""


class TranslationScore(evaluate.Metric):
    """BLEU and chrF by sacreBLEU with their signatures, and exact match, as an `evaluate.Metric`.

    What `evaluate.load("sacrebleu")` gives, without the download, and with `evaluate`'s accumulation: `add`,
    `add_batch`, several processes by `num_process`, `process_id` and `experiment_id`. `compute()` takes `predictions`,
    `references` and the options `tokenize`, `lowercase` and `chrf_word_order`; its docstring lists what it returns.

    `compute` raises ValueError if the numbers of predictions and references differ, if there are none, if a sentence
    has no reference, or if sacreBLEU does not know the tokenizer.
    """

    def _info(self) -> evaluate.MetricInfo:
        """Tell `evaluate` what the metric stores for each sentence."""
        text = datasets.Value("string")
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation=_CITATION,
            inputs_description=_INPUTS,
            features=datasets.Features({"predictions": text, "references": [text]}),
            homepage="https://github.com/mjpost/sacrebleu",
            codebase_urls=["https://github.com/mjpost/sacrebleu"],
            reference_urls=["https://aclanthology.org/W18-6319", "https://aclanthology.org/W15-3049"],
        )

    def add_batch(
        self,
        *,
        predictions: Sequence[str] | None = None,
        references: Sequence[str] | Sequence[Sequence[str]] | None = None,
        **kwargs: Any,
    ) -> None:
        """Add sentences to those to be scored.

        Raises:
            ValueError: If one of the two is missing or their numbers differ.
        """
        if predictions is None or references is None:
            raise ValueError("predictions and references must both be given.")
        if len(predictions) != len(references):
            raise ValueError(
                f"{len(predictions):,} predictions and {len(references):,} references: every prediction needs its own."
            )
        evaluate.Metric.add_batch(
            self, predictions=list(predictions), references=[_as_list(row) for row in references], **kwargs
        )

    def add(
        self, *, prediction: str | None = None, reference: str | Sequence[str] | None = None, **kwargs: Any
    ) -> None:
        """Add one sentence to those to be scored.

        Raises:
            ValueError: If one of the two is missing.
        """
        if prediction is None or reference is None:
            raise ValueError("prediction and reference must both be given.")
        evaluate.Metric.add(self, prediction=prediction, reference=_as_list(reference), **kwargs)

    def _compute(
        self,
        predictions: Sequence[str],
        references: Sequence[Sequence[str]],
        tokenize: str = "13a",
        lowercase: bool = False,
        chrf_word_order: int = 0,
    ) -> dict[str, Any]:
        """Score the accumulated corpus; see the description of the inputs for arguments and result."""
        predictions = list(predictions)
        per_sentence = [list(row) for row in references]
        if not predictions:
            raise ValueError("There is nothing to score: predictions and references are empty.")
        for index, row in enumerate(per_sentence):
            if not row:
                raise ValueError(f"Sentence {index:,} has no reference: every prediction needs at least one.")
        # sacreBLEU wants one list per reference set and takes None where a sentence has fewer references than others.
        most = max(map(len, per_sentence))
        streams = [[row[k] if k < len(row) else None for row in per_sentence] for k in range(most)]
        bleu, chrf = _scorers(tokenize, lowercase, chrf_word_order)
        bleu_score = bleu.corpus_score(predictions, streams)
        chrf_score = chrf.corpus_score(predictions, streams)
        return {
            "bleu": bleu_score.score,
            "chrf": chrf_score.score,
            "exact_match": _exact_match(predictions, per_sentence, lowercase),
            "bleu_signature": str(bleu.get_signature()),
            "chrf_signature": str(chrf.get_signature()),
            "brevity_penalty": bleu_score.bp,
            "hypothesis_length": bleu_score.sys_len,
            "reference_length": bleu_score.ref_len,
            "num_sentences": len(predictions),
        }


def build_compute_metrics(
    tokenizer: PreTrainedTokenizerBase,
    *,
    tokenize: str = "13a",
    lowercase: bool = False,
    chrf_word_order: int = 0,
) -> Callable[[EvalPrediction], dict[str, float]]:
    """A `compute_metrics` for a Seq2SeqTrainer with `predict_with_generate`.

    Generated ids and labels are decoded, the -100 of their padding apart, and scored by `TranslationScore`. The
    references are the decoded labels: those are the original text if the tokenizer is lossless and nothing was
    truncated. The sacreBLEU signatures are logged, once.

    Args:
        tokenizer: The tokenizer of the targets; needs a padding token.
        tokenize: sacreBLEU's tokenizer for BLEU, see `TranslationScore`.
        lowercase: Whether the scores ignore case.
        chrf_word_order: 0 for chrF, 2 for chrF++.

    Returns:
        A function from an `EvalPrediction` to "bleu", "chrf", "exact_match" (each 0 to 100) and "gen_len", the mean
        number of generated tokens, the end token included and the start token not.

    Raises:
        ValueError: If the tokenizer has no padding token, or sacreBLEU lacks what was asked for. The function
            returned raises it if the predictions are not token ids (a Trainer without `predict_with_generate` hands
            out logits), if there are no labels, or if their numbers differ.
    """
    pad_token_id = tokenizer.pad_token_id
    if pad_token_id is None:
        raise ValueError(f"{type(tokenizer).__name__} has no padding token to put in place of the -100 of the labels.")
    _scorers(tokenize, lowercase, chrf_word_order)  # a wrong option shows now, not at the first evaluation
    score = TranslationScore(keep_in_memory=True)
    logged: set[str] = set()

    def compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
        generated = prediction.predictions[0] if isinstance(prediction.predictions, tuple) else prediction.predictions
        generated = _as_token_ids("predictions", generated)
        labels = _as_token_ids("label_ids", prediction.label_ids)
        if len(generated) != len(labels):
            raise ValueError(
                f"{len(generated):,} predictions for {len(labels):,} references: BLEU during evaluation takes one "
                "translation a sentence (num_return_sequences=1)."
            )
        result = score.compute(
            predictions=_decode(tokenizer, generated),
            references=_decode(tokenizer, labels),
            tokenize=tokenize,
            lowercase=lowercase,
            chrf_word_order=chrf_word_order,
        )
        for name, signature in (("BLEU", result["bleu_signature"]), ("chrF", result["chrf_signature"])):
            if signature not in logged:
                logged.add(signature)
                logger.info("%s by sacreBLEU, signature %s", name, signature)
        lengths = _generated_lengths(generated, pad_token_id, tokenizer.eos_token_id)
        return {key: float(result[key]) for key in ("bleu", "chrf", "exact_match")} | {
            "gen_len": float(lengths.mean())
        }

    return compute_metrics


def _decode(tokenizer: PreTrainedTokenizerBase, ids: npt.NDArray[np.integer[Any]]) -> list[str]:
    """The texts of rows of ids, in which padding may be -100. [N, T]."""
    ids = np.where(ids == -100, tokenizer.pad_token_id, ids)
    return list(tokenizer.batch_decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def _as_token_ids(name: str, value: Any) -> npt.NDArray[np.integer[Any]]:
    """The value as a matrix of token ids. [N, T]."""
    if value is None:
        raise ValueError(f"There are no {name} to score: the evaluation data need labels.")
    array = np.asarray(value)
    if array.ndim != 2 or not np.issubdtype(array.dtype, np.integer):
        raise ValueError(
            f"{name} must be token ids in a matrix, got {array.dtype} of shape {array.shape}: set "
            "predict_with_generate=True in the training arguments."
        )
    return array


def _generated_lengths(
    generated: npt.NDArray[np.integer[Any]], pad_token_id: int, eos_token_id: int | None
) -> npt.NDArray[np.int64]:
    """Tokens of each row after the decoder's start token, up to the end token and including it. [N]."""
    tokens = generated[:, 1:]
    is_end = tokens == eos_token_id
    # What follows the end is padding, for which generate() in beam mode also uses the end token.
    after_end = np.cumsum(is_end, axis=1) - is_end > 0
    is_padding = ((tokens == pad_token_id) & ~is_end) | (tokens == -100)
    return np.asarray((~after_end & ~is_padding).sum(axis=1), dtype=np.int64)


def _as_list(reference: str | Sequence[str]) -> list[str]:
    """The references of one sentence."""
    return [reference] if isinstance(reference, str) else list(reference)


def _exact_match(predictions: Sequence[str], references: Sequence[Sequence[str]], lowercase: bool) -> float:
    """Percentage of predictions equal to one of their references, white space at the ends apart."""

    def normalised(text: str) -> str:
        return text.strip().lower() if lowercase else text.strip()

    hits = sum(
        normalised(prediction) in {normalised(reference) for reference in row}
        for prediction, row in zip(predictions, references, strict=True)
    )
    return 100.0 * hits / len(predictions)


def _scorers(tokenize: str, lowercase: bool, chrf_word_order: int) -> tuple[BLEU, CHRF]:
    """The two metrics of sacreBLEU, after a check of the options."""
    if tokenize not in BLEU.TOKENIZERS:
        raise ValueError(
            f"sacreBLEU does not know tokenize={tokenize!r}; its tokenizers are {', '.join(sorted(BLEU.TOKENIZERS))}."
        )
    if isinstance(chrf_word_order, bool) or not isinstance(chrf_word_order, int) or chrf_word_order < 0:
        raise ValueError(f"chrf_word_order must be a whole number >= 0 (0: chrF, 2: chrF++), got {chrf_word_order!r}.")
    return BLEU(tokenize=tokenize, lowercase=lowercase), CHRF(word_order=chrf_word_order, lowercase=lowercase)
