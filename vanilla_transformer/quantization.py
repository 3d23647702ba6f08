"""Linear layers in int8, for translating: a quarter of the memory, and faster where the processor multiplies int8.

Weights are int8 with a scale a row; activations are quantised as they come, a scale for each call ("dynamic"). Nothing
is trained or calibrated. Embeddings, normalisation and attention stay as they are.
"""

from __future__ import annotations

import warnings
from typing import Any, Literal, TypeVar

import torch
from torch import nn

Model = TypeVar("Model", bound=nn.Module)


def quantize_int8(model: Model, backend: Literal["auto", "torch", "torchao"] = "auto") -> Model:
    """Put all linear layers of a model into int8, in place, the output projection included.

    The model is for inference in this process: it can be neither trained nor saved. A tied output projection gets a
    matrix of its own; the embedding keeps its precision.

    Args:
        model: A model in float32 ("torch"), or in float32 or bfloat16 ("torchao").
        backend: "torch": the int8 kernels that torch brings for CPUs, which run eagerly. "torchao": the package of
            that name (pip install torchao), for GPUs; on a CPU it pays under `torch.compile` only. "auto": the first
            on a CPU where torch has it, else the second.

    Returns:
        The model.

    Raises:
        ValueError: The backend is unknown, does not fit the model's device or type, or cannot be imported.
    """
    weight = next(model.parameters())
    eager = _eager_quantization()
    if backend == "auto":
        backend = "torch" if weight.device.type == "cpu" and eager is not None else "torchao"
    if backend not in ("torch", "torchao"):
        raise ValueError(f'backend must be "auto", "torch" or "torchao", got {backend!r}.')
    model.eval().requires_grad_(False)
    if backend == "torch":
        if eager is None:
            raise ValueError(f'torch {torch.__version__} has no int8 kernels of its own: use backend="torchao".')
        if weight.device.type != "cpu" or weight.dtype != torch.float32:
            raise ValueError(
                f'backend="torch" needs a float32 model on the CPU, this one is {weight.dtype} on {weight.device}: '
                'load it so, or use backend="torchao".'
            )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a note that the module will go some day, printed for each of its parts
            eager.quantize_dynamic(model, {nn.Linear: eager.per_channel_dynamic_qconfig}, inplace=True)
        return model
    try:
        from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_
    except ImportError as error:
        raise ValueError(f"int8 on {weight.device} needs torchao: pip install torchao ({error}).") from error
    quantize_(model, Int8DynamicActivationInt8WeightConfig())
    return model


def _eager_quantization() -> Any:
    """Return torch's module of eager quantisation, deprecated but there in 2.13, or None."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import torch.ao.quantization as eager
    except ImportError:
        return None
    return eager if hasattr(eager, "quantize_dynamic") else None
