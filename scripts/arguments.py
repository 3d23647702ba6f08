"""Command lines of the scripts: dataclasses, flags, or a YAML file in place of flags."""

from __future__ import annotations

import contextlib
import difflib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

YAML_SUFFIXES = (".yaml", ".yml")


def wants_help(argv: Sequence[str]) -> bool:
    """Return whether the command line asks for the short help, which needs no heavy import."""
    return "--help" in argv or "-h" in argv


def parse(
    argv: Sequence[str], description: str | None, dataclasses: Sequence[Any], further_help: str = ""
) -> tuple[Any, ...]:
    """Read `argv` into one instance of each of `dataclasses`, by `HfArgumentParser`.

    If the first argument names a YAML file, its keys stand for flags; flags after it win. `--help` prints and exits.

    Args:
        argv: The command line without the program's name.
        description: The script's docstring.
        dataclasses: Dataclass types whose fields are the flags.
        further_help: Last lines of the help.

    Raises:
        SystemExit: With status 2 and one message, when an argument does not fit.
    """
    from transformers import HfArgumentParser
    from transformers.hf_argparser import ArgumentDefaultsHelpFormatter

    class Formatter(ArgumentDefaultsHelpFormatter):
        """Keeps the docstring's own lines."""

        def _fill_text(self, text: str, width: int, indent: str) -> str:
            return text

    parser = HfArgumentParser(
        list(dataclasses),
        usage="%(prog)s [recipe.yaml] [--flag value ...]",
        description=description,
        epilog=further_help,
        formatter_class=Formatter,
        allow_abbrev=False,
    )
    known = sorted(option[2:] for action in parser._actions for option in action.option_strings if option[:2] == "--")
    arguments = list(argv)
    if arguments and arguments[0].endswith(YAML_SUFFIXES):
        arguments = _yaml_flags(Path(arguments[0]), parser.error, known) + arguments[1:]
    *parsed, unknown = parser.parse_args_into_dataclasses(arguments, return_remaining_strings=True)
    for word in unknown:
        parser.error(_unknown_argument(word, known))
    return tuple(parsed)


def _yaml_flags(path: Path, error: Callable[[str], Any], known: Sequence[str]) -> list[str]:
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as problem:
        error(f"cannot read the recipe {path}: {problem}")
    if not isinstance(content, dict):
        error(f"the recipe {path} must hold `flag: value` lines, and holds a {type(content).__name__}")
    flags = []
    for key, value in content.items():
        if key not in known:
            error(f"the recipe {path}: {_unknown_argument(f'--{key}', known)}")
        if isinstance(value, dict):
            flags += [f"--{key}", json.dumps(value)]
        elif isinstance(value, list):
            flags += [f"--{key}", *map(str, value)]
        elif value is not None:
            flags += [f"--{key}", str(value)]
    return flags


def _unknown_argument(word: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(word.lstrip("-").partition("=")[0], known, n=1, cutoff=0.6)
    return f"unknown argument {word}" + (f"; did you mean --{near[0]}?" if near else "")


def require_at_least(least: int, arguments: Any, *names: str) -> None:
    """Refuse numbers that are too small; None, which is not given, may pass.

    Raises:
        ValueError: One of the `arguments` of these names is below `least`.
    """
    for name in names:
        value = getattr(arguments, name)
        if value is not None and value < least:
            raise ValueError(f"--{name} {value} must be at least {least}")


@contextlib.contextmanager
def clear_errors() -> Iterator[None]:
    """Turn what bad input raises into one line on stderr and exit status 2; for the part before the work starts."""
    try:
        yield
    except (ValueError, OSError) as problem:
        print(f"{Path(sys.argv[0]).name}: error: {problem}", file=sys.stderr)
        raise SystemExit(2) from None
