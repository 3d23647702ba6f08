"""Measure a checkpoint: BLEU and chrF of its translations, with their sacreBLEU signatures.

    python scripts/evaluate.py --model runs/quickstart                             # the embedded grammar's test set
    python scripts/evaluate.py --model runs/en-de --test_file test.en test.de
    python scripts/evaluate.py --model runs/en-de --test_file test.tsv.gz --source_lang en --target_lang de

The scores are on detokenised, cased text. `--moses de` adds BLEU on Moses-tokenised, lower-cased text, which older
papers report; the two are not comparable. Offline: nothing is downloaded.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.append(sys.path.pop(0))  # this folder last: its evaluate.py must not hide the library of that name

from arguments import clear_errors, parse, require_at_least


@dataclass
class EvaluateArguments:
    """What to measure, on which text, and how."""

    model: str = field(metadata={"help": "Checkpoint folder or Hub id."})
    test_file: list[str] | None = field(
        default=None, metadata={"help": "Test text, one file or two; default: the embedded grammar's test set."}
    )
    dataset_name: str | None = field(default=None, metadata={"help": "Hub data set or local data set folder."})
    dataset_config_name: str | None = field(default=None, metadata={"help": "Configuration of the data set."})
    split: str = field(default="test", metadata={"help": "Split of the data set."})
    source_lang: str | None = field(default=None, metadata={"help": "Source language code, such as en."})
    target_lang: str | None = field(default=None, metadata={"help": "Target language code, such as de."})
    source_column: str | None = field(default=None, metadata={"help": "Name of the source column."})
    target_column: str | None = field(default=None, metadata={"help": "Name of the target column."})
    on_bad_pair: str = field(default="error", metadata={"help": "error or drop (counted)."})
    grammar_seed: int | None = field(default=None, metadata={"help": "Seed of the embedded grammar's sentences."})
    memoriser: bool = field(
        default=False, metadata={"help": "Score the nearest training sentence's translation too (embedded grammar)."}
    )
    num_beams: int | None = field(default=None, metadata={"help": "Beams; 1 is greedy. Default: the checkpoint's."})
    max_new_tokens: int | None = field(
        default=None, metadata={"help": "Longest output in tokens. Default: source length + 50, as in the paper."}
    )
    batch_size: int = field(default=64, metadata={"help": "Most sentences decoded together."})
    max_tokens_per_batch: int = field(
        default=4096, metadata={"help": "Most source tokens decoded together, padding included; 0: no such limit."}
    )
    inter_threads: int | None = field(
        default=None,
        metadata={
            "help": "Batches decoded side by side on a CPU, which takes as many times the memory. Default: one for "
            "each thread of torch, 8 at most; 1 with --torch_compile and for other packages' models."
        },
    )
    tokenize: str = field(default="13a", metadata={"help": "sacreBLEU's tokenizer, such as zh, ja-mecab or none."})
    lowercase: bool = field(default=False, metadata={"help": "Ignore case."})
    moses: str | None = field(
        default=None, metadata={"help": "Language code: add BLEU on Moses-tokenised lower-cased text (sacremoses)."}
    )
    output: str | None = field(default=None, metadata={"help": "File for the translations, a line each."})
    json: str | None = field(default=None, metadata={"help": "File for the scores as JSON."})
    device: str = field(default="auto", metadata={"help": "cpu, cuda, cuda:1, ...; auto takes a GPU if there is one."})
    dtype: str = field(default="float32", metadata={"help": "float32, bfloat16, float16 or int8 (linear layers)."})
    torch_compile: bool = field(
        default=False, metadata={"help": "Compile first, which takes long; docs/performance.md says when it pays."}
    )
    trust_remote_code: bool = field(default=False, metadata={"help": "Run code that comes with the checkpoint."})


def main() -> None:
    """Translate the test text and print the scores."""
    (arguments,) = parse(sys.argv[1:], __doc__, [EvaluateArguments])
    with clear_errors():
        check_arguments(arguments)

        from loading import decoding_options, load_model_of

        from vanilla_transformer.translation import translate_sentences

        sources, references = load_test(arguments)
        model, tokenizer = load_model_of(arguments)
    start = time.perf_counter()
    found = translate_sentences(
        model,
        tokenizer,
        sources,
        batch_size=arguments.batch_size,
        max_tokens_per_batch=arguments.max_tokens_per_batch or None,
        inter_threads=arguments.inter_threads,
        show_progress=sys.stderr.isatty(),
        **decoding_options(arguments),
    )
    seconds = time.perf_counter() - start
    translations = [best.text for best, *_ in found]
    scores = {"model": score(translations, references, arguments)}
    compiling = ", compiling included" if arguments.torch_compile else ""
    print(f"{len(sources):,} sentences in {seconds:.1f} s{compiling}")
    if arguments.memoriser:
        scores["memoriser"] = score(memorised(arguments, sources), references, arguments)
    for name, result in scores.items():
        report(name, result)
    if arguments.output:
        lines = (" ".join(text.splitlines()) + "\n" for text in translations)
        Path(arguments.output).write_text("".join(lines), encoding="utf-8")
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(scores, indent=2) + "\n", encoding="utf-8")


def check_arguments(arguments: Any) -> None:
    """Refuse what cannot work before the model is loaded."""
    require_at_least(1, arguments, "batch_size", "inter_threads")
    require_at_least(0, arguments, "max_tokens_per_batch")
    for name in ("output", "json"):
        path = getattr(arguments, name)
        if path and Path(path).exists():
            raise ValueError(f"--{name} {path} exists already; remove it or choose another name")
    if arguments.test_file and arguments.dataset_name:
        raise ValueError("--test_file and --dataset_name: choose one of the two")
    if arguments.memoriser and (arguments.test_file or arguments.dataset_name):
        raise ValueError("--memoriser is for the embedded grammar: leave out --test_file and --dataset_name")
    if arguments.moses:
        try:
            import sacremoses  # noqa: F401
        except ImportError:
            raise ValueError(f"--moses {arguments.moses} needs sacremoses: pip install sacremoses") from None


def load_test(arguments: Any) -> tuple[list[str], list[str]]:
    """Return source sentences and references."""
    from loading import column_options, grammar_splits

    from vanilla_transformer.corpus import load_parallel_dataset, load_parallel_files

    if not arguments.test_file and not arguments.dataset_name:
        test = grammar_splits(arguments.grammar_seed).test
        return [source for source, _ in test], [target for _, target in test]
    columns = column_options(arguments)
    if arguments.test_file:
        dataset, account = load_parallel_files(arguments.test_file, **columns)
    else:
        dataset, account = load_parallel_dataset(
            arguments.dataset_name, arguments.dataset_config_name, split=arguments.split, **columns
        )
    print(account, file=sys.stderr)
    return dataset["source"][:], dataset["target"][:]


def memorised(arguments: Any, sources: Sequence[str]) -> list[str]:
    """Return what a memoriser says: the translation of the most similar training sentence."""
    from loading import grammar_splits

    from vanilla_transformer.phrase_grammar import NearestSentenceMemoriser

    return NearestSentenceMemoriser(grammar_splits(arguments.grammar_seed).train).translate(sources)


def score(translations: Sequence[str], references: Sequence[str], arguments: Any) -> dict[str, Any]:
    """Return BLEU, chrF and what was asked for beside them."""
    from vanilla_transformer.metrics import TranslationScore

    result: dict[str, Any] = TranslationScore().compute(
        predictions=list(translations),
        references=list(references),
        tokenize=arguments.tokenize,
        lowercase=arguments.lowercase,
    )
    if arguments.moses:
        moses = TranslationScore().compute(
            predictions=moses_lines(translations, arguments.moses),
            references=moses_lines(references, arguments.moses),
            tokenize="none",
        )
        result |= {"moses_bleu": moses["bleu"], "moses_bleu_signature": moses["bleu_signature"]}
    return result


def moses_lines(lines: Sequence[str], language: str) -> list[str]:
    """Return lines lower-cased, then normalised, tokenised and escaped as the Moses scripts do it."""
    from sacremoses import MosesPunctNormalizer, MosesTokenizer

    normalizer, tokenizer = MosesPunctNormalizer(lang=language), MosesTokenizer(lang=language)
    return [
        tokenizer.tokenize(
            normalizer.normalize(line.lower()), return_str=True, escape=True, aggressive_dash_splits=False
        )
        for line in lines
    ]


def report(name: str, result: dict[str, Any]) -> None:
    """Print one set of scores."""
    print(f"{name}: BLEU {result['bleu']:.2f} | chrF {result['chrf']:.2f} | exact match {result['exact_match']:.1f}%")
    print(f"  {result['bleu_signature']}")
    print(f"  {result['chrf_signature']}")
    if "moses_bleu" in result:
        print(f"  Moses-tokenised, lower-cased BLEU {result['moses_bleu']:.2f}, {result['moses_bleu_signature']}")


if __name__ == "__main__":
    main()
