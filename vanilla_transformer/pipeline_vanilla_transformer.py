"""The `translation`, `summarization` and `text2text-generation` pipelines for any sequence-to-sequence model.

The library removed these three tasks in its release 5.0. Arguments, result keys and result shapes here are those of
its last 4.x release; where this file does better than that release, the docstring of the method says so.

This file travels with every checkpoint, so it imports torch, transformers and a file beside it alone. With
`trust_remote_code=True` it works from the checkpoint's folder, without this package.
"""

from __future__ import annotations

import copy
import itertools
import math
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_convert
from transformers import Pipeline
from transformers.pipelines.base import pad_collate_fn  # not documented; the same in 5.0.0 to 5.24.0
from transformers.tokenization_utils_base import LARGE_INTEGER, TruncationStrategy
from transformers.utils import logging

from .parallel_vanilla_transformer import (
    check_inter_threads,
    choose_inter_threads,
    generation_setting,
    map_in_threads,
)

logger = logging.get_logger(__name__)

# A length set in one of two ways replaces the same length set in the other way by something of lower rank.
_RIVALS = {
    "max_length": "max_new_tokens",
    "max_new_tokens": "max_length",
    "min_length": "min_new_tokens",
    "min_new_tokens": "min_length",
}


class _Stream(IterableDataset[Any]):
    """Any iterable as something the base class consumes lazily on every release (5.0 turns generators into lists)."""

    def __init__(self, iterable: Iterable[Any]) -> None:
        self.iterable = iterable

    def __iter__(self) -> Iterator[Any]:
        return iter(self.iterable)


def length_sorted_batches(lengths: Sequence[int], batch_size: int, max_tokens: float) -> Iterator[list[int]]:
    """Yield the indices of `lengths` in batches of like lengths, longest first: too large a batch fails at once.

    A batch has at most `batch_size` sentences and `max_tokens` tokens, padding included, or one longer sentence.
    """
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    end = 0
    while end < len(order):
        start, longest = end, max(1, lengths[order[end]])
        end += int(min(batch_size, max(1, max_tokens / longest)))
        yield order[start:end]


def _as_arrays(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return preprocessed inputs with arrays for tensors, each of which would take a file between processes."""
    return [{key: one.numpy() if torch.is_tensor(one) else one for key, one in item.items()} for item in items]


@dataclass(eq=False)
class _SortedResults(IterableDataset[Any]):
    """The results of a pipeline's inputs, in their order, computed as they are read in batches of like lengths."""

    tokenised: DataLoader[list[dict[str, Any]]]
    window_batches: float
    batch_size: int
    max_tokens: float
    inter_threads: Callable[[], int]
    collate: Callable[[list[dict[str, Any]]], dict[str, Any]]
    forward: Callable[[dict[str, Any]], dict[str, Any]]
    postprocess: Callable[[dict[str, Any]], Any]

    def __len__(self) -> int:
        return len(self.tokenised.dataset)  # type: ignore[arg-type]  # a TypeError for streams, as it should be

    def __iter__(self) -> Iterator[Any]:
        for window in self._windows():
            done: dict[int, Any] = {}
            following = 0
            lengths = [item["input_ids"].shape[-1] for item in window]
            batches = list(length_sorted_batches(lengths, self.batch_size, self.max_tokens))
            collated = (self.collate([window[index] for index in batch]) for batch in batches)
            results = map_in_threads(self.forward, collated, min(self.inter_threads(), len(batches)))
            for batch, outputs in zip(batches, results, strict=True):
                for row, index in enumerate(batch):
                    done[index] = self.postprocess({key: value[row : row + 1] for key, value in outputs.items()})
                while following in done:
                    yield done.pop(following)
                    following += 1

    def _windows(self) -> Iterator[list[dict[str, Any]]]:
        """Yield runs of inputs to sort. In a stream what comes before a faulty input goes first, then its error."""
        window: list[dict[str, Any]] = []
        tokens = 0
        try:
            for item in itertools.chain.from_iterable(self.tokenised):
                window.append(default_convert(item))
                tokens += item["input_ids"].shape[-1]
                if max(len(window) / self.batch_size, tokens / self.max_tokens) >= self.window_batches:
                    yield window
                    window, tokens = [], 0
        except Exception:
            if self.window_batches < math.inf:
                yield window
            raise
        yield window


def _check_text(text: Any, where: str = "The input") -> None:
    """Raise a ValueError unless `text` is a string."""
    if isinstance(text, str):
        return
    hint = ""
    if isinstance(text, Mapping):
        hint = " To read one column of a dataset pass the column, for example dataset['source']."
    raise ValueError(f"{where} is {text!r:.80} of type {type(text).__name__}, not a string.{hint}")


def _overlay(lower: dict[str, Any], upper: dict[str, Any]) -> dict[str, Any]:
    """Return the generation arguments of `lower` replaced by those of `upper`."""
    return {**{key: value for key, value in lower.items() if _RIVALS.get(key) not in upper}, **upper}


class Text2TextGenerationPipeline(Pipeline):
    """Text in, text out: `pipeline("text2text-generation")`, for any encoder-decoder model that can generate.

    A setting of the decoding comes from the first of these that has it: arguments of the call, arguments of the
    constructor, the task's entry in `config.task_specific_params` (T5), the model's `generation_config`, and last
    `num_beams=4` and `max_new_tokens=256`. A model with a length rule of its own
    (`generation_config.max_length_offset`) keeps it. The model and its configs are never changed.

    Args:
        *args: As for `transformers.Pipeline`.
        **kwargs: As for `transformers.Pipeline` (`model`, `tokenizer`, `device`, `batch_size`, ...), and every option
            of `__call__` as a default for all calls.

    Raises:
        ValueError: There is no tokenizer, or the model is not an encoder-decoder model that can generate.

    Attributes:
        prefix: Text put before every input; from `config.task_specific_params[task]` or `config.prefix`.
        window_batches: Of inputs that are read lazily, how many batches are read ahead and sorted together; default
            16. With 1 each result comes as soon as can be, and more of a batch is padding.

    Example:
        >>> from transformers import pipeline
        >>> pipe = pipeline("text2text-generation", model="google-t5/t5-small")  # doctest: +SKIP
        >>> pipe("translate English to German: Good morning")  # doctest: +SKIP
        [{'generated_text': 'Guten Morgen'}]
    """

    _load_processor = False
    _load_image_processor = False
    _load_video_processor = False
    _load_feature_extractor = False
    _load_tokenizer = True
    # False although it generates: the base class's own handling of generation arguments changed in 5.20, so arguments
    # go straight to `model.generate`.
    _pipeline_calls_generate = False
    modelcard = None  # `Pipeline.save_pretrained` of 5.0.0 reads it and nothing sets it

    task: str
    return_name = "generated"
    # Whether a blank input gives a blank result. A language model may well be asked to write from nothing.
    blank_stays_blank = False
    window_batches = 16

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.tokenizer is None:
            raise ValueError(f"{type(self).__name__} needs a tokenizer: pass tokenizer=... beside the model.")
        if not getattr(self.model.config, "is_encoder_decoder", False) or not self.model.can_generate():
            raise ValueError(
                f"{type(self).__name__} needs an encoder-decoder model that can generate, and "
                f"{type(self.model).__name__} is none: load the checkpoint with AutoModelForSeq2SeqLM."
            )
        self._choose_task()
        prefix = self._task_params().get("prefix", getattr(self.model.config, "prefix", None))
        self.prefix: str = prefix or ""

    def _choose_task(self) -> None:
        """Replace `self.task` by the task of the model's config that is meant; only translation has such."""

    def _task_params(self) -> dict[str, Any]:
        """Return what the config says about this task (`task_specific_params`, used by T5); a copy."""
        return dict((getattr(self.model.config, "task_specific_params", None) or {}).get(self.task) or {})

    def _sanitize_parameters(
        self,
        *,
        return_tensors: bool | None = None,
        return_text: bool | None = None,
        clean_up_tokenization_spaces: bool | None = None,
        truncation: bool | str | TruncationStrategy | None = None,
        stop_sequence: str | None = None,
        generate_kwargs: Mapping[str, Any] | None = None,
        max_tokens_per_batch: int | None = None,
        inter_threads: int | None = None,
        **generation: Any,
    ) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        preprocess: dict[str, Any] = {}
        if truncation is not None:
            # Checks the name before anything is computed.
            preprocess["truncation"] = truncation if isinstance(truncation, bool) else TruncationStrategy(truncation)
        postprocess = {
            "return_tensors": return_tensors,
            "return_text": return_text,
            "clean_up_tokenization_spaces": clean_up_tokenization_spaces,
        }
        postprocess = {key: value for key, value in postprocess.items() if value is not None}
        wanted = {**getattr(self, "_postprocess_params", {}), **postprocess}
        if wanted.get("return_text") is False and not wanted.get("return_tensors"):
            raise ValueError("return_text=False leaves nothing to return: add return_tensors=True.")
        if generate_kwargs is not None and not isinstance(generate_kwargs, Mapping):
            raise ValueError(f"generate_kwargs={generate_kwargs!r} is not a dict of arguments for model.generate.")
        twice = sorted(set(generate_kwargs or {}) & set(generation))
        if twice:
            raise ValueError(f"{', '.join(twice)} is given both directly and in generate_kwargs: give it once.")
        generation.update(generate_kwargs or {})
        if stop_sequence is not None:
            generation.update(stop_strings=[stop_sequence], tokenizer=self.tokenizer)
        # In a call, `_forward_params` has what the constructor was given; a generation config replaces all of that.
        given = getattr(self, "_forward_params", {}).get("generation", {})
        merged = generation if generation.get("generation_config") is not None else _overlay(given, generation)
        forward: dict[str, Any] = {"generation": merged}
        if max_tokens_per_batch is not None:
            if type(max_tokens_per_batch) is not int or max_tokens_per_batch < 1:
                raise ValueError(f"max_tokens_per_batch={max_tokens_per_batch!r} is not a whole number of at least 1.")
            forward["max_tokens_per_batch"] = max_tokens_per_batch
        if inter_threads is not None:
            check_inter_threads(inter_threads)
            forward["inter_threads"] = inter_threads
        return preprocess, forward, postprocess

    def __call__(self, inputs: Any, **kwargs: Any) -> Any:
        """Generate text from text.

        Args:
            inputs: A string; a list, tuple or other sized collection of strings, such as a column `dataset["source"]`;
                or a generator, an iterator, a streamed column or a torch `Dataset` of strings (`KeyDataset`).
            **kwargs: Options, every one of them also an argument of the constructor:

                - `return_text` (bool): Give the text. Default: unless `return_tensors` is true.
                - `return_tensors` (bool, default False): Give the token ids, as a 1-d tensor on the CPU that begins
                  with the decoder's start token. Padding after the last token is cut off, so that the batch size does
                  not show (4.x left it).
                - `clean_up_tokenization_spaces` (bool, default False): Passed to `tokenizer.decode`.
                - `truncation` (bool, str or `TruncationStrategy`, default "do_not_truncate"): Passed to the tokenizer.
                  By default an input longer than `tokenizer.model_max_length` is never cut; the tokenizer logs a
                  warning.
                - `stop_sequence` (str): Stop after this text, also when it is several tokens (4.x took the first).
                - `batch_size` (int, default 1): Most inputs decoded at once. It changes speed, never a result: inputs
                  are sorted by length, and the results come in the order of the inputs. A list is sorted as a whole;
                  of a generator, iterator or dataset at most `window_batches` batches are read ahead.
                - `max_tokens_per_batch` (int): Most source tokens decoded at once, padding included; one longer input
                  is decoded alone. With a `batch_size` both limits hold, without one this is the only limit.
                - `inter_threads` (int): Batches decoded at a time on a CPU, each by its share of torch's threads. By
                  default as many as torch has threads, 8 at most, where all is known to allow it (see
                  `choose_inter_threads`), else one. It changes speed and memory, never a result; it has none to work
                  on with a `batch_size` of 1.
                - `num_workers` (int, default 0): Processes that tokenise, for lists and datasets.
                - `generate_kwargs` (dict) and any other argument of `model.generate`: `num_beams`,
                  `num_return_sequences`, `max_new_tokens`, `generation_config`, ... A `generation_config` replaces the
                  constructor's arguments, the task's settings and the defaults of this class. Of a dictionary result
                  of `generate` the sequences are used.

        Returns:
            One result is a list of `num_return_sequences` dicts with the keys `<name>_text` and `<name>_token_ids` (as
            asked for), where name is `generated`, `summary` or `translation`. A string gives one result. A list or
            other sized collection gives a list of results in its order; with one sequence each, a list of dicts. A
            generator, iterator, streamed column or torch `Dataset` gives an iterator over results, computed as it is
            read.

        Raises:
            ValueError: An input is not a string, an option does not fit, or `batch_size` is above 1 and the tokenizer
                has no padding token.
        """
        if isinstance(inputs, str):
            return super().__call__(inputs, **kwargs)
        budget = kwargs.get("max_tokens_per_batch") or self._forward_params.get("max_tokens_per_batch")
        # `_batch_size`, private, is what the constructor was given: seen in 5.0.0 to 5.24.0.
        if budget and kwargs.get("batch_size") is None and self._batch_size is None:
            kwargs["batch_size"] = budget  # no limit, as every input has a token
        if isinstance(inputs, Dataset):
            empty = isinstance(inputs, Sized) and len(inputs) == 0
            return iter(()) if empty else super().__call__(inputs, **kwargs)
        if isinstance(inputs, (bytes, bytearray, Mapping)) or not isinstance(inputs, Iterable):
            _check_text(inputs)
        if not hasattr(inputs, "__len__"):
            return super().__call__(_Stream(inputs), **kwargs)
        texts = list(inputs)
        for index, text in enumerate(texts):
            _check_text(text, f"Input {index} of {len(texts)}")
        results = super().__call__(texts, **kwargs) if texts else []
        return [result[0] for result in results] if all(len(result) == 1 for result in results) else results

    def get_iterator(self, inputs: Any, num_workers: int, batch_size: int, *params: dict[str, Any]) -> Iterable[Any]:
        """Return the results of a list or a torch `Dataset`; the base class calls this for all but a single string."""
        if type(batch_size) is not int or batch_size < 1:
            raise ValueError(f"batch_size={batch_size!r} is not a whole number of at least 1.")
        single = super().get_iterator(inputs, num_workers, 1, *params)  # for preprocess, forward, postprocess
        if batch_size == 1:
            return single
        stage = single.loader.loader  # the first, which reads and tokenises: so in 5.0.0 to 5.24.0
        chunk = 32 if stage.num_workers else 1  # without processes nothing is read before its time
        arguments = self._generation_arguments(params[1].get("generation", {}))
        return _SortedResults(
            DataLoader(stage.dataset, chunk, num_workers=stage.num_workers, collate_fn=_as_arrays),
            math.inf if isinstance(inputs, list) else self.window_batches,
            batch_size,
            params[1].get("max_tokens_per_batch", math.inf),
            lambda: choose_inter_threads(params[1].get("inter_threads"), self.model, arguments),
            pad_collate_fn(self.tokenizer, None),
            lambda batch: self.forward(batch, **params[1]),
            lambda output: self.postprocess(output, **params[2]),
        )

    def preprocess(
        self, inputs: Any, truncation: bool | TruncationStrategy = TruncationStrategy.DO_NOT_TRUNCATE
    ) -> dict[str, Any]:
        """Turn one string into the model's inputs.

        Args:
            inputs: The string.
            truncation: As in `__call__`.

        Returns:
            `input_ids` [1, S], `attention_mask` [1, S], and `blank` [1, 1], true where the model need not be asked.

        Raises:
            ValueError: `inputs` is not a string.
        """
        _check_text(inputs)
        return self._model_inputs(self.tokenizer(self.prefix + inputs, truncation=truncation), inputs)

    def _model_inputs(self, encoded: Mapping[str, Any], text: str) -> dict[str, Any]:
        """Return the tensors of one encoded sentence, with a mask always, and never without a token."""
        ids = list(encoded["input_ids"])
        if not ids:  # a tokenizer without an end token, and an empty text
            end = self.tokenizer.eos_token_id
            ids = [self._pad_token_id({}) if end is None else end]
        mask = list(encoded.get("attention_mask") or [1] * len(ids))
        blank = self.blank_stays_blank and not text.strip()
        return {
            "input_ids": torch.tensor([ids]),
            "attention_mask": torch.tensor([mask]),
            "blank": torch.tensor([[blank]]),
        }

    def check_inputs(self, input_length: int, min_length: int, max_length: int) -> bool:
        """Look for lengths that hardly fit the task, and log a warning; a hook for subclasses.

        Args:
            input_length: Tokens of the longest input of the batch.
            min_length: The least number of tokens to generate.
            max_length: The largest number of tokens to generate.

        Returns:
            Whether the lengths look right.
        """
        return True

    def _generation_arguments(self, given: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments for `model.generate`; `given` is what the caller passed. The class tells the order."""
        if given.get("generation_config") is not None:
            # A config together with other arguments is deprecated, so they go into a copy of it.
            config = copy.deepcopy(given["generation_config"])
            others = config.update(**{key: value for key, value in given.items() if key != "generation_config"})
            return {"generation_config": config, **others}
        own = self.model.generation_config
        settings: dict[str, Any] = {}
        if own.num_beams is None:
            settings["num_beams"] = 4
        if own.max_length is None and own.max_new_tokens is None and getattr(own, "max_length_offset", None) is None:
            settings["max_new_tokens"] = 256
        task = {key: value for key, value in self._task_params().items() if key != "prefix" and hasattr(own, key)}
        return _overlay(_overlay(settings, task), given)

    def _forward(
        self,
        model_inputs: dict[str, Any],
        generation: Mapping[str, Any] | None = None,
        max_tokens_per_batch: int = 0,
        inter_threads: int = 0,
    ) -> dict[str, Any]:
        # `max_tokens_per_batch` and `inter_threads` are for `get_iterator`.
        inputs, given = dict(model_inputs), dict(generation or {})
        blank = inputs.pop("blank").squeeze(1)
        forced = inputs.pop("forced_bos_token_id", None)
        if forced is not None:  # one number, or, after batching, a list with the same number for each row
            given.setdefault("forced_bos_token_id", forced[0] if isinstance(forced, list) else forced)
        arguments = self._generation_arguments(given)
        self._check_lengths(int(inputs["attention_mask"].sum(1).max()), arguments)
        rows = self._generate(inputs, ~blank, arguments)
        if bool(blank.any()):
            rows = self._with_blanks(rows, blank, arguments)
        return {"output_ids": rows, "lengths": self._lengths(rows, arguments)}

    def _generate(self, inputs: dict[str, Any], keep: torch.Tensor, arguments: dict[str, Any]) -> torch.Tensor:
        """Return the token ids [rows kept, num_return_sequences, T]; blank rows are left out of the work."""
        ids: torch.Tensor = inputs["input_ids"][keep]
        mask: torch.Tensor = inputs["attention_mask"][keep]
        if not len(ids):
            count = self._setting("num_return_sequences", arguments) or 1
            return ids.new_zeros(0, count, 2)
        # A source is padded on the right whatever `tokenizer.padding_side` says: on the left it would move positions.
        order = mask.argsort(dim=1, descending=True, stable=True)
        ids, mask = ids.gather(1, order), mask.gather(1, order)
        was_training = self.model.training
        self.model.eval()  # no dropout, whatever the trainer left behind
        try:
            output = self.model.generate(input_ids=ids, attention_mask=mask, **arguments)
        finally:
            if was_training:
                self.model.train()
        sequences: torch.Tensor = getattr(output, "sequences", output)
        return sequences.reshape(len(ids), -1, sequences.shape[-1])

    def _setting(self, name: str, arguments: dict[str, Any]) -> Any:
        """Return a generation setting: from the arguments, their generation config, or the model's."""
        return generation_setting(name, arguments, self.model)

    def _with_blanks(self, rows: torch.Tensor, blank: torch.Tensor, arguments: dict[str, Any]) -> torch.Tensor:
        """Put a row of start and end token, which decodes to the empty text, in the place of each blank input."""
        ends = self._end_token_ids(arguments)
        starts = [self._setting(name, arguments) for name in ("decoder_start_token_id", "bos_token_id")]
        pad = self._pad_token_id(arguments)
        full = rows.new_full((len(blank), rows.shape[1], max(rows.shape[-1], 2)), pad)
        full[~blank, :, : rows.shape[-1]] = rows
        full[blank, :, 0] = next((start for start in starts if start is not None), pad)
        full[blank, :, 1] = ends[0] if ends else pad
        return full

    def _lengths(self, rows: torch.Tensor, arguments: dict[str, Any]) -> torch.Tensor:
        """Return where each of the `rows` [B, n, T] ends: behind its end token, or else its last token; [B, n].

        What follows is filling, which beam search makes of padding or of end tokens, and only in a batch.
        """
        positions = torch.arange(1, rows.shape[-1] + 1, device=rows.device)
        ends = torch.tensor(self._end_token_ids(arguments), device=rows.device, dtype=rows.dtype)
        # The first token starts the decoder; in BART it is the end token.
        ended = torch.isin(rows, ends) & (positions > 1)
        content = ((rows != self._pad_token_id(arguments)) * positions).amax(-1).clamp(min=1)
        return torch.where(ended.any(-1), ended.int().argmax(-1) + 1, content)

    def _check_lengths(self, input_length: int, arguments: dict[str, Any]) -> None:
        """Call `check_inputs` where a maximal length is in force."""
        max_length = self._setting("max_length", arguments)
        if max_length is not None and self._setting("max_new_tokens", arguments) is None:
            self.check_inputs(input_length, self._setting("min_length", arguments) or 0, max_length)

    def _end_token_ids(self, arguments: dict[str, Any]) -> list[int]:
        ends = self._setting("eos_token_id", arguments)
        return [] if ends is None else torch.as_tensor(ends).reshape(-1).tolist()

    def _pad_token_id(self, arguments: dict[str, Any]) -> int:
        candidates = (self._setting("pad_token_id", arguments), self.tokenizer.pad_token_id)
        return next((int(candidate) for candidate in candidates if candidate is not None), 0)

    def postprocess(
        self,
        model_outputs: dict[str, Any],
        return_tensors: bool = False,
        return_text: bool | None = None,
        clean_up_tokenization_spaces: bool = False,
    ) -> list[dict[str, Any]]:
        """Turn the token ids of one input into its result.

        Args:
            model_outputs: `output_ids` [1, num_return_sequences, T] and their `lengths` [1, num_return_sequences].
            return_tensors: As in `__call__`.
            return_text: As in `__call__`.
            clean_up_tokenization_spaces: As in `__call__`.

        Returns:
            One dict a sequence, best first, see `__call__`.
        """
        records = []
        for row, length in zip(model_outputs["output_ids"][0], model_outputs["lengths"][0].tolist(), strict=True):
            ids = row[:length]
            record: dict[str, Any] = {}
            if return_tensors:
                record[f"{self.return_name}_token_ids"] = ids
            if return_text or (return_text is None and not return_tensors):
                record[f"{self.return_name}_text"] = self.tokenizer.decode(
                    ids, skip_special_tokens=True, clean_up_tokenization_spaces=clean_up_tokenization_spaces
                )
            records.append(record)
        return records


class SummarizationPipeline(Text2TextGenerationPipeline):
    """Summarise documents: `pipeline("summarization")`; everything else as in `Text2TextGenerationPipeline`.

    A blank document has a blank summary; the model is not asked.

    Example:
        >>> from transformers import pipeline
        >>> pipe = pipeline("summarization", model="facebook/bart-large-cnn")  # doctest: +SKIP
        >>> pipe("A long article ...", min_length=5, max_length=60)  # doctest: +SKIP
        [{'summary_text': '...'}]
    """

    return_name = "summary"
    blank_stays_blank = True

    def check_inputs(self, input_length: int, min_length: int, max_length: int) -> bool:
        """Warn of a maximal length under the minimal length, or above the length of the document."""
        if max_length < min_length:
            logger.warning(f"min_length={min_length} is larger than max_length={max_length}: nothing fits both.")
            return False
        if input_length < max_length:
            logger.warning_once(
                f"max_length is {max_length}, and the document has only {input_length} tokens. A summary should be "
                f"shorter than its document: consider max_length={max(1, input_length // 2)}."
            )
            return False
        return True


class TranslationPipeline(Text2TextGenerationPipeline):
    """Translate: `pipeline("translation")` or `pipeline("translation_xx_to_yy")`, for example `translation_en_to_de`.

    Everything else is as in `Text2TextGenerationPipeline`. Languages come from `src_lang` and `tgt_lang` (of the call
    or the constructor) or else from the name of the task. They are used in one of these ways:

    - mBART, NLLB, M2M100, SeamlessM4T, PLBart: by the tokenizer's rule; both languages are needed, in its own codes.
    - A tokenizer with a token `>>yy<<` (the tokenizers of this package, multilingual Marian): that token's id is put
      before the source. It is never read from the text. An input that already begins with the token is left alone.
    - T5: the name of the task chooses the prefix ("translate English to German: ") and the settings in the config. For
      the task "translation" the languages given to the constructor choose, or else the first pair of the config is
      taken, with a warning.
    - Other models know one pair: a `src_lang` or `tgt_lang` passed by the caller has no effect, and a warning says so.

    A blank text has a blank translation; the model is not asked.

    Example:
        >>> from transformers import pipeline
        >>> pipe = pipeline("translation_en_to_de", model="google-t5/t5-small")  # doctest: +SKIP
        >>> pipe(["Good morning", "Thank you"], batch_size=2)  # doctest: +SKIP
        [{'translation_text': 'Guten Morgen'}, {'translation_text': 'Danke'}]
    """

    return_name = "translation"
    blank_stays_blank = True

    def _choose_task(self) -> None:
        config_params = getattr(self.model.config, "task_specific_params", None) or {}
        pairs = [task for task in config_params if task.startswith("translation_")]
        if self.task != "translation" or not pairs:
            return
        meant = "translation_{src_lang}_to_{tgt_lang}".format_map(
            {"src_lang": "", "tgt_lang": "", **self._preprocess_params}
        )
        self.task = meant if meant in pairs else pairs[0]
        if meant not in pairs:
            warnings.warn(
                f"The model translates by the tasks {', '.join(pairs)}; for 'translation' the first is taken.",
                UserWarning,
                stacklevel=2,
            )

    def _sanitize_parameters(
        self, *, src_lang: str | None = None, tgt_lang: str | None = None, **kwargs: Any
    ) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        preprocess, generation, postprocess = super()._sanitize_parameters(**kwargs)
        for name, language in (("src_lang", src_lang), ("tgt_lang", tgt_lang)):
            if language is None:
                continue
            if not isinstance(language, str) or not language:
                raise ValueError(f"{name}={language!r} is not a language code: pass a string such as 'de'.")
            preprocess[name] = language
        return preprocess, generation, postprocess

    def check_inputs(self, input_length: int, min_length: int, max_length: int) -> bool:
        """Warn of a source that comes close to the maximal length of its translation."""
        if input_length > 0.9 * max_length:
            logger.warning_once(
                f"The source has {input_length} tokens, and max_length is {max_length}: the translation may end too "
                "early. Consider a larger max_length or max_new_tokens."
            )
            return False
        return True

    def preprocess(
        self,
        inputs: Any,
        truncation: bool | TruncationStrategy = TruncationStrategy.DO_NOT_TRUNCATE,
        src_lang: str | None = None,
        tgt_lang: str | None = None,
    ) -> dict[str, Any]:
        """Turn one string into the model's inputs.

        Args:
            inputs: The string.
            truncation: As in `__call__`. A language token counts as one of the tokens.
            src_lang: Language of the text, in the tokenizer's code; default: that of the task's name.
            tgt_lang: Language to translate into, in the tokenizer's code; default: that of the task's name.

        Returns:
            As in `Text2TextGenerationPipeline.preprocess`, and `forced_bos_token_id` where the decoder has to begin
            with the target language.

        Raises:
            ValueError: `inputs` is not a string, or the tokenizer has languages and does not know one of these.
        """
        _check_text(inputs)
        named = re.fullmatch(r"translation_(.+?)_to_(.+)", self.task or "")
        of_task = named.groups() if named else (None, None)
        source, target = src_lang or of_task[0], tgt_lang or of_task[1]
        # `_build_translation_inputs` is private, and the only way: seen in 5.0.0 to 5.24.0.
        build = getattr(self.tokenizer, "_build_translation_inputs", None)
        if build is not None:
            self._check_languages(source, target)
            encoded = build(inputs, return_tensors=None, truncation=truncation, src_lang=source, tgt_lang=target)
            forced = {"forced_bos_token_id": int(encoded["forced_bos_token_id"])}
            return {**self._model_inputs(encoded, inputs), **forced}
        tag = None if target is None else self._token_id(f">>{target}<<")
        unused = [] if source == of_task[0] else ["src_lang"]
        unused += [] if target == of_task[1] or tag is not None else ["tgt_lang"]
        if unused:
            logger.warning_once(
                f"No effect with this model: {', '.join(unused)}. Its tokenizer has no token for that language. (For "
                "T5, name the languages in the task, as in pipeline('translation_en_to_de').)"
            )
        if tag is None:
            return super().preprocess(inputs, truncation=truncation)
        return self._tagged_inputs(inputs, tag, truncation)

    def _tagged_inputs(self, text: str, tag: int, truncation: bool | TruncationStrategy) -> dict[str, Any]:
        """Encode with the id of the language token in front; truncation leaves room for it."""
        limit = self.tokenizer.model_max_length
        cut = truncation not in (False, TruncationStrategy.DO_NOT_TRUNCATE)
        room = {"max_length": limit - 1} if cut and 1 < limit < LARGE_INTEGER else {}
        encoded = dict(self.tokenizer(self.prefix + text, truncation=truncation, **room))
        if encoded["input_ids"][:1] != [tag]:
            encoded["input_ids"] = [tag, *encoded["input_ids"]]
            encoded.pop("attention_mask", None)
        return self._model_inputs(encoded, text)

    def _token_id(self, token: str) -> int | None:
        """Return the id of a token of the vocabulary, `None` if there is no such token."""
        found = self.tokenizer.convert_tokens_to_ids(token)
        known = found is not None and self.tokenizer.convert_ids_to_tokens(found) == token
        return int(found) if known else None

    def _check_languages(self, source: str | None, target: str | None) -> None:
        """Raise unless the tokenizer knows both languages; it would take the unknown token for a language itself."""
        for name, language in (("src_lang", source), ("tgt_lang", target)):
            if language is None:
                raise ValueError(f"This model needs src_lang and tgt_lang, and {name} is missing: pass both.")
            if self._token_id(language) is None and self._token_id(f"__{language}__") is None:
                raise ValueError(
                    f"{name}={language!r} is not a language of {type(self.tokenizer).__name__}: use the codes of the "
                    "model's documentation, for example 'en_XX' (mBART), 'eng_Latn' (NLLB), 'en' (M2M100)."
                )
