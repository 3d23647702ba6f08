"""The converter from tensor2tensor, against its published formulas written down anew in numpy, float64."""

from __future__ import annotations

import json
import pathlib

import numpy as np
import pytest
import torch

from vanilla_transformer.convert.renaming import ConversionError
from vanilla_transformer.convert.tensor2tensor import HPARAMS, from_tensor2tensor, read

D, HEADS, FILTER, SOURCE_SIZE, TARGET_SIZE = 16, 4, 24, 37, 29
PRE, POST = "transformer_base", "transformer_base_v1"
SOURCE = [[5, 6, 7, 8, 9, 1], [10, 11, 1]]
TARGET = [[7, 5, 6, 1], [9, 8, 7, 1]]


def hparams(name: str, **changes):
    return {**HPARAMS[name], "num_heads": HEADS, "hidden_size": D, "filter_size": FILTER, **changes}


def variables(name=PRE, *, sharing="shared", shards=16, keys=D, values=D, space=True, layers=(2, 3), lead=()):
    """Arrays under the names, and of the shapes, of a public checkpoint; none is zero or one."""
    draw = np.random.default_rng(0)
    where = "layer_prepostprocess" if name == PRE else "layer_postprocess"
    arrays = {}

    def add(key, *shape, centre=0.0, scale=0.4):
        arrays[f"transformer/{key}"] = draw.normal(centre, scale, shape)

    def norm(key):
        add(f"{key}/{where}/layer_norm/layer_norm_scale", D, centre=1.0, scale=0.2)
        add(f"{key}/{where}/layer_norm/layer_norm_bias", D)

    def attention(key):
        norm(key)
        for part, shape in (("q", (D, keys)), ("k", (D, keys)), ("v", (D, values)), ("output_transform", (values, D))):
            add(f"{key}/multihead_attention/{part}/kernel", *lead, *shape)

    def table(kind, size):
        for number in range(shards):
            rows = size // shards + (number < size % shards)
            add(f"symbol_modality_{size}_{D}/{kind}/weights_{number}", rows, D)

    for side, number in zip(("encoder", "decoder"), layers, strict=True):
        for n in range(number):
            layer = f"body/{side}/layer_{n}"
            for part in ("self_attention", "encdec_attention")[: 1 + (side == "decoder")]:
                attention(f"{layer}/{part}")
            norm(f"{layer}/ffn")
            add(f"{layer}/ffn/conv1/kernel", *lead, D, FILTER)
            add(f"{layer}/ffn/conv1/bias", FILTER)
            add(f"{layer}/ffn/conv2/kernel", *lead, FILTER, D)
            add(f"{layer}/ffn/conv2/bias", D)
        if name == PRE:
            norm(f"body/{side}")
    if space:
        add("body/target_space_embedding/kernel", 32, D)
    if sharing == "shared":
        table("shared", SOURCE_SIZE)
    elif sharing == "shared of two sizes":
        table("shared", SOURCE_SIZE)
        table("shared", TARGET_SIZE)
    else:
        table("input_emb", SOURCE_SIZE)
        table("target_emb", TARGET_SIZE)
        table("softmax", TARGET_SIZE)
    return arrays


class Tensor2Tensor:
    """Logits of one sentence pair by tensor2tensor's formulas, from its variables."""

    def __init__(self, arrays, params, space_id=None) -> None:
        self.arrays = {key.removeprefix("transformer/"): value for key, value in arrays.items()}
        self.params, self.space_id = params, space_id

    def table(self, kind, size):
        for name in (f"symbol_modality_{size}_{D}/{kind}", f"symbol_modality_{size}_{D}/shared"):
            parts = [key for key in self.arrays if key.startswith(f"{name}/")]
            if parts:
                return np.concatenate([self.arrays[f"{name}/weights_{n}"] for n in range(len(parts))])
        raise KeyError(kind)

    def embed(self, kind, size, ids):
        rows = self.table(kind, size)[ids]
        if self.params.get("multiply_embedding_mode", "sqrt_depth") == "sqrt_depth":
            rows = rows * D**0.5
        return rows * (np.array(ids) != 0)[:, None]

    @staticmethod
    def timing(length):
        inverse = np.exp(np.arange(D // 2) * -np.log(10_000.0) / (D // 2 - 1))
        angles = np.arange(length)[:, None] * inverse[None]
        return np.concatenate([np.sin(angles), np.cos(angles)], axis=1)

    def kernel(self, name):
        array = self.arrays[f"{name}/kernel"]
        return array.reshape(array.shape[-2:])

    def norm(self, x, scope):
        centred = x - x.mean(-1, keepdims=True)
        x = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + self.params.get("norm_epsilon", 1e-6))
        return (
            x * self.arrays[f"{scope}/layer_norm/layer_norm_scale"]
            + self.arrays[f"{scope}/layer_norm/layer_norm_bias"]
        )

    def sublayer(self, x, scope, function):
        if self.params["layer_preprocess_sequence"] == "n":
            return x + function(self.norm(x, f"{scope}/layer_prepostprocess"))
        return self.norm(x + function(x), f"{scope}/layer_postprocess")

    def attention(self, x, memory, scope, causal=False):
        q, k, v = (
            (states @ self.kernel(f"{scope}/multihead_attention/{part}")).reshape(len(states), HEADS, -1)
            for part, states in (("q", x), ("k", memory), ("v", memory))
        )
        outputs = []
        for head in range(HEADS):
            scores = (q[:, head] * q.shape[-1] ** -0.5) @ k[:, head].T
            if causal:
                scores = np.where(np.tri(len(x), dtype=bool), scores, -1e9)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            outputs.append(weights / weights.sum(-1, keepdims=True) @ v[:, head])
        return np.concatenate(outputs, axis=1) @ self.kernel(f"{scope}/multihead_attention/output_transform")

    def ffn(self, x, scope):
        inner = np.maximum(x @ self.kernel(f"{scope}/conv1") + self.arrays[f"{scope}/conv1/bias"], 0)
        return inner @ self.kernel(f"{scope}/conv2") + self.arrays[f"{scope}/conv2/bias"]

    def stack(self, side, x, memory=None):
        number = 0
        while f"body/{side}/layer_{number}/ffn/conv1/bias" in self.arrays:
            layer = f"body/{side}/layer_{number}"
            scope = f"{layer}/self_attention"
            x = self.sublayer(x, scope, lambda y, s=scope: self.attention(y, y, s, causal=memory is not None))
            if memory is not None:
                scope = f"{layer}/encdec_attention"
                x = self.sublayer(x, scope, lambda y, s=scope: self.attention(y, memory, s))
            x = self.sublayer(x, f"{layer}/ffn", lambda y, s=f"{layer}/ffn": self.ffn(y, s))
            number += 1
        if self.params["layer_preprocess_sequence"] == "n":
            x = self.norm(x, f"body/{side}/layer_prepostprocess")
        return x

    def logits(self, source, target, target_size):
        states = self.embed("input_emb", SOURCE_SIZE, source)
        if self.space_id is not None:
            states = states + self.arrays["body/target_space_embedding/kernel"][self.space_id]
        memory = self.stack("encoder", states + self.timing(len(source)))
        shifted = self.embed("target_emb", target_size, target)
        shifted = np.concatenate([np.zeros((1, D)), shifted[:-1]])  # zeros start the target
        states = self.stack("decoder", shifted + self.timing(len(target)), memory)
        return states @ self.table("softmax", target_size).T


@torch.no_grad()
def logits_of(model) -> torch.Tensor:
    width = max(map(len, SOURCE))
    source = torch.tensor([row + [0] * (width - len(row)) for row in SOURCE])
    return model(input_ids=source, attention_mask=source.ne(0).long(), labels=torch.tensor(TARGET)).logits


CASES = {
    "pre-norm": (PRE, {}, {}, 8),
    "post-norm": (POST, {}, {}, 8),
    "separate": (PRE, {"sharing": "separate"}, {}, 3),
    "one shard, no target space": (POST, {"shards": 1, "space": False}, {}, None),
    "d_k and d_v of their own": (PRE, {"keys": 8, "values": 20}, {"attention_key_channels": 8}, 8),
    "unscaled, another epsilon": (PRE, {}, {"multiply_embedding_mode": "none", "norm_epsilon": 1e-3}, 8),
    "kernels of convolutions": (PRE, {"lead": (1,)}, {}, 8),
}


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_the_formulas(case):
    name, shapes, changes, space_id = CASES[case]
    arrays, params = variables(name, **shapes), hparams(name, **changes)
    model = from_tensor2tensor(arrays, params, target_space_id=space_id)
    size = TARGET_SIZE if shapes.get("sharing") == "separate" else SOURCE_SIZE
    oracle = Tensor2Tensor(arrays, params, space_id)
    expected = np.stack([oracle.logits(*pair, size) for pair in zip(SOURCE, TARGET, strict=True)])
    assert np.abs(expected).max() > 3
    torch.testing.assert_close(logits_of(model), torch.tensor(expected), atol=1e-9, rtol=0)


def test_two_shared_matrices_are_told_apart_by_the_source_size():
    arrays, params = variables(sharing="shared of two sizes"), hparams(PRE)
    with pytest.raises(ConversionError, match=r"shared matrices of \[37, 29\] rows: source_vocab_size says"):
        from_tensor2tensor(arrays, params, target_space_id=8)
    model = from_tensor2tensor(arrays, params, target_space_id=8, source_vocab_size=SOURCE_SIZE)
    oracle = Tensor2Tensor(arrays, params, 8)
    expected = np.stack([oracle.logits(*pair, TARGET_SIZE) for pair in zip(SOURCE, TARGET, strict=True)])
    torch.testing.assert_close(logits_of(model), torch.tensor(expected), atol=1e-9, rtol=0)


def test_matrices_stay_one_where_nothing_was_folded_into_them():
    arrays = variables(space=False)
    assert not from_tensor2tensor(arrays, hparams(PRE)).config.tie_word_embeddings
    arrays[f"transformer/symbol_modality_{SOURCE_SIZE}_{D}/shared/weights_0"][0] = 0
    model = from_tensor2tensor(arrays, hparams(PRE))
    assert model.config.tie_word_embeddings
    assert model.config.share_encoder_decoder_embeddings
    assert model.lm_head.weight is model.model.encoder.embed_tokens.weight


def test_the_config_holds_the_hyperparameters():
    params = hparams(
        PRE, relu_dropout=0.2, attention_dropout=0.3, layer_prepostprocess_dropout=0.4, label_smoothing=0.05
    )
    config = from_tensor2tensor(variables(), params, target_space_id=8).config
    expected = {
        "vocab_size": SOURCE_SIZE,
        "decoder_vocab_size": SOURCE_SIZE,
        "d_model": D,
        "encoder_layers": 2,
        "decoder_layers": 3,
        "encoder_attention_heads": HEADS,
        "decoder_attention_heads": HEADS,
        "encoder_ffn_dim": FILTER,
        "decoder_ffn_dim": FILTER,
        "norm_position": "pre",
        "layer_norm_eps": 1e-6,
        "dropout": 0.4,
        "attention_dropout": 0.3,
        "activation_dropout": 0.2,
        "label_smoothing": 0.05,
        "position_embedding_type": "sinusoidal_tensor2tensor",
        "sinusoid_layout": "halves",
        "position_offset": 0,
        "scale_embedding": True,
        "attention_bias": False,
        "output_bias": False,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": None,
        "decoder_start_token_id": 0,
    }
    assert {name: getattr(config, name) for name in expected} == expected


# As the functions of these names in tensor2tensor 1.15.7, models/transformer.py, set them.
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("transformer_base_v1", ("post", 8, 0.1, 0.0, 0.0)),
        ("transformer_base_v2", ("pre", 8, 0.1, 0.1, 0.1)),
        ("transformer_base_v3", ("pre", 8, 0.1, 0.1, 0.1)),
        ("transformer_base", ("pre", 8, 0.1, 0.1, 0.1)),
        ("transformer_big", ("pre", 16, 0.3, 0.1, 0.1)),
    ],
)
def test_the_named_sets_are_those_of_tensor2tensor(name, expected):
    arrays = variables(POST if name == POST else PRE)
    config = from_tensor2tensor(arrays, name, target_space_id=8).config
    rates = config.dropout, config.attention_dropout, config.activation_dropout
    assert (config.norm_position, config.encoder_attention_heads, *rates) == expected
    assert config.label_smoothing == 0.1


def test_variables_of_the_training_are_left_out():
    arrays = variables()
    name = "transformer/body/encoder/layer_0/ffn/conv1/bias"
    extra = {"global_step": np.int64(5), f"training/{name}/Adam": arrays[name], f"{name}/Adam_1": arrays[name]}
    extra["losses_avg/problem_0/total_loss"] = np.float32(1.0)
    plain, more = (from_tensor2tensor(a, hparams(PRE), target_space_id=8) for a in (arrays, {**arrays, **extra}))
    assert torch.equal(logits_of(plain), logits_of(more))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norm_type": "batch"}, "norm_type='batch' cannot be expressed: this class has 'layer' only"),
        ({"pos": "emb"}, "pos='emb'"),
        ({"self_attention_type": "dot_product_relative"}, "self_attention_type='dot_product_relative'"),
        ({"ffn_layer": "conv_relu_conv"}, "ffn_layer='conv_relu_conv'"),
        ({"proximity_bias": True}, "proximity_bias=True"),
        ({"causal_decoder_self_attention": False}, "causal_decoder_self_attention=False"),
        ({"unidirectional_encoder": True}, "unidirectional_encoder=True"),
        ({"attention_variables_3d": True}, "attention_variables_3d=True"),
        ({"prepend_mode": "prepend_inputs_masked_attention"}, "prepend_mode='prepend"),
        ({"symbol_dropout": 0.1}, r"symbol_dropout=0\.1"),
        ({"num_area_layers": 1}, "num_area_layers=1"),
        ({"hard_attention_k": 4}, "hard_attention_k=4"),
        ({"layer_postprocess_sequence": "dan"}, "layer_preprocess_sequence='n' with layer_postprocess_sequence='dan'"),
        ({"num_heads": 3}, "num_heads=3 does not divide keys of 16"),
        ({"num_heads": "8"}, "num_heads='8' does not divide"),
        ({"hidden_size": 512}, "hidden_size=512, and the variables say 16"),
        ({"filter_size": 2048}, "filter_size=2048, and the variables say 24"),
        ({"num_decoder_layers": 6}, "num_decoder_layers=6, and the variables say 3"),
        ({"label_smoothing": 1.0}, r"tensor2tensor model cannot be expressed: label_smoothing=1\.0"),
    ],
)
def test_hyperparameters_that_cannot_be_expressed_are_refused(changes, message):
    with pytest.raises(ConversionError, match=message):
        from_tensor2tensor(variables(), hparams(PRE, **changes), target_space_id=8)


LAYER = "transformer/body/decoder/layer_1"
SHARD = f"transformer/symbol_modality_{SOURCE_SIZE}_{D}/shared/weights_"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: a.update({"transformer/body/extra": np.ones(1)}), "unknown: body/extra"),
        (lambda a: a.update({"other/variable": np.ones(1)}), r"unknown: other/variable \(outside of transformer/\)"),
        (
            lambda a: a.pop(f"{LAYER}/encdec_attention/multihead_attention/k/kernel"),
            "missing: body/decoder/layer_1/enc",
        ),
        (lambda a: a.update({f"{LAYER}/ffn/conv2/bias": np.ones(3)}), r"wrong shape: .*conv2/bias is \[3\], \[16\]"),
        (lambda a: a.update({f"{LAYER}/ffn/conv1/kernel": np.ones((3, D, FILTER))}), "wrong shape: .*conv1/kernel"),
        (lambda a: a.pop(f"{SHARD}7"), r"shards \[0, 1, 2, 3, 4, 5, 6, 8.*have 35 rows, not the 37"),
        (lambda a: [a.pop(n) for n in list(a) if "symbol" in n], "missing: symbol_modality_V_D/input_emb/weights_0"),
        (lambda a: [a.pop(n) for n in list(a) if "encoder/layer_0" in n], "There is no body/encoder/layer_0"),
        (lambda a: a.update({f"{LAYER}/ffn/conv2/bias": np.ones(D, dtype=int)}), "are torch.int64"),
        (lambda a: a.update({f"{LAYER}/ffn/conv2/bias": np.array(["a"] * D)}), "is no array of numbers"),
    ],
)
def test_variables_that_do_not_fit_are_refused(change, message):
    arrays = variables()
    change(arrays)
    with pytest.raises(ConversionError, match=message):
        from_tensor2tensor(arrays, hparams(PRE), target_space_id=8)


def test_a_target_space_is_needed_where_there_is_one_and_refused_where_not():
    for wrong in (None, 32, -1):
        with pytest.raises(ConversionError, match=f"target_space_id={wrong}: .* 0 to 31"):
            from_tensor2tensor(variables(), hparams(PRE), target_space_id=wrong)
    with pytest.raises(ConversionError, match="target_space_id=8, and the checkpoint has no"):
        from_tensor2tensor(variables(space=False), hparams(PRE), target_space_id=8)


def test_norms_in_the_other_place_are_refused():
    with pytest.raises(ConversionError, match=r"unknown: .*layer_prepostprocess"):
        from_tensor2tensor(variables(PRE), hparams(POST), target_space_id=8)


@pytest.mark.parametrize("params", ["nothing", 5, {"num_heads": 8}])
def test_unusable_hyperparameters_are_refused(params):
    with pytest.raises(ConversionError, match="hparams"):
        from_tensor2tensor(variables(), params, target_space_id=8)


def test_a_file_reads_as_its_variables(tmp_path):
    arrays = {name: array.astype(np.float32) for name, array in variables().items()}
    np.savez(tmp_path / "variables.npz", **arrays)
    (tmp_path / "hparams.json").write_text(json.dumps(hparams(PRE)))
    expected = from_tensor2tensor(arrays, hparams(PRE), target_space_id=8)
    for params in (hparams(PRE), tmp_path / "hparams.json"):
        model, tokenizer = read(tmp_path / "variables.npz", hparams=params, target_space_id=8)
        assert tokenizer is None
        assert model.dtype == torch.float32
        assert torch.equal(logits_of(model), logits_of(expected))
    with pytest.raises(ConversionError, match=r"is none of transformer_base_v1, .* and no JSON file"):
        read(tmp_path / "variables.npz", hparams="transformer_huge")


class Bomb:
    def __init__(self, mark: pathlib.Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return (pathlib.Path.touch, (self.mark,))


def test_a_hostile_or_damaged_file_is_refused_unexecuted(tmp_path):
    mark = tmp_path / "mark"
    np.savez(tmp_path / "bomb.npz", x=np.array([Bomb(mark)], dtype=object))
    torch.save({"x": Bomb(mark)}, tmp_path / "torch.npz")
    (tmp_path / "short.npz").write_bytes((tmp_path / "bomb.npz").read_bytes()[:50])
    for name in ("bomb", "torch", "short", "none"):
        # An archive of something else is bytes to numpy.
        with pytest.raises(ConversionError, match=r"nothing in it was executed|data.pkl is no array"):
            read(tmp_path / f"{name}.npz", hparams=PRE)
    assert not mark.exists()
