"""The paper's learning rate (section 5.3), known as the Noam schedule.

    lr = factor · d_model^-0.5 · min(step^-0.5, step · warmup_steps^-1.5)

The rate grows linearly for `warmup_steps` updates, then falls with the inverse square root of the step. Steps count
from 1: the first update is made at step 1. (The library's "inverse_sqrt" schedule counts from 0, so that its first
update changes nothing.)

The paper's optimizer, Adam with β = (0.9, 0.98) and ε = 1e-9, needs no code of its own: `torch.optim.AdamW` with
weight_decay=0 makes the same updates as `torch.optim.Adam`.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


def noam_learning_rate(step: int, *, d_model: int, warmup_steps: int, factor: float = 1.0) -> float:
    """The learning rate of one update, equation 3 of the paper.

    Args:
        step: Number of the update, counted from 1.
        d_model: Width of the model.
        warmup_steps: Number of updates over which the rate grows; at step == warmup_steps it is at its peak,
            factor · (d_model · warmup_steps)^-0.5.
        factor: What the rate is multiplied by (1 in the paper).

    Raises:
        ValueError: If step, d_model or warmup_steps is below 1 or factor is not above 0.
    """
    _check(d_model=d_model, warmup_steps=warmup_steps)
    if step < 1:
        raise ValueError(f"step counts from 1, got {step}.")
    if not (factor > 0 and math.isfinite(factor)):
        raise ValueError(f"factor must be a finite number above 0, got {factor}.")
    return factor * d_model**-0.5 * min(step**-0.5, step * warmup_steps**-1.5)


def get_noam_schedule(
    optimizer: Optimizer,
    *,
    d_model: int | None = None,
    warmup_steps: int = 4000,
    factor: float | None = None,
    peak_lr: float | None = None,
) -> LambdaLR:
    """The paper's schedule as a PyTorch scheduler: call its `step()` after each update.

    Before the first update the rate is already that of step 1. The schedule sets the rate of every parameter group
    by itself: the rates the optimizer was built with are overwritten. It resumes from its `state_dict()`, which
    holds the number of updates made; d_model, warmup_steps and factor or peak_lr are those given here.

    Args:
        optimizer: The optimizer whose rate is to be set.
        d_model: Width of the model; not needed with `peak_lr`.
        warmup_steps: Number of updates over which the rate grows.
        factor: What the paper's rate is multiplied by; 1 if neither it nor `peak_lr` is given.
        peak_lr: The rate at step == warmup_steps, in place of the factor: one of the two, not both.

    Raises:
        ValueError: If both or, without d_model, none of the two are given, or a value is out of its range.
    """
    _check(warmup_steps=warmup_steps)
    if peak_lr is not None:
        if factor is not None:
            raise ValueError(
                f"factor={factor} and peak_lr={peak_lr} both set the height of the schedule: give one of the two."
            )
        if not (peak_lr > 0 and math.isfinite(peak_lr)):
            raise ValueError(f"peak_lr must be a finite number above 0, got {peak_lr}.")
        # The peak of the paper's schedule is (d_model · warmup_steps)^-0.5; any d_model will do to divide it out.
        d_model = 1
        factor = peak_lr * warmup_steps**0.5
    elif d_model is None:
        raise ValueError("The schedule needs d_model, the width of the model, unless peak_lr sets its height.")
    rate = partial(_rate_after, d_model=d_model, warmup_steps=warmup_steps, factor=1.0 if factor is None else factor)
    rate(0)  # the checks of the values, before the optimizer is touched
    for group in optimizer.param_groups:
        # LambdaLR multiplies by the rate each group began with. Compiled optimizers keep it in a tensor.
        group["initial_lr"] = 1.0
        group["lr"] = group["lr"].fill_(1.0) if isinstance(group["lr"], torch.Tensor) else 1.0
    return LambdaLR(optimizer, rate)


def _rate_after(updates: int, *, d_model: int, warmup_steps: int, factor: float) -> float:
    """The rate of the next update, after so many updates; at module level so that the schedule can be pickled."""
    return noam_learning_rate(updates + 1, d_model=d_model, warmup_steps=warmup_steps, factor=factor)


def _check(**counts: int) -> None:
    """Raise unless every value is at least 1."""
    for name, value in counts.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}.")
