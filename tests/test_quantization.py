"""Linear layers in int8: what becomes of them, how near they stay, and that a quantised model translates."""

import copy

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from vanilla_transformer.quantization import quantize_int8

BACKENDS = ("torch", "torchao")


@pytest.fixture
def model(make_model):
    return make_model(d_model=32, encoder_ffn_dim=64, decoder_ffn_dim=64).eval()


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_linear_layer_is_quantised_and_nothing_else(model, backend):
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    others = {n: p.clone() for n, p in model.named_parameters() if n.rpartition(".")[0] not in linear}
    assert quantize_int8(model, backend) is model
    for name in linear:
        module = model.get_submodule(name)
        weight = module.weight() if callable(module.weight) else module.weight.data
        assert type(weight) is not torch.Tensor or weight.dtype == torch.qint8, name
    after = dict(model.named_parameters())
    assert others
    assert all(torch.equal(after[name], value) for name, value in others.items())


def test_a_linear_layer_equals_its_weights_and_inputs_rounded():
    # By hand: symmetric int8 with a scale a row for the weights; 7 bits over the range of the input, so that a sum of
    # products cannot overflow on processors without VNNI.
    torch.manual_seed(0)
    layer, inputs = nn.Linear(16, 8), torch.randn(5, 16)
    scale = layer.weight.detach().abs().amax(1, keepdim=True) / 127.5
    weight = (layer.weight.detach() / scale).round().clamp(-128, 127) * scale
    low, high = inputs.min().clamp(max=0), inputs.max().clamp(min=0)
    step = (high - low) / 127
    zero = (-low / step).round()
    rounded = ((inputs / step).round() + zero).clamp(0, 127).sub(zero) * step
    expected = rounded @ weight.T + layer.bias.detach()
    assert_close(quantize_int8(nn.Sequential(layer), "torch")(inputs), expected, rtol=0, atol=8e-3)  # one rounding


@pytest.mark.parametrize("backend", BACKENDS)
def test_logits_stay_near_and_decoding_works(model, backend):
    source = torch.randint(3, 50, (4, 9))
    exact = copy.deepcopy(model)
    quantised = quantize_int8(model, backend)
    labels = torch.randint(3, 50, (4, 7))
    with torch.inference_mode():
        logits, expected = (m(source, labels=labels).logits for m in (quantised, exact))
    assert (logits - expected).norm() < 0.03 * expected.norm()
    assert not torch.equal(logits, expected)
    output = quantised.generate(source, num_beams=3, max_new_tokens=8)
    assert output.shape[0] == 4


def test_auto_takes_the_kernels_of_torch_on_a_cpu(model):
    quantize_int8(model)
    assert "DynamicQuantizedLinear" in str(model.lm_head)


def test_what_cannot_be_done_is_refused(model):
    with pytest.raises(ValueError, match="backend must be"):
        quantize_int8(model, "int4")
    with pytest.raises(ValueError, match=r"float32 model on the CPU, this one is torch\.bfloat16"):
        quantize_int8(model.bfloat16(), "torch")
