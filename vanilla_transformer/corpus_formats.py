r"""The files parallel text comes in, read record by record: plain text, TSV, CSV, JSON lines, Parquet.

Every reader yields a `Row` for every record, the bad ones with what is wrong, so that `corpus` can account for all.
Lines end at "\n" and "\r\n" only, and the text is given as it stands.
"""

import csv
import gzip
import io
import itertools
import json
import re
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

TABLE_SUFFIXES = (".tsv", ".csv", ".jsonl", ".json", ".ndjson", ".parquet")
BATCH_SIZE = 1000

CellPath = tuple[str, ...]
"""Where a side's text lies in a record: ("en",), or ("translation", "en") inside a dict."""

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
# How a file opens that can't be read as UTF-8 text, and what it is then.
_NOT_PLAIN_TEXT = {
    b"\xfd7zXZ\x00": "xz-compressed",
    b"\x28\xb5\x2f\xfd": "zstandard-compressed",
    b"PK\x03\x04": "a zip archive",
    b"\xff\xfe": "UTF-16 text",
    b"\xfe\xff": "UTF-16 text",
}


class Defect(NamedTuple):
    """Why a pair can't be used: a reason to count by, the side it is on (0 source, 1 target), and particulars."""

    reason: str
    side: int = 0
    detail: str = ""


class Row(NamedTuple):
    """What a reader yields: the line (or row) number counted from 1, the two cells, and a defect already seen."""

    number: int
    source: Any = None
    target: Any = None
    defect: Defect | None = None


class _Line(NamedTuple):
    """A line of text: its number counted from 1, the text, its line break, and the place of an invalid byte."""

    number: int
    text: str
    end: str
    invalid: str | None = None


# Checking text -------------------------------------------------------------------


def check_text(text: str, where: str = "text") -> None:
    r"""Refuse what is no Unicode text: half of a surrogate pair, which has no UTF-8 form and no token.

    Such code points come from JSON escapes cut in two (`"\ud83d"`) and from `errors="surrogateescape"`. A stock fast
    tokenizer answers them with an unrelated `TypeError`, so call this wherever text from outside enters.

    Args:
        text: The string to look at.
        where: What the message calls it: a file and line, "the source of pair 3".

    Raises:
        ValueError: `text` is not a string, or holds a lone surrogate; names the code point and its index.
    """
    if not isinstance(text, str):
        raise ValueError(f"{where} must be a string, got {type(text).__name__} {shorten(repr(text))}")
    found = _lone_surrogate(text)
    if found is not None:
        raise ValueError(
            f"{where} holds a lone surrogate, U+{ord(found.group()):04X} at index {found.start()}: half of a UTF-16 "
            "pair is not a character and can't be encoded. Remove it, or repair the program that wrote it."
        )


def _lone_surrogate(text: str) -> re.Match[str] | None:
    return None if text.isascii() else _LONE_SURROGATE.search(text)


def shorten(text: str, width: int = 60) -> str:
    """The beginning of a text, for messages."""
    return text if len(text) <= width else text[: width - 3] + "..."


def examine(source: Any, target: Any) -> Defect | None:
    """The first defect of a pair: not a string, empty, NUL, lone surrogate; None for a good pair."""
    for side, (name, text) in enumerate((("source", source), ("target", target))):
        if not isinstance(text, str):
            return Defect("not a string", side, f"the {name} is {shorten(repr(text))}")
        if not text or text.isspace():
            return Defect("empty", side, f"no text in the {name}")
        if "\0" in text:
            return Defect("NUL character", side, f"in the {name} at index {text.index(chr(0))}")
        if (found := _lone_surrogate(text)) is not None:
            return Defect("lone surrogate", side, f"U+{ord(found.group()):04X} in the {name} at index {found.start()}")
    return None


# Reading lines -------------------------------------------------------------------


def iterate_lines(file: str | Path) -> Iterator[str]:
    r"""Lines of a UTF-8 text file, plain or gzip (by the suffix `.gz`), without their line breaks.

    Only "\n" and "\r\n" end a line. `str.splitlines` and text-mode files also split at U+2028, U+0085, form feeds or
    lone "\r", each of which occurs inside real sentences and would shift every pair after it. A byte-order mark at the
    start is taken off.

    Args:
        file: The file; it is read as the lines are asked for.

    Yields:
        One line after the other, exactly as it stands.

    Raises:
        FileNotFoundError: No such file.
        ValueError: A folder, another compression, damaged gzip data, or invalid UTF-8: names the file, the line, and
            the byte with its offset (in the unpacked file).
    """
    for line in _lines(Path(file), []):
        if line.invalid:
            raise ValueError(f"{file}:{line.number}: invalid UTF-8 ({line.invalid}). Convert the file to UTF-8.")
        yield line.text


def _lines(path: Path, notes: list[str]) -> Iterator[_Line]:
    """Numbered lines; invalid bytes come as lone surrogates (so a CSV record stays whole) with their place."""
    offset = 0
    for number, raw in enumerate(_raw_lines(path), start=1):
        start = len(_BYTE_ORDER_MARK) if number == 1 and raw.startswith(_BYTE_ORDER_MARK) else 0
        if start:
            notes.append(f"byte-order mark taken off {path}")
        end = "\r\n" if raw.endswith(b"\r\n") else "\n" if raw.endswith(b"\n") else ""
        body = raw[start : len(raw) - len(end)]
        try:
            yield _Line(number, body.decode(), end)
        except UnicodeDecodeError as error:
            place = f"byte 0x{body[error.start]:02x} at offset {offset + start + error.start:,}"
            yield _Line(number, body.decode(errors="surrogateescape"), end, place)
        offset += len(raw)


def _raw_lines(path: Path) -> Iterator[bytes]:
    number = 0
    with _open(path) as file:
        try:
            for raw in gzip.GzipFile(fileobj=file) if is_named_gzip(path) else file:
                yield raw
                number += 1
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise ValueError(
                f"{path}: the gzip data is cut off or damaged after line {number:,} ({error}). Fetch the file again."
            ) from error


def _open(path: Path) -> io.BufferedReader:
    """The file opened for bytes, once its first bytes have shown that its name tells the truth."""
    check_file(path)
    file = path.open("rb")
    opening = file.peek(8)  # does not consume, so pipes work too
    is_gzip = opening.startswith(b"\x1f\x8b")
    problem = next((what for magic, what in _NOT_PLAIN_TEXT.items() if opening.startswith(magic)), None)
    if problem:
        problem += "; give UTF-8 text, plain or gzip-compressed"
    elif is_gzip and not is_named_gzip(path):
        problem = "gzip-compressed although its name does not end in .gz; rename it"
    elif opening and not is_gzip and is_named_gzip(path):
        problem = "not gzip-compressed although its name ends in .gz; rename it"
    if problem:
        file.close()
        raise ValueError(f"{path} is {problem}")
    return file


def is_named_gzip(path: Path) -> bool:
    """Whether the name ends in `.gz`."""
    return path.suffix.lower() == ".gz"


def check_file(path: Path) -> None:
    """Refuse a folder (`ValueError`) and a missing file (`FileNotFoundError`)."""
    if path.is_dir():
        raise ValueError(f"{path} is a folder; a file is needed (a dataset folder is read by load_parallel_dataset)")
    if not path.exists():
        raise FileNotFoundError(f"no such file: {path}")


def table_suffix(path: Path) -> str:
    """What kind of table the name promises: `.tsv` for pairs.TSV and pairs.tsv.gz, "" for a plain text file."""
    name = path.with_suffix("") if is_named_gzip(path) else path
    suffix = name.suffix.lower()
    return suffix if suffix in TABLE_SUFFIXES else ""


# Columns -------------------------------------------------------------------------


@dataclass(frozen=True)
class Columns:
    """What the caller said about the columns, and the search for them."""

    source_lang: str | None
    target_lang: str | None
    source_column: str | None
    target_column: str | None

    def __post_init__(self) -> None:
        for kind in ("column", "lang"):
            source, target = getattr(self, f"source_{kind}"), getattr(self, f"target_{kind}")
            if source is not None and source == target:
                raise ValueError(f"source_{kind} and target_{kind} are both {source!r}; a pair needs two sides")

    def are_named_in(self, header: Collection[str]) -> bool:
        """Whether a first line that might be data is a header: it holds a name we look for."""
        asked = {self.source_column, self.target_column, self.source_lang, self.target_lang} - {None}
        return not asked.isdisjoint(header) or {"source", "target"} <= set(header)

    def find(self, names: Sequence[str], codes: Collection[str], where: str) -> tuple[CellPath, CellPath]:
        """The path to each side, ("en",) or ("translation", "en").

        Args:
            names: The columns there are.
            codes: The language codes inside a `translation` dict, empty without one.
            where: The file or dataset, for the message.

        Raises:
            ValueError: A side has no column; the message lists what there is, what was looked for, and the flags.
        """
        explicit: list[CellPath | None] = [
            (column,) if column else None for column in (self.source_column, self.target_column)
        ]
        if all(path is None or path[0] in names for path in explicit):
            languages = (self.source_lang, self.target_lang)
            plain: list[CellPath | None] = [(code,) if code and code in names else None for code in languages]
            nested: list[CellPath | None] = [
                ("translation", code) if code and code in codes else None for code in languages
            ]
            usual: list[CellPath | None] = [(name,) if name in names else None for name in ("source", "target")]
            for found in (plain, nested, usual):
                source, target = explicit[0] or found[0], explicit[1] or found[1]
                if source and target and source != target:
                    return source, target
        there = ", ".join(map(repr, names)) + (f" (translation: {', '.join(map(repr, codes))})" if codes else "")
        raise ValueError(f"{where} has the columns {there or 'none'}; {self._wanted()}")

    def _wanted(self) -> str:
        sides = []
        for side in ("source", "target"):
            column, code = getattr(self, f"{side}_column"), getattr(self, f"{side}_lang")
            tried = [repr(column)] if column else [repr(code), f"translation[{code!r}]"] if code else []
            sides.append(f"for the {side} " + " or ".join(tried if column else [*tried, repr(side)]))
        return (
            f"looked {' and '.join(sides)}. Name them with --source_column and --target_column "
            "(source_column=, target_column=)."
        )


def _cell(record: Any, path: CellPath) -> Any:
    """The value at a path of nested dicts; KeyError where there is none."""
    for key in path:
        if not isinstance(record, dict):
            raise KeyError(key)
        record = record[key]
    return record


# One reader a format ------------------------------------------------------------


def _read_text_pair(paths: Sequence[Path], notes: list[str]) -> Iterator[Row]:
    counts = [0, 0]
    for source, target in itertools.zip_longest(*(_lines(path, notes) for path in paths)):
        counts = [counts[0] + (source is not None), counts[1] + (target is not None)]
        if source is None or target is None:
            continue  # only to count: the corpus is refused below
        defect = None
        if source.invalid or target.invalid:
            defect = Defect("invalid UTF-8", 0 if source.invalid else 1, source.invalid or target.invalid or "")
        yield Row(source.number, source.text, target.text, defect)
    if counts[0] != counts[1]:
        raise ValueError(
            f"{paths[0]} has {counts[0]:,} lines and {paths[1]} has {counts[1]:,}: line n of one must be the "
            "translation of line n of the other, so both need the same number of lines"
        )


def _read_tsv(path: Path, columns: Columns, notes: list[str]) -> Iterator[Row]:
    width, source, target = 2, 0, 1
    expected = "2 are expected; a file with more columns needs a header line that names them"
    for line in _lines(path, notes):
        cells = line.text.split("\t")
        if line.number == 1 and columns.are_named_in(cells):
            (source_name,), (target_name,) = columns.find(cells, (), f"the header of {path}")
            width, source, target = len(cells), cells.index(source_name), cells.index(target_name)
            expected = f"the header has {width}"
            continue
        if line.number == 1 and (columns.source_column or columns.target_column):
            columns.find(cells, (), f"the first line of {path}")
        if line.invalid:
            yield Row(line.number, defect=Defect("invalid UTF-8", 0, line.invalid))
        elif len(cells) == width:
            yield Row(line.number, cells[source], cells[target])
        elif not line.text or line.text.isspace():
            yield Row(line.number, defect=Defect("empty", 0, "a blank line"))
        else:
            reason = "stray tab" if len(cells) > width else "missing tab"
            yield Row(line.number, defect=Defect(reason, 0, f"{len(cells)} fields where {expected}"))


def _read_csv(path: Path, columns: Columns, notes: list[str]) -> Iterator[Row]:
    invalid: list[tuple[int, str]] = []

    def texts() -> Iterator[str]:
        for line in _lines(path, notes):
            if line.invalid:
                invalid.append((line.number, line.invalid))
            yield line.text + line.end

    # Strict: without it an unclosed quote silently swallows the rest of the file into one field.
    reader = csv.reader(texts(), strict=True)
    try:
        header = next(reader, None)
        if header is None:
            return
        (source_name,), (target_name,) = columns.find(header, (), f"the header of {path}")
        source, target = header.index(source_name), header.index(target_name)
        if invalid:
            raise ValueError(f"{path}:1: invalid UTF-8 in the header ({invalid[0][1]}). Convert the file to UTF-8.")
        number = reader.line_num + 1
        for cells in reader:
            if invalid:
                yield Row(invalid[0][0], defect=Defect("invalid UTF-8", 0, invalid[0][1]))
                invalid.clear()
            elif not cells:
                yield Row(number, defect=Defect("empty", 0, "a blank line"))
            elif len(cells) != len(header):
                detail = f"{len(cells)} fields where the header has {len(header)}"
                yield Row(number, defect=Defect("wrong number of fields", 0, detail))
            else:
                yield Row(number, cells[source], cells[target])
            number = reader.line_num + 1  # a quoted field may span lines: name the one where a record starts
    except csv.Error as error:
        # Never a mere drop: where quotes are broken, the records after them can't be trusted either.
        raise ValueError(f"{path}:{reader.line_num}: malformed CSV: {error}. Correct the quoting.") from error


def _read_json_lines(path: Path, columns: Columns, notes: list[str]) -> Iterator[Row]:
    paths: tuple[CellPath, CellPath] | None = None
    for line in _lines(path, notes):
        if line.invalid:
            yield Row(line.number, defect=Defect("invalid UTF-8", 0, line.invalid))
            continue
        if not line.text or line.text.isspace():
            yield Row(line.number, defect=Defect("empty", 0, "a blank line"))
            continue
        try:
            record = json.loads(line.text)
        except (ValueError, RecursionError) as error:
            problem = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
            yield Row(line.number, defect=Defect("invalid JSON", 0, f"{problem}; one object a line is expected"))
            continue
        if not isinstance(record, dict):
            detail = f"{type(record).__name__} instead of one object a line"
            yield Row(line.number, defect=Defect("invalid JSON", 0, detail))
            continue
        if paths is None:
            translation = record.get("translation")
            codes = list(translation) if isinstance(translation, dict) else []
            paths = columns.find(list(record), codes, f"line {line.number} of {path}")
        try:
            yield Row(line.number, _cell(record, paths[0]), _cell(record, paths[1]))
        except KeyError as error:
            yield Row(line.number, defect=Defect("missing field", 0, f"no {error}"))


def _read_parquet(path: Path, columns: Columns, notes: list[str]) -> Iterator[Row]:
    check_file(path)
    try:
        with pq.ParquetFile(path) as file:
            schema = file.schema_arrow
            struct = schema.field("translation").type if "translation" in schema.names else None
            codes = [child.name for child in struct] if struct is not None and pa.types.is_struct(struct) else []
            paths = columns.find(schema.names, codes, str(path))
            number = 0
            for batch in file.iter_batches(BATCH_SIZE, columns=list({cell_path[0] for cell_path in paths})):
                sources, targets = (_parquet_cells(batch, cell_path) for cell_path in paths)
                for source, target in zip(sources, targets, strict=True):
                    number += 1
                    invalid = _invalid_bytes(source, 0) or _invalid_bytes(target, 1)
                    yield Row(number, _decoded(source), _decoded(target), invalid)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path} can't be read as Parquet: {shorten(str(error), 200)}") from error


def _parquet_cells(batch: Any, path: CellPath) -> list[Any]:
    """A column as Python values, strings as bytes (Parquet writers don't have to check their UTF-8)."""
    column = batch.column(path[0])
    if len(path) == 2:
        column = pc.struct_field(column, path[1])
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        column = column.cast(pa.large_binary())
    elif pa.types.is_binary(column.type) or pa.types.is_large_binary(column.type):
        return [value if value is None else bytearray(value) for value in column.to_pylist()]  # not text by its type
    return cast(list[Any], column.to_pylist())


def _decoded(value: Any) -> Any:
    return value.decode(errors="surrogateescape") if isinstance(value, bytes) else value


def _invalid_bytes(value: Any, side: int) -> Defect | None:
    if isinstance(value, bytes):
        try:
            value.decode()
        except UnicodeDecodeError as error:
            return Defect(
                "invalid UTF-8", side, f"byte 0x{value[error.start]:02x} at offset {error.start:,} of the cell"
            )
    return None


def read_rows(paths: Sequence[Path], columns: Columns, notes: list[str]) -> Iterator[Row]:
    """Every record of two plain text files or one table.

    Args:
        paths: Two text files, or one file whose name ends in one of `TABLE_SUFFIXES` (and `.gz`).
        columns: Which columns of a table hold the pair.
        notes: Takes a remark where something was done to the text.

    Yields:
        A `Row` for every record, the bad ones with their defect; the cells of good ones may still be anything.

    Raises:
        FileNotFoundError: No such file.
        ValueError: What makes the whole file useless: unequal line counts, no such column, damaged data.
    """
    if len(paths) == 2:
        return _read_text_pair(paths, notes)
    readers: dict[str, Callable[[Path, Columns, list[str]], Iterator[Row]]] = {
        ".tsv": _read_tsv,
        ".csv": _read_csv,
        ".parquet": _read_parquet,
    }
    return readers.get(table_suffix(paths[0]), _read_json_lines)(paths[0], columns, notes)
