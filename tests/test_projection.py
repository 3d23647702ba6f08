"""Linear layers beside each other and with packed weights, against the layers themselves."""

import copy

import pytest
import torch
from torch import nn

from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from vanilla_transformer import beam_decoder_vanilla_transformer as beam_decoder
from vanilla_transformer.projection_vanilla_transformer import Projection
from vanilla_transformer.quantization import quantize_int8


def layers_of(outputs, bias=True, dtype=torch.float32):
    torch.manual_seed(0)
    return [nn.Linear(24, width, bias=bias, dtype=dtype) for width in outputs]


@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("outputs", [(40,), (8, 8, 16)])
@torch.no_grad()
def test_projection_is_the_layers_beside_each_other(pack, bias, outputs):
    layers = layers_of(outputs, bias)
    projection = Projection(layers, pack=pack)
    for rows in (1, 5, 300):
        states = torch.randn(rows, 3, 24)
        expected = torch.cat([layer(states) for layer in layers], dim=-1)
        torch.testing.assert_close(projection(states), expected, rtol=0, atol=2e-6)


@torch.no_grad()
def test_weights_are_packed_where_torch_can():
    # The operators are not public (torch 2.5 to 2.13): this says when they are gone.
    projection = Projection(layers_of((40,)), pack=True)
    assert projection.packed is not None
    states = torch.randn(6, 24, 3).transpose(1, 2)  # not contiguous
    torch.testing.assert_close(projection(states), projection.layers[0](states), rtol=0, atol=2e-6)


@pytest.mark.parametrize("activation", [nn.ReLU(), nn.SiLU(), nn.GELU()])
@pytest.mark.parametrize("pack", [False, True])
@torch.no_grad()
def test_activation_is_applied_once(activation, pack):
    (layer,) = layers_of((40,))
    states = torch.randn(7, 24)
    output = Projection([layer], pack=pack, activation=activation)(states)
    torch.testing.assert_close(output, activation(layer(states)), rtol=0, atol=2e-6)


@torch.no_grad()
def test_bfloat16_within_its_rounding():
    layers = layers_of((8, 8), dtype=torch.bfloat16)
    states = torch.randn(70, 24, dtype=torch.bfloat16)
    output = Projection(layers, pack=True)(states)
    assert output.dtype == torch.bfloat16
    expected = torch.cat([copy.deepcopy(layer).double()(states.double()) for layer in layers], dim=-1)
    torch.testing.assert_close(output.double(), expected, rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("case", ["hook", "subclass", "quantised", "one bias"])
@torch.no_grad()
def test_what_is_more_than_a_matrix_is_called_as_it_is(case):
    class Doubled(nn.Linear):
        def forward(self, states):
            return 2 * super().forward(states)

    layers = layers_of((8, 8))
    if case == "hook":
        layers[1].register_forward_hook(lambda module, inputs, output: output + 1)
    elif case == "subclass":
        layers[1] = Doubled(24, 8)
    elif case == "quantised":
        layers = list(quantize_int8(nn.ModuleList(layers)))
    else:
        layers[1] = nn.Linear(24, 8, bias=False)
    states = torch.randn(70, 24)
    projection = Projection(layers, pack=True)
    assert projection.weight is None
    assert projection.packed is None
    torch.testing.assert_close(projection(states), torch.cat([layer(states) for layer in layers], dim=-1))


@torch.no_grad()
def test_autocast_reaches_the_product():
    with torch.autocast("cpu", torch.bfloat16):
        projection = Projection(layers_of((8,)), pack=True)
        assert projection(torch.randn(70, 24)).dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("keys", [3, 40, 100])
@pytest.mark.parametrize("masked", [False, True])
@torch.no_grad()
def test_attention_of_a_step_equals_the_kernel(monkeypatch, dtype, keys, masked):
    torch.manual_seed(0)
    query, key, value = (torch.randn(20, 2, length, 8).to(dtype) for length in (4, keys, keys))
    mask = None
    if masked:
        mask = torch.rand(20, 1, 4, keys) < 0.7
        mask[..., 0] = True
        mask[3] = False  # nothing to attend to
    found = {}
    for plainly in (True, False):
        monkeypatch.setattr(beam_decoder, "_is_faster_plainly", lambda query, keys, plainly=plainly: plainly)
        mask_of_both = None if mask is None else beam_decoder._Mask(mask)
        found[plainly] = beam_decoder._attend(0.3, query, key, value, mask_of_both, None).float()
    expected = torch.nn.functional.scaled_dot_product_attention(
        query.double(), key.double(), value.double(), mask, scale=0.3
    )
    expected = expected.nan_to_num(0.0).float()
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(found[True], expected, rtol=0, atol=tolerance)
    torch.testing.assert_close(found[False].nan_to_num(0.0), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("position_embedding_type", ["sinusoidal", "sinusoidal_tensor2tensor", "learned"])
@torch.no_grad()
def test_positions_of_a_long_search_equal_those_of_the_model(position_embedding_type):
    # More steps than the table begins with; the expected scores are those of one forward pass over the whole target.
    torch.manual_seed(0)
    model = VanillaTransformerForConditionalGeneration(
        VanillaTransformerConfig(
            vocab_size=30, d_model=16, encoder_layers=1, decoder_layers=2, encoder_attention_heads=2,
            decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, max_position_embeddings=200,
            position_embedding_type=position_embedding_type,
        )
    ).eval()  # fmt: skip
    model.generation_config.eos_token_id = None
    source = torch.randint(4, 30, (2, 9))
    output = model.generate(
        source, num_beams=3, max_new_tokens=150, return_dict_in_generate=True, output_scores=True, length_penalty=0.0
    )
    tokens = output.sequences
    assert tokens.shape == (2, 151)
    log_probabilities = model(source, decoder_input_ids=tokens[:, :-1]).logits.log_softmax(dim=-1)
    expected = log_probabilities.gather(-1, tokens[:, 1:, None]).sum(dim=(1, 2))
    torch.testing.assert_close(output.sequences_scores, expected, rtol=1e-5, atol=1e-3)
