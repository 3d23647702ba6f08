"""Dropout against what `torch.nn.functional.dropout` promises; expected figures are those of Bernoulli's law."""

import math

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from vanilla_transformer import dropout_vanilla_transformer
from vanilla_transformer.dropout_vanilla_transformer import dropout


@pytest.mark.parametrize("p", [0.1, 0.3, 0.5, 0.9])
def test_drops_the_share_asked_for_and_scales_the_rest(p):
    torch.manual_seed(3)
    size = 1_000_003  # not a multiple of four
    output = dropout(torch.ones(size), p, True)
    deviation = math.sqrt(p * (1 - p) / size)
    assert (output == 0).float().mean().item() == pytest.approx(p, abs=5 * deviation + 2**-17)
    kept = output[output != 0]
    assert_close(kept, torch.full_like(kept, 1 / (1 - p)), rtol=2e-4, atol=0)
    assert output.mean().item() == pytest.approx(1.0, abs=5 * deviation / (1 - p))


def test_elements_are_independent():
    torch.manual_seed(5)
    zero = (dropout(torch.ones(2_000_000), 0.5, True) == 0).double()
    for distance in (1, 2, 3, 4, 5, 8):
        both = (zero[:-distance] * zero[distance:]).mean().item()
        assert both == pytest.approx(0.25, abs=5 * math.sqrt(0.25 * 0.75 / len(zero)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_gradient_passes_where_the_value_did(dtype):
    torch.manual_seed(0)
    states = torch.randn(3, 7, 5, dtype=dtype, requires_grad=True)
    output = dropout(states, 0.4, True)
    assert output.dtype == dtype
    assert output.shape == states.shape
    output.sum().backward()
    factor = torch.tensor(1 / 0.6, dtype=dtype).item()
    assert_close(states.grad, (output != 0).to(dtype) * factor, rtol=1e-2 if dtype == torch.bfloat16 else 1e-4, atol=0)
    assert_close(output, states.detach() * states.grad)


def test_the_seed_decides():
    states = torch.randn(100)
    torch.manual_seed(1)
    first, second = dropout(states, 0.5, True), dropout(states, 0.5, True)
    torch.manual_seed(1)
    assert torch.equal(dropout(states, 0.5, True), first)
    assert not torch.equal(first, second)


def test_recomputed_activations_drop_the_same():
    states = torch.ones(50, requires_grad=True)
    output = torch.utils.checkpoint.checkpoint(lambda x: dropout(x * 2, 0.5, True) * x, states, use_reentrant=False)
    output.sum().backward()
    assert_close(states.grad, 2 * output.detach())  # d(2 n x²)/dx = 4 n x, and the value is 2 n


@pytest.mark.parametrize(("p", "training"), [(0.5, False), (0.0, True)])
def test_nothing_is_drawn_where_nothing_is_dropped(p, training):
    states, before = torch.randn(10), torch.get_rng_state()
    assert torch.equal(dropout(states, p, training), states)
    assert torch.equal(torch.get_rng_state(), before)


def test_other_devices_and_compiled_code_get_torchs_own(monkeypatch):
    called = []
    monkeypatch.setattr(nn.functional, "dropout", lambda states, p, training: called.append(p) or states)
    dropout(torch.empty(4, device="meta"), 0.25, True)
    monkeypatch.setattr(dropout_vanilla_transformer.torch.compiler, "is_compiling", lambda: True)
    dropout(torch.ones(4), 0.125, True)
    assert called == [0.25, 0.125]
