"""fairseq's dictionaries and byte-pair codes → tokenizers.

A dictionary (`dict.<language>.txt`) has a line "symbol count" for each entry behind `<s>`, `<pad>`, `</s>`, `<unk>`; a
symbol that ends in "@@" goes on in the next one. Codes are those of subword-nmt ("#version: 0.2", two symbols a line)
or fastBPE (two symbols and a count). What codes make and the dictionary lacks is `<unk>`.

Two tokenizers, both stock classes that `AutoTokenizer` loads:

- `moses_tokenizer`: FSMTTokenizer, for text as people write it. Words are split as Moses does and put together again;
  each side has its dictionary. It needs `sacremoses`, and it encodes a target with the source's dictionary.
- `fast_tokenizer`: a fast tokenizer for text whose words are split by spaces already, source or target. It has one
  vocabulary: the target's dictionary with its ids, then what only the source's has, then symbols on the way of a merge
  that neither has. The encoder's embeddings follow that order (`rows`), with the row of `<unk>` for what the source's
  dictionary lacks, so that the model sees what fairseq's saw. In a target the ids behind the target's dictionary are
  what fairseq calls `<unk>`: to train further, put 3 in their place.

What does not carry over: codes of subword-nmt before 0.2 (refused), SentencePiece, counts, the "@@" of words that
themselves end in it, `--bpe-dropout`.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from .fsmt import require_sacremoses
from .renaming import ConversionError

SPECIAL_SYMBOLS = ("<s>", "<pad>", "</s>", "<unk>")
UNK = 3
_GOES_ON = "@@"
_END_OF_WORD = "</w>"
_OVERWRITE = "#fairseq:overwrite"


def read_dictionary(path: str | Path) -> list[str]:
    """Read a dictionary of fairseq.

    Args:
        path: `dict.<language>.txt`.

    Returns:
        The symbols; the place of one is its id. An entry that a later one overwrites has a name that no text spells.

    Raises:
        ConversionError: A line is no "symbol count", or repeats a symbol without the flag that allows it.
    """
    symbols = list(SPECIAL_SYMBOLS)
    places = {symbol: place for place, symbol in enumerate(symbols)}
    for number, line in _lines(path):
        rest, _, last = line.rpartition(" ")
        overwrites = last == _OVERWRITE
        symbol, _, count = rest.rpartition(" ") if overwrites else (rest, "", last)
        if not symbol or not count.isdecimal():
            raise ConversionError(f"{path}, line {number}: {line!r:.80} is no 'symbol count'.")
        if symbol in places:
            if not overwrites:
                raise ConversionError(f"{path}, line {number}: {symbol!r:.80} is there twice.")
            if symbol in SPECIAL_SYMBOLS:  # the model's special tokens stay the first four
                symbol = f"<again {symbol}>"
            else:
                symbols[places[symbol]] = f"<overwritten {places[symbol]}>"
        places[symbol] = len(symbols)
        symbols.append(symbol)
    return symbols


def read_bpe_codes(path: str | Path) -> list[tuple[str, str]]:
    """Read byte-pair codes of subword-nmt 0.2 or fastBPE.

    Args:
        path: The file; `bpecodes` or `codes` by custom.

    Returns:
        The pairs to merge, first things first.

    Raises:
        ConversionError: Codes of an older version, or a line that is none.
    """
    lines = list(_lines(path))
    has_version = bool(lines) and lines[0][1].startswith("#version:")
    if has_version and not re.fullmatch(r"#version:\s*0\.2(\.0+)*", lines[0][1]):
        raise ConversionError(f"{path}: codes of {lines[0][1]!r:.40} are not read, only those of version 0.2.")
    merges: dict[tuple[str, str], None] = {}  # of equal ones the first counts
    for number, line in lines[1:] if has_version else lines:
        parts = line.split(" ")
        if len(parts) != (2 if has_version else 3) or not (has_version or parts[2].isdecimal()):
            raise ConversionError(
                f"{path}, line {number}: {line!r:.80} is neither of subword-nmt's version 0.2 (two symbols a line, "
                "and '#version: 0.2' in the first) nor of fastBPE (two symbols and a count)."
            )
        merges.setdefault((parts[0], parts[1]))
    return list(merges)


def _lines(path: str | Path) -> Iterable[tuple[int, str]]:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise ConversionError(f"{path} cannot be read: {error}.") from error
    lines = enumerate((line.strip("\r\n ") for line in text.split("\n")), start=1)  # other white space may be a symbol
    return ((number, line) for number, line in lines if line)


def _bpe_symbols(symbols: Sequence[str]) -> list[str]:
    """Return a dictionary's symbols as codes write them: the end of a word is marked, and not that it goes on."""
    return [
        symbol
        if place < len(SPECIAL_SYMBOLS)
        else symbol.removesuffix(_GOES_ON)
        if symbol.endswith(_GOES_ON) and symbol != _GOES_ON
        else symbol + _END_OF_WORD
        for place, symbol in enumerate(symbols)
    ]


def fast_tokenizer(
    source: Sequence[str], target: Sequence[str], merges: Sequence[tuple[str, str]]
) -> tuple[Any, list[int]]:
    """Return a fast tokenizer for text whose words are split already, and what it asks of the source's embeddings.

    Args:
        source: The source's dictionary, of `read_dictionary`.
        target: The target's; the same where it is joined.
        merges: The codes, of `read_bpe_codes`.

    Returns:
        A `PreTrainedTokenizerFast` whose first ids are those of `target`, and for each of its ids the id in `source`,
        that of `<unk>` for what `source` lacks.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    own = {symbol: place for place, symbol in enumerate(_bpe_symbols(source))}
    vocabulary = {symbol: place for place, symbol in enumerate(_bpe_symbols(target))}
    for symbol in own:
        vocabulary.setdefault(symbol, len(vocabulary))
    for first, second in merges:
        for symbol in (first, second, first + second):
            vocabulary.setdefault(symbol, len(vocabulary))
    unk, end = SPECIAL_SYMBOLS[UNK], SPECIAL_SYMBOLS[2]
    backend = Tokenizer(
        models.BPE(vocabulary, list(merges), unk_token=unk, end_of_word_suffix=_END_OF_WORD, fuse_unk=False)
    )
    # What Python's str.split splits at, as fairseq does; Unicode's white space lacks the four separators.
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\x1c-\x1f]+"), "removed")
    backend.decoder = decoders.BPEDecoder(suffix=_END_OF_WORD)
    backend.post_processor = processors.TemplateProcessing(
        single=f"$A {end}", pair=f"$A $B:0 {end}", special_tokens=[(end, 2)]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        **dict(zip(("bos_token", "pad_token", "eos_token", "unk_token"), SPECIAL_SYMBOLS, strict=True)),
        split_special_tokens=True,  # their names in a text are text
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
        padding_side="right",
        truncation_side="right",
    )
    return tokenizer, [own.get(symbol, UNK) for symbol in vocabulary]


def moses_tokenizer(
    source: Sequence[str], target: Sequence[str], merges: Sequence[tuple[str, str]], languages: Sequence[str]
) -> Any:
    """Return an FSMTTokenizer.

    Args:
        source: The source's dictionary, of `read_dictionary`.
        target: The target's; the same where it is joined.
        merges: The codes, of `read_bpe_codes`.
        languages: Codes of source and target; Moses has rules for each language.

    Raises:
        ImportError: `sacremoses` is not installed.
    """
    require_sacremoses()
    from transformers import FSMTTokenizer

    with tempfile.TemporaryDirectory() as folder:  # its constructor reads files
        names = ("vocab-src.json", "vocab-tgt.json", "merges.txt")
        files = [Path(folder, name) for name in names]
        for file, symbols in zip(files, (source, target), strict=False):
            ids = {symbol: place for place, symbol in enumerate(_bpe_symbols(symbols))}
            file.write_text(json.dumps(ids, ensure_ascii=False), encoding="utf-8")
        files[2].write_text("".join(f"{first} {second}\n" for first, second in merges), encoding="utf-8")
        paths = dict(zip(("src_vocab_file", "tgt_vocab_file", "merges_file"), map(str, files), strict=True))
        return FSMTTokenizer(langs=list(languages), **paths)
