"""The converter to and from `torch.nn.Transformer`, against PyTorch's own modules."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch import Tensor, nn

from vanilla_transformer import train_tokenizer
from vanilla_transformer.convert.renaming import ConversionError
from vanilla_transformer.convert.torch_nn import from_torch_nn, read, to_torch_nn, write

D, SOURCE_SIZE, TARGET_SIZE = 16, 50, 37
IDS = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2, "decoder_start_token_id": 2}
SOURCE = torch.tensor([[5, 6, 7, 8, 9, 1], [10, 11, 1, 0, 0, 0]])
MASK = SOURCE.ne(0).long()
TARGET = torch.tensor([[2, 5, 6, 7], [2, 9, 8, 7]])


def stack(side: str, layers: int, heads: int, ffn: int, norm_first: bool, norm: bool | None = None, **options):
    kind = nn.TransformerEncoderLayer if side == "encoder" else nn.TransformerDecoderLayer
    layer = kind(D, heads, ffn, norm_first=norm_first, batch_first=True, **options)
    last = nn.LayerNorm(D, eps=layer.norm1.eps) if (norm_first if norm is None else norm) else None
    if side == "encoder":
        return nn.TransformerEncoder(layer, layers, last, enable_nested_tensor=False)
    return nn.TransformerDecoder(layer, layers, last)


def make(norm_first=False, encoder=None, decoder=None, **options) -> nn.Transformer:
    """Stacks of different depth, heads and inner width; every parameter is random."""
    torch.manual_seed(0)
    transformer = nn.Transformer(
        D,
        4,
        custom_encoder=encoder or stack("encoder", 2, 4, 24, norm_first, **options),
        custom_decoder=decoder or stack("decoder", 3, 2, 40, norm_first, **options),
        batch_first=True,
    )
    with torch.no_grad():
        for name, parameter in transformer.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.4 + ("norm" in name and name.endswith("weight")))
    return transformer.double().eval()


def matrix(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 0.5


def embed(table: Tensor, ids: Tensor) -> Tensor:
    """The paper's embeddings times sqrt(d_model) plus its sinusoids, written down anew."""
    rows = [
        [(math.sin, math.cos)[c % 2](p / 10000 ** (c // 2 * 2 / D)) for c in range(D)] for p in range(ids.shape[1])
    ]
    return table[ids] * math.sqrt(D) + torch.tensor(rows, dtype=table.dtype)


@torch.no_grad()
def logits_of_torch(transformer, source: Tensor, target: Tensor, output: Tensor, bias: Tensor | None) -> Tensor:
    padding = MASK.eq(0)
    causal = nn.Transformer.generate_square_subsequent_mask(TARGET.shape[1], dtype=source.dtype)
    states = transformer(
        embed(source, SOURCE),
        embed(target, TARGET),
        tgt_mask=causal,
        src_key_padding_mask=padding,
        memory_key_padding_mask=padding,
    )
    return nn.functional.linear(states, output, bias)


@torch.no_grad()
def logits_of(model) -> Tensor:
    return model(input_ids=SOURCE, attention_mask=MASK, decoder_input_ids=TARGET).logits


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("norm", [None, True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("sharing", ["one", "tied", "separate"])
def test_logits_equal_those_of_torch(norm_first, norm, bias, sharing):
    transformer = make(norm_first, norm=norm, bias=bias, activation="gelu" if bias else "relu", layer_norm_eps=3e-4)
    source = matrix(SOURCE_SIZE, D, seed=1)
    target = None if sharing == "one" else matrix(TARGET_SIZE, D, seed=2)
    output = matrix(TARGET_SIZE, D, seed=3) if sharing == "separate" else None
    output_bias = matrix(TARGET_SIZE, seed=4) if sharing == "separate" else None
    model = from_torch_nn(transformer, source, target, output, output_bias, **IDS)
    target = source if target is None else target
    expected = logits_of_torch(transformer, source, target, target if output is None else output, output_bias)
    assert expected.abs().max() > 1
    torch.testing.assert_close(logits_of(model), expected, atol=1e-10, rtol=0)
    assert model.config.has_final_norm is (norm_first if norm is None else norm)
    assert model.config.attention_bias is bias
    assert model.config.share_encoder_decoder_embeddings is (sharing == "one")
    assert model.config.tie_word_embeddings is (sharing != "separate")


@pytest.mark.parametrize("norm_first", [False, True])
def test_a_default_transformer_converts(norm_first):
    torch.manual_seed(0)
    transformer = nn.Transformer(D, 4, 1, 2, 24, norm_first=norm_first, batch_first=True).double().eval()
    source = matrix(SOURCE_SIZE, D, seed=1)
    expected = logits_of_torch(transformer, source, source, source, None)
    torch.testing.assert_close(logits_of(from_torch_nn(transformer, source, **IDS)), expected, atol=1e-10, rtol=0)


def test_a_stack_without_attention_biases_beside_one_with_them():
    encoder = stack("encoder", 2, 4, 24, True, bias=False)
    transformer = make(True, encoder=encoder)
    source = matrix(SOURCE_SIZE, D, seed=1)
    expected = logits_of_torch(transformer, source, source, source, None)
    torch.testing.assert_close(logits_of(from_torch_nn(transformer, source, **IDS)), expected, atol=1e-10, rtol=0)


def test_the_config_holds_what_the_modules_say():
    transformer = make(True, dropout=0.2, layer_norm_eps=3e-4)
    for layer in [*transformer.encoder.layers, *transformer.decoder.layers]:
        layer.dropout.p, layer.self_attn.dropout = 0.3, 0.4
    for layer in transformer.decoder.layers:
        layer.multihead_attn.dropout = 0.4
    config = from_torch_nn(transformer, matrix(SOURCE_SIZE, D, seed=1), **IDS, label_smoothing=0.3).config
    expected = {
        "vocab_size": SOURCE_SIZE,
        "d_model": D,
        "encoder_layers": 2,
        "decoder_layers": 3,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 2,
        "encoder_ffn_dim": 24,
        "decoder_ffn_dim": 40,
        "norm_position": "pre",
        "layer_norm_eps": 3e-4,
        "activation_function": "relu",
        "dropout": 0.2,
        "activation_dropout": 0.3,
        "attention_dropout": 0.4,
        "label_smoothing": 0.3,
        "output_bias": False,
        **IDS,
    }
    assert {name: getattr(config, name) for name in expected} == expected


@pytest.mark.parametrize("norm_position", ["post", "pre"])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"final_norm": True},
        {"final_norm": False},
        {"tie_word_embeddings": False, "output_bias": True, "attention_bias": True},
    ],
)
@pytest.mark.parametrize("separate", [False, True])
def test_our_models_as_torch_modules(make_model, norm_position, fields, separate):
    if separate:
        fields = {**fields, "share_encoder_decoder_embeddings": False, "decoder_vocab_size": TARGET_SIZE}
    model = make_model(dtype=torch.float64, norm_position=norm_position, layer_norm_eps=3e-4, **fields)
    theirs = to_torch_nn(model)
    expected = logits_of_torch(
        theirs.transformer, theirs.source_embedding, theirs.target_embedding, theirs.output_weight, theirs.output_bias
    )
    torch.testing.assert_close(expected, logits_of(model), atol=1e-10, rtol=0)
    tied = model.config.tie_word_embeddings
    assert (theirs.output_weight is theirs.target_embedding) is tied
    assert (theirs.source_embedding is theirs.target_embedding) is not separate
    parts = theirs.source_embedding, theirs.target_embedding, theirs.output_weight, theirs.output_bias
    back = from_torch_nn(theirs.transformer, *parts, **IDS, label_smoothing=0.1)
    # None and the default written out mean the same.
    model.config.final_norm = back.config.final_norm if "final_norm" in fields else None
    assert back.config.to_dict() == model.config.to_dict()
    assert back.config.has_final_norm == fields.get("final_norm", norm_position == "pre")
    assert all(torch.equal(tensor, back.state_dict()[name]) for name, tensor in model.state_dict().items())


def test_dropout_rates_go_to_their_places(make_model):
    model = make_model(dropout=0.2, attention_dropout=0.3, activation_dropout=0.4)
    layer = to_torch_nn(model).transformer.decoder.layers[1]
    rates = (layer.dropout1.p, layer.dropout2.p, layer.dropout3.p, layer.dropout.p)
    assert rates == (0.2, 0.2, 0.2, 0.4)
    assert layer.self_attn.dropout == layer.multihead_attn.dropout == 0.3


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"d_k": 5}, "d_k=5, d_v=4 with encoder_attention_heads=4: nn.MultiheadAttention"),
        ({"d_v": 8}, "d_k=4, d_v=8 with encoder_attention_heads=4"),
        ({"activation_function": "silu"}, "activation_function='silu'"),
        ({"position_embedding_type": "learned"}, "position_embedding_type='learned'"),
    ],
)
def test_what_torch_cannot_express_is_refused_and_nothing_written(make_model, tmp_path, fields, message):
    model = make_model(**fields)
    with pytest.raises(ConversionError, match=message):
        to_torch_nn(model)
    with pytest.raises(ConversionError, match=message):
        write(model, None, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


class OtherLayer(nn.TransformerEncoderLayer):
    pass


class OtherTransformer(nn.Transformer):
    pass


class OtherEncoder(nn.TransformerEncoder):
    pass


def _other_attention(**options) -> nn.Transformer:
    transformer = make(True)
    transformer.decoder.layers[1].multihead_attn = nn.MultiheadAttention(D, 2, batch_first=True, **options)
    return transformer.double()


def _changed(change) -> nn.Transformer:
    transformer = make(True)
    change(transformer)
    return transformer


REFUSED = {
    "one final norm": (
        lambda: make(encoder=stack("encoder", 1, 4, 24, False, True)),
        r"encoder.norm and decoder.norm are there: \[True, False\]",
    ),
    "custom encoder": (lambda: make(encoder=nn.Identity()), "custom_encoder is a Identity"),
    "subclass of the encoder": (
        lambda: make(encoder=OtherEncoder(nn.TransformerEncoderLayer(D, 4, 24, batch_first=True), 1)),
        "custom_encoder is a OtherEncoder",
    ),
    "custom layer": (
        lambda: make(encoder=nn.TransformerEncoder(OtherLayer(D, 4, 24, batch_first=True), 1)),
        "encoder.layers.0 is a OtherLayer",
    ),
    "kdim": (lambda: _other_attention(kdim=12), "decoder.layers.1.multihead_attn: kdim=12 cannot"),
    "vdim": (lambda: _other_attention(vdim=12), "vdim=12 cannot"),
    "bias_kv": (lambda: _other_attention(add_bias_kv=True), "add_bias_kv=True"),
    "zero_attn": (lambda: _other_attention(add_zero_attn=True), "add_zero_attn=True"),
    "heads differ": (
        lambda: _changed(lambda t: setattr(t.decoder.layers[0].self_attn, "num_heads", 4)),
        r"layers differ.*decoder_attention_heads.*'2', '4'",
    ),
    "dropout differs": (lambda: _changed(lambda t: setattr(t.decoder.layers[0].dropout1, "p", 0.7)), "'0.1', '0.7'"),
    "norm first differs": (
        lambda: _changed(lambda t: setattr(t.decoder.layers[0], "norm_first", False)),
        "layers differ",
    ),
    "eps differs": (lambda: _changed(lambda t: setattr(t.encoder.norm, "eps", 0.1)), "layer_norm_eps"),
    "activation": (lambda: make(activation=torch.tanh), "activation=.*tanh.* is not known"),
    "tanh gelu": (lambda: make(activation=nn.GELU(approximate="tanh")), "activation=GELU.*tanh"),
    "other final norm": (
        lambda: _changed(lambda t: setattr(t.encoder, "norm", nn.RMSNorm(D))),
        "encoder.norm is a RMSNorm",
    ),
    "subclass": (
        lambda: type("Mine", (nn.Transformer,), {})(D, 4, 1, 1, 8, batch_first=True),
        "transformer is a Mine",
    ),
    "more parameters": (
        lambda: _changed(lambda t: t.encoder.layers[0].register_parameter("extra", nn.Parameter(torch.ones(1)))),
        "unknown: encoder.layers.0.extra",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_this_class_cannot_express_is_refused(case):
    build, message = REFUSED[case]
    with pytest.raises(ConversionError, match=message):
        from_torch_nn(build(), matrix(SOURCE_SIZE, D, seed=1), **IDS)


def test_misshapen_and_contradicting_arguments_are_refused():
    transformer, source = make(), matrix(SOURCE_SIZE, D, seed=1)
    with pytest.raises(ConversionError, match=r"wrong shape: target_embedding is \[37, 8\], \[37, 16\]"):
        from_torch_nn(transformer, source, matrix(TARGET_SIZE, 8, seed=2), **IDS)
    with pytest.raises(ConversionError, match=r"wrong shape: output_bias is \[1, 3\], \[1, 50\]"):
        from_torch_nn(transformer, source, output_bias=matrix(3, seed=2), **IDS)
    with pytest.raises(ConversionError, match="norm_position: this is read"):
        from_torch_nn(transformer, source, norm_position="pre", **IDS)
    with pytest.raises(ConversionError, match=r"missing: model\.encoder\.embed_positions\.weight"):
        from_torch_nn(transformer, source, position_embedding_type="learned", **IDS)
    with pytest.raises(ConversionError, match="pad_token_id=99 is outside"):
        from_torch_nn(transformer, source, **{**IDS, "pad_token_id": 99})


# ---------------------------------------------------------------------------------------- files


def tutorial_state(norm_first=True) -> dict[str, Tensor]:
    """A state dict of the model class of PyTorch's translation tutorial, by its published names."""
    state = {f"transformer.{name}": tensor for name, tensor in make(norm_first).state_dict().items()}
    rows = [[(math.sin, math.cos)[c % 2](p / 10000 ** (c // 2 * 2 / D)) for c in range(D)] for p in range(100)]
    return {
        **state,
        "generator.weight": matrix(TARGET_SIZE, D, seed=3),
        "generator.bias": matrix(TARGET_SIZE, seed=4),
        "src_tok_emb.embedding.weight": matrix(SOURCE_SIZE, D, seed=1),
        "tgt_tok_emb.embedding.weight": matrix(TARGET_SIZE, D, seed=2),
        "positional_encoding.pos_embedding": torch.tensor(rows)[:, None],
    }


OPTIONS = {"encoder_attention_heads": 4, "decoder_attention_heads": 2, "norm_position": "pre", **IDS}


def test_the_tutorials_state_dict_reads(tmp_path):
    torch.save(tutorial_state(), tmp_path / "model.pth")
    model, tokenizer = read(tmp_path / "model.pth", **OPTIONS)
    parts = matrix(SOURCE_SIZE, D, seed=1), matrix(TARGET_SIZE, D, seed=2), matrix(TARGET_SIZE, D, seed=3)
    expected = logits_of_torch(make(True), *parts, matrix(TARGET_SIZE, seed=4))
    torch.testing.assert_close(logits_of(model), expected, atol=1e-10, rtol=0)
    assert tokenizer is None
    assert model.config.layer_norm_eps == 1e-5
    assert (model.config.dropout, model.config.attention_dropout, model.config.activation_dropout) == (0.1, 0.1, 0.1)


def test_the_tutorials_own_model_reads(tmp_path):
    # Which is `nn.Transformer` with its defaults: post-norm, and final norms.
    state = tutorial_state() | {f"transformer.{k}": v for k, v in make(norm=True).state_dict().items()}
    torch.save(state, tmp_path / "model.pth")
    model, _ = read(tmp_path / "model.pth", **OPTIONS | {"norm_position": "post"})
    parts = matrix(SOURCE_SIZE, D, seed=1), matrix(TARGET_SIZE, D, seed=2), matrix(TARGET_SIZE, D, seed=3)
    expected = logits_of_torch(make(norm=True), *parts, matrix(TARGET_SIZE, seed=4))
    torch.testing.assert_close(logits_of(model), expected, atol=1e-10, rtol=0)


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (lambda s: s, {"norm_position": None}, "does not say norm_position"),
        (lambda s: s.update(extra=torch.ones(1)), {}, "unknown: extra"),
        (lambda s: s.pop("transformer.encoder.layers.1.linear1.bias"), {}, "missing: encoder.layers.1.linear1.bias"),
        (lambda s: s.pop("transformer.decoder.layers.0.self_attn.in_proj_bias"), {}, r"missing: .*in_proj_bias\[q\]"),
        (
            lambda s: s.update({"transformer.encoder.norm.weight": torch.ones(3)}),
            {},
            "wrong shape: encoder.norm.weight",
        ),
        (
            lambda s: s.update({"transformer.encoder.layers.0.self_attn.in_proj_weight": torch.ones(47, D)}),
            {},
            "cannot be split",
        ),
        (lambda s: s.update({"positional_encoding.pos_embedding": torch.rand(100, 1, D)}), {}, "does not hold"),
        (lambda s: s, {"vocab_size": 3}, "vocab_size: this is read"),
    ],
)
def test_a_file_that_does_not_fit_is_refused(tmp_path, change, options, message):
    state = tutorial_state()
    change(state)
    torch.save(state, tmp_path / "model.pth")
    with pytest.raises(ConversionError, match=message):
        read(tmp_path / "model.pth", **{**OPTIONS, **options})


class Bomb:
    def __init__(self, mark) -> None:
        self.mark = mark

    def __reduce__(self):
        return (type(self.mark).touch, (self.mark,))


def test_a_hostile_or_whole_pickled_file_is_refused_unexecuted(tmp_path):
    mark = tmp_path / "mark"
    torch.save({**tutorial_state(), "extra": Bomb(mark)}, tmp_path / "bomb.pth")
    torch.save(make(), tmp_path / "model.pth")
    for name in ("bomb", "model"):
        with pytest.raises(ConversionError, match="nothing in it was executed: it asks for"):
            read(tmp_path / f"{name}.pth", **OPTIONS)
    assert not mark.exists()


def test_a_folder_goes_out_and_comes_back(make_model, tmp_path):
    model = make_model(
        vocab_size=300,
        norm_position="pre",
        dropout=0.2,
        position_embedding_type="sinusoidal_tensor2tensor",
        scale_embedding=False,
    )
    tokenizer = train_tokenizer(["a b"], vocab_size=259)
    write(model, tokenizer, tmp_path / "out")
    back, tokens = read(tmp_path / "out")
    assert back.config.to_dict() == model.config.to_dict()
    assert all(torch.equal(tensor, back.state_dict()[name]) for name, tensor in model.state_dict().items())
    assert tokens("ab")["input_ids"] == tokenizer("ab")["input_ids"]
    assert json.loads((tmp_path / "out" / "torch_nn.json").read_text())["encoder_attention_heads"] == 4
    with pytest.raises(ConversionError, match="is not an empty folder"):
        write(model, tokenizer, tmp_path / "out")
    with pytest.raises(ConversionError, match=r"has no torch_nn\.json"):
        read(tmp_path)
