"""Label-smoothed cross-entropy, fused with the output projection (Szegedy et al. 2016; section 5.4 of the paper).

With z = W h + b, smoothing ε and V classes, a token y has the target distribution
q = (1 - ε) · onehot(y) + ε / V, and

    loss      = -sum_v q_v log softmax(z)_v = logsumexp(z) - (1 - ε) z_y - ε · mean(z)
    d loss/dz = softmax(z) - q

Both need a row of z once, so tokens are taken a chunk at a time: the float32 logits of a whole batch, by far the
largest tensor of a training step, never exist. ε is spread over all V classes, as in `F.cross_entropy` and in the
library's `LabelSmoother`; fairseq and tensor2tensor spread it over V - 1, so their losses differ a little.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

IGNORE_INDEX = -100


class _FusedLinearCrossEntropy(torch.autograd.Function):
    """Sum of the smoothed losses over all tokens; computes the gradients in the forward pass, chunk by chunk."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, label_smoothing: float
    ) -> Tensor:
        # Autocast does not reach into a custom function: matrix products run in its dtype, statistics in float32.
        device = hidden.device.type
        compute = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
        with torch.autocast(device, enabled=False):
            return _forward_chunks(ctx, hidden, weight, bias, labels, label_smoothing, compute)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            # `once_differentiable` would let a gradient penalty pass as a constant.
            raise RuntimeError(
                "This loss has no second derivative (create_graph=True was given): take the logits of "
                "model(..., return_logits=True) and compute the loss from them."
            )
        hidden_dtype, weight_dtype, bias_dtype = ctx.dtypes
        grad_hidden, grad_weight, grad_bias = ctx.saved_tensors
        return (
            None if grad_hidden is None else (grad_hidden * grad_output).to(hidden_dtype),
            None if grad_weight is None else (grad_weight * grad_output).to(weight_dtype),
            None if grad_bias is None else (grad_bias * grad_output).to(bias_dtype),
            None,
            None,
        )


def _chunk_rows(num_classes: int, device: torch.device) -> int:
    """Return how many tokens to take at a time: few enough for the caches, enough for an efficient matrix product."""
    if device.type == "cpu":
        return max(256, 2**21 // num_classes)  # 8 MiB of float32 up to 8,192 classes, 38 MB at 37,000
    return max(256, 2**26 // num_classes)  # 256 MiB of float32


def _forward_chunks(
    ctx: Any,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    label_smoothing: float,
    compute: torch.dtype,
) -> Tensor:
    stats = torch.promote_types(torch.float32, compute)  # float64 stays float64
    real = labels != IGNORE_INDEX  # [N]
    # Zeros in place of the rows without a loss keep those out of the weight's gradient.
    inputs, matrix = hidden.to(compute).where(real[:, None], 0), weight.to(compute)
    num_classes = weight.shape[0]
    needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
    grad_hidden = torch.empty_like(inputs) if needs_hidden else None
    grad_weight = torch.zeros_like(weight, dtype=stats) if needs_weight else None
    grad_bias = torch.zeros_like(bias, dtype=stats) if bias is not None and needs_bias else None
    loss = hidden.new_zeros((), dtype=stats)

    rows = min(_chunk_rows(num_classes, hidden.device), labels.shape[0])
    logits_buffer = inputs.new_empty(rows, num_classes)  # once: fresh pages for each chunk cost as much as a pass
    softmax_buffer = inputs.new_empty(rows, num_classes, dtype=stats)
    for start in range(0, labels.shape[0], max(1, rows)):
        chunk = slice(start, start + rows)
        target = labels[chunk].where(real[chunk], 0)[:, None]  # [n, 1]
        size = target.shape[0]
        logits = torch.mm(inputs[chunk], matrix.T, out=logits_buffer[:size])  # [n, V]
        if bias is not None:
            logits = logits.to(stats).add_(bias)
        target_logit, maximum = logits.gather(1, target).to(stats), logits.amax(-1, keepdim=True).to(stats)
        grad = torch.softmax(logits, dim=-1, dtype=stats, out=softmax_buffer[:size])
        log_z = maximum - grad.amax(-1, keepdim=True).log()  # the largest probability is exp(maximum) / Z
        loss += ((log_z - (1 - label_smoothing) * target_logit)[:, 0] * real[chunk]).sum()
        if not (needs_hidden or needs_weight or needs_bias):
            continue
        grad.scatter_add_(1, target, torch.full_like(log_z, label_smoothing - 1))
        if grad_bias is not None:
            grad_bias += (real[chunk].to(stats) @ grad).view_as(grad_bias)
        if compute != stats:
            grad = logits_buffer[:size].copy_(grad)
        if grad_hidden is not None:
            torch.mm(grad, matrix, out=grad_hidden[chunk])
        if grad_weight is not None:
            if compute == stats:
                grad_weight.addmm_(grad.T, inputs[chunk])
            else:
                grad_weight += grad.T @ inputs[chunk]
    if label_smoothing:
        # What ε / V of every class adds is the same for all classes, so it needs no pass over [N, V].
        mean_row, count = weight.mean(0, dtype=stats), real.sum(dtype=stats)
        summed = inputs.sum(0, dtype=stats)
        loss -= label_smoothing * (summed @ mean_row)
        if grad_hidden is not None:
            grad_hidden -= label_smoothing * mean_row.to(compute)
        if grad_weight is not None:
            grad_weight -= label_smoothing / num_classes * summed
        if bias is not None:
            loss -= label_smoothing * bias.to(stats).mean() * count
        if grad_bias is not None:
            grad_bias -= label_smoothing / num_classes * count
    if grad_hidden is not None:
        grad_hidden *= real[:, None]
    ctx.save_for_backward(grad_hidden, grad_weight, grad_bias)
    ctx.dtypes = hidden.dtype, weight.dtype, None if bias is None else bias.dtype
    return loss


def is_plain_linear(lm_head: nn.Module) -> bool:
    """Return whether `lm_head` is an ordinary local `nn.Linear`, so that its weight may be used without calling it.

    It is not when it is wrapped (LoRA, accelerate's hooks), quantised (torchao), or sharded at the time (DTensor,
    ZeRO-3; FSDP2 where it is sharded apart from the whole model).
    """
    weight: Any = getattr(lm_head, "weight", None)
    return (
        type(lm_head) is nn.Linear
        and "forward" not in vars(lm_head)
        and not (lm_head._forward_hooks or lm_head._forward_pre_hooks)
        and type(weight) in (nn.Parameter, Tensor)
        and type(weight.data) is Tensor
        and not hasattr(weight, "ds_id")  # DeepSpeed ZeRO-3
    )


def label_smoothed_loss(
    hidden_states: Tensor,
    lm_head: nn.Module,
    labels: Tensor,
    *,
    label_smoothing: float,
    bias: Tensor | None = None,
    num_items_in_batch: Tensor | int | None = None,
) -> Tensor:
    """Return the label-smoothed cross-entropy of `lm_head(hidden_states) + bias`, without ever holding all logits.

    Equal to `F.cross_entropy(logits, labels, label_smoothing=ε)` to float32 rounding, in value and gradients. A
    `lm_head` that is not a plain local `nn.Linear` is called, and `F.cross_entropy` does the rest. So it is under
    `torch.compile`, which would unroll the loop over chunks and so compile anew for each number of tokens.

    Args:
        hidden_states: The decoder's output, [B, T, D].
        lm_head: Output projection D → V.
        labels: Token ids [B, T]; -100 marks positions without a loss.
        label_smoothing: ε in [0, 1); 0 is the plain negative log-likelihood.
        bias: Added to the logits, V values.
        num_items_in_batch: Number of real target tokens in all batches of the update, over devices and accumulation
            steps, as the Trainer passes it. The loss is then sum / num_items_in_batch, else the mean over the real
            tokens of this batch (0 where there is none).

    Returns:
        A scalar in float32 (float64 for float64 weights).
    """
    labels = labels.reshape(-1).to(hidden_states.device)
    hidden_states = hidden_states.reshape(labels.shape[0], -1)
    if is_plain_linear(lm_head) and not torch.compiler.is_compiling():
        projection: Any = lm_head
        if projection.bias is not None:
            bias = projection.bias if bias is None else bias + projection.bias
        function: Any = _FusedLinearCrossEntropy  # `Function.apply` has no annotations
        total: Tensor = function.apply(hidden_states, projection.weight, bias, labels, label_smoothing)
    else:
        logits = lm_head(hidden_states)
        logits = logits if bias is None else logits + bias
        total = cross_entropy_sum(logits, labels, label_smoothing)
    return total / token_count(labels, num_items_in_batch)


def cross_entropy_sum(logits: Tensor, labels: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Return the summed cross-entropy of `logits` [N, V] against `labels` [N] in float32 or wider."""
    logits = logits.to(torch.promote_types(torch.float32, logits.dtype))
    return nn.functional.cross_entropy(
        logits, labels, ignore_index=IGNORE_INDEX, label_smoothing=label_smoothing, reduction="sum"
    )


def token_count(labels: Tensor, num_items_in_batch: Tensor | int | None) -> Tensor | int:
    """Return what a summed loss is divided by: `num_items_in_batch` or the number of real labels, at least 1."""
    if num_items_in_batch is None:
        return (labels != IGNORE_INDEX).sum().clamp(min=1)
    if isinstance(num_items_in_batch, Tensor):
        return num_items_in_batch.to(labels.device).clamp(min=1)
    return max(num_items_in_batch, 1)
