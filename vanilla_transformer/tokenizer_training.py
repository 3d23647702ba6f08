"""A joint source-target vocabulary, trained into a stock fast tokenizer (section 5.1 of the paper).

Byte-level byte-pair encoding: its alphabet is the 256 bytes, so there is no unknown token, no text that can't be
written, and nothing is normalised; decoding gives back the exact string. As in the paper one vocabulary serves both
languages, about 37,000 tokens for English and German, so that source, target and output share an embedding matrix;
the paper's own merges start from characters.

The tokenizer is a plain `PreTrainedTokenizerFast`: a saved folder loads anywhere, without this package.
"""

import json
import os
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import datasets
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from .corpus_formats import BATCH_SIZE, check_file, check_text, iterate_lines, shorten, table_suffix

PAD_TOKEN = "<pad>"
EOS_TOKEN = "</s>"
BOS_TOKEN = "<s>"
"""The decoder's start token; it stands in no row, the model puts it before the labels."""

_SPECIAL_TOKENS = (PAD_TOKEN, EOS_TOKEN, BOS_TOKEN)  # the ids 0, 1, 2
_LANGUAGE = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")
_LANGUAGE_TOKEN = re.compile(rf">>({_LANGUAGE.pattern})<<")


def train_tokenizer(
    texts: Iterable[str],
    *,
    vocab_size: int = 37_000,
    languages: Sequence[str] = (),
    min_frequency: int = 2,
    model_max_length: int | None = None,
    show_progress: bool = False,
) -> PreTrainedTokenizerFast:
    """Train byte-level BPE on text of both languages.

    Ids: `<pad>` 0, `</s>` 1, `<s>` 2, then `>>xx<<` for each language, then the 256 bytes, then the merges. Every row,
    source or label, truncated or empty, a pair too, ends in exactly one `</s>`; none starts with `<s>`. The names of
    these tokens inside a text are text (`split_special_tokens`), so no input can forge one. The same texts give the
    same tokenizer.

    Args:
        texts: Source and target sentences in any order, read once and not kept: see `iterate_texts`.
        vocab_size: Tokens in all, special ones included; at least 259 plus the number of languages. A corpus with
            fewer pairs to merge gives a smaller vocabulary and a warning.
        languages: Codes that get a tag token, for models of several languages: see `add_language_tag`.
        min_frequency: How often a pair of tokens must occur to become a token.
        model_max_length: Written into the tokenizer, where `truncation=True` finds it; None for no limit.
        show_progress: Show the progress bars of the `tokenizers` library.

    Returns:
        The tokenizer. Give the model `vocab_size=len(tokenizer)`.

    Raises:
        ValueError: An impossible size, a bad or repeated language code, no text at all, or a text that isn't one.
    """
    special_tokens = [*_SPECIAL_TOKENS, *map(language_token, languages)]
    _check_arguments(texts, vocab_size, languages, min_frequency, model_max_length)

    backend = _train_backend(texts, special_tokens, vocab_size, min_frequency, show_progress)
    size = backend.get_vocab_size()
    if size < vocab_size:
        warnings.warn(
            f"the texts support a vocabulary of {size:,} tokens, not the {vocab_size:,} asked for (pairs must occur "
            f"{min_frequency} times): give the model vocab_size=len(tokenizer), or train on more text",
            stacklevel=2,
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD_TOKEN,
        eos_token=EOS_TOKEN,
        bos_token=BOS_TOKEN,
        extra_special_tokens=special_tokens[len(_SPECIAL_TOKENS) :],
        split_special_tokens=True,
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],  # releases before 5 would add token_type_ids
        model_max_length=model_max_length,
        padding_side="right",
        truncation_side="right",
    )


def _check_arguments(
    texts: Iterable[str], vocab_size: int, languages: Sequence[str], min_frequency: int, model_max_length: int | None
) -> None:
    if isinstance(texts, (str, bytes, os.PathLike)):
        raise ValueError(f"texts must be an iterable of strings, got {shorten(repr(texts))}; use iterate_texts(files)")
    least = len(_SPECIAL_TOKENS) + len(languages) + len(pre_tokenizers.ByteLevel.alphabet())
    if vocab_size < least:
        raise ValueError(
            f"vocab_size={vocab_size} is too small: {len(_SPECIAL_TOKENS)} special tokens, {len(languages)} language "
            f"tags and 256 bytes make {least} before the first merge"
        )
    if len(set(languages)) < len(languages):
        raise ValueError(f"languages has a code twice: {list(languages)}")
    if min_frequency < 1:
        raise ValueError(f"min_frequency must be at least 1, got {min_frequency}")
    if model_max_length is not None and model_max_length < 2:
        raise ValueError(f"model_max_length must be at least 2 (a token and </s>) or None, got {model_max_length}")


def _train_backend(
    texts: Iterable[str], special_tokens: Sequence[str], vocab_size: int, min_frequency: int, show_progress: bool
) -> Tokenizer:
    backend = Tokenizer(models.BPE())
    # No space is put before the first word: decoding would have to guess whether to take it away again.
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=min_frequency,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in special_tokens],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=show_progress,
    )
    backend.train_from_iterator(_checked(texts), trainer=trainer)
    # A pair (question, context) is one row with one end; a second </s> would end the source in its middle.
    backend.post_processor = processors.TemplateProcessing(
        single=f"$A {EOS_TOKEN}", pair=f"$A $B:0 {EOS_TOKEN}", special_tokens=[(EOS_TOKEN, 1)]
    )
    return backend


def _checked(texts: Iterable[str]) -> Iterator[str]:
    """The texts as they come; an error for one that is no text, and at the end when there was none."""
    empty = True
    for number, text in enumerate(texts, start=1):
        check_text(text, f"text {number}")
        empty = empty and not text
        yield text
    if empty:
        raise ValueError("no text to train a tokenizer on: the corpus is empty")


# Where the texts come from --------------------------------------------------------


def iterate_texts(
    source: str | Path | Sequence[str | Path] | datasets.Dataset | datasets.IterableDataset,
    columns: Sequence[str] = ("source", "target"),
) -> Iterator[str]:
    """Stream the texts of plain text files or of a dataset's columns, for `train_tokenizer`.

    Args:
        source: One or more text files (plain or `.gz`), a text a line; or a dataset, as `load_parallel_files` and
            `load_parallel_dataset` give. Tables (TSV, CSV, JSON lines, Parquet) go through `load_parallel_files`.
        columns: The columns of a dataset to read; not used for files.

    Yields:
        The texts: file after file, or batch after batch all of one column and then of the next.

    Raises:
        FileNotFoundError: No such file.
        ValueError: A table instead of a text file, invalid UTF-8, or a missing column; before the first text.
    """
    if isinstance(source, datasets.Dataset | datasets.IterableDataset):
        missing = [name for name in columns if source.column_names is not None and name not in source.column_names]
        if missing:
            raise ValueError(f"the dataset has no column {missing[0]!r}; it has {source.column_names}")
        batches = source.select_columns(list(columns)).iter(BATCH_SIZE)
        return (text for batch in batches for name in columns for text in batch[name])
    files = [Path(file) for file in ([source] if isinstance(source, str | Path) else source)]
    if not files:
        raise ValueError("no files to read texts from")
    for file in files:
        if table_suffix(file):
            raise ValueError(f"{file} is a table; read it with load_parallel_files and give the dataset here")
        check_file(file)  # a missing file shows now, not after the files before it
    return (line for file in files for line in iterate_lines(file))


# Language tags --------------------------------------------------------------------


def language_token(language: str) -> str:
    """The tag of a language as Marian writes it: `>>de<<` for "de".

    Raises:
        ValueError: The code isn't made of ASCII letters, digits, "-" and "_", a letter first.
    """
    if not isinstance(language, str) or not _LANGUAGE.fullmatch(language):
        raise ValueError(f"a language code is a letter, then letters, digits, '-' or '_'; got {language!r}")
    return f">>{language}<<"


def add_language_tag(input_ids: Sequence[int], tokenizer: PreTrainedTokenizerBase, language: str) -> list[int]:
    """Put a language's tag before a source row, telling a model of several languages which one to write.

    By id, never by writing `>>de<<` before the text: there it is text like any other.

    Args:
        input_ids: One row of ids.
        tokenizer: A tokenizer trained with `languages`.
        language: The language to translate into.

    Returns:
        The ids with the tag's id first: one longer.

    Raises:
        ValueError: The tokenizer has no tag for this language; lists those it has.
    """
    token = language_token(language)
    if token not in tokenizer.all_special_tokens:
        found = [match[1] for match in map(_LANGUAGE_TOKEN.fullmatch, tokenizer.all_special_tokens) if match]
        raise ValueError(
            f"the tokenizer has no tag {token}; it has {', '.join(found) or 'no language tags'}. Train it with "
            f"languages=[..., {language!r}]."
        )
    return [cast(int, tokenizer.convert_tokens_to_ids(token)), *input_ids]


# BPE-dropout ----------------------------------------------------------------------


@contextmanager
def bpe_dropout(tokenizer: PreTrainedTokenizerBase, dropout: float) -> Iterator[None]:
    """Encode with random segmentations inside a `with` block (Provilkov et al. 2020, BPE-dropout, arXiv 1910.13267).

    Each merge is left out with this probability, so the same sentence comes in other pieces every time, and the text
    they spell stays the same. Only for encoding training data, and only around the encoding call: outside the block
    the tokenizer is as it was, and nothing of this is saved with it. The draws come from the `tokenizers` library,
    which takes no seed: two runs differ.

    Args:
        tokenizer: A fast tokenizer with a BPE model.
        dropout: Probability of leaving a merge out, in [0, 1]; the paper's is 0.1, and 1 gives single bytes.

    Raises:
        ValueError: The probability is out of range, or the tokenizer has no BPE model.
    """
    if not 0.0 <= dropout <= 1.0:
        raise ValueError(f"dropout must lie in [0, 1], got {dropout}")
    model = getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)
    if not isinstance(model, models.BPE):
        raise ValueError(f"BPE-dropout needs a fast tokenizer with a BPE model; {type(tokenizer).__name__} has none")
    before = model.dropout
    model.dropout = dropout or None
    try:
        yield
    finally:
        model.dropout = before


# Saving ---------------------------------------------------------------------------


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: str | Path) -> None:
    """Save the tokenizer under the class name that every release of transformers knows.

    `save_pretrained` of transformers 5 writes "TokenizersBackend", the class's new name, which releases before 5 can't
    load; "PreTrainedTokenizerFast" is its alias in 5 and its name before. The truncation and padding of the last
    call, which the library would write into `tokenizer.json` too, are left out. Apart from these it is the same.

    Args:
        tokenizer: What `train_tokenizer` returned, or any stock fast tokenizer.
        folder: Where to put `tokenizer.json` and `tokenizer_config.json`.
    """
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    tokenizer.save_pretrained(str(folder))
    path = Path(folder, "tokenizer_config.json")
    settings: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if settings["tokenizer_class"] == "TokenizersBackend":
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
        path.write_text(json.dumps(settings, indent=2, ensure_ascii=False, sort_keys=True) + "\n", encoding="utf-8")
