"""Batches decoded side by side on a CPU, each in a thread of its own that has a share of torch's threads.

A search makes many short products, and what lies between them runs on one core: two batches on two cores, one core
each, are done sooner than one after the other on both (docs/performance.md).
"""

from __future__ import annotations

import contextvars
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")

_MOST = 8  # unless more are asked for: each batch takes memory


def choose_inter_threads(asked: int | None, model: Any, do_sample: bool) -> int:
    """Return how many batches to decode at a time: what was asked for, or as many as fit the model's device.

    By default as many as torch has threads, 8 at most, for a model on a CPU that is known to allow it; one where
    sampling draws from the one generator of random numbers, or where torch would compile a module in several threads.

    Args:
        asked: A number of at least 1, or None.
        model: The model, in evaluation mode.
        do_sample: Whether decoding draws random numbers.

    Raises:
        ValueError: `asked` is no whole number of at least 1.
    """
    if asked is not None:
        if type(asked) is not int or asked < 1:
            raise ValueError(f"inter_threads={asked!r} is not a whole number of at least 1.")
        return asked
    is_ours = getattr(model.config, "model_type", None) == "vanilla_transformer"
    if not is_ours or model.device.type != "cpu" or model.training or do_sample:
        return 1
    if not torch.backends.openmp.is_available():  # other builds have one pool for all threads
        return 1
    # Seen in torch 2.13, as `Module.compile` sets it.
    if any(getattr(module, "_compiled_call_impl", None) is not None for module in model.modules()):
        return 1
    return min(_MOST, torch.get_num_threads())


def map_in_threads(function: Callable[[Item], Result], items: Iterable[Item], inter_threads: int) -> Iterator[Result]:
    """Yield `function` of each of the `items`, in their order, computed by so many threads at a time.

    Each thread has its share of the threads that torch has here, and what holds here: autocast, inference mode,
    context variables. Few items are computed before they are read. An error comes where its result would; what
    follows is not begun.
    """
    if inter_threads <= 1:
        yield from map(function, items)
        return
    total = torch.get_num_threads()
    autocast = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
    inference = torch.is_inference_mode_enabled()

    def run(item: Item) -> Result:
        with torch.inference_mode(inference), torch.autocast("cpu", autocast[1], enabled=autocast[0]):
            return function(item)

    # In OpenMP the number is the calling thread's own; threads that begin later take the last that was set.
    threads = ThreadPoolExecutor(
        inter_threads, initializer=lambda: torch.set_num_threads(max(1, total // inter_threads))
    )
    pending: deque[Future[Result]] = deque()
    try:
        for item in items:
            pending.append(threads.submit(contextvars.copy_context().run, run, item))
            if len(pending) == 2 * inter_threads:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        threads.shutdown(cancel_futures=True)
        torch.set_num_threads(total)
