"""Batches decoded side by side: order, errors, what each thread has, and when it is one after the other."""

from __future__ import annotations

import contextvars
import threading

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessorList

from vanilla_transformer import parallel_vanilla_transformer as parallel
from vanilla_transformer.parallel_vanilla_transformer import (
    check_inter_threads,
    choose_inter_threads,
    map_in_threads,
)


def test_two_items_are_really_computed_at_the_same_time():
    meeting = threading.Barrier(2, timeout=60)  # one thread alone would wait there for ever

    def meet(item):
        meeting.wait()
        return 10 * item

    assert list(map_in_threads(meet, range(6), 2)) == [0, 10, 20, 30, 40, 50]


def test_results_keep_the_order_of_the_items():
    first_may_end = threading.Event()

    def wait(item):
        if item == 0:
            assert first_may_end.wait(60)
        if item == 2:
            first_may_end.set()
        return item

    assert list(map_in_threads(wait, iter(range(5)), 2)) == [0, 1, 2, 3, 4]


def test_each_thread_has_its_share_of_torchs_threads_and_the_caller_keeps_its_own(four_threads):
    found = set(map_in_threads(lambda _: (threading.get_ident(), torch.get_num_threads()), range(8), 2))
    assert {count for _, count in found} == {2}
    assert threading.get_ident() not in {thread for thread, _ in found}
    assert torch.get_num_threads() == 4
    later = []
    thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert later == [4]


def test_threads_that_begin_while_results_are_read_have_what_the_caller_has(four_threads):
    results = map_in_threads(lambda item: torch.get_num_threads(), range(8), 2)
    assert next(results) == 2
    found = []
    thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert found == [4]
    assert torch.get_num_threads() == 4
    assert set(results) == {2}


def test_one_at_a_time_is_the_callers_thread_and_reads_nothing_ahead():
    items = iter(range(3))
    results = map_in_threads(lambda item: threading.get_ident(), items, 1)
    assert next(results) == threading.get_ident()
    assert next(items) == 1


def test_little_is_read_ahead():
    items = iter(range(100))
    results = map_in_threads(lambda item: item, items, 3)
    assert next(results) == 0
    assert next(items) == 6
    results.close()


def test_an_error_comes_in_its_place_and_little_is_begun_after_it():
    begun, threads = [], threading.active_count()

    def fail(item):
        begun.append(item)
        if item == 1:
            raise ValueError("item 1")
        return item

    results = map_in_threads(fail, range(1000), 2)
    assert next(results) == 0
    with pytest.raises(ValueError, match="item 1"):
        list(results)
    assert len(begun) <= 1 + 2 * 2  # those that had been read
    assert threading.active_count() == threads


def test_what_holds_for_the_caller_holds_in_the_threads():
    variable = contextvars.ContextVar("variable", default="default")

    def look(_):
        product = torch.ones(2, 2) @ torch.ones(2, 2)
        return product.dtype, torch.is_inference_mode_enabled(), variable.get()

    def inside():
        variable.set("set")
        with torch.autocast("cpu", torch.bfloat16), torch.inference_mode():
            return set(map_in_threads(look, range(4), 2))

    assert contextvars.copy_context().run(inside) == {(torch.bfloat16, True, "set")}
    assert set(map_in_threads(look, range(4), 2)) == {(torch.float32, False, "default")}


def test_by_default_as_many_as_torch_has_threads(make_model, four_threads, monkeypatch):
    model = make_model()
    assert choose_inter_threads(None, model, {}) == 4
    assert choose_inter_threads(None, model, {"num_beams": 2, "do_sample": False, "suppress_tokens": [5]}) == 4
    monkeypatch.setattr(parallel, "_MOST", 3)
    assert choose_inter_threads(None, model, {}) == 3
    assert choose_inter_threads(5, model, {"do_sample": True}) == 5  # whoever asks, gets it


REASONS = ["sampling", "a config that samples", "a static cache", "a processor", "another model", "no OpenMP"]
REASONS += ["compiled", "another forward", "a hook"]


@pytest.mark.parametrize("reason", REASONS)
def test_one_by_default_where_something_speaks_against_more(make_model, four_threads, monkeypatch, reason):
    model, arguments = make_model(), {}
    if reason == "sampling":
        arguments = {"do_sample": True}
    elif reason == "a config that samples":
        model.generation_config.do_sample = True
        arguments = {"generation_config": GenerationConfig(do_sample=None), "do_sample": None}
    elif reason == "a static cache":
        arguments = {"cache_implementation": "static"}
    elif reason == "a processor":
        arguments = {"logits_processor": LogitsProcessorList()}
    elif reason == "another model":
        model.config.model_type = "marian"
    elif reason == "no OpenMP":
        monkeypatch.setattr(torch.backends.openmp, "is_available", lambda: False)
    elif reason == "compiled":
        model.get_encoder().compile(backend="eager")
    elif reason == "another forward":
        model.model.encoder.forward = model.model.encoder.forward
    else:
        model.lm_head.register_forward_hook(lambda *_: None)
    assert choose_inter_threads(None, model, arguments) == 1
    assert choose_inter_threads(2, model, arguments) == 2


@pytest.mark.parametrize("reason", ["training", "a GPU"])
def test_one_whatever_was_asked_for(make_model, reason):
    model = make_model().train() if reason == "training" else make_model().to("meta")
    assert choose_inter_threads(None, model, {}) == choose_inter_threads(3, model, {}) == 1


@pytest.mark.parametrize("wrong", [0, -1, 2.0, True, "2"])
def test_a_wrong_number_is_named(wrong):
    with pytest.raises(ValueError, match=f"inter_threads={wrong!r} is not a whole number of at least 1"):
        check_inter_threads(wrong)
