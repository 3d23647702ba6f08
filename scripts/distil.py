r"""Write a teacher's translations of a source file, for a smaller student to train on in place of the references.

    python scripts/distil.py --model runs/teacher --source_file train.en --output train.distilled.de
    python scripts/train.py scripts/recipes/distil_student.yaml --train_file train.en train.distilled.de \
        --validation_file val.en val.de --test_file test.en test.de --tokenizer_name runs/teacher \
        --output_dir runs/student

    python scripts/distil.py --model runs/teacher --source_file train.en --reference_file train.de \
        --output train.nearest.de              # of the beam's translations the one nearest to the reference

Sequence-level knowledge distillation of Kim and Rush (2016). The teacher is any sequence-to-sequence checkpoint. The
text has its name when it is whole; after a kill the same command goes on where it was. docs/shrinking.md has figures.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any

sys.path.append(sys.path.pop(0))  # this folder last: its evaluate.py must not hide the library of that name

from arguments import clear_errors, parse, require_at_least


@dataclass
class DistilArguments:
    """Which teacher, which text, and how it translates."""

    model: str = field(metadata={"help": "The teacher: checkpoint folder or Hub id."})
    source_file: str = field(metadata={"help": "Source text, a sentence a line, .gz or not."})
    output: str = field(metadata={"help": "Target text to write."})
    reference_file: str | None = field(
        default=None, metadata={"help": "Real translations: take the teacher's nearest to each, not its best."}
    )
    n_best: int | None = field(
        default=None, metadata={"help": "With --reference_file: among how many; default: all beams."}
    )
    closest_by: str = field(default="bleu", metadata={"help": "With --reference_file: nearest by bleu or chrf."})
    num_beams: int | None = field(default=None, metadata={"help": "Beams; 1 is greedy. Default: the checkpoint's."})
    length_penalty: float | None = field(
        default=None,
        metadata={"help": "Rank by log P / length^this, as the library does. Default: the checkpoint's ranking."},
    )
    max_new_tokens: int | None = field(
        default=None, metadata={"help": "Longest output in tokens. Default: source length + 50, as in the paper."}
    )
    batch_size: int = field(default=64, metadata={"help": "Most sentences decoded together."})
    max_tokens_per_batch: int = field(
        default=4096, metadata={"help": "Most source tokens decoded together, padding included; 0: no such limit."}
    )
    buffer_size: int = field(default=2048, metadata={"help": "Lines sorted by length together, and then written."})
    device: str = field(default="auto", metadata={"help": "cpu, cuda, cuda:1, ...; auto takes a GPU if there is one."})
    dtype: str = field(default="float32", metadata={"help": "float32, bfloat16, float16 or int8 (linear layers)."})
    trust_remote_code: bool = field(default=False, metadata={"help": "Run code that comes with the checkpoint."})


def main() -> None:
    """Translate, and say what was written and how to train on it."""
    (arguments,) = parse(sys.argv[1:], __doc__, [DistilArguments])
    with clear_errors():
        check_arguments(arguments)
        from loading import decoding_options, load_model_of

        from vanilla_transformer.distillation import distil_targets

        model, tokenizer = load_model_of(arguments)
        options = decoding_options(arguments)
        if arguments.length_penalty is not None:
            options["length_penalty"] = arguments.length_penalty
        text = distil_targets(
            model,
            tokenizer,
            arguments.source_file,
            arguments.output,
            reference_file=arguments.reference_file,
            n_best=arguments.n_best,
            closest_by=arguments.closest_by,
            buffer_size=arguments.buffer_size,
            batch_size=arguments.batch_size,
            max_tokens_per_batch=arguments.max_tokens_per_batch or None,
            show_progress=sys.stderr.isatty(),
            **options,
        )
    empty = f", {text.empty:,} of them empty: train with --on_bad_pair drop" if text.empty else ""
    print(f"{text.lines:,} lines in {text.path}{empty}")


def check_arguments(arguments: Any) -> None:
    """Refuse numbers that cannot work before the model is loaded."""
    require_at_least(1, arguments, "batch_size", "buffer_size", "n_best", "num_beams", "max_new_tokens")
    require_at_least(0, arguments, "max_tokens_per_batch")
    if arguments.n_best and not arguments.reference_file:
        raise ValueError(f"--n_best {arguments.n_best} chooses by a reference: give --reference_file, or leave it out")


if __name__ == "__main__":
    main()
