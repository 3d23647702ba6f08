"""The converter from OpenNMT-py, against its layout and formulas written down anew here.

The layout (names, shapes, options, classes in the pickles) is that of releases 1.2.0, 2.3.0 and 3.5.1.
"""

from __future__ import annotations

import math
import sys
import types
from argparse import Namespace
from functools import partial

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from vanilla_transformer.convert.opennmt import from_opennmt, read
from vanilla_transformer.convert.opennmt_vocabulary import STAND_INS, vocabularies
from vanilla_transformer.convert.reading import load_torch_file
from vanilla_transformer.convert.renaming import ConversionError

D, HEADS = 16, 4
SPECIAL = ["<unk>", "<blank>", "<s>", "</s>"]
PAD, BOS, EOS = 1, 2, 3
SOURCE_TOKENS = SPECIAL + [f"w{n}" for n in range(33)]
TARGET_TOKENS = SPECIAL + [f"t{n}" for n in range(25)]


class Attention(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        for name in ("linear_keys", "linear_values", "linear_query", "final_linear"):
            setattr(self, name, nn.Linear(D, D, bias=bias))

    def forward(self, query: Tensor, memory: Tensor, hidden: Tensor) -> Tensor:
        def split(x: Tensor) -> Tensor:
            return x.reshape(len(x), -1, HEADS, D // HEADS).transpose(1, 2)

        q, k, v = split(self.linear_query(query)), split(self.linear_keys(memory)), split(self.linear_values(memory))
        scores = (q / math.sqrt(D // HEADS)) @ k.mT
        weights = scores.masked_fill(hidden, -1e18).softmax(-1)
        return self.final_linear((weights @ v).transpose(1, 2).reshape(len(query), -1, D))


class FeedForward(nn.Module):
    def __init__(self, inner: int, bias: bool, eps: float, activation) -> None:
        super().__init__()
        self.w_1, self.w_2 = nn.Linear(D, inner, bias=bias), nn.Linear(inner, D, bias=bias)
        self.layer_norm = nn.LayerNorm(D, eps=eps)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return x + self.w_2(self.activation(self.w_1(self.layer_norm(x))))


class EncoderLayer(nn.Module):
    def __init__(self, inner: int, bias: bool, ffn_bias: bool, eps: float, activation) -> None:
        super().__init__()
        self.self_attn = Attention(bias)
        self.feed_forward = FeedForward(inner, ffn_bias, eps, activation)
        self.layer_norm = nn.LayerNorm(D, eps=eps)

    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        y = self.layer_norm(x)
        return self.feed_forward(x + self.self_attn(y, y, hidden))


class DecoderLayer(nn.Module):
    def __init__(self, inner: int, bias: bool, ffn_bias: bool, eps: float, activation) -> None:
        super().__init__()
        self.self_attn, self.context_attn = Attention(bias), Attention(bias)
        self.feed_forward = FeedForward(inner, ffn_bias, eps, activation)
        self.layer_norm_1, self.layer_norm_2 = nn.LayerNorm(D, eps=eps), nn.LayerNorm(D, eps=eps)

    def forward(self, x: Tensor, memory: Tensor, hidden: Tensor) -> Tensor:
        y = self.layer_norm_1(x)
        future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        x = x + self.self_attn(y, y, future)
        return self.feed_forward(x + self.context_attn(self.layer_norm_2(x), memory, hidden))


class Positions(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        half = D // 2
        steps = half if kind == "SinusoidalInterleaved" else half - 1
        angles = torch.arange(60.0)[:, None] * 10_000.0 ** (-torch.arange(half) / steps)
        pair = [angles.sin(), angles.cos()]
        table = torch.stack(pair, -1).flatten(1) if kind == "SinusoidalInterleaved" else torch.cat(pair, 1)
        self.register_buffer("pe", table[:, None])

    def forward(self, embedded: Tensor) -> Tensor:
        return embedded * math.sqrt(D) + self.pe[: embedded.shape[1], 0]


class Embeddings(nn.Module):
    def __init__(self, size: int, positions: str) -> None:
        super().__init__()
        self.make_embedding = nn.Sequential()
        self.make_embedding.add_module("emb_luts", nn.ModuleList([nn.Embedding(size, D)]))
        self.make_embedding.add_module("pe", Positions(positions))

    def forward(self, ids: Tensor) -> Tensor:
        return self.make_embedding.pe(self.make_embedding.emb_luts[0](ids))


class Encoder(nn.Module):
    def __init__(self, size: int, layers: int, positions: str, **options) -> None:
        super().__init__()
        self.embeddings = Embeddings(size, positions)
        self.transformer = nn.ModuleList(EncoderLayer(24, **options) for _ in range(layers))
        self.layer_norm = nn.LayerNorm(D, eps=options["eps"])


class Decoder(nn.Module):
    def __init__(self, size: int, layers: int, positions: str, **options) -> None:
        super().__init__()
        self.embeddings = Embeddings(size, positions)
        self.transformer_layers = nn.ModuleList(DecoderLayer(40, **options) for _ in range(layers))
        self.layer_norm = nn.LayerNorm(D, eps=options["eps"])


class OpenNMT(nn.Module):
    def __init__(
        self, bias=True, ffn_bias=True, eps=1e-6, gelu=False, positions="SinusoidalInterleaved", shared=False
    ):
        super().__init__()
        activation = nn.functional.gelu if gelu else nn.functional.relu
        options = {"bias": bias, "ffn_bias": ffn_bias, "eps": eps, "activation": activation}
        target_size = len(SOURCE_TOKENS if shared else TARGET_TOKENS)
        self.encoder = Encoder(len(SOURCE_TOKENS), 2, positions, **options)
        self.decoder = Decoder(target_size, 3, positions, **options)
        self.generator = nn.Linear(D, target_size)
        torch.manual_seed(0)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                is_gain = "norm" in name and name.endswith("weight")
                parameter.copy_(torch.randn_like(parameter) * (0.2 if is_gain else 0.4) + is_gain)
        if shared:
            table = self.encoder.embeddings.make_embedding.emb_luts[0].weight
            self.decoder.embeddings.make_embedding.emb_luts[0].weight = self.generator.weight = table
        self.double().eval()

    @torch.no_grad()
    def forward(self, source: Tensor, mask: Tensor, target: Tensor) -> Tensor:
        hidden = mask.eq(0)[:, None, None]
        memory = self.encoder.embeddings(source)
        for layer in self.encoder.transformer:
            memory = layer(memory, hidden)
        memory = self.encoder.layer_norm(memory)
        states = self.decoder.embeddings(target)
        for layer in self.decoder.transformer_layers:
            states = layer(states, memory, hidden)
        return self.generator(self.decoder.layer_norm(states))


OPTIONS = {
    "model_type": "text",
    "encoder_type": "transformer",
    "decoder_type": "transformer",
    "position_encoding": True,
    "heads": HEADS,
    "enc_layers": 2,
    "dec_layers": 3,
    "transformer_ff": 24,
    "self_attn_type": "scaled-dot",
    "max_relative_positions": 0,
    "copy_attn": False,
    "generator_function": "softmax",
    "dropout": [0.2],
    "attention_dropout": [0.1],
    "label_smoothing": 0.05,
}


def checkpoint_of(model: OpenNMT, generator_prefix="", source=SOURCE_TOKENS, target=TARGET_TOKENS, **options) -> dict:
    state = model.state_dict()
    return {
        "model": {name: tensor for name, tensor in state.items() if "generator" not in name},
        "generator": {f"{generator_prefix}{kind}": state[f"generator.{kind}"] for kind in ("weight", "bias")},
        "vocab": {"src": source, "tgt": target, "data_task": "seq2seq", "decoder_start_token": "<s>"},
        "opt": Namespace(**{**OPTIONS, **options}),
        "optim": {"training_step": 5},
    }


SOURCE = torch.tensor([[5, 6, 7, 8, 9], [10, 11, 12, PAD, PAD]])
MASK = SOURCE.ne(PAD).long()
TARGET = torch.tensor([[BOS, 5, 6, 7], [BOS, 9, 8, 7]])


@torch.no_grad()
def logits_of(model) -> Tensor:
    return model(input_ids=SOURCE, attention_mask=MASK, decoder_input_ids=TARGET).logits


CASES = {
    "version 1": ({}, {}, "0."),
    "version 3": (
        {"bias": False, "ffn_bias": False, "eps": 1e-3},
        {"norm_eps": 1e-3, "add_ffnbias": False, "self_attn_type": "scaled-dot-flash", "num_kv": 0},
        "",
    ),
    "concatenated sinusoids, gelu": (
        {"positions": "SinusoidalConcat", "gelu": True},
        {"position_encoding_type": "SinusoidalConcat", "pos_ffn_activation_fn": "gelu"},
        "",
    ),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("shared", [False, True])
def test_logits_equal_the_formulas(case, shared):
    shape, options, prefix = CASES[case]
    theirs = OpenNMT(**shape, shared=shared)
    target = SOURCE_TOKENS if shared else TARGET_TOKENS
    ours = from_opennmt(checkpoint_of(theirs, prefix, target=target, **options))
    expected = theirs(SOURCE, MASK, TARGET)
    assert expected.abs().max() > 3
    # Its sinusoids are a float32 buffer, ours are not.
    torch.testing.assert_close(logits_of(ours), expected, atol=2e-6, rtol=0)
    assert ours.config.tie_word_embeddings is ours.config.share_encoder_decoder_embeddings is shared


def test_the_config_holds_the_options():
    config = from_opennmt(checkpoint_of(OpenNMT())).config
    expected = {
        "vocab_size": 37,
        "decoder_vocab_size": 29,
        "d_model": D,
        "encoder_layers": 2,
        "decoder_layers": 3,
        "encoder_attention_heads": HEADS,
        "decoder_attention_heads": HEADS,
        "encoder_ffn_dim": 24,
        "decoder_ffn_dim": 40,
        "norm_position": "pre",
        "layer_norm_eps": 1e-6,
        "activation_function": "relu",
        "dropout": 0.2,
        "activation_dropout": 0.2,
        "attention_dropout": 0.1,
        "label_smoothing": 0.05,
        "position_embedding_type": "sinusoidal",
        "scale_embedding": True,
        "attention_bias": True,
        "output_bias": True,
        "pad_token_id": PAD,
        "eos_token_id": EOS,
        "bos_token_id": BOS,
        "decoder_start_token_id": BOS,
    }
    assert {name: getattr(config, name) for name in expected} == expected
    old = checkpoint_of(OpenNMT(), dropout=[0.4, 0.3], label_smoothing=0.0)
    del old["opt"].attention_dropout  # releases before 1.0 had one rate
    config = from_opennmt(old).config
    assert (config.dropout, config.attention_dropout, config.label_smoothing) == (0.3, 0.3, 0.0)


def test_another_start_token_is_carried():
    checkpoint = checkpoint_of(OpenNMT())
    checkpoint["vocab"]["decoder_start_token"] = "</s>"
    config = from_opennmt(checkpoint).config
    assert (config.decoder_start_token_id, config.bos_token_id) == (EOS, BOS)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model_type", "audio"),
        ("model_task", "lm"),
        ("encoder_type", "brnn"),
        ("decoder_type", "rnn"),
        ("position_encoding", False),
        ("position_encoding_type", "Learned"),
        ("pos_ffn_activation_fn", "silu"),
        ("pos_ffn_activation_fn", "gated-gelu"),
        ("self_attn_type", "average"),
        ("layer_norm", "rms"),
        ("max_relative_positions", 20),
        ("max_relative_positions", -1),
        ("relative_positions_buckets", 32),
        ("num_kv", 1),
        ("multiquery", True),
        ("parallel_residual", True),
        ("shared_layer_norm", True),
        ("sliding_window", 128),
        ("num_experts", 8),
        ("copy_attn", True),
        ("coverage_attn", True),
        ("generator_function", "sparsemax"),
        ("lora_layers", ["linear_query"]),
        ("lora_embedding", True),
        ("quant_layers", ["w_1"]),
        ("n_src_feats", 1),
    ],
)
def test_options_that_cannot_be_expressed_are_refused_by_name(name, value):
    with pytest.raises(ConversionError, match=f"^{name}=.*cannot be expressed"):
        from_opennmt(checkpoint_of(OpenNMT(), **{name: value}))


LAYER = "decoder.transformer_layers.2"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c["model"].update(extra=torch.ones(1)), "unknown: extra"),
        (lambda c: c["model"].pop(f"{LAYER}.context_attn.linear_keys.weight"), f"missing: {LAYER}.context_attn"),
        (lambda c: c["model"].pop(f"{LAYER}.feed_forward.w_1.bias"), f"missing: {LAYER}.feed_forward.w_1.bias"),
        (
            lambda c: c["model"].update({f"{LAYER}.layer_norm_2.bias": torch.ones(3)}),
            r"wrong shape: .* is \[3\], \[16\]",
        ),
        (lambda c: c["generator"].update(bias=torch.ones(3)), r"wrong shape: generator.bias is \[1, 3\], \[1, 29\]"),
        (
            lambda c: c["model"].update({"encoder.embeddings.make_embedding.pe.pe": torch.rand(60, 1, D)}),
            "does not hold the sinusoidal position encodings",
        ),
        (
            lambda c: setattr(c["opt"], "position_encoding_type", "SinusoidalConcat"),
            "does not hold the sinusoidal_tensor2",
        ),
        (lambda c: c.pop("vocab"), "The checkpoint has no vocab"),
        (lambda c: c.update(generator={}), "'generator' of the checkpoint holds no tensors"),
        (lambda c: c.update(opt=5), "'opt' of the checkpoint is a int"),
        (lambda c: delattr(c["opt"], "heads"), "has no heads"),
        (lambda c: setattr(c["opt"], "heads", 3), "OpenNMT-py model cannot be expressed: d_model=16 is not divisible"),
        (lambda c: setattr(c["opt"], "dec_layers", 6), "dec_layers=6, and the tensors have 3 layers"),
        (lambda c: setattr(c["opt"], "dropout", [1.5]), r"dropout=1\.5"),
        (lambda c: c["vocab"].update(src=SOURCE_TOKENS[:-1]), "src vocabulary has 36 tokens, and its embeddings 37"),
        (lambda c: c["vocab"].update(src_feats=[["a"]]), "src_feats: features"),
        (lambda c: c["vocab"].update(src=None), "'src' in 'vocab' of the checkpoint is a NoneType without tokens"),
        (lambda c: c["vocab"].update(tgt=["a", *TARGET_TOKENS[:1], *TARGET_TOKENS[2:]]), "vocabulary has no <blank>"),
        (
            lambda c: c["vocab"].update(tgt=[*TARGET_TOKENS[1:], "<unk>"]),
            "pad_token_id: <blank> has id 1 in the source",
        ),
        (lambda c: c.update(vocab=[]), "'vocab' of the checkpoint is a list"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    checkpoint = checkpoint_of(OpenNMT())
    change(checkpoint)
    with pytest.raises(ConversionError, match=message):
        from_opennmt(checkpoint)


# ---------------------------------------------------------------------------------------- files


def test_a_file_of_version_3_reads_with_a_tokenizer(tmp_path):
    theirs = OpenNMT(shared=True)
    torch.save(checkpoint_of(theirs, target=SOURCE_TOKENS), tmp_path / "model.pt")
    model, tokenizer = read(tmp_path / "model.pt")
    torch.testing.assert_close(logits_of(model), theirs(SOURCE, MASK, TARGET), atol=2e-6, rtol=0)
    assert tokenizer("w3  w1 never w0")["input_ids"] == [7, 5, 0, 4]
    assert tokenizer.decode([7, 5, EOS], skip_special_tokens=True) == "w3 w1"
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (PAD, BOS, EOS)


def test_weights_in_a_safetensors_file_beside_it(tmp_path):
    theirs = OpenNMT()
    checkpoint = checkpoint_of(theirs)
    save_file(theirs.state_dict(), tmp_path / "model.safetensors")
    torch.save({name: checkpoint[name] for name in ("vocab", "opt", "optim")}, tmp_path / "model.pt")
    model, tokenizer = read(tmp_path / "model.pt")
    torch.testing.assert_close(logits_of(model), theirs(SOURCE, MASK, TARGET), atol=2e-6, rtol=0)
    assert tokenizer is None
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ConversionError, match="The checkpoint has no model, generator"):
        read(tmp_path / "model.pt")


@pytest.fixture
def torchtext(monkeypatch):
    """Classes and functions by the names in the pickles of versions 1 and 2, for as long as the file is written."""

    def module(name: str, **members) -> types.ModuleType:
        made = types.ModuleType(name)
        for member_name, member in members.items():
            member.__module__, member.__qualname__ = name, member_name
            setattr(made, member_name, member)
        monkeypatch.setitem(sys.modules, name, made)
        return made

    class Plain:
        def __init__(self, **state) -> None:
            self.__dict__.update(state)

    kinds = [type(name, (Plain,), {}) for name in ("Field", "Vocab", "TextMultiField")]
    for name in ("torchtext", "torchtext.data", "onmt", "onmt.inputters"):
        module(name)
    return types.SimpleNamespace(
        field=module("torchtext.data.field", Field=kinds[0]),
        vocab=module("torchtext.vocab", Vocab=kinds[1]),
        data=module("torchtext.data.utils", _split_tokenizer=lambda x: x.split()),
        text=module("onmt.inputters.text_dataset", TextMultiField=kinds[2], _feature_tokenize=lambda x: x.split()),
    )


def old_vocabulary(torchtext, **tokens) -> dict:
    """The "vocab" of versions 1 and 2: fields that hold a vocabulary and how to cut a line."""

    def field(itos: list[str]):
        vocab = torchtext.vocab.Vocab(itos=itos, stoi={token: n for n, token in enumerate(itos)}, vectors=None)
        cut = partial(torchtext.text._feature_tokenize, layer=0, truncate=None, feat_delim=None)
        return torchtext.field.Field(vocab=vocab, tokenize=cut, dtype=torch.long, pad_token="<blank>")

    fields = {side: torchtext.text.TextMultiField(fields=[(side, field(itos))]) for side, itos in tokens.items()}
    return {**fields, "indices": torchtext.field.Field(use_vocab=False, tokenize=torchtext.data._split_tokenizer)}


def test_a_file_of_versions_1_and_2_reads_without_torchtext(tmp_path, torchtext, monkeypatch):
    theirs = OpenNMT()
    checkpoint = checkpoint_of(theirs, "0.")
    checkpoint["vocab"] = old_vocabulary(torchtext, src=SOURCE_TOKENS, tgt=TARGET_TOKENS)
    torch.save(checkpoint, tmp_path / "model.pt")
    expected = from_opennmt(checkpoint)  # who loaded it with OpenNMT-py has its own objects
    assert vocabularies(checkpoint["vocab"]) == (SOURCE_TOKENS, TARGET_TOKENS)
    monkeypatch.undo()
    assert "torchtext" not in sys.modules
    model, tokenizer = read(tmp_path / "model.pt")
    assert torch.equal(logits_of(model), logits_of(expected))
    torch.testing.assert_close(logits_of(model), theirs(SOURCE, MASK, TARGET), atol=2e-6, rtol=0)
    assert (tokenizer, model.config.pad_token_id, model.config.eos_token_id) == (None, PAD, EOS)


def test_source_features_of_versions_1_and_2_are_refused(torchtext):
    checkpoint = checkpoint_of(OpenNMT())
    checkpoint["vocab"] = old_vocabulary(torchtext, src=SOURCE_TOKENS, tgt=TARGET_TOKENS)
    checkpoint["vocab"]["src"].fields.append(("src_feat_0", torchtext.field.Field()))
    with pytest.raises(ConversionError, match="src_feats: features"):
        from_opennmt(checkpoint)


class Bomb:
    def __init__(self, mark) -> None:
        self.mark = mark

    def __reduce__(self):
        return (type(self.mark).touch, (self.mark,))


def test_a_hostile_file_is_refused_unexecuted(tmp_path):
    mark = tmp_path / "mark"
    for place in ("opt", "vocab", "optim"):
        checkpoint = checkpoint_of(OpenNMT())
        checkpoint[place] = Namespace(a=Bomb(mark)) if place == "opt" else {"src": Bomb(mark)}
        torch.save(checkpoint, tmp_path / "model.pt")
        with pytest.raises(ConversionError, match="nothing in it was executed: it asks for"):
            read(tmp_path / "model.pt")
    assert not mark.exists()
    torch.save([1], tmp_path / "model.pt")
    with pytest.raises(ConversionError, match="holds a list and no checkpoint of OpenNMT-py"):
        read(tmp_path / "model.pt")


def test_a_stand_in_takes_the_place_of_what_could_be_called(tmp_path, torchtext):
    torch.save({"cut": partial(torchtext.text._feature_tokenize, layer=0)}, tmp_path / "model.pt")
    cut = load_torch_file(tmp_path / "model.pt", STAND_INS)["cut"]
    assert type(cut).__module__ == "functools"
    assert not isinstance(cut, partial)
    assert not callable(cut)
    assert cut.state == {}
    with pytest.raises(ConversionError, match="nothing in it was executed: it asks for"):
        load_torch_file(tmp_path / "model.pt")  # and is allowed for this one file only
