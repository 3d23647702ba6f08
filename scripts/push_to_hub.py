"""Push a checkpoint folder to the Hub, with its model card, after a check that it works there without this package.

    python scripts/push_to_hub.py runs/en-de --repo_id me/en-de --dry_run
    python scripts/push_to_hub.py runs/en-de --repo_id me/en-de --license cc-by-4.0

Log in first by `hf auth login`, or put a token with write access into HF_TOKEN; a dry run needs neither. README.md
goes as it lies in the folder, your edits included, but for the repository's name and address. Checkpoints of the run,
optimizer states and logs stay where they are.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any

sys.path.append(sys.path.pop(0))  # this folder last: its evaluate.py must not hide the library of that name

from arguments import YAML_SUFFIXES, clear_errors, parse


@dataclass
class PushArguments:
    """What to push, and where to."""

    folder: str = field(metadata={"help": "Checkpoint folder; may stand first without its flag."})
    repo_id: str = field(metadata={"help": "Repository on the Hub, owner/name; made if it does not exist."})
    private: bool = field(default=False, metadata={"help": "Make the repository a private one."})
    license: str | None = field(default=None, metadata={"help": "Licence of the weights, such as apache-2.0."})
    revision: str | None = field(default=None, metadata={"help": "Branch, made if it does not exist; default: main."})
    commit_message: str | None = field(default=None, metadata={"help": "Message of the commit."})
    include: list[str] = field(
        default_factory=list, metadata={"help": "Further files of the folder to push, such as 'figures/*.png'."}
    )
    dry_run: bool = field(default=False, metadata={"help": "Do everything but the push, and say what it would be."})


def main() -> None:
    """Check the folder, push it, and say what was pushed."""
    argv = sys.argv[1:]
    if argv and not argv[0].startswith("-") and not argv[0].endswith(YAML_SUFFIXES):
        argv.insert(0, "--folder")
    (arguments,) = parse(argv, __doc__, [PushArguments])

    from transformers.utils import logging

    from vanilla_transformer.hub import push_checkpoint

    logging.disable_progress_bar()
    with clear_errors():
        push = push_checkpoint(**vars(arguments))
    report(push)


def report(push: Any) -> None:
    """Print what was pushed, or would be."""
    for warning in push.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    print(f"self-check: without the package as with it, {push.sentence!r} gives {push.translation!r}")
    for name, size in push.files.items():
        print(f"{size:>15,}  {name}")
    print(f"{sum(push.files.values()):>15,}  bytes in {len(push.files)} files")
    if push.left_out:
        print(f"left out: {', '.join(push.left_out)}")
    print(f"pushed: {push.url}" if push.url else f"dry run: nothing was pushed to {push.repo_id}")


if __name__ == "__main__":
    main()
