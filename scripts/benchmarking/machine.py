"""The machine under a measurement: its threads, its matrix products, a process's memory; and fair alternation."""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch

GEMM_SIZE = {"cpu": 2048, "cuda": 8192}


def describe(device: str) -> dict[str, Any]:
    """Return processor, threads, versions and the rate of a large matrix product in fp32 and bf16, FLOP a second."""
    import transformers

    return {
        "device": torch.cuda.get_device_name(device) if device.startswith("cuda") else processor_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "gemm_fp32": gemm_rate(torch.float32, device),
        "gemm_bf16": gemm_rate(torch.bfloat16, device),
    }


def machine_line(machine: Mapping[str, Any]) -> str:
    """Return the machine in a line."""
    return (
        f"{machine['device']}, {machine['threads']} threads on {machine['cores']} cores, torch {machine['torch']}, "
        f"transformers {machine['transformers']}; matrix product {machine['gemm_fp32'] / 1e9:,.0f} GFLOP/s fp32, "
        f"{machine['gemm_bf16'] / 1e9:,.0f} bf16"
    )


def processor_name() -> str:
    """Return the processor's name as the system gives it."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def gemm_rate(dtype: torch.dtype, device: str, repetitions: int = 7) -> float:
    """Return FLOP a second of a square matrix product, the median of some."""
    size = GEMM_SIZE[device.partition(":")[0]]
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    output = torch.empty(size, size, device=device, dtype=dtype)
    seconds = timed(lambda: torch.mm(left, right, out=output), repetitions, device)
    return 2 * size**3 / seconds


def synchronize(device: str) -> None:
    """Wait for the device."""
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def timed(function: Callable[[], Any], repetitions: int, device: str = "cpu") -> float:
    """Return the median seconds of a call, after one that does not count."""
    return statistics.median(timings(function, repetitions, device))


def timed_once(function: Callable[[], Any]) -> float:
    """Return the seconds of a call whose result is on the host."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def timings(function: Callable[[], Any], repetitions: int, device: str = "cpu") -> list[float]:
    """Return the seconds of each of some calls, after one that does not count."""
    function()
    results = []
    for _ in range(repetitions):
        synchronize(device)
        start = time.perf_counter()
        function()
        synchronize(device)
        results.append(time.perf_counter() - start)
    return results


def alternate(
    runs: Mapping[str, Callable[[], float]], rounds: int, seconds: float = math.inf
) -> dict[str, list[float]]:
    """Call each of `runs` once a round, the first one another each round, and return what each gave.

    What slows the machine down for a while so meets all of them, and ratios are taken within a round. No further round
    begins once so many seconds have passed.
    """
    names = list(runs)
    results: dict[str, list[float]] = {name: [] for name in runs}
    start = time.perf_counter()
    for number in range(rounds):
        if number and time.perf_counter() - start > seconds:
            break
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            results[name].append(runs[name]())
    return results


def paired_ratio(ours: list[float], theirs: list[float]) -> float:
    """Return the median of ours / theirs, round by round."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def peak_memory() -> int:
    """Return the largest memory this process ever had resident, in bytes."""
    status = Path("/proc/self/status")
    if status.is_file():  # getrusage would count what a parent had
        for line in status.read_text(encoding="utf-8").splitlines():
            if line.startswith("VmHWM"):
                return int(line.split()[1]) * 1024
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if platform.system() == "Darwin" else peak * 1024


def reset_peak_memory() -> None:
    """Let `peak_memory` forget what was, where the system can (Linux)."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")


def in_own_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return what a module-level function gives in a fresh process with as many threads: its memory is its own."""
    with ProcessPoolExecutor(
        1,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=torch.set_num_threads,
        initargs=(torch.get_num_threads(),),
    ) as pool:
        return pool.submit(function, *arguments).result()
