"""Loading: seconds from a fresh Python to a model that is ready, ours and MarianMT of the same size."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from . import machine
from .workload import Workload

_PROGRAM = """
import sys, time
start = time.perf_counter()
{imports}
imported = time.perf_counter()
model = {auto}.from_pretrained(sys.argv[1])
print(imported - start, time.perf_counter() - imported)
"""
_OURS = _PROGRAM.format(
    imports="from vanilla_transformer import VanillaTransformerForConditionalGeneration as Model", auto="Model"
)
_MARIAN = _PROGRAM.format(imports="from transformers import MarianMTModel as Model", auto="Model")


def benchmark(workload: Workload, *, rounds: int) -> list[dict[str, Any]]:
    """Return a row a model: seconds to import and to load, and the size of the weights on disk."""
    with tempfile.TemporaryDirectory() as folder:
        ours, marian = Path(folder, "ours"), Path(folder, "marian")
        workload.ours().save_pretrained(ours)
        workload.marian().save_pretrained(marian)
        programs = {"vanilla-transformer": (_OURS, ours), "MarianMT": (_MARIAN, marian)}
        parts: dict[str, list[tuple[float, float]]] = {name: [] for name in programs}

        def run(name: str) -> float:
            program, path = programs[name]
            output = subprocess.run(
                [sys.executable, "-c", program, str(path)], capture_output=True, text=True, check=True
            ).stdout.split()
            parts[name].append((float(output[-2]), float(output[-1])))
            return sum(parts[name][-1])

        for name in programs:
            run(name)  # files into the system's cache
            parts[name].clear()
        machine.alternate({name: partial(run, name) for name in programs}, rounds)
        return [
            {
                "contender": name,
                "import_seconds": statistics.median(first for first, _ in parts[name]),
                "load_seconds": statistics.median(second for _, second in parts[name]),
                "bytes": sum(file.stat().st_size for file in path.glob("*.safetensors")),
            }
            for name, (_, path) in programs.items()
        ]
