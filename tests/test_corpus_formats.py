"""Files of parallel text: every format in, every pair accounted for, nothing silent.

What is expected comes from the strings the tests write themselves, through writers that are not ours (`csv`, `json`,
`gzip`, pyarrow), and from Python's own UTF-8 decoder.
"""

import csv
import gzip
import io
import json
import os
import pickle
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parallel_pairs import PAIRS, pairs_of

from vanilla_transformer.corpus import iterate_lines, load_parallel_files


def write(path, content):
    data = content if isinstance(content, bytes) else content.encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def write_table(folder, name, pairs, columns=("en", "de")):
    """Write pairs with a writer that is not ours; with a column of other data before them."""
    path = folder / name
    header = ["id", *columns]
    rows = [[str(i), *pair] for i, pair in enumerate(pairs)]
    records = [dict(zip(header, row, strict=True)) for row in rows]
    if ".parquet" in name:
        pq.write_table(pa.Table.from_pylist(records), path)
        return path
    if ".csv" in name:
        buffer = io.StringIO(newline="")
        csv.writer(buffer).writerows([header, *rows])
        return write(path, buffer.getvalue())
    if ".tsv" in name:
        return write(path, "".join("\t".join(row) + "\n" for row in [header, *rows]))
    return write(path, "".join(json.dumps(record) + "\n" for record in records))


TABLES = ["p.tsv", "p.tsv.gz", "p.csv", "p.csv.gz", "p.jsonl", "p.jsonl.gz", "p.json", "p.ndjson", "p.parquet"]

# Formats --------------------------------------------------------------------------


@pytest.mark.parametrize("names", [("t.en", "t.de"), ("t.en.gz", "t.de"), ("t.en.gz", "t.de.gz")])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("last_line_ends", [True, False])
def test_two_text_files(tmp_path, names, end, last_line_ends):
    files = []
    for side, name in enumerate(names):
        text = end.join(pair[side] for pair in PAIRS) + (end if last_line_ends else "")
        files.append(write(tmp_path / name, text))
    dataset, report = load_parallel_files(files, source_lang="en", target_lang="de")
    assert pairs_of(dataset) == PAIRS
    assert dataset.column_names == ["source", "target"]
    assert str(report) == f"4 pairs read from {files[0]}, {files[1]}: 4 kept, 0 dropped"


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize(
    ("columns", "arguments"),
    [
        (("en", "de"), {"source_lang": "en", "target_lang": "de"}),
        (("de", "en"), {"source_lang": "de", "target_lang": "en"}),
        (("source", "target"), {}),
        (("source", "target"), {"source_lang": "en", "target_lang": "de"}),
        (("English text", "Deutsch"), {"source_column": "English text", "target_column": "Deutsch"}),
        (("English", "de"), {"source_column": "English", "source_lang": "en", "target_lang": "de"}),
        (("target", "source"), {"source_column": "target", "target_column": "source"}),
    ],
)
def test_tables_by_column_name(tmp_path, name, columns, arguments):
    pairs = [(a, b) for a, b in PAIRS if "\r" not in a or "tsv" not in name]
    path = write_table(tmp_path, name, pairs, columns)
    dataset, report = load_parallel_files(path, **arguments)
    assert pairs_of(dataset) == pairs
    assert report.read == report.kept == len(pairs)
    assert not report.dropped


def test_language_codes_go_before_source_and_target(tmp_path):
    path = write(tmp_path / "p.jsonl", json.dumps({"source": "a", "target": "b", "en": "c", "de": "d"}))
    assert pairs_of(load_parallel_files(path, source_lang="en", target_lang="de")[0]) == [("c", "d")]
    assert pairs_of(load_parallel_files(path, source_lang="en", target_lang="fr")[0]) == [("a", "b")]
    assert pairs_of(load_parallel_files(path, source_column="de", target_column="source")[0]) == [("d", "a")]


@pytest.mark.parametrize("name", ["p.jsonl", "p.json.gz", "p.parquet"])
def test_translation_dict(tmp_path, name):
    records = [{"id": i, "translation": {"de": b, "en": a, "fr": "x"}} for i, (a, b) in enumerate(PAIRS)]
    if name == "p.parquet":
        pq.write_table(pa.Table.from_pylist(records), tmp_path / name)
    else:
        write(tmp_path / name, "\n".join(json.dumps(record, ensure_ascii=False) for record in records))
    dataset, _ = load_parallel_files(tmp_path / name, source_lang="en", target_lang="de")
    assert pairs_of(dataset) == PAIRS
    with pytest.raises(ValueError, match=r"translation: 'de', 'en', 'fr'.*--source_column"):
        load_parallel_files(tmp_path / name, source_lang="en", target_lang="es")


@pytest.mark.parametrize("name", ["p.tsv", "p.en-de.tsv.gz"])
def test_tsv_without_header(tmp_path, name):
    path = write(tmp_path / name, 'A "quote\tEin Hund\r\nde\tvon\n')
    assert pairs_of(load_parallel_files(str(path), source_lang="en", target_lang="fr")[0]) == [
        ('A "quote', "Ein Hund"),
        ("de", "von"),
    ]


def test_csv_fields_with_quotes_commas_and_line_breaks(tmp_path):
    pairs = [('say "hi", you', "a\nb\r\nc"), ("x", "y")]
    path = write_table(tmp_path, "p.csv", pairs)
    assert pairs_of(load_parallel_files(path, source_lang="en", target_lang="de")[0]) == pairs


def test_parquet_with_dictionary_and_large_strings(tmp_path):
    table = pa.table(
        {"en": pa.array(["a", "b", "a"]).dictionary_encode(), "de": pa.array(["c", "d", "e"], pa.large_string())}
    )
    pq.write_table(table, tmp_path / "p.parquet")
    dataset, _ = load_parallel_files(tmp_path / "p.parquet", source_lang="en", target_lang="de")
    assert pairs_of(dataset) == [("a", "c"), ("b", "d"), ("a", "e")]


def test_more_rows_than_one_batch_keep_their_order(tmp_path):
    pairs = [(f"s{i}", f"t{i}") for i in range(2_500)]
    for name in ("p.tsv", "p.parquet"):
        dataset, report = load_parallel_files(write_table(tmp_path, name, pairs), source_lang="en", target_lang="de")
        assert pairs_of(dataset) == pairs
        assert str(report).startswith("2,500 pairs read from ")


line = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\n\r\0"), min_size=1).filter(
    lambda text: not text.isspace() and not text.startswith("\ufeff")
)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(line, line), min_size=1, max_size=5))
def test_any_text_comes_back_byte_for_byte(tmp_path_factory, pairs):
    folder = tmp_path_factory.mktemp("any")
    files = [write(folder / name, "\n".join(pair[side] for pair in pairs)) for side, name in enumerate(["a", "b"])]
    assert pairs_of(load_parallel_files(files)[0]) == pairs
    for name in ("p.csv", "p.jsonl", "p.parquet"):
        path = write_table(folder, name, pairs)
        assert pairs_of(load_parallel_files(path, source_lang="en", target_lang="de")[0]) == pairs


def test_iterate_lines_splits_at_line_feeds_only(tmp_path):
    path = write(tmp_path / "t.txt.gz", "\ufeffa\u2028b\x85c\x0bd\x0ce\rf\r\n\ng")
    assert list(iterate_lines(path)) == ["a\u2028b\x85c\x0bd\x0ce\rf", "", "g"]


def test_byte_order_mark_is_taken_off_and_said(tmp_path):
    path = write(tmp_path / "p.tsv", "\ufeffen\tde\na\tb\n")
    dataset, report = load_parallel_files(path, source_lang="en", target_lang="de")
    assert pairs_of(dataset) == [("a", "b")]
    assert str(report) == f"1 pairs read from {path}: 1 kept, 0 dropped; byte-order mark taken off {path}"


def test_an_edited_file_is_read_anew(tmp_path):
    path = write(tmp_path / "p.tsv", "a\tb\n")
    load_parallel_files(path)
    write(path, "c\td\n")
    assert pairs_of(load_parallel_files(path)[0]) == [("c", "d")]


def test_a_dataset_stays_as_it_is_when_others_are_loaded(tmp_path):
    first, _ = load_parallel_files(write_table(tmp_path, "p.csv", PAIRS), source_lang="en", target_lang="de")
    load_parallel_files(write(tmp_path / "p.tsv", "a\tb\n"))
    assert pairs_of(pickle.loads(pickle.dumps(first))) == PAIRS  # as a worker process gets it: by its file


def test_the_temporary_files_go_with_the_process(tmp_path):
    path = write(tmp_path / "p.tsv", "a\tb\n")
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    code = (
        "import sys; from vanilla_transformer.corpus import load_parallel_files as f; from pathlib import Path;"
        "d, _ = f(sys.argv[1]); p = Path(d.cache_files[0]['filename']); assert p.is_file(); print(p)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code, path],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "TMPDIR": str(scratch)},
    )
    assert Path(ran.stdout.strip()).is_relative_to(scratch)
    assert not list(scratch.rglob("*.arrow"))


# Bad pairs ------------------------------------------------------------------------


def check_bad(files, places, dropped, kept, **arguments):
    """Under "error" the message names places, counts and remedy; under "drop" the pairs are counted by reason."""
    with pytest.raises(ValueError, match=r"can't be used") as error:
        load_parallel_files(files, **arguments)
    message = str(error.value)
    for place in places:
        assert place in message
    total = sum(dropped.values())
    assert f"{total} of {total + len(kept)} pairs read from" in message
    assert "--on_bad_pair drop" in message
    dataset, report = load_parallel_files(files, on_bad_pair="drop", **arguments)
    assert pairs_of(dataset) == kept
    assert report.dropped == Counter(dropped)
    assert (report.read, report.kept) == (total + len(kept), len(kept))
    for reason, count in dropped.items():
        assert f"{count} {reason}" in str(report)
    return report


def test_bad_pairs_in_text_files(tmp_path):
    source = write(tmp_path / "t.en", b"a\n\nb\xffc\nd\nnul\0\ne\ttab\n")
    target = write(tmp_path / "t.de", "A\nB\nC\n \u2003\nE\nF\n".encode())
    places = [
        f"{source}:2: empty (no text in the source)",
        f"{source}:3: invalid UTF-8 (byte 0xff at offset 4)",
        f"{target}:4: empty (no text in the target)",
        f"{source}:5: NUL character (in the source at index 3)",
    ]
    dropped = {"empty": 2, "invalid UTF-8": 1, "NUL character": 1}
    report = check_bad([source, target], places, dropped, [("a", "A"), ("e\ttab", "F")])
    assert str(report).endswith(": 2 kept, 4 dropped (2 empty, 1 invalid UTF-8, 1 NUL character)")


@pytest.mark.parametrize("bad", [b"\xc3", b"\xed\xa0\x80", b"\xf5\x80\x80\x80", b"\xc0\x80", b"\xe4\xf6"])
@pytest.mark.parametrize("name", ["t.en", "t.en.gz"])
def test_invalid_utf8_names_file_line_and_byte(tmp_path, bad, name):
    prefix = "ä\r\nü ".encode()
    source = write(tmp_path / name, prefix + bad + b"\nlast\n")
    target = write(tmp_path / "t.de", "1\n2\n3\n")
    with pytest.raises(UnicodeDecodeError) as theirs:
        (prefix + bad + b"\n").decode()
    place = f"{source}:2: invalid UTF-8 (byte 0x{bad[0]:02x} at offset {theirs.value.start})"
    check_bad([source, target], [place], {"invalid UTF-8": 1}, [("ä", "1"), ("last", "3")])
    with pytest.raises(ValueError, match=r"t\.en(\.gz)?:2: invalid UTF-8 \(byte 0x"):
        list(iterate_lines(source))


def test_invalid_utf8_after_a_byte_order_mark_and_on_the_target_side(tmp_path):
    source = write(tmp_path / "t.en", "a\nb\n")
    target = write(tmp_path / "t.de", b"\xef\xbb\xbfA\xff\nB\n")
    place = f"{target}:1: invalid UTF-8 (byte 0xff at offset 4)"
    check_bad([source, target], [place], {"invalid UTF-8": 1}, [("b", "B")])


def test_bad_pairs_in_tsv(tmp_path):
    path = write(tmp_path / "p.tsv", b"a\tb\nc\td\te\nf\n\ng\t\nh\xff\ti\nj\tk\n")
    places = [
        f"{path}:2: stray tab (3 fields where 2 are expected",
        f"{path}:3: missing tab (1 fields where 2 are expected",
        f"{path}:4: empty (a blank line)",
        f"{path}:5: empty (no text in the target)",
        f"{path}:6: invalid UTF-8 (byte 0xff at offset 17)",
    ]
    dropped = {"stray tab": 1, "missing tab": 1, "empty": 2, "invalid UTF-8": 1}
    check_bad(path, places, dropped, [("a", "b"), ("j", "k")])
    path = write(tmp_path / "q.tsv", "n\ten\tde\n1\ta\tb\n2\ta\tb\tc\n")
    place = f"{path}:3: stray tab (4 fields where the header has 3)"
    check_bad(path, [place], {"stray tab": 1}, [("a", "b")], source_lang="en", target_lang="de")


def test_a_stray_tab_in_the_first_line_is_no_header(tmp_path):
    path = write(tmp_path / "p.tsv", "a\tb\tc\nd\te\n")
    check_bad(path, [f"{path}:1: stray tab", "needs a header line"], {"stray tab": 1}, [("d", "e")])


def test_bad_pairs_in_csv(tmp_path):
    path = write(tmp_path / "p.csv", b'en,de\n"a\nb",c\nd\ne,f,g\n\nh,\n"\xff\n",i\nj,k\n')
    places = [
        f"{path}:4: wrong number of fields (1 fields where the header has 2)",
        f"{path}:5: wrong number of fields (3 fields where the header has 2)",
        f"{path}:6: empty (a blank line)",
        f"{path}:7: empty (no text in the target)",
        f"{path}:8: invalid UTF-8 (byte 0xff at offset 27)",
    ]
    dropped = {"wrong number of fields": 2, "empty": 2, "invalid UTF-8": 1}
    check_bad(path, places, dropped, [("a\nb", "c"), ("j", "k")], source_lang="en", target_lang="de")


@pytest.mark.parametrize("on_bad_pair", ["error", "drop"])
@pytest.mark.parametrize("text", ['en,de\na,b\n"c,d\ne,f\n', 'en,de\n"a"b,c\nd,e\n'])
def test_broken_csv_quoting_is_always_an_error(tmp_path, text, on_bad_pair):
    path = write(tmp_path / "p.csv", text)
    with pytest.raises(ValueError, match=r"p\.csv:\d: malformed CSV: .*quoting"):
        load_parallel_files(path, source_lang="en", target_lang="de", on_bad_pair=on_bad_pair)


def test_bad_pairs_in_json_lines(tmp_path):
    lines = [
        '{"en": "a", "de": "b"}',
        '{"en": "a", "de": "b"',
        '["a", "b"]',
        '{"en": "a"}',
        '{"en": null, "de": "b"}',
        '{"en": "a", "de": 3}',
        r'{"en": "\ud83d", "de": "b"}',
        r'{"en": "a", "de": "x\u0000"}',
        "",
        r'{"en": "\ud83d\ude00", "de": "\u2028"}',
        r'{"en": "\ud83d\ude00", "de": "c"}',
    ]
    path = write(tmp_path / "p.jsonl", "\n".join(lines))
    places = [
        f"{path}:2: invalid JSON (",
        f"{path}:3: invalid JSON (list instead of one object a line)",
        f"{path}:4: missing field (no 'de')",
        f"{path}:5: not a string (the source is None)",
        f"{path}:6: not a string (the target is 3)",
        "... and 4 more",
    ]
    dropped = {
        "invalid JSON": 2,
        "missing field": 1,
        "not a string": 2,
        "lone surrogate": 1,
        "NUL character": 1,
        "empty": 2,
    }
    arguments = {"source_lang": "en", "target_lang": "de"}
    check_bad(path, places, dropped, [("a", "b"), ("😀", "c")], **arguments)
    path = write(tmp_path / "q.jsonl", lines[6] + "\n" + lines[0])
    check_bad(
        path, [f"{path}:1: lone surrogate (U+D83D in the source"], {"lone surrogate": 1}, [("a", "b")], **arguments
    )


def test_translation_without_a_language_is_a_bad_pair(tmp_path):
    records = [{"translation": {"en": "a", "de": "b"}}, {"translation": {"en": "a"}}, {"translation": None}]
    path = write(tmp_path / "p.jsonl", "\n".join(map(json.dumps, records)))
    arguments = {"source_lang": "en", "target_lang": "de"}
    check_bad(path, [f"{path}:2: missing field (no 'de')"], {"missing field": 2}, [("a", "b")], **arguments)
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "p.parquet")
    path = tmp_path / "p.parquet"
    place = f"{path} row 2: not a string (the target is None)"
    check_bad(path, [place], {"not a string": 2}, [("a", "b")], **arguments)


def test_bad_pairs_in_parquet(tmp_path):
    invalid = pa.Array.from_buffers(
        pa.string(), 3, pa.array([b"a", b"x\xff", b"c"]).buffers()
    )  # pyarrow itself does not check
    path = tmp_path / "p.parquet"
    places = [
        f"{path} row 2: invalid UTF-8 (byte 0xff at offset 1 of the cell)",
        f"{path} row 3: not a string (the target is None)",
    ]
    arguments = {"source_lang": "en", "target_lang": "de"}
    pq.write_table(pa.table({"en": invalid, "de": ["A", "B", None]}), path)
    check_bad(path, places, {"invalid UTF-8": 1, "not a string": 1}, [("a", "A")], **arguments)
    # A dictionary column pyarrow checks itself, as a whole.
    pq.write_table(pa.table({"en": pa.DictionaryArray.from_arrays([0, 1, 2], invalid), "de": ["A", "B", "C"]}), path)
    with pytest.raises(ValueError, match=r"p\.parquet can't be read as Parquet: Invalid UTF8"):
        load_parallel_files(path, **arguments)
    pq.write_table(pa.table({"en": [b"bytes", b"x"], "de": ["A", "B"]}), path)
    with pytest.raises(ValueError, match="not a string"):
        load_parallel_files(path, **arguments)


# Files that are no corpus ---------------------------------------------------------


@pytest.mark.parametrize("on_bad_pair", ["error", "drop"])
def test_unequal_line_counts_are_always_an_error(tmp_path, on_bad_pair):
    short, long = write(tmp_path / "t.en", b"a\n\xff\n"), write(tmp_path / "t.de", "A\nB\nC\n")
    for files, counts in (((short, long), (2, 3)), ((long, short), (3, 2))):
        with pytest.raises(ValueError, match="the same number of lines") as error:
            load_parallel_files(files, on_bad_pair=on_bad_pair)
        assert f"{files[0]} has {counts[0]} lines and {files[1]} has {counts[1]}" in str(error.value)


@pytest.mark.parametrize("on_bad_pair", ["error", "drop"])
@pytest.mark.parametrize(
    ("name", "content"),
    [("p.tsv", ""), ("p.tsv.gz", ""), ("p.tsv", "en\tde\n"), ("p.csv", ""), ("p.csv", "en,de\n"), ("p.jsonl", "")],
)
def test_an_empty_corpus_is_an_error(tmp_path, name, content, on_bad_pair):
    path = write(tmp_path / name, content)
    with pytest.raises(ValueError, match=f"no pairs read from .*{name}: it is empty"):
        load_parallel_files(path, source_lang="en", target_lang="de", on_bad_pair=on_bad_pair)


def test_empty_text_files_and_parquet_are_an_error(tmp_path):
    files = [write(tmp_path / "t.en", ""), write(tmp_path / "t.de", "")]
    with pytest.raises(ValueError, match="it is empty"):
        load_parallel_files(files)
    (tmp_path / "zero.gz").write_bytes(b"")  # not even a gzip header
    with pytest.raises(ValueError, match="it is empty"):
        load_parallel_files([tmp_path / "zero.gz", files[1]])
    path = write_table(tmp_path, "p.parquet", PAIRS)
    pq.write_table(pq.read_table(path).slice(0, 0), path)
    with pytest.raises(ValueError, match="it is empty"):
        load_parallel_files(path, source_lang="en", target_lang="de")


def test_dropping_every_pair_is_an_error(tmp_path):
    path = write(tmp_path / "p.tsv", "a\t\n\tb\n")
    with pytest.raises(ValueError, match=r"nothing is left: 2 pairs .* 2 dropped \(2 empty\)") as error:
        load_parallel_files(path, on_bad_pair="drop")
    assert f"{path}:1: empty" in str(error.value)


@pytest.mark.parametrize("name", ["p.tsv", "p.csv", "p.jsonl", "p.parquet"])
def test_a_missing_column_names_file_columns_and_remedy(tmp_path, name):
    path = write_table(tmp_path, name, PAIRS[:1], ("english", "german"))
    wrong = {"source_column": "en", "target_column": "german"}
    with pytest.raises(ValueError, match="--source_column and --target_column") as error:
        load_parallel_files(path, **wrong)
    message = str(error.value)
    assert str(path) in message
    assert "'id', 'english', 'german'" in message
    assert "for the source 'en'" in message
    if name != "p.tsv":  # without a name to look for, a TSV file has no header
        with pytest.raises(ValueError, match=r"'en' or translation\['en'\] or 'source'"):
            load_parallel_files(path, source_lang="en", target_lang="de")


def test_a_column_name_for_a_tsv_without_header_is_an_error(tmp_path):
    path = write(tmp_path / "p.tsv", "a\tb\nc\td\n")
    with pytest.raises(ValueError, match=r"the first line of .* has the columns 'a', 'b'; looked for the source 'x'"):
        load_parallel_files(path, source_column="x", target_column="y")


def test_half_a_tsv_header_is_an_error(tmp_path):
    path = write(tmp_path / "p.tsv", "en\tGerman\na\tb\n")
    with pytest.raises(ValueError, match=r"the header of .* has the columns 'en', 'German'"):
        load_parallel_files(path, source_lang="en", target_lang="de")


@pytest.mark.parametrize("name", ["t.en", "p.tsv", "p.csv", "p.jsonl", "p.parquet"])
def test_missing_files_and_folders(tmp_path, name):
    other = [write(tmp_path / "other", "x\n")] if name == "t.en" else []
    with pytest.raises(FileNotFoundError, match=name):
        load_parallel_files([tmp_path / name, *other])
    (tmp_path / name).mkdir()
    with pytest.raises(ValueError, match=f"{name} is a folder"):
        load_parallel_files([tmp_path / name, *other])


@pytest.mark.parametrize("name", ["p.tsv.gz", "p.csv.gz", "p.jsonl.gz"])
@pytest.mark.parametrize("damage", ["cut", "flipped"])
def test_damaged_gzip(tmp_path, name, damage):
    path = write_table(tmp_path, name, [(f"source {i * 7919 % 1009}", f"target {i}") for i in range(2_000)])
    data = bytearray(path.read_bytes())
    if damage == "cut":
        del data[len(data) // 2 :]
    else:
        data[-6] ^= 0xFF  # in the checksum
    path.write_bytes(data)
    with pytest.raises(ValueError, match=f"{name}: the gzip data is cut off or damaged after line"):
        load_parallel_files(path, source_lang="en", target_lang="de", on_bad_pair="drop")


@pytest.mark.parametrize("cut", [0, 10, -10])
def test_damaged_parquet(tmp_path, cut):
    path = write_table(tmp_path, "p.parquet", PAIRS)
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(ValueError, match=r"p\.parquet can't be read as Parquet"):
        load_parallel_files(path, source_lang="en", target_lang="de")


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("p.tsv", gzip.compress(b"a\tb\n", mtime=0), "gzip-compressed although its name does not end in .gz"),
        ("p.tsv.gz", b"a\tb\n", "not gzip-compressed although its name ends in .gz"),
        ("p.tsv", b"\xfd7zXZ\x00rest", "xz-compressed"),
        ("p.jsonl", b"PK\x03\x04rest", "a zip archive"),
        ("p.tsv", "a\tb\n".encode("utf-16"), "UTF-16 text; give UTF-8"),
        ("p.txt", b"a\tb\n", "a single file must be a table"),
        ("p.parquet.gz", b"", "unpack the .gz"),
    ],
)
def test_a_file_that_is_not_what_its_name_says(tmp_path, name, data, message):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ValueError, match=message) as error:
        load_parallel_files(tmp_path / name)
    assert str(tmp_path / name) in str(error.value)


def test_arguments_that_fit_nothing(tmp_path):
    en, de, tsv = (write(tmp_path / name, "a\n") for name in ("t.en", "t.de.gz", "p.tsv"))
    for files in ([], [en, de, tsv]):
        with pytest.raises(ValueError, match="give one file, or two"):
            load_parallel_files(files)
    for files in ([tsv, de], [en, tsv]):
        with pytest.raises(ValueError, match=r"p\.tsv is a table: give it alone"):
            load_parallel_files(files)
    with pytest.raises(ValueError, match="the source comes first"):
        load_parallel_files([de, en], source_lang="en", target_lang="de")
    with pytest.raises(ValueError, match="both 'en'"):
        load_parallel_files(tsv, source_lang="en", target_lang="en")
    with pytest.raises(ValueError, match="on_bad_pair must be one of 'error', 'drop', got 'skip'"):
        load_parallel_files([en, de], on_bad_pair="skip")
