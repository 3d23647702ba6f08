"""The model against the paper's equations (`reference.py`), torch.nn.Transformer and MarianMT; training, precision."""

from __future__ import annotations

import contextlib

import pytest
import reference
import torch
from tiny_models import SEPARATE, SHARING, SOURCES, TARGETS, batch, pad
from torch import Tensor, nn
from torch.testing import assert_close
from transformers import MarianConfig, MarianMTModel
from transformers.modeling_outputs import BaseModelOutputWithPooling

from vanilla_transformer import (
    attention_vanilla_transformer,
    loss_vanilla_transformer,
    modeling_vanilla_transformer,
)
from vanilla_transformer.modeling_vanilla_transformer import (
    VanillaTransformerDecoderLayer,
    VanillaTransformerEncoderLayer,
    shift_tokens_right,
)


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    return {"rtol": 1e-10, "atol": 1e-10} if dtype == torch.float64 else {"rtol": 1e-5, "atol": 1e-5}


def backward(logits: Tensor, mask: Tensor) -> None:
    """Backpropagate a fixed random direction through the logits of the real tokens."""
    direction = torch.randn(logits.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    (logits * direction.to(logits.dtype) * mask[..., None]).sum().backward()


# ---------------------------------------------------------------------------------------- the paper's equations

MODES = {
    "paper": ({}, {}),
    "pre-norm, gelu": (
        {"norm_position": "pre", "activation_function": "gelu"},
        {"pre_norm": True, "activation": reference.gelu},
    ),
    "d_k and d_v": ({"d_k": 3, "d_v": 7}, {}),
    "biases": ({"attention_bias": True, "output_bias": True}, {}),
    "tensor2tensor": (
        {"position_embedding_type": "sinusoidal_tensor2tensor", "position_offset": 3},
        {"positions": reference.position_encoding_tensor2tensor, "position_offset": 3},
    ),
    "learned": (
        {"position_embedding_type": "learned", "max_position_embeddings": 8, "position_offset": 2},
        {"positions": None, "position_offset": 2},
    ),
    "unscaled, other epsilon": (
        {"scale_embedding": False, "layer_norm_eps": 1e-2, "position_offset": 1},
        {"scale": False, "eps": 1e-2, "position_offset": 1},
    ),
    "untied": (SHARING["untied"], {}),
    "separate": (SHARING["separate"], {}),
    "separate, untied": (SHARING["separate, untied"], {}),
}


@pytest.mark.parametrize("attn_implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("mode", MODES)
def test_equals_the_papers_equations_forward_and_backward(make_model, mode, attn_implementation):
    fields, reference_fields = MODES[mode]
    model = make_model(attn_implementation, dtype=torch.float64, **fields)
    inputs = batch()
    logits = model(**inputs).logits
    backward(logits, inputs["decoder_attention_mask"])

    parameters = model.state_dict(keep_vars=True)
    leaves = {id(p): p.detach().clone().requires_grad_() for p in parameters.values()}
    paper = reference.Transformer(
        weights={name: leaves[id(p)] for name, p in parameters.items()},
        d_model=16,
        layers=(2, 3),
        heads=(4, 2),
        **reference_fields,
    )
    rows = [paper.logits(source, target) for source, target in zip(SOURCES, TARGETS, strict=True)]
    for row, ours in zip(rows, logits, strict=True):
        assert_close(ours[: len(row)], row, **tolerance(torch.float64))
    padded = torch.stack([nn.functional.pad(row, (0, 0, 0, logits.shape[1] - len(row))) for row in rows])
    backward(padded, inputs["decoder_attention_mask"])
    for name, parameter in parameters.items():
        assert_close(
            parameter.grad, leaves[id(parameter)].grad, **tolerance(torch.float64), msg=lambda m, n=name: n + m
        )


def test_equals_the_papers_equations_in_float32(make_model):
    model = make_model()
    logits = model(**batch()).logits
    paper = reference.Transformer(
        weights={name: p.double() for name, p in model.state_dict().items()}, d_model=16, layers=(2, 3), heads=(4, 2)
    )
    for source, target, ours in zip(SOURCES, TARGETS, logits, strict=True):
        assert_close(ours[: len(target)].double(), paper.logits(source, target), **tolerance(torch.float32))


# ---------------------------------------------------------------------------------------- torch.nn.Transformer


def by_our_names(theirs: nn.Transformer, read) -> dict[str, Tensor]:
    """Return `read(parameter)` of torch's parameters under our names, the fused projection cut in three."""
    output = {}

    def attention(ours: str, module: nn.MultiheadAttention) -> None:
        for part in ("weight", "bias"):
            fused = read(getattr(module, f"in_proj_{part}"))
            for name, piece in zip("qkv", fused.chunk(3), strict=True):
                output[f"{ours}.{name}_proj.{part}"] = piece
            output[f"{ours}.out_proj.{part}"] = read(getattr(module.out_proj, part))

    def copy(ours: str, module: nn.Module) -> None:
        for name, parameter in module.named_parameters():
            output[f"{ours}.{name}"] = read(parameter)

    for n, layer in enumerate(theirs.encoder.layers):
        prefix = f"model.encoder.layers.{n}"
        attention(f"{prefix}.self_attn", layer.self_attn)
        names = ("self_attn_layer_norm", layer.norm1), ("fc1", layer.linear1), ("fc2", layer.linear2)
        for name, module in (*names, ("final_layer_norm", layer.norm2)):
            copy(f"{prefix}.{name}", module)
    for n, layer in enumerate(theirs.decoder.layers):
        prefix = f"model.decoder.layers.{n}"
        attention(f"{prefix}.self_attn", layer.self_attn)
        attention(f"{prefix}.encoder_attn", layer.multihead_attn)
        names = ("self_attn_layer_norm", layer.norm1), ("encoder_attn_layer_norm", layer.norm2)
        for name, module in (
            *names,
            ("fc1", layer.linear1),
            ("fc2", layer.linear2),
            ("final_layer_norm", layer.norm3),
        ):
            copy(f"{prefix}.{name}", module)
    for side, stack in (("encoder", theirs.encoder), ("decoder", theirs.decoder)):
        if stack.norm is not None:
            copy(f"model.{side}.layer_norm", stack.norm)
    return output


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("norm", ["post", "pre"])
def test_equals_torch_nn_transformer(make_model, norm, activation, dtype):
    model = make_model(
        dtype=dtype,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        attention_bias=True,
        norm_position=norm,
        activation_function=activation,
    )
    torch.manual_seed(1)
    theirs = nn.Transformer(
        16, 4, 2, 3, 32, 0.0, activation, layer_norm_eps=1e-6, batch_first=True, norm_first=norm == "pre", dtype=dtype
    )
    if norm == "post":  # nn.Transformer norms a last time also then; the paper does not
        theirs.encoder.norm = theirs.decoder.norm = None
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.3)
    weights = by_our_names(theirs, lambda p: p.detach().clone())
    weights |= {name: p for name, p in model.state_dict().items() if "embed_tokens" in name or "shared" in name}
    weights["lm_head.weight"] = weights["model.shared.weight"]
    model.load_state_dict(weights)  # strict: the names above are all there are

    inputs = batch()
    logits = model(**inputs).logits
    backward(logits, inputs["decoder_attention_mask"])

    table = weights["model.shared.weight"].clone().requires_grad_()

    def embed(ids: Tensor) -> Tensor:
        positions = [reference.position_encoding(place, 16) for place in range(ids.shape[1])]
        return table[ids] * 4.0 + torch.tensor(positions, dtype=dtype)

    source_padding, target_padding = inputs["attention_mask"] == 0, inputs["decoder_attention_mask"] == 0
    states = theirs(
        embed(inputs["input_ids"]),
        embed(inputs["decoder_input_ids"]),
        tgt_mask=torch.ones(8, 8, dtype=torch.bool).triu(1),
        src_key_padding_mask=source_padding,
        tgt_key_padding_mask=target_padding,
        memory_key_padding_mask=source_padding,
    )
    expected = states @ table.T
    backward(expected, inputs["decoder_attention_mask"])
    real = ~target_padding
    assert_close(logits[real], expected[real], **tolerance(dtype))
    gradients = by_our_names(theirs, lambda p: p.grad)
    gradients["model.shared.weight"] = table.grad
    ours = dict(model.named_parameters())
    assert ours.keys() == gradients.keys()
    for name, gradient in gradients.items():
        scale = 1 if dtype == torch.float64 else 10  # sums over all tokens
        limits = {key: scale * value for key, value in tolerance(dtype).items()}
        assert_close(ours[name].grad, gradient, **limits, msg=lambda m, n=name: f"{n}: {m}")


# ---------------------------------------------------------------------------------------- MarianMT


@pytest.mark.parametrize("sharing", ["tied", "separate", "separate, untied"])
def test_equals_marian(make_model, sharing):
    fields = SHARING[sharing]
    common = {
        **fields,
        "vocab_size": 50,
        "d_model": 16,
        "encoder_layers": 2,
        "decoder_layers": 3,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 2,
        "encoder_ffn_dim": 24,
        "decoder_ffn_dim": 40,
        "activation_function": "swish",
        "dropout": 0.0,
        "scale_embedding": True,
    }
    torch.manual_seed(2)
    marian = MarianMTModel(
        MarianConfig(**common, pad_token_id=0, eos_token_id=1, decoder_start_token_id=2, max_position_embeddings=32)
    ).eval()
    nn.init.normal_(marian.final_logits_bias)
    if sharing == "separate":  # 5.0 does not tie these when it makes the model
        marian.lm_head.weight = marian.model.decoder.embed_tokens.weight
    for name, parameter in marian.named_parameters():
        if "embed_positions" not in name:
            nn.init.normal_(parameter, std=0.3)
    model = make_model(**common, sinusoid_layout="halves", attention_bias=True, output_bias=True, layer_norm_eps=1e-5)
    weights = {name: weight for name, weight in marian.state_dict().items() if "embed_positions" not in name}
    model.load_state_dict(weights)  # strict

    inputs = batch()
    logits, expected = model(**inputs).logits, marian(**inputs).logits
    real = inputs["decoder_attention_mask"] == 1
    assert_close(logits[real], expected[real], rtol=1e-5, atol=1e-5)
    backward(logits, inputs["decoder_attention_mask"])
    backward(expected, inputs["decoder_attention_mask"])
    ours = dict(model.named_parameters())
    for name, parameter in marian.named_parameters():
        if "embed_positions" not in name:
            assert_close(ours[name].grad, parameter.grad, rtol=1e-4, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


# ---------------------------------------------------------------------------------------- post-norm and dropout


def zero_sublayers(layer: nn.Module) -> None:
    """Make each sublayer's output zero, whatever comes in."""
    for name, module in layer.named_modules():
        if isinstance(module, nn.Linear) and not name.endswith("fc1"):
            for parameter in module.parameters():
                nn.init.zeros_(parameter)


def test_zero_sublayers_leave_the_layer_norms(make_config):
    torch.manual_seed(3)
    x, memory = torch.randn(2, 5, 16) * 3 + 1, torch.randn(2, 4, 16)
    for norm in ("post", "pre"):
        encoder = VanillaTransformerEncoderLayer(make_config(norm_position=norm, attention_bias=True), 0)
        decoder = VanillaTransformerDecoderLayer(make_config(norm_position=norm, attention_bias=True), 0)
        zero_sublayers(encoder)
        zero_sublayers(decoder)
        # A second LayerNorm of the same vector changes nothing but for ε.
        expected = nn.functional.layer_norm(x, (16,), eps=1e-6) if norm == "post" else x
        assert_close(encoder(x, None)[0], expected, rtol=1e-5, atol=1e-5)
        assert_close(decoder(x, memory, None, None)[0], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("norm_first", [False, True])
def test_one_layer_equals_torchs(make_config, norm_first):
    torch.manual_seed(4)
    arguments = {"dropout": 0.0, "layer_norm_eps": 1e-6, "batch_first": True, "norm_first": norm_first}
    theirs = nn.Transformer(16, 4, 1, 1, 32, dtype=torch.float64, **arguments)
    theirs.encoder.norm = theirs.decoder.norm = None
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.5)
    config = make_config(
        attention_bias=True,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        decoder_attention_heads=4,
        norm_position="pre" if norm_first else "post",
    )
    config._attn_implementation = "sdpa"
    x, memory = torch.randn(2, 5, 16).double(), torch.randn(2, 4, 16).double()
    weights = by_our_names(theirs, lambda p: p.detach())
    for cls, side in ((VanillaTransformerEncoderLayer, "encoder"), (VanillaTransformerDecoderLayer, "decoder")):
        layer = cls(config, 0).double()
        prefix = f"model.{side}.layers.0."
        layer.load_state_dict({name[len(prefix) :]: w for name, w in weights.items() if name.startswith(prefix)})
        if side == "encoder":
            expected, output = theirs.encoder.layers[0](x), layer(x, None)[0]
        else:
            causal = torch.ones(5, 5, dtype=torch.bool).triu(1)
            expected, output = theirs.decoder.layers[0](x, memory, tgt_mask=causal), layer(x, memory, None, None)[0]
        assert_close(output, expected, rtol=1e-10, atol=1e-10)


def test_only_pre_norm_has_a_last_norm_unless_told_otherwise(make_model):
    for norm, final, norms in (("post", None, 0), ("pre", None, 2), ("post", True, 2), ("pre", False, 0)):
        model = make_model(norm_position=norm, final_norm=final)
        assert model.num_parameters() == model.config.num_trainable_parameters()
        assert sum(name.endswith("coder.layer_norm.weight") for name in model.state_dict()) == norms
        seen = []
        model.model.encoder.layers[-1].register_forward_hook(
            lambda module, args, output, seen=seen: seen.append(output)
        )
        last = model.model.encoder(torch.tensor([[5, 6, 7, 1]])).last_hidden_state
        assert torch.equal(last, seen[0][0]) == (norms == 0)


def test_dropout_on_the_sum_of_embedding_and_position(make_model):
    model = make_model(dropout=0.25, d_model=64, encoder_layers=1, decoder_layers=1).train()
    ids = torch.arange(3, 43).repeat(8, 1)
    outputs = model(input_ids=ids, decoder_input_ids=ids, output_hidden_states=True)
    positions = torch.tensor([reference.position_encoding(place, 64) for place in range(40)], dtype=torch.float32)
    whole = model.model.shared(ids) * 8.0 + positions
    for states in (outputs.encoder_hidden_states[0], outputs.decoder_hidden_states[0]):
        kept = states != 0
        assert kept.float().mean().item() == pytest.approx(0.75, abs=0.02)  # 20,480 draws, standard error 0.003
        assert_close(states[kept], whole[kept] / 0.75, rtol=1e-5, atol=1e-5)


def test_dropout_on_each_sublayer_before_it_is_added(make_config):
    torch.manual_seed(5)
    # Pre-norm shows a sublayer's share as output - input; the other sublayers are silenced.
    layer = VanillaTransformerDecoderLayer(make_config(norm_position="pre", d_model=64, dropout=0.25), 0)
    x, memory = torch.randn(4, 50, 64), torch.randn(4, 6, 64)
    for active in ("self_attn.out_proj", "encoder_attn.out_proj", "fc2"):
        trial = VanillaTransformerDecoderLayer(layer.self_attn.config, 0)
        trial.load_state_dict(layer.state_dict())
        for name in {"self_attn.out_proj", "encoder_attn.out_proj", "fc2"} - {active}:
            for parameter in trial.get_submodule(name).parameters():
                nn.init.zeros_(parameter)
        whole = trial.eval()(x, memory, None, None)[0] - x
        dropped = trial.train()(x, memory, None, None)[0] - x
        kept = dropped != 0
        assert kept.float().mean().item() == pytest.approx(0.75, abs=0.02)
        assert_close(dropped[kept], whole[kept] / 0.75, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("field", "calls"),
    [("attention_dropout", 2 + 3 * 2), ("activation_dropout", 2 + 3), ("dropout", 2 + 2 * 2 + 3 * 3)],
)
@pytest.mark.parametrize("attn_implementation", ["eager", "sdpa"])
def test_each_dropout_field_is_honoured(make_model, monkeypatch, field, calls, attn_implementation):
    # 2 encoder layers of 2 sublayers, 3 decoder layers of 3, one embedding sum a stack.
    seen = []
    dropout, attention = nn.functional.dropout, nn.functional.scaled_dot_product_attention

    def spy_dropout(x, p, training):
        seen.append(p if training else 0.0)
        return dropout(x, p, training)

    def spy_attention(*args, **kwargs):
        seen.append(kwargs["dropout_p"])
        return attention(*args, **kwargs)

    monkeypatch.setattr(modeling_vanilla_transformer, "dropout", spy_dropout)
    monkeypatch.setattr(attention_vanilla_transformer, "drop", spy_dropout)
    monkeypatch.setattr(attention_vanilla_transformer, "_SHORT", 0)  # "sdpa" by its kernel
    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", spy_attention)
    model = make_model(attn_implementation, **{"dropout": 0.0, field: 0.375})
    model.train()(**batch())
    assert seen.count(0.375) == calls
    seen.clear()
    model.eval()(**batch())
    assert set(seen) <= {0.0}


# ---------------------------------------------------------------------------------------- inputs and outputs


def test_embeddings_and_encoder_outputs_take_the_place_of_ids(make_model):
    model = make_model()
    inputs = batch()
    expected = model(**inputs).logits
    masks = {name: inputs[name] for name in ("attention_mask", "decoder_attention_mask")}
    embeds = {
        "inputs_embeds": model.model.shared(inputs["input_ids"]),
        "decoder_inputs_embeds": model.model.shared(inputs["decoder_input_ids"]),
    }
    assert torch.equal(model(**masks, **embeds).logits, expected)
    states = model.model.encoder(inputs["input_ids"], inputs["attention_mask"])
    rest = {name: value for name, value in inputs.items() if name != "input_ids"}
    for encoder_outputs in (states, (states.last_hidden_state,), BaseModelOutputWithPooling(states.last_hidden_state)):
        assert torch.equal(model(**rest, encoder_outputs=encoder_outputs).logits, expected)


def test_return_dict_false_gives_a_tuple(make_model):
    model = make_model()
    inputs = batch()
    labels = inputs["decoder_input_ids"].clone()
    loss, logits = model(**inputs, labels=labels, return_dict=False)[:2]
    outputs = model(**inputs, labels=labels)
    assert torch.equal(loss, outputs.loss)
    assert torch.equal(logits, outputs.logits)


def test_missing_or_double_inputs_are_named(make_model):
    model = make_model()
    inputs = batch()
    with pytest.raises(ValueError, match=r"exactly one of input_ids and inputs_embeds"):
        model(decoder_input_ids=inputs["decoder_input_ids"])
    with pytest.raises(ValueError, match=r"exactly one of decoder_input_ids and decoder_inputs_embeds"):
        model(**inputs, decoder_inputs_embeds=torch.zeros(3, 8, 16))
    with pytest.raises(ValueError, match=r"decoder has no input"):
        make_model(**SEPARATE)(input_ids=inputs["input_ids"])


def test_labels_are_shifted_behind_the_start_token():
    labels = torch.tensor([[5, 6, 1, -100], [-100, -100, -100, -100]])
    assert shift_tokens_right(labels, 0, 2).tolist() == [[2, 5, 6, 1], [2, 0, 0, 0]]
    assert labels.tolist() == [[5, 6, 1, -100], [-100, -100, -100, -100]]  # not written into


def test_labels_make_the_decoder_input(make_model):
    model = make_model()
    source, mask = pad(SOURCES)
    labels = torch.tensor([[17, 18, 1, -100, -100], [23, 24, 25, 26, 1], [1, -100, -100, -100, -100]])
    decoder_input_ids = torch.tensor([[2, 17, 18, 1, 0], [2, 23, 24, 25, 26], [2, 1, 0, 0, 0]])
    outputs = model(input_ids=source, attention_mask=mask, labels=labels)
    expected = model(input_ids=source, attention_mask=mask, decoder_input_ids=decoder_input_ids).logits
    assert torch.equal(outputs.logits, expected)
    assert torch.equal(model.prepare_decoder_input_ids_from_labels(labels), decoder_input_ids)


# ---------------------------------------------------------------------------------------- training and precision


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing_changes_neither_loss_nor_gradients(make_model, use_reentrant):
    inputs = batch()
    labels = inputs.pop("decoder_input_ids")
    results = []
    for checkpointing in (False, True):
        model = make_model(dropout=0.3, attention_dropout=0.2).train()
        calls = []
        model.model.decoder.layers[0].fc1.register_forward_hook(lambda *args, calls=calls: calls.append(1))
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
        torch.manual_seed(8)
        loss = model(**inputs, labels=labels).loss
        loss.backward()
        results.append((len(calls), loss, {name: p.grad for name, p in model.named_parameters()}))
    (once, loss, gradients), (twice, checkpointed_loss, checkpointed_gradients) = results
    assert (once, twice) == (1, 2)  # it does recompute
    assert torch.equal(loss, checkpointed_loss)
    assert gradients.keys() == checkpointed_gradients.keys()
    for name, gradient in gradients.items():
        assert gradient.abs().sum() > 0
        assert_close(gradient, checkpointed_gradients[name], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_keeps_statistics_in_float32(make_model, dtype):
    model = make_model("eager", dtype=dtype)
    inputs = batch()
    labels = inputs["decoder_input_ids"]
    for training in (False, True):
        loss = model.train(training)(**inputs, labels=labels).loss
        assert loss.dtype == torch.float32
    logits = model.eval()(**inputs).logits
    assert logits.dtype == dtype
    # In float32 from the same weights: only the rounding of states to `dtype` between.
    wide = make_model("eager")
    wide.load_state_dict({name: weight.float() for name, weight in model.state_dict().items()})
    error = (logits.float() - wide(**inputs).logits)[inputs["decoder_attention_mask"] == 1].abs().max()
    assert error < (0.02 if dtype == torch.float16 else 0.15)


def test_float16_layer_norm_of_large_activations_is_finite_and_right(make_config):
    torch.manual_seed(9)
    layer = VanillaTransformerEncoderLayer(make_config(encoder_layers=1), 0)
    zero_sublayers(layer)
    nn.init.zeros_(layer.fc1.weight)
    states = torch.randn(2, 5, 16) * 1.5e4 + 1e3  # squares are far beyond float16's 65,504
    half = states.half()
    output = layer.half()(half, None)[0]
    expected = nn.functional.layer_norm(half.float(), (16,), eps=1e-6)
    assert half.abs().max() > 2.5e4
    assert_close(output.float(), expected, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_training_step_never_waits_for_the_device(make_model, monkeypatch, implementation):
    # On "meta" there are no values: a step that looked at one, as .item() and bool() do, would fail there.
    model = make_model(attn_implementation=implementation, dropout=0.1).to("meta").train()
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: False)  # "meta" has no autocast to ask about
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: contextlib.nullcontext())
    ids = torch.ones(3, 7, dtype=torch.long, device="meta")
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids[:, :5]}
    with pytest.raises(RuntimeError, match="meta"):
        bool(batch["attention_mask"].all())
    fused = []
    apply = loss_vanilla_transformer._FusedLinearCrossEntropy.apply
    monkeypatch.setattr(
        loss_vanilla_transformer._FusedLinearCrossEntropy,
        "apply",
        lambda *arguments: fused.append(1) or apply(*arguments),
    )
    model(**batch, num_items_in_batch=torch.ones((), device="meta")).loss.backward()
    assert fused
    assert all(parameter.grad is not None for parameter in model.model.encoder.layers.parameters())
    assert model.lm_head.weight.grad is not None
