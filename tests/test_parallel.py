"""Batches decoded side by side: order, errors, what each thread has, and when it is one after the other."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from vanilla_transformer import parallel_vanilla_transformer as parallel
from vanilla_transformer.parallel_vanilla_transformer import choose_inter_threads, map_in_threads


@pytest.fixture
def four_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


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


def test_an_error_comes_in_its_place_and_nothing_is_begun_after_it():
    begun = []

    def fail(item):
        begun.append(item)
        if item == 1:
            raise ValueError("item 1")
        return item

    results = map_in_threads(fail, range(1000), 2)
    assert next(results) == 0
    with pytest.raises(ValueError, match="item 1"):
        list(results)
    assert len(begun) < 10
    assert threading.active_count() < 10


def test_what_holds_for_the_caller_holds_in_the_threads():
    def look(_):
        product = torch.ones(2, 2) @ torch.ones(2, 2)
        return product.dtype, torch.is_inference_mode_enabled()

    with torch.autocast("cpu", torch.bfloat16), torch.inference_mode():
        assert set(map_in_threads(look, range(4), 2)) == {(torch.bfloat16, True)}
    assert set(map_in_threads(look, range(4), 2)) == {(torch.float32, False)}


def test_by_default_as_many_as_torch_has_threads(make_model, four_threads, monkeypatch):
    model = make_model()
    assert choose_inter_threads(None, model, False) == 4
    monkeypatch.setattr(parallel, "_MOST", 3)
    assert choose_inter_threads(None, model, False) == 3
    assert choose_inter_threads(5, model, True) == 5  # whoever asks, gets it


@pytest.mark.parametrize("reason", ["sampling", "training", "another model", "a GPU", "compiled", "no OpenMP"])
def test_one_where_something_speaks_against_more(make_model, four_threads, monkeypatch, reason):
    model = make_model()
    if reason == "training":
        model.train()
    elif reason == "another model":
        model.config.model_type = "marian"
    elif reason == "a GPU":
        model = model.to("meta")
    elif reason == "compiled":
        model.get_encoder().compile(backend="eager")
    elif reason == "no OpenMP":
        monkeypatch.setattr(torch.backends.openmp, "is_available", lambda: False)
    assert choose_inter_threads(None, model, reason == "sampling") == 1


@pytest.mark.parametrize("wrong", [0, -1, 2.0, True, "2"])
def test_a_wrong_number_is_named(wrong):
    with pytest.raises(ValueError, match=f"inter_threads={wrong!r} is not a whole number of at least 1"):
        choose_inter_threads(wrong, nn.Identity(), False)
