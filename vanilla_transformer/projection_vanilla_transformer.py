"""Linear layers for inference: several of the same input as one matrix product, with packed weights on a CPU.

And memory that is used again at each step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from .loss_vanilla_transformer import is_plain_linear


class Projection:
    """What maps states [..., D] to the outputs of linear layers beside each other; it takes the weights as they are.

    A layer that is more than a matrix (quantised, adapted, with hooks) is called as it is.

    On a CPU the weight can be packed, that is copied into the order that oneDNN reads it in. The copy takes about a
    sixth of a product with 256 rows, which it makes faster by a quarter in float32; with few rows and many outputs,
    as of the output projection of one sentence, by up to eight times (torch 2.13).

    Args:
        layers: Linear layers with inputs of the same width.
        pack: Pack the weight, where that is possible.
        activation: Applied to the output.
    """

    def __init__(
        self, layers: Sequence[nn.Module], *, pack: bool = False, activation: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        self.layers, self.activation = layers, activation
        self.weight: Tensor | None = None
        self.packed: Any = None
        biases = [layer.bias for layer in layers if isinstance(layer, nn.Linear)]
        if not all(map(is_plain_linear, layers)) or len({bias is None for bias in biases}) > 1:
            return
        weights = [layer.weight.detach() for layer in layers if isinstance(layer, nn.Linear)]
        self.weight = weights[0] if len(weights) == 1 else torch.cat(weights)
        self.bias = None if biases[0] is None else torch.cat([bias.detach() for bias in biases])
        if pack and _can_pack(self.weight):
            self.packed = torch.ops.mkldnn._reorder_linear_weight(self.weight)
            self.follows = "relu" if type(activation) is nn.ReLU else "none"
            self.activation = None if self.follows == "relu" else activation

    def __call__(self, states: Tensor) -> Tensor:
        """Return the outputs [..., sum of their widths] of `states` [..., D]."""
        if self.packed is not None:
            output = torch.ops.mkldnn._linear_pointwise(states, self.packed, self.bias, self.follows, [], "")
        elif self.weight is not None:
            output = linear(states, self.weight, self.bias)
        else:
            outputs = [layer(states) for layer in self.layers]
            output = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)
        return output if self.activation is None else self.activation(output)


class Workspace:
    """Memory for one tensor after another: what is asked for afresh at each step costs its first touch each time."""

    def __init__(self) -> None:
        self.memory: Tensor | None = None

    def like(self, values: Tensor) -> Tensor:
        """Return a float32 tensor of the shape of `values`, on their device; the one given before is overwritten."""
        size = values.numel()
        if self.memory is None or self.memory.numel() < size:
            self.memory = values.new_empty(size, dtype=torch.float32)
        return self.memory[:size].view(values.shape)


def _can_pack(weight: Tensor) -> bool:
    """Return whether torch has the products with packed weights for this one.

    They are not public: `torch.compile` uses them for weights that do not change (seen in torch 2.5 to 2.13). Where
    they are missing, the ordinary product does the same.
    """
    ops = torch.ops.mkldnn
    if weight.device.type != "cpu" or not (torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled):
        return False
    if not (hasattr(ops, "_linear_pointwise") and hasattr(ops, "_reorder_linear_weight")):
        return False
    if torch.is_autocast_enabled("cpu"):  # which does not know them
        return False
    return weight.dtype == torch.float32 or (weight.dtype == torch.bfloat16 and ops._is_mkldnn_bf16_supported())
