r"""Measure this package beside its peers, in pairs, on this machine: time, memory, share of what the hardware can do.

    python scripts/benchmark.py all                                    # generated text; all but learn and gpu, briefly
    python scripts/benchmark.py train --size small --vocab_size 8000
    python scripts/benchmark.py train --data train.en train.de
    python scripts/benchmark.py decode --checkpoint runs/en-de --test_data test.en test.de
    python scripts/benchmark.py all --data train.en train.de --checkpoint runs/en-de --test_data test.en test.de
    python scripts/benchmark.py learn --data train.en train.de --test_data val.en val.de --minutes 15
    python scripts/benchmark.py loss | load | growth
    python scripts/benchmark.py gpu --device cuda                      # base and big, bf16; some minutes

The first word says what is measured. Peers: MarianMT under the library's Trainer, torch.nn.Transformer in a plain
loop, JoeyNMT (train; pip install --no-deps joeynmt, as its pins would downgrade protobuf, then importlib_metadata
matplotlib sentencepiece subword-nmt tensorboard), MarianMT's generate, CTranslate2 (pip install
'vanilla-transformer[ctranslate2]'). Those not installed take no part. The contenders run by turns; medians and ratios
within a round are reported. The method and our results: docs/performance.md.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import json
import math
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.append(sys.path.pop(0))  # this folder last: its evaluate.py must not hide the library of that name

from arguments import clear_errors, parse, require_at_least, wants_help

COMMANDS = ("train", "loss", "decode", "load", "growth", "learn", "gpu", "all")
TOGETHER = {  # what the words for several commands stand for
    "all": ("train", "loss", "decode", "load", "growth", "summary"),
    "gpu": ("train", "loss", "decode", "summary"),
}
LEARNERS = ("ours", "marian", "marian_by_length")


@dataclass
class BenchmarkArguments:
    """What to measure with; every command takes what it needs of it."""

    device: str = field(default="cpu", metadata={"help": "cpu or cuda."})
    size: list[str] | None = field(default=None, metadata={"help": "Of tiny, small, base and big."})
    vocab_size: list[int] | None = field(default=None, metadata={"help": "Vocabulary sizes (train)."})
    data: list[str] | None = field(
        default=None, metadata={"help": "A parallel corpus in one file or two; default: generated token ids."}
    )
    test_data: list[str] | None = field(
        default=None,
        metadata={
            "help": "What is translated (decode; default: with a --checkpoint the last 1,000 pairs of --data, else "
            "the embedded grammar's) or validated on (learn)."
        },
    )
    checkpoint: str | None = field(
        default=None,
        metadata={"help": "A trained model for decode; default: one of the embedded grammar, on a GPU none."},
    )
    num_beams: int = field(default=4, metadata={"help": "Beams (decode)."})
    tokens_per_update: int | None = field(
        default=None, metadata={"help": "Real target tokens an update (train); default: 4,096, in gpu 25,000."}
    )
    updates: int = field(default=2, metadata={"help": "Updates a round (train; in all and gpu one)."})
    rounds: int = field(default=3, metadata={"help": "Rounds: each contender runs once in each."})
    minutes: float = field(default=15.0, metadata={"help": "Training time of each contender (learn)."})
    learning_rate: float | None = field(
        default=None, metadata={"help": "Peak rate of all contenders (learn); default: 0.256 / d_model."}
    )
    threads: int = field(default=2, metadata={"help": "Threads of all contenders."})
    precision: list[str] | None = field(
        default=None, metadata={"help": "fp32, bf16; default: the faster one (train), fp32 (learn)."}
    )
    contenders: list[str] | None = field(
        default=None,
        metadata={
            "help": "Of ours, marian, marian_by_length (train, learn), torch_nn, joeynmt (train, where "
            "ours always takes part); default: all there."
        },
    )
    no_memory: bool = field(default=False, metadata={"help": "Do not measure memory."})
    output: str | None = field(default=None, metadata={"help": "File for all figures as JSON."})
    save_to: str | None = field(default=None, metadata={"help": "Folder for our trained model (learn)."})
    plot: str | None = field(default=None, metadata={"help": "File for the picture (growth, learn), a PNG."})


def main() -> None:
    """Measure, print tables, write the figures."""
    command = sys.argv[1] if len(sys.argv) > 1 and sys.argv[1] in COMMANDS else None
    if command is None and not wants_help(sys.argv[1:]):
        given = f", not {sys.argv[1]!r}" if len(sys.argv) > 1 else ""
        raise SystemExit(f"benchmark.py: error: the first word must be one of {', '.join(COMMANDS)}{given}")
    (arguments,) = parse(sys.argv[2:] if command else sys.argv[1:], __doc__, [BenchmarkArguments])
    commands = TOGETHER.get(str(command), (command,))
    with clear_errors():
        if command == "gpu":
            prepare_gpu(arguments)
        prepare(arguments)
        bench = Benchmark(arguments, brief=command in TOGETHER)
        if "decode" in commands:
            bench.trained  # noqa: B018 - a checkpoint that cannot be loaded is found out now
    for name in commands:
        start = time.perf_counter()
        getattr(bench, str(name))()
        print(f"\n({name}: {time.perf_counter() - start:.0f} s)\n", flush=True)
        if arguments.output:
            Path(arguments.output).write_text(json.dumps(bench.results, indent=1), encoding="utf-8")


def prepare(arguments: Any) -> None:
    """Check what was asked for, and set the number of threads before anything runs."""
    import torch
    from benchmarking.contenders import CONTENDERS, why_no_joeynmt
    from benchmarking.workload import SIZES
    from transformers.utils import logging

    for size in arguments.size or ():
        if size not in SIZES:
            raise ValueError(f"--size {size} is unknown: choose of {', '.join(SIZES)}")
    for precision in arguments.precision or ():
        if precision not in ("fp32", "bf16"):
            raise ValueError(f"--precision {precision} is unknown: choose of fp32, bf16")
    for contender in arguments.contenders or ():
        if contender not in CONTENDERS:
            raise ValueError(f"--contenders {contender} is unknown: choose of {', '.join(CONTENDERS)}")
        if contender == "joeynmt" and (why := why_no_joeynmt()):
            raise ValueError(f"--contenders joeynmt cannot take part ({why}): install it as --help says")
    if arguments.tokens_per_update is None:
        arguments.tokens_per_update = 4096
    require_at_least(1, arguments, "threads", "rounds", "updates", "tokens_per_update", "num_beams")
    if arguments.device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"--device {arguments.device} cannot be used: torch sees no GPU")
    for path in [*(arguments.data or ()), *(arguments.test_data or ())]:
        if not Path(path).is_file():
            raise FileNotFoundError(f"there is no file {path}")
    for name in ("output", "plot"):
        path = getattr(arguments, name)
        if path and not Path(path).absolute().parent.is_dir():
            raise FileNotFoundError(f"--{name} {path}: there is no folder {Path(path).parent}; make it first")
    torch.set_num_threads(arguments.threads)
    logging.set_verbosity_error()
    logging.disable_progress_bar()


def prepare_gpu(arguments: Any) -> None:
    """Choose what fits a GPU where nothing else was asked for: base and big, bf16, 25,000 tokens an update."""
    if not arguments.device.startswith("cuda"):
        raise ValueError(f"gpu needs --device cuda, got {arguments.device}")
    arguments.precision = arguments.precision or ["bf16"]
    arguments.size = arguments.size or ["base", "big"]
    arguments.vocab_size = arguments.vocab_size or [37_000]
    arguments.tokens_per_update = arguments.tokens_per_update or 25_000


class Benchmark:
    """The commands, with the machine and the results so far.

    Args:
        arguments: `BenchmarkArguments`.
        brief: Keep to what is needed, so that all commands together end soon: an update a round, no further round
            after a minute, smaller trials of settings, and none for a second vocabulary, training memory for the last
            size and vocabulary only, JoeyNMT for the first only (unless it was asked for), one size of the loss.
    """

    def __init__(self, arguments: Any, brief: bool = False) -> None:
        from benchmarking import machine

        self.arguments, self.brief = arguments, brief
        self.seconds = 60.0 if brief else math.inf
        self.machine = machine.describe(arguments.device)
        self.results: dict[str, Any] = {"machine": self.machine}
        print(machine.machine_line(self.machine) + "\n", flush=True)

    def _contenders(self, *default: str) -> tuple[str, ...]:
        from benchmarking.contenders import CONTENDERS

        return tuple(CONTENDERS[name] for name in self.arguments.contenders or default)

    def _sizes(self, *default: str) -> list[str]:
        return self.arguments.size or list(default)

    def train(self) -> None:
        """Real target tokens a second of whole updates."""
        from benchmarking import report, training
        from benchmarking.contenders import CONTENDERS, JOEYNMT, OURS, why_no_joeynmt
        from benchmarking.workload import Workload, corpus_pairs, generated_pairs, word_tokenizer

        arguments = self.arguments
        precisions = [name == "bf16" for name in arguments.precision or ("fp32", "bf16")]
        contenders = tuple(dict.fromkeys((OURS, *self._contenders(*CONTENDERS))))  # all are compared with ours
        if not arguments.contenders and (why := why_no_joeynmt()):
            contenders = tuple(name for name in contenders if name != JOEYNMT)
            print(f"JoeyNMT takes no part: {why}.\n")
        sizes, vocab_sizes = self._sizes("small", "base"), arguments.vocab_size or [8_000, 37_000]
        if arguments.data:
            texts = {vocab_size: corpus_pairs(arguments.data, vocab_size, 40_000) for vocab_size in vocab_sizes}
            what = f"pairs of {arguments.data[0]}"
        else:
            texts = {v: (generated_pairs(v, 20_000), word_tokenizer(v)) for v in vocab_sizes}
            what = "generated pairs"
        workloads = list(itertools.product(sizes, vocab_sizes))
        known: dict[str, dict[str, Any]] = {size: {} for size in sizes}
        for size, vocab_size in workloads:
            dataset, tokenizer = texts[vocab_size]
            taking_part = contenders
            if self.brief and not arguments.contenders and (size, vocab_size) != workloads[0]:
                taking_part = tuple(name for name in contenders if name != JOEYNMT)
            is_last = (size, vocab_size) == workloads[-1]
            workload = Workload(size, vocab_size)
            rows = training.benchmark(
                workload,
                dataset,
                tokenizer,
                tokens_per_update=arguments.tokens_per_update,
                updates=1 if self.brief else arguments.updates,
                rounds=arguments.rounds,
                device=arguments.device,
                precisions=precisions,
                contenders=taking_part,
                with_memory=(is_last or not self.brief) and not arguments.no_memory,
                trial=512 if self.brief else 1024,
                tries=2 if self.brief else 3,
                known=known[size] if self.brief else None,
                seconds=self.seconds,
            )
            self.results.setdefault("train", []).extend(rows)
            tokens = f"{arguments.tokens_per_update:,} real target tokens an update"
            print(
                f"Training, {workload}, {len(dataset):,} {what}, {tokens}\n\n{report.training_table(rows)}\n",
                flush=True,
            )

    def loss(self) -> None:
        """The loss with its gradients, alone."""
        from benchmarking import losses, report

        tokens = 25_000 if self.arguments.device.startswith("cuda") else 2_048
        rows = losses.benchmark(
            losses.SIZES[-1:] if self.brief else losses.SIZES,
            tokens=tokens,
            rounds=self.arguments.rounds,
            device=self.arguments.device,
            with_memory=not self.arguments.no_memory,
        )
        self.results["loss"] = rows
        print(f"Output projection and smoothed loss, forward and backward, {tokens:,} tokens\n")
        print(report.loss_table(rows), flush=True)

    def decode(self) -> None:
        """A trained model on its sentences, a random one at base size, and single sentences."""
        from benchmarking import decoding, report
        from benchmarking.workload import EOS, PAD, Workload, generated_pairs

        arguments = self.arguments
        with_ctranslate2 = importlib.util.find_spec("ctranslate2") is not None and arguments.device == "cpu"
        if not with_ctranslate2:
            print("CTranslate2 takes no part: it is not installed (or runs on another device).\n")
        common = {"rounds": arguments.rounds, "device": arguments.device, "seconds": self.seconds}
        common |= {"threads": arguments.threads, "trial": 128 if self.brief else 256}
        if self.trained is None:
            print("No trained model is decoded: on a GPU name one by --checkpoint.\n")
        else:
            self._decode_trained(self.trained, with_ctranslate2, common)
        for size in self._sizes("base"):
            workload = Workload(size, 8_000)
            sources = list(generated_pairs(workload.vocab_size, 128 if self.brief else 256)["input_ids"])
            forced = decoding.Task(sources, arguments.num_beams, 20, PAD, EOS)
            model = workload.ours().eval().to(arguments.device)
            found = decoding.decoders(model, forced, arguments.threads, with_ctranslate2=with_ctranslate2)
            rows = decoding.benchmark(found, forced, **common)
            print(f"\nDecoding, {workload}, random weights, {len(sources)} sentences, 20 forced tokens\n")
            print(report.decoding_table(rows, len(sources)), flush=True)
            self.results.setdefault("decode_random", {})[str(workload)] = rows

    def _decode_trained(self, trained: Any, with_ctranslate2: bool, common: dict[str, Any]) -> None:
        from benchmarking import decoding, report

        model, task, score, what = trained
        arguments = self.arguments
        found = decoding.decoders(model, task, arguments.threads, with_ctranslate2=with_ctranslate2)
        rows = decoding.benchmark(found, task, score=score, **common)
        if arguments.device == "cpu" and not arguments.no_memory:
            decoding.add_memory(rows, model, task, arguments.threads)
        print(f"Decoding, {what}, {len(task.sources):,} sentences, {task.num_beams} beams\n")
        print(report.decoding_table(rows, len(task.sources)), flush=True)
        self.results["decode"] = rows
        alone = decoding.latency(found, task, rounds=arguments.rounds)
        self.results["latency"] = alone
        print("\nOne sentence alone, the same model\n")
        print(report.latency_table(alone), flush=True)

    @functools.cached_property
    def trained(self) -> tuple[Any, Any, Any, str] | None:
        """A model, what to decode with it, what gives BLEU, and its name.

        It is the checkpoint and its sentences, or a model of the embedded grammar, trained if it is not there; None on
        a GPU without a checkpoint, where the time to train one is better spent.
        """
        import sacrebleu
        from benchmarking import decoding
        from loading import grammar_splits, load_model

        arguments = self.arguments
        if arguments.device != "cpu" and not arguments.checkpoint:
            return None
        folder = arguments.checkpoint or grammar_model()
        model, tokenizer = load_model(folder, arguments.device, "float32", trust_remote_code=False)
        files = arguments.test_data or (arguments.data if arguments.checkpoint else None)
        if files:
            from vanilla_transformer.corpus import load_parallel_files

            pairs, _ = load_parallel_files(files)
            if not arguments.test_data:
                pairs = pairs.select(range(max(0, len(pairs) - 1000), len(pairs)))
            sources, references = list(pairs["source"]), list(pairs["target"])
            text = files[0] if arguments.test_data else f"the last {len(pairs):,} pairs of {files[0]}, maybe learned"
        else:
            test = grammar_splits(None).test
            sources, references = [source for source, _ in test], [target for _, target in test]
            text = "the embedded grammar"
        ids = tokenizer(sources)["input_ids"]
        config = model.config
        task = decoding.Task(ids, arguments.num_beams, None, config.pad_token_id, config.eos_token_id)

        def score(outputs: list[list[int]]) -> float:
            texts = tokenizer.batch_decode(outputs, skip_special_tokens=True)
            return float(sacrebleu.corpus_bleu(texts, [references]).score)

        sizes = f"{config.encoder_layers}+{config.decoder_layers}, d_model {config.d_model}"
        return model, task, score, f"{folder} on {text} ({sizes})"

    def load(self) -> None:
        """From a fresh Python to a loaded model."""
        from benchmarking import loading, report
        from benchmarking.workload import Workload

        for size in self._sizes("base"):
            rows = loading.benchmark(Workload(size, 37_000), rounds=self.arguments.rounds)
            self.results.setdefault("load", {})[size] = rows
            print(f"Loading, {size}\n")
            print(report.loading_table(rows), flush=True)

    def growth(self) -> None:
        """Curves of cost against length, batch, beams and vocabulary."""
        from benchmarking import growth, machine, report
        from benchmarking.workload import Workload

        for size in self._sizes("small"):
            rounds = 1 if self.brief else self.arguments.rounds
            curves = growth.benchmark(Workload(size, 8_000), rounds=rounds, device=self.arguments.device)
            self.results.setdefault("growth", {})[size] = curves
            for curve in curves:
                print(f"{curve['name']}, {size}\n")
                print(report.growth_table(curve) + "\n", flush=True)
            if self.arguments.plot:
                growth.plot(curves, Path(self.arguments.plot), machine.machine_line(self.machine))

    def learn(self) -> None:
        """Validation BLEU against minutes, beside MarianMT."""
        from benchmarking import learning, machine
        from benchmarking.workload import SIZES, Workload, corpus_pairs

        from vanilla_transformer.corpus import load_parallel_files

        arguments = self.arguments
        with clear_errors():
            if not arguments.data or not arguments.test_data:
                raise ValueError("learn needs --data (to train on) and --test_data (to validate on)")
            for contender in arguments.contenders or ():
                if contender not in LEARNERS:
                    raise ValueError(f"--contenders {contender} is not one of learn: choose of {', '.join(LEARNERS)}")
            vocab_size = (arguments.vocab_size or [10_000])[0]
            dataset, tokenizer = corpus_pairs(arguments.data, vocab_size, None)
            pairs, _ = load_parallel_files(arguments.test_data)
        validation = list(zip(pairs["source"], pairs["target"], strict=True))
        for size in self._sizes("tiny"):
            curves = learning.benchmark(
                Workload(size, vocab_size),
                dataset,
                validation,
                tokenizer,
                minutes=arguments.minutes,
                learning_rate=arguments.learning_rate or 0.256 / SIZES[size]["d_model"],
                bf16=arguments.precision == ["bf16"],
                device=arguments.device,
                contenders=self._contenders(*LEARNERS),
                save_to=Path(arguments.save_to) if arguments.save_to else None,
            )
            self.results.setdefault("learn", {})[size] = curves
            if arguments.plot:
                learning.plot(curves, Path(arguments.plot), machine.machine_line(self.machine))

    def summary(self) -> None:
        """All ratios at a glance."""
        from benchmarking import report, summary

        print("What was measured, ours beside each peer in the same run\n")
        print(report.table(["what", "against", "measured"], summary.lines(self.results)), flush=True)


def grammar_model() -> str:
    """Return the folder of a small model of the embedded grammar; the first time it is trained, some minutes."""
    import subprocess

    folder = Path("runs", "benchmark-grammar")
    if not (folder / "config.json").is_file():
        print("Training a small model (3+3, d_model 256) on the embedded grammar: some minutes, once.", flush=True)
        scripts = Path(__file__).parent
        sizes = {"d_model": 256, "encoder_layers": 3, "decoder_layers": 3, "encoder_ffn_dim": 1024}
        sizes |= {"decoder_ffn_dim": 1024, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
        flags = [text for name, value in sizes.items() for text in (f"--{name}", str(value))]
        recipe = str(scripts / "recipes" / "phrase_grammar.yaml")
        subprocess.run(
            [sys.executable, str(scripts / "train.py"), recipe, "--output_dir", str(folder), *flags], check=True
        )
    return str(folder)


if __name__ == "__main__":
    main()
