"""Folders that appear whole or not at all."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path


def is_free(folder: Path) -> bool:
    """Return whether something may be written there: nothing is, or an empty folder."""
    return not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))


@contextlib.contextmanager
def whole_folder(output: Path) -> Iterator[Path]:
    """Give a folder to write into that takes the place of `output` at the end, and is gone after an error.

    It lies beside its place, so that a process that is killed leaves no half folder there. `output` must be free.
    """
    scratch = output.with_name(f".{output.name}.incomplete")
    shutil.rmtree(scratch, ignore_errors=True)  # of a process that was killed
    made = [parent for parent in scratch.parents if not parent.exists()]
    scratch.mkdir(parents=True)
    try:
        yield scratch
        if output.exists():
            output.rmdir()
        scratch.rename(output)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        for parent in made:  # the innermost first
            with contextlib.suppress(OSError):  # another process has put something there
                parent.rmdir()
        raise
