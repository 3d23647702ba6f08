"""Translate text line for line: a file or standard input in, standard output out.

    python scripts/translate.py --model runs/quickstart < input.txt > output.txt
    python scripts/translate.py --model runs/quickstart --input input.txt.gz --n_best 4

Lines are translated as they arrive, so the script works at the end of a pipe and at the keyboard. With --n_best over 1
each translation is a line `number ||| translation ||| score`, number counting the input lines from 0.
"""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.append(sys.path.pop(0))  # this folder last: its evaluate.py must not hide the library of that name

from arguments import clear_errors, parse, require_at_least


@dataclass
class TranslateArguments:
    """What to translate, with what, and how."""

    model: str = field(metadata={"help": "Checkpoint folder or Hub id."})
    input: str | None = field(default=None, metadata={"help": "Text file, .gz or not; default: standard input."})
    output: str | None = field(default=None, metadata={"help": "File to write; default: standard output."})
    n_best: int = field(default=1, metadata={"help": "Translations a sentence."})
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
    buffer_size: int = field(default=2048, metadata={"help": "Most lines read before translating, sorted by length."})
    device: str = field(default="auto", metadata={"help": "cpu, cuda, cuda:1, ...; auto takes a GPU if there is one."})
    dtype: str = field(default="float32", metadata={"help": "float32, bfloat16, float16 or int8 (linear layers)."})
    torch_compile: bool = field(
        default=False, metadata={"help": "Compile first, which takes long; docs/performance.md says when it pays."}
    )
    trust_remote_code: bool = field(default=False, metadata={"help": "Run code that comes with the checkpoint."})


def read_lines(stream: Any, name: str) -> Iterator[str]:
    """Yield the lines of a binary stream; only a line feed ends one.

    Raises:
        ValueError: Invalid UTF-8, with the line and the byte.
    """
    for number, raw in enumerate(stream, 1):
        try:
            yield raw.decode("utf-8").removesuffix("\n").removesuffix("\r")
        except UnicodeDecodeError as problem:
            raise ValueError(f"{name}, line {number}, byte {problem.start + 1}: not valid UTF-8") from None


def arriving_chunks(lines: Iterable[str], most: int) -> Iterator[list[str]]:
    """Yield what has arrived of `lines`, at most `most` at a time, without waiting for a full chunk."""
    arrived: queue.Queue[Any] = queue.Queue(maxsize=most)
    end: list[BaseException | None] = []

    def pump() -> None:
        problem = None
        try:
            for line in lines:
                arrived.put(line)
        except (ValueError, OSError) as caught:
            problem = caught
        end.append(problem)
        arrived.put(None)

    threading.Thread(target=pump, daemon=True).start()
    line = arrived.get()
    while line is not None:
        chunk = [line]
        while line is not None and len(chunk) < most and not arrived.empty():
            line = arrived.get()
            if line is not None:
                chunk.append(line)
        yield chunk
        line = line if line is None else arrived.get()
    if end[0] is not None:
        raise end[0]


def main() -> None:
    """Translate."""
    (arguments,) = parse(sys.argv[1:], __doc__, [TranslateArguments])
    with clear_errors():
        require_at_least(1, arguments, "batch_size", "inter_threads", "buffer_size")
        require_at_least(0, arguments, "max_tokens_per_batch")
        if arguments.input and not Path(arguments.input).is_file():
            raise ValueError(f"--input {arguments.input}: no such file")
        if arguments.output and Path(arguments.output).exists():
            raise ValueError(f"--output {arguments.output} exists already; remove it or choose another name")

    from loading import decoding_options, load_model_of

    from vanilla_transformer.corpus import iterate_lines
    from vanilla_transformer.translation import translate_sentences

    with clear_errors(), contextlib.ExitStack() as open_files:
        model, tokenizer = load_model_of(arguments)
        lines = iterate_lines(arguments.input) if arguments.input else read_lines(sys.stdin.buffer, "standard input")
        sink: Any = sys.stdout
        if arguments.output:
            sink = open_files.enter_context(Path(arguments.output).open("x", encoding="utf-8"))
        number = 0
        for chunk in arriving_chunks(lines, arguments.buffer_size):
            results = translate_sentences(
                model,
                tokenizer,
                chunk,
                batch_size=arguments.batch_size,
                max_tokens_per_batch=arguments.max_tokens_per_batch or None,
                inter_threads=arguments.inter_threads,
                n_best=arguments.n_best,
                with_scores=arguments.n_best > 1,
                **decoding_options(arguments),
            )
            for number, hypotheses in enumerate(results, number):  # noqa: B020 - goes on where the last chunk ended
                for text, score in hypotheses:
                    print(as_line(text, score, number if arguments.n_best > 1 else None), file=sink)
            number += 1
            sink.flush()


def as_line(text: str, score: float | None, number: int | None) -> str:
    """Return a translation as one line, with number and score where there is a number."""
    one_line = " ".join(text.splitlines())
    if number is None:
        return one_line
    return f"{number} ||| {one_line} ||| {'' if score is None else format(score, '.4f')}"


if __name__ == "__main__":
    main()
