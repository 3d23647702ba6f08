"""Scripts as modules of the test's own process, so that many calls share one."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"


def load(script: str) -> Any:
    """Return a script as a module."""
    sys.path.append(str(SCRIPTS))
    try:
        spec = importlib.util.spec_from_file_location(f"script_{script}", SCRIPTS / f"{script}.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # dataclasses look there
        path = list(sys.path)
        spec.loader.exec_module(module)
        sys.path[:] = path  # the script moves its folder behind all others
        return module
    finally:
        sys.path.remove(str(SCRIPTS))
