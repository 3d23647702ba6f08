"""Batches decoded side by side on a CPU, each in a thread of its own that has a share of torch's threads.

A search makes many short products, and what lies between them runs on one core: two batches on two cores, one core
each, are done sooner than one after the other on both (docs/performance.md).
"""

from __future__ import annotations

import contextvars
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")

_MOST = 8  # unless more are asked for: each batch takes memory


def generation_setting(name: str, arguments: Mapping[str, Any], model: Any) -> Any:
    """Return what `model.generate(**arguments)` goes by: the argument, or the given config's, or the model's own."""
    configs = (arguments.get("generation_config"), model.generation_config)
    values = (arguments.get(name), *(getattr(config, name, None) for config in configs))
    return next((value for value in values if value is not None), None)


def check_inter_threads(asked: int | None) -> None:
    """Refuse what is no number of batches.

    Raises:
        ValueError: `asked` is neither None nor a whole number of at least 1.
    """
    if asked is not None and (type(asked) is not int or asked < 1):
        raise ValueError(f"inter_threads={asked!r} is not a whole number of at least 1.")


def choose_inter_threads(asked: int | None, model: Any, arguments: Mapping[str, Any]) -> int:
    """Return how many batches to decode at a time.

    One on other devices than a CPU, and for a model in training mode, which each batch would switch. Else what was
    asked for, or as many as torch has threads, 8 at most, where all is known to allow it. It is one by default for
    other models than this package's; where sampling draws from the one generator of random numbers; where a model has
    a single cache (static ones); where an argument of `generate` may have a state (a processor, a streamer); and where
    a module was compiled, wrapped or given hooks.

    Args:
        asked: A number of at least 1, or None.
        model: The model.
        arguments: Those of `model.generate`.
    """
    if model.device.type != "cpu" or model.training:
        return 1
    if asked is not None:
        return asked
    if getattr(model.config, "model_type", None) != "vanilla_transformer" or not torch.backends.openmp.is_available():
        return 1  # builds of torch without OpenMP have one pool for all threads
    if any(generation_setting(name, arguments, model) for name in ("do_sample", "cache_implementation")):
        return 1
    plain = (type(None), bool, int, float, str, list, tuple, type(model.generation_config))
    if not all(type(value) in plain for value in arguments.values()):  # the library's lists of processors are lists
        return 1
    if any(_is_changed(module) for module in model.modules()):
        return 1
    return min(_MOST, torch.get_num_threads())


def _is_changed(module: torch.nn.Module) -> bool:
    # `_compiled_call_impl` is what `Module.compile` sets: seen in torch 2.13.
    if getattr(module, "_compiled_call_impl", None) is not None or "forward" in vars(module):
        return True
    return bool(module._forward_hooks or module._forward_pre_hooks)


def map_in_threads(function: Callable[[Item], Result], items: Iterable[Item], inter_threads: int) -> Iterator[Result]:
    """Yield `function` of each of the `items`, in their order, computed by so many threads at a time.

    Each thread has its share of the threads that torch has here, and what holds here: autocast on the CPU, inference
    mode, context variables. At most 2 · `inter_threads` items are read before the first result. An error comes where
    its result would, after which none is begun; those that run are waited for.
    """
    if inter_threads <= 1:
        yield from map(function, items)
        return
    autocast = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
    inference = torch.is_inference_mode_enabled()

    def run(item: Item) -> Result:
        with torch.inference_mode(inference), torch.autocast("cpu", autocast[1], enabled=autocast[0]):
            return function(item)

    with _threads(inter_threads) as threads:
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


def _threads(count: int) -> ThreadPoolExecutor:
    """Return so many running threads, each with its share of the threads that torch has here."""
    total, ready = torch.get_num_threads(), threading.Barrier(count + 1)

    def begin() -> None:
        # In OpenMP the number is the calling thread's own. A thread takes the last that any has set when it first
        # asks: let it not do so later.
        torch.get_num_threads()
        torch.set_num_threads(max(1, total // count))
        ready.wait()

    threads = ThreadPoolExecutor(count)
    for _ in range(count):
        threads.submit(begin)
    ready.wait()
    torch.set_num_threads(total)
    return threads
