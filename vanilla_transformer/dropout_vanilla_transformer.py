"""Dropout (section 5.4), as `torch.nn.functional.dropout`, with cheaper random numbers on a CPU."""

from __future__ import annotations

import torch
from torch import Tensor, nn

_LEVELS = 2**16  # a 64-bit random number decides over four elements


def dropout(states: Tensor, p: float, training: bool) -> Tensor:
    """Set each element to zero with probability `p` and divide the others by 1 - p; only in training.

    On a CPU torch draws 64 bits an element, one after the other, which takes up to a seventh of a training step. Here
    an element gets 16: `p` is rounded to a multiple of 1/65,536, and the rounded one is what is divided by, so that
    the expectation stays the input. The generator is torch's own: seeds, checkpoints and recomputation hold for it.

    Args:
        states: Any shape, in a floating-point type.
        p: Probability in [0, 1).
        training: Whether to drop anything.
    """
    if not training or p == 0.0:
        return states
    dropped = round(p * _LEVELS)
    if states.device.type != "cpu" or torch.compiler.is_compiling() or dropped == _LEVELS:
        return nn.functional.dropout(states, p, training)
    numbers = torch.empty((states.numel() + 3) // 4, dtype=torch.int64).random_(torch.iinfo(torch.int64).min, None)
    drawn = numbers.view(torch.int16)[: states.numel()].view(states.shape)  # from -32,768 to 32,767
    kept = (drawn >= dropped - _LEVELS // 2).to(states.dtype)
    return states * kept.mul_(_LEVELS / (_LEVELS - dropped))
