r"""Train a joint source-target BPE tokenizer.

    python scripts/train_tokenizer.py --files train.en train.de --vocab_size 10000 --output_dir tokenizer
    python scripts/train_tokenizer.py --files train.tsv.gz --source_lang en --target_lang de --output_dir tokenizer
    python scripts/train_tokenizer.py --dataset_name wmt/wmt14 --dataset_config_name de-en --streaming true \
        --source_lang en --target_lang de --output_dir tokenizer

The text is read once and not kept, so a corpus may be larger than memory.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.append(sys.path.pop(0))  # this folder last: its evaluate.py must not hide the library of that name

from arguments import clear_errors, parse


@dataclass
class TokenizerArguments:
    """Where the text is and what the tokenizer shall be."""

    output_dir: str = field(metadata={"help": "Folder for the tokenizer; new or empty."})
    files: list[str] | None = field(
        default=None,
        metadata={"help": "Plain text files of any number, or one TSV, CSV, JSONL or Parquet file; .gz or not."},
    )
    dataset_name: str | None = field(default=None, metadata={"help": "Hub dataset or local dataset folder."})
    dataset_config_name: str | None = field(default=None, metadata={"help": "Configuration of the dataset."})
    split: str = field(default="train", metadata={"help": "Split of the dataset."})
    streaming: bool = field(default=False, metadata={"help": "Read the dataset without downloading it whole."})
    source_lang: str | None = field(default=None, metadata={"help": "Source language code, such as en."})
    target_lang: str | None = field(default=None, metadata={"help": "Target language code, such as de."})
    source_column: str | None = field(default=None, metadata={"help": "Name of the source column."})
    target_column: str | None = field(default=None, metadata={"help": "Name of the target column."})
    on_bad_pair: str = field(default="error", metadata={"help": "error or drop."})
    vocab_size: int = field(default=37_000, metadata={"help": "Tokens in all, special ones included."})
    min_frequency: int = field(default=2, metadata={"help": "How often a pair must occur to become a token."})
    languages: list[str] | None = field(default=None, metadata={"help": "Languages that get a tag token, >>xx<<."})


def texts(arguments: Any) -> Iterator[str]:
    """Return the texts that the arguments name, streaming."""
    from loading import column_options

    from vanilla_transformer.corpus import load_parallel_dataset, load_parallel_files
    from vanilla_transformer.corpus_formats import table_suffix
    from vanilla_transformer.tokenizer_training import iterate_texts

    columns = column_options(arguments)
    if bool(arguments.files) == bool(arguments.dataset_name):
        raise ValueError("give the text by --files or by --dataset_name, one of the two")
    if arguments.dataset_name:
        dataset, report = load_parallel_dataset(
            arguments.dataset_name,
            arguments.dataset_config_name,
            split=arguments.split,
            streaming=arguments.streaming,
            **columns,
        )
    elif len(arguments.files) == 1 and table_suffix(Path(arguments.files[0])):
        dataset, report = load_parallel_files(arguments.files, **columns)
    else:
        return iterate_texts(arguments.files)
    print(report, file=sys.stderr)
    return iterate_texts(dataset)


def main() -> None:
    """Train and save a tokenizer."""
    (arguments,) = parse(sys.argv[1:], __doc__, [TokenizerArguments])
    with clear_errors():
        folder = Path(arguments.output_dir)
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ValueError(f"--output_dir {folder} is not empty; choose another folder")

        from vanilla_transformer.tokenizer_training import save_tokenizer, train_tokenizer

        tokenizer = train_tokenizer(
            texts(arguments),
            vocab_size=arguments.vocab_size,
            min_frequency=arguments.min_frequency,
            languages=arguments.languages or (),
            show_progress=sys.stderr.isatty(),
        )
        save_tokenizer(tokenizer, folder)
    print(f"{len(tokenizer):,} tokens, saved in {folder}")


if __name__ == "__main__":
    main()
