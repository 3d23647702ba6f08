r"""Average the weights of checkpoints of one run, as the paper did (section 6.1: the last 5, or 20 of the big model).

    python scripts/average_checkpoints.py --run runs/en-de --last 5 --output_dir runs/en-de-average
    python scripts/average_checkpoints.py --run runs/en-de --best 5 --metric bleu --output_dir runs/en-de-average
    python scripts/average_checkpoints.py --checkpoints runs/en-de/checkpoint-9000 runs/en-de/checkpoint-10000 \
        --output_dir runs/en-de-average

The result is a checkpoint folder like any other: give it to evaluate.py, translate.py or the Auto classes.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.append(sys.path.pop(0))  # this folder last: its evaluate.py must not hide the library of that name

from arguments import clear_errors, parse


@dataclass
class AveragingArguments:
    """Which checkpoints, and where to."""

    output_dir: str = field(metadata={"help": "Folder for the average; new or empty."})
    checkpoints: list[str] | None = field(default=None, metadata={"help": "Checkpoint folders, or --run instead."})
    run: str | None = field(default=None, metadata={"help": "Output folder of a run, with checkpoint-* in it."})
    last: int | None = field(default=None, metadata={"help": "Average the last so many checkpoints of --run."})
    best: int | None = field(default=None, metadata={"help": "Average the best so many by --metric."})
    metric: str = field(default="bleu", metadata={"help": "What --best goes by: bleu, chrf, loss, ..."})


def chosen_checkpoints(arguments: Any) -> list[Path]:
    """Return the folders that the arguments name."""
    from vanilla_transformer.averaging import best_checkpoints, last_checkpoints

    if bool(arguments.checkpoints) == bool(arguments.run):
        raise ValueError("give the checkpoints by --checkpoints, or their run by --run, one of the two")
    if arguments.checkpoints:
        if arguments.last is not None or arguments.best is not None:
            raise ValueError("--last and --best choose among the checkpoints of --run; leave them out")
        return [Path(folder) for folder in arguments.checkpoints]
    if (arguments.last is None) == (arguments.best is None):
        raise ValueError("--run needs --last or --best, one of the two, with the number of checkpoints")
    if arguments.last is not None:
        return last_checkpoints(arguments.run, arguments.last)
    return best_checkpoints(arguments.run, arguments.best, arguments.metric)


def main() -> None:
    """Write the average and say of what."""
    (arguments,) = parse(sys.argv[1:], __doc__, [AveragingArguments])
    with clear_errors():
        from vanilla_transformer.averaging import average_checkpoints

        checkpoints = chosen_checkpoints(arguments)
        folder = average_checkpoints(checkpoints, arguments.output_dir)
    print(f"average of {', '.join(path.name for path in checkpoints)}, saved in {folder}")


if __name__ == "__main__":
    main()
