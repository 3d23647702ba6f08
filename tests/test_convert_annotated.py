"""The converter from the Annotated Transformer's layout, against its published formulas written down anew here."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from vanilla_transformer.convert.annotated import from_annotated, layer_norm_difference, read
from vanilla_transformer.convert.renaming import ConversionError

HEADS = 4
SHAPE = {"d_model": 16, "encoder_layers": 2, "decoder_layers": 3, "encoder_ffn": 24, "decoder_ffn": 40}


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.a_2, self.b_2 = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        deviation = ((centred**2).sum(-1, keepdim=True) / (x.shape[-1] - 1)).sqrt()
        return self.a_2 * centred / (deviation + 1e-6) + self.b_2


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(width, width) for _ in range(4))

    def forward(self, query: Tensor, memory: Tensor, mask: Tensor) -> Tensor:
        batch, _, width = query.shape
        q, k, v = (
            linear(x).reshape(batch, -1, HEADS, width // HEADS).permute(0, 2, 1, 3)
            for linear, x in zip(self.linears, (query, memory, memory), strict=False)
        )
        scores = q @ k.mT / math.sqrt(width // HEADS)
        weights = scores.masked_fill(~mask[:, None], -1e9).softmax(-1)
        return self.linears[3]((weights @ v).permute(0, 2, 1, 3).reshape(batch, -1, width))


class FeedForward(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.w_1, self.w_2 = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.w_2(self.w_1(x).clamp(min=0))


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = Norm(width)

    def forward(self, x: Tensor, function) -> Tensor:
        return x + function(self.norm(x))


class Layer(nn.Module):
    def __init__(self, width: int, inner: int, is_decoder: bool) -> None:
        super().__init__()
        self.self_attn = Attention(width)
        if is_decoder:
            self.src_attn = Attention(width)
        self.feed_forward = FeedForward(width, inner)
        self.sublayer = nn.ModuleList(Residual(width) for _ in range(3 if is_decoder else 2))

    def forward(self, x: Tensor, mask: Tensor, memory: Tensor | None = None, source_mask: Tensor | None = None):
        x = self.sublayer[0](x, lambda y: self.self_attn(y, y, mask))
        if memory is not None:
            x = self.sublayer[1](x, lambda y: self.src_attn(y, memory, source_mask))
        return self.sublayer[-1](x, self.feed_forward)


class Stack(nn.Module):
    def __init__(self, width: int, inner: int, layers: int, is_decoder: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width, inner, is_decoder) for _ in range(layers))
        self.norm = Norm(width)

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, *others)
        return self.norm(x)


class Lut(nn.Module):
    def __init__(self, width: int, vocab: int) -> None:
        super().__init__()
        self.lut = nn.Embedding(vocab, width)

    def forward(self, ids: Tensor) -> Tensor:
        return self.lut(ids) * math.sqrt(self.lut.embedding_dim)


class Positions(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        rows = [
            [(math.sin, math.cos)[c % 2](p / 10000 ** (c // 2 * 2 / width)) for c in range(width)] for p in range(60)
        ]
        self.register_buffer("pe", torch.tensor(rows, dtype=torch.float64)[None])

    def forward(self, x: Tensor) -> Tensor:
        return x + self.pe[:, : x.shape[1]]


class Generator(nn.Module):
    def __init__(self, width: int, vocab: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, vocab)


class AnnotatedTransformer(nn.Module):
    """The published layout and formulas, in our own words."""

    def __init__(self, vocab=(37, 29), shape=SHAPE) -> None:
        super().__init__()
        width = shape["d_model"]
        self.encoder = Stack(width, shape["encoder_ffn"], shape["encoder_layers"], is_decoder=False)
        self.decoder = Stack(width, shape["decoder_ffn"], shape["decoder_layers"], is_decoder=True)
        self.src_embed = nn.Sequential(Lut(width, vocab[0]), Positions(width))
        self.tgt_embed = nn.Sequential(Lut(width, vocab[1]), Positions(width))
        self.generator = Generator(width, vocab[1])
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                is_gain = name.endswith("a_2")
                parameter.copy_(torch.randn_like(parameter) * (0.2 if is_gain else 0.4) + is_gain)

    def forward(self, source: Tensor, source_mask: Tensor, target: Tensor) -> Tensor:
        keys = source_mask.bool()[:, None, :]
        memory = self.encoder(self.src_embed(source), keys)
        causal = torch.ones(target.shape[1], target.shape[1], dtype=torch.bool).tril()[None]
        return self.generator.proj(self.decoder(self.tgt_embed(target), causal, memory, keys))


def make(vocab=(37, 29), sharing="separate", dtype=torch.float64) -> AnnotatedTransformer:
    torch.manual_seed(0)
    model = AnnotatedTransformer(vocab).to(dtype)
    if sharing == "tied":
        model.tgt_embed[0].lut.weight = model.src_embed[0].lut.weight = model.generator.proj.weight
    return model.eval()


SOURCE = torch.tensor([[5, 6, 7, 8, 9, 1], [10, 11, 1, 2, 2, 2]])
MASK = SOURCE.ne(2).long()
TARGET = torch.tensor([[0, 5, 6, 7], [0, 9, 8, 7]])


def logits_of(model) -> Tensor:
    with torch.no_grad():
        return model(input_ids=SOURCE, attention_mask=MASK, decoder_input_ids=TARGET).logits


@pytest.mark.parametrize(("vocab", "sharing"), [((37, 29), "separate"), ((37, 37), "separate"), ((31, 31), "tied")])
def test_logits_equal_up_to_the_place_of_epsilon(vocab, sharing):
    theirs = make(vocab, sharing)
    with pytest.warns(UserWarning, match="the logits of the converted model differ by"):
        ours = from_annotated(theirs.state_dict(), heads=HEADS, allow_layer_norm=True)
    with torch.no_grad():
        expected = theirs(SOURCE, MASK, TARGET)
    assert ours.dtype == torch.float64
    assert expected.abs().max() > 3
    torch.testing.assert_close(logits_of(ours), expected, atol=3e-5, rtol=0)
    assert ours.config.tie_word_embeddings == ours.config.share_encoder_decoder_embeddings == (sharing == "tied")


def test_nothing_but_the_place_of_epsilon_remains(monkeypatch):
    # With an epsilon of nothing theirs is an ordinary LayerNorm: then the two are equal to the last digits.
    monkeypatch.setattr(
        Norm,
        "forward",
        lambda norm, x: norm.a_2 * (x - x.mean(-1, keepdim=True)) / x.std(-1, keepdim=True) + norm.b_2,
    )
    theirs = make()
    with pytest.warns(UserWarning, match="ε=0 "):
        ours = from_annotated(theirs.state_dict(), heads=HEADS, allow_layer_norm=True, layer_norm_eps=0.0)
    with torch.no_grad():
        torch.testing.assert_close(logits_of(ours), theirs(SOURCE, MASK, TARGET), atol=1e-9, rtol=0)


def test_the_reported_difference_is_the_one_to_the_foreign_model():
    theirs = make()
    with pytest.warns(UserWarning, match="Annotated Transformer"):
        ours = from_annotated(theirs.state_dict(), heads=HEADS, allow_layer_norm=True)
    generator = torch.Generator().manual_seed(0)
    source = torch.randint(37, (4, 16), generator=generator)
    target = torch.randint(29, (4, 16), generator=generator)
    with torch.no_grad():
        expected = theirs(source, torch.ones_like(source), target)
        logits = ours(input_ids=source, decoder_input_ids=target).logits
    difference, largest = layer_norm_difference(ours)
    assert difference == pytest.approx(float((logits - expected).abs().max()), rel=0.05)
    assert 1e-8 < difference < 1e-4
    assert largest == pytest.approx(float(expected.abs().max()), rel=1e-5)


def test_without_consent_the_layer_norm_is_refused_with_its_size():
    with pytest.raises(ConversionError, match=r"differ by \d\.\de-\d+ at most .* allow_layer_norm=True"):
        from_annotated(make().state_dict(), heads=HEADS)


def test_the_config_holds_what_the_layout_means():
    with pytest.warns(UserWarning, match="Annotated Transformer"):
        config = from_annotated(
            make().state_dict(), heads=HEADS, allow_layer_norm=True, dropout=0.2, label_smoothing=0.3
        ).config
    expected = {
        "vocab_size": 37,
        "decoder_vocab_size": 29,
        "d_model": 16,
        "encoder_layers": 2,
        "decoder_layers": 3,
        "encoder_ffn_dim": 24,
        "decoder_ffn_dim": 40,
        "encoder_attention_heads": HEADS,
        "decoder_attention_heads": HEADS,
        "norm_position": "pre",
        "position_embedding_type": "sinusoidal",
        "sinusoid_layout": "interleaved",
        "scale_embedding": True,
        "attention_bias": True,
        "output_bias": True,
        "activation_function": "relu",
        "dropout": 0.2,
        "activation_dropout": 0.2,
        "attention_dropout": 0.1,
        "label_smoothing": 0.3,
        "pad_token_id": 2,
        "eos_token_id": 1,
        "bos_token_id": 0,
        "decoder_start_token_id": 0,
    }
    assert {name: getattr(config, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.update(extra=torch.zeros(1)), "unknown: extra"),
        (lambda state: state.pop("decoder.layers.2.src_attn.linears.1.bias"), "missing: decoder.layers.2.src_attn"),
        (
            lambda state: state.update({"encoder.layers.1.sublayer.0.norm.a_2": torch.ones(15)}),
            r"wrong shape: encoder.layers.1.sublayer.0.norm.a_2 is \[15\], \[16\] is needed",
        ),
        (lambda state: state.pop("src_embed.0.lut.weight"), "no src_embed.0.lut.weight"),
        (lambda state: state.update({"src_embed.0.lut.weight": torch.zeros(3)}), "2 axes are needed"),
        (lambda state: state.update({"src_embed.1.pe": torch.rand(1, 60, 16)}), "src_embed.1.pe .* does not hold"),
        (lambda state: [state.pop(name) for name in list(state) if "encoder.layers.0." in name], r"found: \[1\]"),
        (
            lambda state: state.update({name: t.long() for name, t in state.items() if not name.endswith(".pe")}),
            "are torch.int64",
        ),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    state = make().state_dict()
    change(state)
    with pytest.raises(ConversionError, match=message):
        from_annotated(state, heads=HEADS, allow_layer_norm=True)


def test_heads_that_do_not_divide_and_fields_that_are_read_are_refused():
    state = make().state_dict()
    with pytest.raises(ConversionError, match="d_model=16 is not divisible by encoder_attention_heads=3"):
        from_annotated(state, heads=3, allow_layer_norm=True)
    with pytest.raises(ConversionError, match="norm_position: this is read"):
        from_annotated(state, heads=HEADS, allow_layer_norm=True, norm_position="post")


def test_a_file_reads_as_its_state_dict(tmp_path):
    state = make(dtype=torch.float32).state_dict()
    torch.save(state, tmp_path / "model.pt")
    with pytest.warns(UserWarning, match="Annotated Transformer"):
        model, tokenizer = read(tmp_path / "model.pt", heads=HEADS, allow_layer_norm=True)
    with pytest.warns(UserWarning, match="Annotated Transformer"):
        expected = from_annotated(state, heads=HEADS, allow_layer_norm=True)
    assert tokenizer is None
    assert model.dtype == torch.float32
    assert torch.equal(logits_of(model), logits_of(expected))


class Bomb:
    def __init__(self, mark) -> None:
        self.mark = mark

    def __reduce__(self):
        return (type(self.mark).touch, (self.mark,))


@pytest.mark.parametrize("content", ["bomb", "model", "list", "half"])
def test_a_file_that_is_more_or_less_than_a_state_dict_is_refused_unexecuted(tmp_path, content):
    path, mark = tmp_path / "model.pt", tmp_path / "mark"
    contents = {"bomb": {"w": Bomb(mark)}, "model": nn.Linear(2, 2), "list": [torch.ones(1)], "half": {}}
    torch.save(contents[content], path)
    if content == "half":
        path.write_bytes(path.read_bytes()[:100])
    message = "holds a list and no state dict" if content == "list" else "nothing in it was executed"
    with pytest.raises(ConversionError, match=message):
        read(path, heads=HEADS)
    assert not mark.exists()
    with pytest.raises(ConversionError, match="is not a file"):
        read(tmp_path / "none.pt", heads=HEADS)
