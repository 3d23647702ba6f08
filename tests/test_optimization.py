"""The schedule of section 5.3 against the paper's formula in float64 and against hand-computed figures."""

from __future__ import annotations

import math
import pickle

import numpy as np
import pytest
import torch

from vanilla_transformer.optimization import get_noam_schedule, noam_learning_rate


def make_optimizer(lr=1e-3) -> torch.optim.Optimizer:
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))]}, {"params": [torch.nn.Parameter(torch.zeros(1))]}]
    return torch.optim.AdamW(groups, lr=lr)


def rates(optimizer: torch.optim.Optimizer, schedule, updates: int) -> list[float]:
    """The rate each update is made with."""
    seen = []
    for _ in range(updates):
        assert len({float(group["lr"]) for group in optimizer.param_groups}) == 1
        seen.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        schedule.step()
    return seen


def test_known_figures_of_the_base_model() -> None:
    rate = lambda step: noam_learning_rate(step, d_model=512, warmup_steps=4000)  # noqa: E731
    # (512 · 4000)^-0.5; a quarter of the way; half the peak at four times the warmup; by hand.
    assert rate(4000) == pytest.approx(6.98771e-4, rel=1e-5)
    assert rate(1000) == pytest.approx(6.98771e-4 / 4, rel=1e-5)
    assert rate(16_000) == pytest.approx(3.49386e-4, rel=1e-5)
    assert rate(1) == pytest.approx(1.74693e-7, rel=1e-5)


@pytest.mark.parametrize("factor", [1.0, 2.5])
@pytest.mark.parametrize(("d_model", "warmup"), [(512, 4000), (1024, 8000), (128, 7)])
def test_equals_the_formula_in_float64(d_model, warmup, factor) -> None:
    steps = np.arange(1, 3 * warmup, dtype=np.float64)
    formula = factor * np.power(d_model, -0.5) * np.minimum(np.power(steps, -0.5), steps * np.power(warmup, -1.5))
    ours = [noam_learning_rate(int(s), d_model=d_model, warmup_steps=warmup, factor=factor) for s in steps]
    np.testing.assert_allclose(ours, formula, rtol=1e-14)


def test_the_first_update_is_step_one_and_the_optimizers_own_rate_does_not_matter() -> None:
    for lr in (1e-3, 1.0, torch.tensor(0.1)):
        optimizer = make_optimizer(lr)
        schedule = get_noam_schedule(optimizer, d_model=16, warmup_steps=5)
        expected = [16**-0.5 * min(step**-0.5, step * 5**-1.5) for step in range(1, 13)]
        assert rates(optimizer, schedule, 12) == pytest.approx(expected, rel=1e-6)
        assert isinstance(optimizer.param_groups[0]["lr"], torch.Tensor) == isinstance(lr, torch.Tensor)


def test_peak_lr_is_the_rate_at_the_end_of_the_warmup() -> None:
    optimizer = make_optimizer()
    seen = rates(optimizer, get_noam_schedule(optimizer, warmup_steps=150, peak_lr=2.5e-3), 600)
    assert seen[149] == max(seen) == pytest.approx(2.5e-3, rel=1e-12)
    assert seen[0] == pytest.approx(2.5e-3 / 150)
    assert seen[599] == pytest.approx(2.5e-3 / 2)  # four times the warmup
    # The factor that gives the same height gives the same schedule.
    other = make_optimizer()
    factor = 2.5e-3 * math.sqrt(64 * 150)
    same = rates(other, get_noam_schedule(other, d_model=64, warmup_steps=150, factor=factor), 600)
    np.testing.assert_allclose(seen, same, rtol=1e-12)


def test_resumes_from_its_state() -> None:
    straight = make_optimizer()
    expected = rates(straight, get_noam_schedule(straight, d_model=16, warmup_steps=5), 12)
    optimizer = make_optimizer()
    schedule = get_noam_schedule(optimizer, d_model=16, warmup_steps=5)
    assert rates(optimizer, schedule, 4) == expected[:4]
    saved = pickle.loads(pickle.dumps((optimizer.state_dict(), schedule.state_dict())))
    resumed = make_optimizer()
    continued = get_noam_schedule(resumed, d_model=16, warmup_steps=5)
    resumed.load_state_dict(saved[0])
    continued.load_state_dict(saved[1])
    assert rates(resumed, continued, 8) == expected[4:]
    pickle.dumps(schedule)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "d_model"),
        ({"d_model": 0}, "d_model must be at least 1"),
        ({"d_model": 16, "warmup_steps": 0}, "warmup_steps must be at least 1"),
        ({"d_model": 16, "factor": 0.0}, "factor must be"),
        ({"d_model": 16, "factor": float("nan")}, "factor must be"),
        ({"peak_lr": -1.0}, "peak_lr must be"),
        ({"peak_lr": 1e-3, "factor": 1.0}, "one of the two"),
    ],
)
def test_wrong_values_are_named_and_the_optimizer_is_left_alone(options, words) -> None:
    optimizer = make_optimizer(0.25)
    with pytest.raises(ValueError, match=words):
        get_noam_schedule(optimizer, **options)
    assert optimizer.param_groups[0]["lr"] == 0.25


def test_steps_count_from_one() -> None:
    with pytest.raises(ValueError, match="counts from 1"):
        noam_learning_rate(0, d_model=512, warmup_steps=4000)
