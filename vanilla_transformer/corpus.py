"""Parallel text: reading it, checking every pair, and turning it into token ids.

Whatever the source (two plain text files, one TSV, CSV, JSON-lines or Parquet file, a Hub dataset, a folder on disk, a
stream), the result is a dataset with the string columns `source` and `target`, and a `CorpusReport` that accounts for
every pair that was read. A pair that can't be used is an error that says where it is, or, when asked for, a counted
drop; nothing is repaired, reordered or left out silently, and the text that is kept is kept byte for byte.
"""

import itertools
import tempfile
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

import datasets
import numpy as np
import numpy.typing as npt
import pyarrow as pa
from transformers import PreTrainedTokenizerBase

from .corpus_formats import (
    BATCH_SIZE,
    TABLE_SUFFIXES,
    CellPath,
    Columns,
    Row,
    check_file,
    check_text,
    examine,
    is_named_gzip,
    iterate_lines,
    read_rows,
    shorten,
    table_suffix,
)

__all__ = [
    "CorpusReport",
    "check_text",
    "encode_pairs",
    "iterate_lines",
    "load_parallel_dataset",
    "load_parallel_files",
]

OnBadPair = Literal["error", "drop"]
TooLong = Literal["error", "drop", "truncate"]

_MAX_EXAMPLES = 5
_DROP_REMEDY = 'Correct them, or leave them out with --on_bad_pair drop (on_bad_pair="drop").'


@dataclass
class CorpusReport:
    """What became of every pair of a corpus; `print(report)` gives one readable line.

    For a stream the counts grow as the stream is read, in the process that reads it (a `DataLoader` worker counts in
    its own copy); a second pass over it adds to them.

    Attributes:
        action: What was done to the pairs, with the place: "read from train.en, train.de".
        read: Pairs met.
        kept: Pairs in the resulting dataset.
        dropped: Pairs left out, by reason; `read == kept + sum(dropped.values())`.
        truncated: Pairs kept but shortened, by side; only `encode_pairs(too_long="truncate")` makes these.
        examples: The first few pairs that could not be used, as "place: reason".
        notes: Anything else done to the text, such as a byte-order mark taken off.
    """

    action: str
    read: int = 0
    kept: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    truncated: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        """`29,000 pairs read from train.en, train.de: 28,997 kept, 3 dropped (2 empty, 1 stray tab)`."""
        text = f"{self.read:,} pairs {self.action}: {self.kept:,} kept"
        if self.truncated:
            text += f", of which truncated: {_counts(self.truncated)}"
        text += f", {self.dropped.total():,} dropped"
        if self.dropped:
            text += f" ({_counts(self.dropped)})"
        return "; ".join([text, *self.notes])

    def _admit(self, row: Row, places: tuple[str, str]) -> bool:
        """Count a row and say whether it is kept; `places` go before the number of a bad source, a bad target."""
        self.read += 1
        defect = row.defect or examine(row.source, row.target)
        if defect is None:
            self.kept += 1
            return True
        self.dropped[defect.reason] += 1
        if len(self.examples) < _MAX_EXAMPLES:
            detail = f" ({defect.detail})" if defect.detail else ""
            self.examples.append(f"{places[defect.side]}{row.number}: {defect.reason}{detail}")
        return False

    def _raise_if_bad(self, on_bad_pair: OnBadPair) -> None:
        """Raise when pairs were dropped that should not have been.

        Raises:
            ValueError: A pair was dropped and `on_bad_pair` is "error"; the message lists counts, places and remedy.
        """
        if self.dropped and on_bad_pair == "error":
            places = "".join(f"\n  {example}" for example in self.examples)
            more = self.dropped.total() - len(self.examples)
            places += f"\n  ... and {more:,} more" if more else ""
            raise ValueError(
                f"{self.dropped.total():,} of {self.read:,} pairs {self.action} can't be used "
                f"({_counts(self.dropped)}):{places}\n{_DROP_REMEDY}"
            )

    def _raise_if_empty(self) -> None:
        """Raise when nothing is left to train on.

        Raises:
            ValueError: No pair was read, or every pair was dropped.
        """
        if self.read == 0:
            raise ValueError(f"no pairs {self.action}: it is empty. Give a file or split that holds pairs.")
        if self.kept == 0:
            places = "".join(f"\n  {example}" for example in self.examples)
            raise ValueError(f"nothing is left: {self}; the first of them:{places}")


def _counts(counter: Counter[str]) -> str:
    """`2 empty, 1 stray tab`, the most frequent first."""
    return ", ".join(f"{count:,} {reason}" for reason, count in counter.most_common())


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")


# Loading -------------------------------------------------------------------------


def load_parallel_files(
    files: str | Path | Sequence[str | Path],
    *,
    source_lang: str | None = None,
    target_lang: str | None = None,
    source_column: str | None = None,
    target_column: str | None = None,
    on_bad_pair: OnBadPair = "error",
) -> tuple[datasets.Dataset, CorpusReport]:
    """Read parallel text from two plain text files, or from one TSV, CSV, JSON-lines or Parquet file.

    Text formats may be gzip-compressed (`.gz`). The pairs are streamed into a memory-mapped Arrow file in the system's
    temporary folder (set `TMPDIR` to move it), which goes when the process ends, so memory use does not grow with the
    corpus.

    - Two files: line n of the second is the translation of line n of the first.
    - TSV: plain tabs, no quoting. Two columns (source, target) without a header, or any columns with a first line that
      holds one of the names given here, or both "source" and "target".
    - CSV: comma-separated, double quotes, a header line.
    - JSON lines (`.jsonl`, `.json`, `.ndjson`): one object a line. Its first object tells which fields there are.
    - Parquet: string columns.

    The columns of a named format are, in this order: `source_column` / `target_column`; the language codes; the codes
    inside a `translation` dict, as in `{"translation": {"en": "...", "de": "..."}}`; "source" and "target".

    Args:
        files: One path, or two (source, target).
        source_lang: Language code of the source.
        target_lang: Language code of the target.
        source_column: Name of the source column where it isn't the code.
        target_column: Name of the target column.
        on_bad_pair: "error" refuses a corpus with a bad pair, after reading all of it, so that the message counts
            them; "drop" leaves bad pairs out and counts them by reason. Bad is: an empty side, invalid UTF-8, a wrong
            number of fields, a malformed JSON line, a missing or non-string value, NUL, a lone surrogate.

    Returns:
        The dataset with string columns "source" and "target", in file order, and the account of every pair.

    Raises:
        FileNotFoundError: No such file.
        ValueError: A bad pair under "error"; and always: unequal line counts, a missing column, no pair left, damaged
            gzip or Parquet data, broken CSV quoting, a file that isn't of the format its name says.
    """
    _check_choice("on_bad_pair", on_bad_pair, get_args(OnBadPair))
    columns = Columns(source_lang, target_lang, source_column, target_column)
    paths = [Path(file) for file in ([files] if isinstance(files, str | Path) else files)]
    _check_paths(paths, columns)
    report = CorpusReport(f"read from {', '.join(map(str, paths))}")
    rows = read_rows(paths, columns, report.notes)
    separator = " row " if table_suffix(paths[0]) == ".parquet" else ":"
    places = (f"{paths[0]}{separator}", f"{paths[-1]}{separator}")
    return _store(_sift(rows, report, places, on_bad_pair)), report


def _check_paths(paths: Sequence[Path], columns: Columns) -> None:
    """Refuse what can be refused by the names alone, before anything is read."""
    if len(paths) not in (1, 2):
        raise ValueError(f"give one file, or two (source, target); got {len(paths)}")
    for path in paths:
        check_file(path)
    kinds = [table_suffix(path) for path in paths]
    if len(paths) == 2:
        if any(kinds):
            raise ValueError(
                f"two files are read as plain text, but {paths[kinds[0] == '']} is a table: give it alone"
            )
        languages = [path.with_suffix("").suffix if is_named_gzip(path) else path.suffix for path in paths]
        if columns.source_lang and languages == [f".{columns.target_lang}", f".{columns.source_lang}"]:
            raise ValueError(
                f"{paths[0]}, {paths[1]}: the source comes first, and the source is {columns.source_lang!r}; swap the "
                "files or the languages"
            )
    elif not kinds[0]:
        raise ValueError(
            f"{paths[0]}: a single file must be a table, named {', '.join(TABLE_SUFFIXES)} (text formats also .gz); "
            "give two files for plain text"
        )
    elif kinds[0] == ".parquet" and is_named_gzip(paths[0]):
        raise ValueError(f"{paths[0]}: Parquet is compressed within; unpack the .gz first")


def _sift(
    rows: Iterable[Row], report: CorpusReport, places: tuple[str, str], on_bad_pair: OnBadPair
) -> Iterator[tuple[str, str]]:
    """The good pairs; at the end the verdict on the corpus."""
    for row in rows:
        if report._admit(row, places):
            yield row.source, row.target
    report._raise_if_bad(on_bad_pair)
    report._raise_if_empty()


@cache
def _scratch_folder() -> tempfile.TemporaryDirectory[str]:
    """One folder a process, removed when it ends: the datasets' files must outlive this module's functions."""
    return tempfile.TemporaryDirectory(prefix="vanilla_transformer_")


def _store(pairs: Iterator[tuple[str, str]]) -> datasets.Dataset:
    """Stream pairs into an Arrow file and map it; `Dataset.from_generator` would give an edited file's old pairs."""
    path = Path(_scratch_folder().name, f"{uuid.uuid4().hex}.arrow")
    schema = pa.schema([("source", pa.string()), ("target", pa.string())])
    try:
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, schema) as writer:
            while batch := list(itertools.islice(pairs, BATCH_SIZE)):
                writer.write_batch(pa.record_batch([list(side) for side in zip(*batch, strict=True)], schema=schema))
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    return datasets.Dataset.from_file(str(path))


def load_parallel_dataset(
    name: str | Path,
    config_name: str | None = None,
    *,
    split: str,
    source_lang: str | None = None,
    target_lang: str | None = None,
    source_column: str | None = None,
    target_column: str | None = None,
    streaming: bool = False,
    on_bad_pair: OnBadPair = "error",
) -> tuple[datasets.Dataset | datasets.IterableDataset, CorpusReport]:
    """Load parallel text with the `datasets` library: a Hub dataset, a local folder, or a `save_to_disk` folder.

    The columns are found as in `load_parallel_files`, in the first row. The pairs stay where `datasets` keeps them;
    only an account of them is taken.

    Args:
        name: Hub id ("wmt/wmt14") or folder.
        config_name: Configuration of the dataset ("de-en").
        split: Split, or a slice of one such as "train[:1%]" (no slices of a `save_to_disk` folder).
        source_lang: Language code of the source.
        target_lang: Language code of the target.
        source_column: Name of the source column where it isn't the code.
        target_column: Name of the target column.
        streaming: Give an `IterableDataset`: pairs are fetched, checked and counted as they are asked for; the report
            fills meanwhile, a bad pair under "error" raises when it is met, and that a stream loses all its pairs can
            be seen only at its end.
        on_bad_pair: As in `load_parallel_files`.

    Returns:
        The dataset with string columns "source" and "target", and the account of every pair.

    Raises:
        FileNotFoundError: No such dataset (from `datasets`).
        ConnectionError: The Hub can't be reached and the dataset isn't cached (from `datasets`).
        ValueError: Unknown configuration or split, a missing column, a bad pair under "error", no pair left.
    """
    _check_choice("on_bad_pair", on_bad_pair, get_args(OnBadPair))
    columns = Columns(source_lang, target_lang, source_column, target_column)
    dataset = _open_dataset(name, config_name, split, streaming)
    report = CorpusReport(f"read from {name}{f' ({config_name})' if config_name else ''}, split {split}")
    first: dict[str, Any] = next(iter(dataset), {})
    if not first:
        report._raise_if_empty()
    codes = list(first["translation"]) if isinstance(first.get("translation"), dict) else []
    paths = columns.find(list(first), codes, f"{name}, split {split},")
    place = f"{name} {split} row "
    if streaming:
        check = _StreamCheck(paths, report, place, on_bad_pair)
        text = datasets.Features({"source": datasets.Value("string"), "target": datasets.Value("string")})
        return dataset.map(check, batched=True, remove_columns=list(first), features=text), report

    good = [report._admit(row, (place, place)) for row in _dataset_rows(dataset, paths)]
    report._raise_if_bad(on_bad_pair)
    report._raise_if_empty()
    if report.dropped:
        dataset = dataset.select(np.flatnonzero(good))
    return _as_source_and_target(dataset, paths), report


def _as_source_and_target(dataset: datasets.Dataset, paths: tuple[CellPath, CellPath]) -> datasets.Dataset:
    """The two columns under our names: views, no copy, so that a Hub dataset and what is made of it stay cached."""
    dataset = dataset.select_columns(list({path[0] for path in paths}))
    if max(map(len, paths)) == 2:
        dataset = dataset.flatten()  # translation: {en, de} becomes translation.en, translation.de
    source, target = (".".join(path) for path in paths)
    return dataset.select_columns([source, target]).rename_columns({source: "source", target: "target"})


def _open_dataset(name: str | Path, config_name: str | None, split: str, streaming: bool) -> Any:
    path = Path(name)
    if path.is_file():
        raise ValueError(f"{name} is a file; read it with load_parallel_files (--train_file)")
    if not any(Path(path, marker).is_file() for marker in ("dataset_dict.json", "state.json")):
        try:
            return datasets.load_dataset(str(name), config_name, split=split, streaming=streaming)
        except datasets.exceptions.DatasetGenerationError as error:  # its own message hides the reason in the cause
            raise ValueError(f"{name} can't be loaded: {error.__cause__ or error}") from error
    if config_name is not None:
        raise ValueError(f"{name} was written by save_to_disk and has no configurations, got {config_name!r}")
    try:
        saved = datasets.load_from_disk(str(path))
    except IndexError as error:  # datasets 5.2 saves a dataset without rows and then can't load it
        raise ValueError(f"{name} is empty: it was saved without rows. Save it anew.") from error
    splits = saved if isinstance(saved, datasets.DatasetDict) else {str(saved.split or "train"): saved}
    if split not in splits:
        raise ValueError(f"{name} has no split {split!r}; it has {', '.join(map(repr, splits))}")
    dataset = splits[split].with_format(None)
    return dataset.to_iterable_dataset() if streaming else dataset


def _dataset_rows(dataset: Any, paths: tuple[CellPath, CellPath], start: int = 0) -> Iterator[Row]:
    """Rows of a dataset, or of one batch of it (a dict of columns)."""
    batches = [dataset] if isinstance(dataset, Mapping) else dataset.iter(BATCH_SIZE)
    number = start
    for batch in batches:
        for source, target in zip(batch[paths[0][0]], batch[paths[1][0]], strict=True):
            number += 1
            yield Row(number, _side(source, paths[0]), _side(target, paths[1]))


def _side(value: Any, path: CellPath) -> Any:
    """The text inside a cell of the column `path[0]`; None where the `translation` dict or the language is missing."""
    if len(path) == 1:
        return value
    return value.get(path[1]) if isinstance(value, dict) else None


class _StreamCheck:
    """A batched map over a stream that keeps the good pairs as "source" and "target"."""

    def __init__(
        self,
        paths: tuple[CellPath, CellPath],
        report: CorpusReport,
        place: str,
        on_bad_pair: OnBadPair,
    ) -> None:
        self.paths, self.report, self.place, self.on_bad_pair = paths, report, place, on_bad_pair

    def __call__(self, batch: Mapping[str, list[Any]]) -> dict[str, list[str]]:
        rows = _dataset_rows(batch, self.paths, start=self.report.read)
        good = [row for row in rows if self.report._admit(row, (self.place, self.place))]
        self.report._raise_if_bad(self.on_bad_pair)
        return {"source": [row.source for row in good], "target": [row.target for row in good]}


# Encoding ------------------------------------------------------------------------


def encode_pairs(
    dataset: datasets.Dataset | datasets.IterableDataset,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_source_length: int | None = None,
    max_target_length: int | None = None,
    too_long: TooLong = "drop",
    num_proc: int | None = None,
) -> tuple[datasets.Dataset | datasets.IterableDataset, CorpusReport]:
    """Turn pairs of text into pairs of token ids, with any tokenizer of the library.

    The target goes through `text_target=`, so tokenizers with a vocabulary or a language of their own for the target
    (Marian, NLLB) use it. Lengths are in tokens and count the end token.

    Args:
        dataset: String columns "source" and "target". A stream is encoded as it is read: its report fills meanwhile,
            and "error" raises when a long pair is met.
        tokenizer: Any tokenizer that puts its end token on the target.
        max_source_length: Longest source in tokens; None for no limit.
        max_target_length: Longest target in tokens; None for no limit.
        too_long: What becomes of a pair over a limit: "error", "drop" it, or "truncate" it as the tokenizer does
            (ours keeps the end token). The report counts all three.
        num_proc: Processes to encode with; not for streams.

    Returns:
        The dataset with exactly the columns "input_ids" and "labels" (lists of int32), in the old order; the account.

    Raises:
        ValueError: Columns missing, an unusable limit, a tokenizer that doesn't end its labels, a long pair under
            "error", text that is no Unicode, or no pair left.
    """
    _check_choice("too_long", too_long, get_args(TooLong))
    limits = _Limits(max_source_length, max_target_length, too_long)
    streaming = isinstance(dataset, datasets.IterableDataset)
    if streaming and num_proc is not None:
        raise ValueError(f"num_proc={num_proc} can't be used with a stream; DataLoader workers read it in parallel")
    columns = dataset.column_names
    if columns is not None and not {"source", "target"} <= set(columns):
        raise ValueError(f"encode_pairs needs the columns 'source' and 'target', the dataset has {columns}")
    _check_end_token(tokenizer)
    report = CorpusReport("encoded")
    encode = _Encode(tokenizer, limits)
    if streaming:
        stream = dataset.map(
            _StreamEncode(encode, report),
            batched=True,
            remove_columns=columns or ["source", "target"],
            features=_integer_lists("input_ids", "labels"),
        )
        return stream, report
    if len(dataset) == 0:
        report._raise_if_empty()
    return _encode_all(dataset, encode, report, num_proc), report


def _encode_all(dataset: Any, encode: "_Encode", report: CorpusReport, num_proc: int | None) -> datasets.Dataset:
    encoded = dataset.map(
        encode,
        batched=True,
        remove_columns=dataset.column_names,
        features=datasets.Features(
            **_integer_lists("input_ids", "labels"),
            source_length=datasets.Value("int32"),
            target_length=datasets.Value("int32"),
        ),
        num_proc=num_proc,
        desc="Encoding pairs",
        # Under BPE-dropout every call must draw anew instead of finding the first draw in the cache.
        new_fingerprint=uuid.uuid4().hex[:16] if _draws_segmentations(encode.tokenizer) else None,
    )
    # From the columns, not by counting inside `encode`: that runs in other processes, or not at all (cache).
    lengths = encoded.select_columns(["source_length", "target_length"]).with_format("numpy")[:]
    keep = encode.limits.judge(report, lengths["source_length"], lengths["target_length"], lambda row: dataset[row])
    report._raise_if_empty()
    encoded = encoded.remove_columns(["source_length", "target_length"])
    return encoded if keep.all() else encoded.select(np.flatnonzero(keep))


def _integer_lists(*names: str) -> datasets.Features:
    return datasets.Features({name: datasets.Sequence(datasets.Value("int32")) for name in names})


def _check_end_token(tokenizer: PreTrainedTokenizerBase) -> None:
    """A model whose labels lack the end token never learns to stop; some fast tokenizers leave it out."""
    end = tokenizer.eos_token_id
    if end is not None and end not in tokenizer(text_target="a")["input_ids"]:
        raise ValueError(
            f"{type(tokenizer).__name__} does not put its end token {tokenizer.eos_token!r} on targets, so a model "
            "trained with it would never stop; set its post-processor or `add_eos_token=True`"
        )


def _draws_segmentations(tokenizer: PreTrainedTokenizerBase) -> bool:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return bool(getattr(getattr(backend, "model", None), "dropout", None))


@dataclass(frozen=True)
class _Limits:
    """The length limits, and what becomes of a pair above them."""

    max_source_length: int | None
    max_target_length: int | None
    too_long: TooLong

    def __post_init__(self) -> None:
        for name in ("max_source_length", "max_target_length"):
            limit = getattr(self, name)
            if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 2):
                raise ValueError(f"{name} must be at least 2 (a token and the end token) or None, got {limit!r}")

    def judge(
        self, report: CorpusReport, source: Any, target: Any, pair: Callable[[int], Mapping[str, str]]
    ) -> npt.NDArray[np.bool_]:
        """Count pairs by their lengths and mark the ones to keep.

        Args:
            report: Where to count.
            source: Source lengths in tokens, [pairs].
            target: Target lengths in tokens, [pairs].
            pair: Gives the text of a pair by its index, for the examples.

        Raises:
            ValueError: A pair is over a limit and `too_long` is "error".
        """
        no_limit = np.iinfo(np.int32).max
        limits = {"source": self.max_source_length or no_limit, "target": self.max_target_length or no_limit}
        lengths = {"source": np.asarray(source), "target": np.asarray(target)}
        over = {side: lengths[side] > limits[side] for side in limits}
        either = over["source"] | over["target"]
        for row in np.flatnonzero(either)[: _MAX_EXAMPLES - len(report.examples)].tolist():
            side = "source" if over["source"][row] else "target"
            report.examples.append(
                f"pair {report.read + row + 1:,}: {side} of {lengths[side][row]:,} tokens where {limits[side]:,} are "
                f"allowed: {shorten(pair(row)[side])!r}"
            )
        report.read += len(either)
        if self.too_long == "truncate":
            report.kept += len(either)
            report.truncated.update({side: int(over[side].sum()) for side in over if over[side].any()})
            return np.ones_like(either)
        report.kept += int((~either).sum())
        reasons = {"source too long": over["source"], "target too long": over["target"] & ~over["source"]}
        report.dropped.update({reason: int(rows.sum()) for reason, rows in reasons.items() if rows.any()})
        if report.dropped and self.too_long == "error":
            places = "".join(f"\n  {example}" for example in report.examples)
            raise ValueError(
                f"{report.dropped.total():,} of {report.read:,} pairs are too long ({_counts(report.dropped)}):"
                f"{places}\nRaise --max_source_length and --max_target_length, or choose --too_long drop or truncate."
            )
        return ~either


class _Encode:
    """A batched map: text to ids, with the lengths before any truncation."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, limits: _Limits) -> None:
        self.tokenizer, self.limits = tokenizer, limits

    def __call__(self, batch: Mapping[str, list[str]]) -> dict[str, list[Any]]:
        input_ids, source_length = self._ids("text", batch["source"], self.limits.max_source_length)
        labels, target_length = self._ids("text_target", batch["target"], self.limits.max_target_length)
        return {
            "input_ids": input_ids,
            "labels": labels,
            "source_length": source_length,
            "target_length": target_length,
        }

    def _ids(self, side: str, texts: list[str], limit: int | None) -> tuple[list[list[int]], list[int]]:
        try:
            rows = self.tokenizer(**{side: texts}, verbose=False)["input_ids"]
        except (TypeError, UnicodeError):
            for text in texts:  # the library's message does not say which text, nor why
                check_text(text, f"the {'source' if side == 'text' else 'target'} {shorten(repr(text))}")
            raise
        lengths = [len(row) for row in rows]
        long = [index for index, length in enumerate(lengths) if limit is not None and length > limit]
        if long and self.limits.too_long == "truncate":
            texts = [texts[index] for index in long]
            cut = self.tokenizer(**{side: texts}, truncation=True, max_length=limit, verbose=False)["input_ids"]
            for index, row in zip(long, cut, strict=True):
                rows[index] = row
        return rows, lengths


class _StreamEncode:
    """`_Encode` for a stream: judges each batch at once, for there is no whole to judge later."""

    def __init__(self, encode: _Encode, report: CorpusReport) -> None:
        self.encode, self.report = encode, report

    def __call__(self, batch: Mapping[str, list[str]]) -> dict[str, list[Any]]:
        rows = self.encode(batch)
        lengths = rows.pop("source_length"), rows.pop("target_length")
        keep = self.encode.limits.judge(
            self.report, *lengths, lambda row: {"source": batch["source"][row], "target": batch["target"][row]}
        )
        return {name: list(itertools.compress(column, keep)) for name, column in rows.items()}
