"""The fused loss against F.cross_entropy and the paper's formula; what goes through it and what does not."""

from __future__ import annotations

import pytest
import reference
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from vanilla_transformer import loss_vanilla_transformer as loss_module
from vanilla_transformer.loss_vanilla_transformer import (
    cross_entropy_sum,
    is_plain_linear,
    label_smoothed_loss,
    token_count,
)

V, D = 11, 6


def inputs(dtype: torch.dtype = torch.float64, rows: int = 3, length: int = 5, bias: bool = True):
    """Return hidden states, an output projection, a bias of shape [1, V], and labels of which four are -100."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, length, D, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    lm_head = nn.Linear(D, V, bias=False).to(dtype)
    with torch.no_grad():
        lm_head.weight.copy_(torch.randn(V, D, generator=generator, dtype=torch.float64))
    extra = nn.Parameter(torch.randn(1, V, generator=generator, dtype=torch.float64).to(dtype)) if bias else None
    labels = torch.randint(V, (rows, length), generator=generator)
    labels[0, 2:] = -100
    labels[2, 0] = -100
    return hidden, lm_head, extra, labels


def plain(hidden: Tensor, lm_head: nn.Linear, bias: Tensor | None, labels: Tensor, epsilon: float) -> Tensor:
    logits = F.linear(hidden, lm_head.weight, lm_head.bias)
    logits = logits if bias is None else logits + bias
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=epsilon, ignore_index=-100)


def gradients(loss: Tensor, *tensors: Tensor | None) -> list[Tensor]:
    return list(torch.autograd.grad(loss, [tensor for tensor in tensors if tensor is not None]))


@pytest.mark.parametrize("rows", [1, 2, 7, 15, 10_000])  # of 15 tokens
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("epsilon", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equals_cross_entropy_forward_and_backward(monkeypatch, dtype, epsilon, bias, rows):
    monkeypatch.setattr(loss_module, "_chunk_rows", lambda *_: rows)
    hidden, lm_head, extra, labels = inputs(dtype, bias=bias)
    close = {"rtol": 1e-10, "atol": 1e-10} if dtype == torch.float64 else {"rtol": 1e-5, "atol": 1e-5}
    loss = label_smoothed_loss(hidden, lm_head, labels, label_smoothing=epsilon, bias=extra)
    expected = plain(hidden, lm_head, extra, labels, epsilon)
    assert loss.dtype == dtype
    assert_close(loss, expected, **close)
    # A factor shows whether the gradient that comes in is used.
    for ours, theirs in zip(
        gradients(loss * -2.5, hidden, lm_head.weight, extra),
        gradients(expected * -2.5, hidden, lm_head.weight, extra),
        strict=True,
    ):
        assert ours.dtype == dtype
        assert_close(ours, theirs, **close)


def test_a_bias_of_the_projection_counts_too():
    for bias in (False, True):
        hidden, _, extra, labels = inputs(bias=bias)
        lm_head = nn.Linear(D, V).double()
        assert is_plain_linear(lm_head)
        loss = label_smoothed_loss(hidden, lm_head, labels, label_smoothing=0.1, bias=extra)
        expected = plain(hidden, lm_head, extra, labels, 0.1)
        assert_close(loss, expected, rtol=1e-10, atol=1e-10)
        wanted = (hidden, lm_head.weight, lm_head.bias, extra)
        for ours, theirs in zip(gradients(loss, *wanted), gradients(expected, *wanted), strict=True):
            assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


def test_gradient_agrees_with_finite_differences(monkeypatch):
    monkeypatch.setattr(loss_module, "_chunk_rows", lambda *_: 4)
    hidden, lm_head, extra, labels = inputs()

    def loss(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return loss_module._FusedLinearCrossEntropy.apply(hidden.flatten(0, 1), weight, bias, labels.flatten(), 0.1)

    assert torch.autograd.gradcheck(loss, (hidden, lm_head.weight, extra))


def test_equals_the_papers_formula():
    hidden, lm_head, extra, _ = inputs()
    hidden, labels = hidden[:1], torch.tensor([[3, 0, 10, 7, 7]])
    loss = label_smoothed_loss(hidden, lm_head, labels, label_smoothing=0.1, bias=extra)
    logits = (hidden @ lm_head.weight.T + extra)[0]
    assert_close(loss, reference.smoothed_loss(logits, labels[0].tolist(), 0.1), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("frozen", ["hidden", "weight", "bias", "all"])
def test_only_what_needs_a_gradient_gets_one(frozen):
    hidden, lm_head, extra, labels = inputs()
    named = {"hidden": hidden, "weight": lm_head.weight, "bias": extra}
    for name, tensor in named.items():
        tensor.requires_grad_(frozen not in (name, "all"))
    loss = label_smoothed_loss(hidden, lm_head, labels, label_smoothing=0.1, bias=extra)
    expected = plain(hidden, lm_head, extra, labels, 0.1)
    assert_close(loss, expected, rtol=1e-10, atol=1e-10)
    assert loss.requires_grad == (frozen != "all")
    wanted = [tensor for tensor in named.values() if tensor.requires_grad]
    if wanted:
        for ours, theirs in zip(gradients(loss, *wanted), gradients(expected, *wanted), strict=True):
            assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("fused", [True, False])
def test_number_of_items_takes_the_means_place(fused):
    hidden, lm_head, extra, labels = inputs()
    if not fused:
        lm_head.register_forward_hook(lambda *args: None)
    mean = plain(hidden, lm_head, extra, labels, 0.1)
    real = (labels != -100).sum().item()
    assert real == 11
    for items in (40, torch.tensor(40), torch.tensor([40])):
        loss = label_smoothed_loss(hidden, lm_head, labels, label_smoothing=0.1, bias=extra, num_items_in_batch=items)
        assert_close(loss.reshape(()), mean * real / 40, rtol=1e-10, atol=1e-10)
    assert token_count(labels, None) == 11
    assert token_count(labels, 0) == token_count(labels, torch.tensor(0)) == 1


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("items", [None, 0, 7, torch.tensor(0)])
def test_no_real_label_gives_zero_and_zero_gradients(fused, items):
    hidden, lm_head, extra, labels = inputs()
    if not fused:
        lm_head.register_forward_hook(lambda *args: None)
    labels = torch.full_like(labels, -100)
    loss = label_smoothed_loss(hidden, lm_head, labels, label_smoothing=0.1, bias=extra, num_items_in_batch=items)
    assert loss == 0
    for gradient in gradients(loss, hidden, lm_head.weight, extra):
        assert not gradient.any()


@pytest.mark.parametrize("bias", [False, True])
def test_autocast_multiplies_in_its_dtype_and_keeps_statistics_in_float32(bias):
    hidden, lm_head, extra, labels = inputs(torch.float32, bias=bias)
    tensors = (hidden, lm_head.weight, extra)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = label_smoothed_loss(hidden, lm_head, labels, label_smoothing=0.1, bias=extra)
        expected = plain(hidden, lm_head, extra, labels, 0.1)  # torch's own: linear in bfloat16, the loss in float32
    assert loss.dtype == torch.float32
    assert_close(loss, expected, rtol=2e-2, atol=2e-2)
    # Closer: operands rounded to bfloat16, the product too, everything after in float32. The mean over the classes
    # that smoothing takes is never rounded here: it is a product with the mean row of the weight.
    logits = (hidden.bfloat16() @ lm_head.weight.bfloat16().T).float()
    logits = logits if extra is None else logits + extra
    exact = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1)
    assert_close(loss, exact, rtol=3e-5, atol=3e-5)
    for ours, theirs in zip(gradients(loss, *tensors), gradients(exact, *tensors), strict=True):
        assert ours.dtype == torch.float32
        assert_close(ours, theirs, rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_weights_have_a_float32_loss(dtype):
    hidden, lm_head, extra, labels = inputs(dtype)
    loss = label_smoothed_loss(hidden, lm_head, labels, label_smoothing=0.1, bias=extra)
    logits = (hidden @ lm_head.weight.T).float() + extra.float()
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1)
    assert loss.dtype == torch.float32
    assert_close(loss, expected, rtol=1e-4, atol=1e-4)
    tensors = (hidden, lm_head.weight, extra)
    for ours, theirs in zip(gradients(loss, *tensors), gradients(expected, *tensors), strict=True):
        assert ours.dtype == dtype
        assert_close(ours.float(), theirs.float(), rtol=3e-2, atol=1e-2)


def test_double_backward_is_refused():
    hidden, lm_head, _, labels = inputs(bias=False)
    for function in (torch.square, torch.clone):  # with and without a gradient of the incoming gradient
        loss = function(label_smoothed_loss(hidden, lm_head, labels, label_smoothing=0.1))
        with pytest.raises(RuntimeError, match=r"no second derivative.*return_logits=True"):
            torch.autograd.grad(loss, hidden, create_graph=True)


class _LargestTensor(TorchDispatchMode):
    """Remembers the size of the largest floating-point tensor that any operation returns."""

    largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        for tensor in output if isinstance(output, (tuple, list)) else [output]:
            if isinstance(tensor, Tensor) and tensor.is_floating_point():
                self.largest = max(self.largest, tensor.numel())
        return output


def test_the_full_logits_never_exist(monkeypatch):
    tokens, classes = 400, 300
    monkeypatch.setattr(loss_module, "_chunk_rows", lambda *_: 20)
    torch.manual_seed(0)
    hidden, labels = torch.randn(4, 100, D, requires_grad=True), torch.randint(classes, (4, 100))
    lm_head = nn.Linear(D, classes, bias=False)
    with _LargestTensor() as fused:
        label_smoothed_loss(hidden, lm_head, labels, label_smoothing=0.1).backward()
    assert fused.largest == 20 * classes
    with _LargestTensor() as whole:  # the spy does see them in the plain formula
        plain(hidden, lm_head, None, labels, 0.1).backward()
    assert whole.largest == tokens * classes


# ---------------------------------------------------------------------------------------- other output projections


class _Wrapper(nn.Module):
    """What an adapter does: a module around the projection, with its `weight`, that computes something else."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down, self.up = nn.Linear(D, 2, bias=False).double(), nn.Linear(2, V, bias=False).double()

    @property
    def weight(self) -> Tensor:
        return self.base.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class _ScaledLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 3.0


def _subclass(lm_head: nn.Linear) -> nn.Module:
    scaled = _ScaledLinear(D, V, bias=False).double()
    scaled.weight = lm_head.weight
    return scaled


def _hooked(lm_head: nn.Linear) -> nn.Module:
    lm_head.register_forward_hook(lambda module, args, output: output * 3.0)
    return lm_head


def _pre_hooked(lm_head: nn.Linear) -> nn.Module:
    lm_head.register_forward_pre_hook(lambda module, args: (args[0] * 3.0,))
    return lm_head


def _patched(lm_head: nn.Linear) -> nn.Module:
    forward = lm_head.forward
    lm_head.forward = lambda x: forward(x) * 3.0  # as accelerate's hooks do
    return lm_head


def _parametrized(lm_head: nn.Linear) -> nn.Module:
    return nn.utils.parametrizations.weight_norm(lm_head)


@pytest.mark.parametrize("wrap", [_Wrapper, _subclass, _hooked, _pre_hooked, _patched, _parametrized])
def test_a_projection_that_is_not_plain_is_called(wrap):
    hidden, lm_head, extra, labels = inputs()
    assert is_plain_linear(lm_head)
    wrapped = wrap(lm_head)
    assert not is_plain_linear(wrapped)
    loss = label_smoothed_loss(hidden, wrapped, labels, label_smoothing=0.1, bias=extra)
    logits = wrapped(hidden) + extra
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1)
    assert_close(loss, expected, rtol=1e-10, atol=1e-10)
    tensors = [hidden, extra, *wrapped.parameters()]
    for ours, theirs in zip(gradients(loss, *tensors), gradients(expected, *tensors), strict=True):
        assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


def test_a_tensor_subclass_as_weight_is_not_plain():
    class Quantised(Tensor):
        pass

    lm_head = nn.Linear(D, V, bias=False)
    lm_head.weight = nn.Parameter(lm_head.weight.detach().as_subclass(Quantised))
    assert not is_plain_linear(lm_head)


def test_cross_entropy_sum_widens_half_precision():
    logits, labels = torch.randn(4, V).bfloat16(), torch.tensor([1, -100, 3, 4])
    expected = F.cross_entropy(logits.float(), labels, reduction="sum")
    assert_close(cross_entropy_sum(logits, labels), expected)


# ---------------------------------------------------------------------------------------- the model's loss


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tie_word_embeddings": False},
        {"output_bias": True},
        {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 37, "label_smoothing": 0.3},
    ],
)
def test_training_is_smoothed_and_evaluation_is_not(make_model, fields):
    model = make_model(dtype=torch.float64, **fields)
    generator = torch.Generator().manual_seed(1)
    source = torch.randint(3, 37, (3, 6), generator=generator)
    labels = torch.randint(3, 37, (3, 5), generator=generator)
    labels[1, 2:] = -100
    evaluation = model.eval()(input_ids=source, labels=labels)
    assert_close(evaluation.loss, F.cross_entropy(evaluation.logits.flatten(0, 1), labels.flatten()))
    weights = [p for p in model.parameters() if p.requires_grad]

    training = model.train()(input_ids=source, labels=labels)
    assert training.logits is None
    smoothing = {"label_smoothing": model.config.label_smoothing}
    expected = F.cross_entropy(evaluation.logits.flatten(0, 1), labels.flatten(), **smoothing)
    assert_close(training.loss, expected, rtol=1e-10, atol=1e-10)
    for ours, theirs in zip(gradients(training.loss, *weights), gradients(expected, *weights), strict=True):
        assert_close(ours, theirs, rtol=1e-10, atol=1e-10)

    asked = model(input_ids=source, labels=labels, return_logits=True)
    assert_close(asked.loss, expected, rtol=1e-10, atol=1e-10)
    assert_close(asked.logits, evaluation.logits)
    real = (labels != -100).sum()
    for training, mean in ((False, evaluation.loss), (True, expected)):
        loss = model.train(training)(input_ids=source, labels=labels, num_items_in_batch=torch.tensor(100)).loss
        assert_close(loss, mean * real / 100, rtol=1e-10, atol=1e-10)


def test_the_model_calls_a_wrapped_head(make_model):
    model = make_model().train()
    source, labels = torch.tensor([[5, 6, 1]]), torch.tensor([[7, 8, 1]])
    model(input_ids=source, labels=labels)
    seen = []
    handle = model.lm_head.register_forward_hook(lambda module, args, output: seen.append(output.shape))
    with_hook = model(input_ids=source, labels=labels).loss
    assert seen == [(3, 50)]
    handle.remove()
    seen.clear()
    assert_close(model(input_ids=source, labels=labels).loss, with_hook)
    assert seen == []


def test_accumulated_uneven_batches_equal_one_batch(make_model):
    generator = torch.Generator().manual_seed(2)
    source = torch.randint(3, 50, (4, 6), generator=generator)
    labels = torch.randint(3, 50, (4, 7), generator=generator)
    labels[0, 1:] = -100  # 1, 7, 7 and 2 tokens
    labels[3, 2:] = -100
    model = make_model(dtype=torch.float64).train()
    model(input_ids=source, labels=labels).loss.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    for rows in (slice(0, 1), slice(1, 4)):
        model(input_ids=source[rows], labels=labels[rows], num_items_in_batch=17).loss.backward()
    for name, parameter in model.named_parameters():
        assert_close(parameter.grad, expected[name], rtol=1e-10, atol=1e-10)
