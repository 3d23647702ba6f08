"""The configuration: the paper's sizes (Table 3), a check of every field, JSON and the library's names."""

from __future__ import annotations

import inspect
import json
import re

import pytest
from transformers import AutoConfig

from vanilla_transformer import VanillaTransformerConfig

# ---------------------------------------------------------------------------------------- the paper's sizes

# Row of Table 3, what differs from the base model, the paper's number of parameters in millions. No single vocabulary
# reproduces all rows; 37,000 (section 5.1) comes within 2.6 million of each but d_model 1024: 163.8 against 168. The
# paper leaves the number blank in rows A: the base model's.
TABLE_3 = [
    ("base", {}, 65),
    ("A: 1 head", {"encoder_attention_heads": 1, "decoder_attention_heads": 1, "d_k": 512, "d_v": 512}, 65),
    ("A: 4 heads", {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "d_k": 128, "d_v": 128}, 65),
    ("A: 16 heads", {"encoder_attention_heads": 16, "decoder_attention_heads": 16, "d_k": 32, "d_v": 32}, 65),
    ("A: 32 heads", {"encoder_attention_heads": 32, "decoder_attention_heads": 32, "d_k": 16, "d_v": 16}, 65),
    ("B: d_k 16", {"d_k": 16}, 58),
    ("B: d_k 32", {"d_k": 32}, 60),
    ("C: N 2", {"encoder_layers": 2, "decoder_layers": 2}, 36),
    ("C: N 4", {"encoder_layers": 4, "decoder_layers": 4}, 50),
    ("C: N 8", {"encoder_layers": 8, "decoder_layers": 8}, 80),
    ("C: d_model 256", {"d_model": 256, "d_k": 32, "d_v": 32}, 28),
    ("C: d_model 1024", {"d_model": 1024, "d_k": 128, "d_v": 128}, 168),
    ("C: d_ff 1024", {"encoder_ffn_dim": 1024, "decoder_ffn_dim": 1024}, 53),
    ("C: d_ff 4096", {"encoder_ffn_dim": 4096, "decoder_ffn_dim": 4096}, 90),
    (
        "big",
        {
            "d_model": 1024,
            "encoder_ffn_dim": 4096,
            "decoder_ffn_dim": 4096,
            "encoder_attention_heads": 16,
            "decoder_attention_heads": 16,
        },
        213,
    ),
]


@pytest.mark.parametrize(("row", "fields", "millions"), TABLE_3, ids=[row for row, _, _ in TABLE_3])
def test_parameters_of_table_3(row, fields, millions):
    computed = VanillaTransformerConfig(**fields).num_trainable_parameters()
    if row == "C: d_model 1024":
        assert round(computed / 1e6, 1) == 163.8
    else:
        assert abs(computed / 1e6 - millions) <= 2.6
    # The sum written out from section 3, matrix by matrix.
    value = {"N": 6, "d": 512, "ff": 2048, "h": 8, "k": None, "v": None}
    names = {"encoder_layers": "N", "d_model": "d", "encoder_ffn_dim": "ff", "encoder_attention_heads": "h"}
    value |= {names.get(name, name[-1]): size for name, size in fields.items() if not name.startswith("decoder")}
    n, d, ff, h = (value[name] for name in ("N", "d", "ff", "h"))
    k, v = value["k"] or d // h, value["v"] or d // h
    attention = d * h * k + d * h * k + d * h * v + h * v * d
    feed_forward = (d * ff + ff) + (ff * d + d)
    norm = 2 * d
    encoder, decoder = attention + feed_forward + 2 * norm, 2 * attention + feed_forward + 3 * norm
    assert computed == n * (encoder + decoder) + 37_000 * d


def test_base_is_the_default_and_the_papers():
    config = VanillaTransformerConfig.base()
    assert config.to_dict() == VanillaTransformerConfig().to_dict()
    expected = {
        "vocab_size": 37_000,
        "d_model": 512,
        "encoder_layers": 6,
        "decoder_layers": 6,
        "encoder_attention_heads": 8,
        "decoder_attention_heads": 8,
        "encoder_ffn_dim": 2048,
        "decoder_ffn_dim": 2048,
        "dropout": 0.1,
        "attention_dropout": 0.0,
        "activation_dropout": 0.0,
        "activation_function": "relu",
        "label_smoothing": 0.1,
        "norm_position": "post",
        "has_final_norm": False,
        "position_embedding_type": "sinusoidal",
        "sinusoid_layout": "interleaved",
        "position_offset": 0,
        "scale_embedding": True,
        "attention_bias": False,
        "output_bias": False,
        "share_encoder_decoder_embeddings": True,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": 2,
        "decoder_start_token_id": 2,
        "is_encoder_decoder": True,
    }
    assert {name: getattr(config, name) for name in expected} == expected
    assert config.head_dims(8) == (64, 64)


def test_big_and_tiny():
    big = VanillaTransformerConfig.big()
    assert (big.d_model, big.encoder_ffn_dim, big.decoder_ffn_dim, big.dropout) == (1024, 4096, 4096, 0.3)
    assert (big.encoder_attention_heads, big.decoder_attention_heads, big.encoder_layers) == (16, 16, 6)
    assert VanillaTransformerConfig.big(dropout=0.1, d_model=512).d_model == 512
    assert VanillaTransformerConfig.base(dropout=0.2).dropout == 0.2
    tiny = VanillaTransformerConfig.tiny()
    assert (tiny.vocab_size, tiny.d_model, tiny.encoder_layers, tiny.decoder_layers) == (10_000, 128, 4, 4)
    assert (tiny.encoder_attention_heads, tiny.encoder_ffn_dim, tiny.decoder_ffn_dim) == (4, 256, 256)
    assert round(tiny.num_trainable_parameters() / 1e6, 1) == 2.6  # as Wu et al. (2021) give it
    assert VanillaTransformerConfig.tiny(vocab_size=300).decoder_vocab_size == 300


# ---------------------------------------------------------------------------------------- checks

POSITIVE, COUNT, PROBABILITY, FLAG = (
    "a positive integer",
    "an integer of at least 0",
    r"a probability in \[0, 1\)",
    "true or false",
)
SIZES = [
    "vocab_size",
    "d_model",
    "encoder_layers",
    "decoder_layers",
    "encoder_attention_heads",
    "decoder_attention_heads",
    "encoder_ffn_dim",
    "decoder_ffn_dim",
    "max_position_embeddings",
]
RULES = {
    **dict.fromkeys(SIZES, (POSITIVE, [0, -8, 8.0, "8", True, None])),
    "decoder_vocab_size": (POSITIVE, [0, -8, 8.0, "8", True]),
    **dict.fromkeys(["d_k", "d_v"], (f"{POSITIVE} or None", [0, -8, 8.0, "8", True])),
    **dict.fromkeys(
        ["position_offset", "pad_token_id", "decoder_start_token_id"], (COUNT, [-1, 1.0, "1", None, False])
    ),
    "bos_token_id": (f"{COUNT} or None", [-1, 1.0, "1", True]),
    "eos_token_id": (f"{COUNT}, a list of such integers, or None", [-1, 1.0, "1", [1, -1], [1, "2"], True]),
    **dict.fromkeys(
        ["dropout", "attention_dropout", "activation_dropout", "label_smoothing"],
        (PROBABILITY, [1, 1.0, -0.1, 5, "0.1", None, True, float("nan")]),
    ),
    "init_std": ("a positive number or None", [0, -0.02, "0.02", float("inf"), float("nan")]),
    "layer_norm_eps": ("a positive number", [0, -1e-6, "1e-6", None, float("inf"), float("nan")]),
    **dict.fromkeys(
        [
            "scale_embedding",
            "attention_bias",
            "output_bias",
            "share_encoder_decoder_embeddings",
            "tie_word_embeddings",
            "use_cache",
        ],
        (FLAG, [0, 1, "true", None]),
    ),
    "final_norm": ("true, false or None", [0, 1, "true"]),
    "norm_position": (r"one of \('post', 'pre'\)", ["Post", "", None, 1, ["post"]]),
    "position_embedding_type": (
        r"one of \('sinusoidal', 'sinusoidal_tensor2tensor', 'learned'\)",
        ["rotary", "", None, ["learned"]],
    ),
    "sinusoid_layout": (r"one of \('interleaved', 'halves'\) or None", ["half", "", 1, ["halves"]]),
    "activation_function": (
        r"a name of transformers.activations.ACT2FN: .*gelu.*relu",
        ["rellu", "", None, 1, ["relu"]],
    ),
}


def test_every_field_has_a_rule():
    fields = set(inspect.signature(VanillaTransformerConfig.__init__).parameters) - {"self", "kwargs"}
    assert fields == set(RULES)


@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field, (_, values) in RULES.items() for value in values]
)
def test_a_wrong_value_is_named_with_its_rule(field, value):
    message = rf"^{field}={re.escape(repr(value))} is not valid: {field} must be {RULES[field][0]}"
    fields = {field: value}
    if field == "decoder_vocab_size":
        fields["share_encoder_decoder_embeddings"] = False
    with pytest.raises(ValueError, match=message):
        VanillaTransformerConfig(**fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"encoder_attention_heads": 7},
            r"d_model=512 is not divisible by encoder_attention_heads=7: .*set d_k and d_v",
        ),
        ({"decoder_attention_heads": 3, "d_k": 8}, r"d_model=512 is not divisible by decoder_attention_heads=3"),
        ({"decoder_attention_heads": 3, "d_v": 8}, r"d_model=512 is not divisible by decoder_attention_heads=3"),
        ({"d_model": 5, "encoder_attention_heads": 1, "decoder_attention_heads": 1}, r"d_model=5 is odd"),
        (
            {
                "d_model": 2,
                "encoder_attention_heads": 1,
                "decoder_attention_heads": 1,
                "position_embedding_type": "sinusoidal_tensor2tensor",
            },
            r"d_model=2 is too small .* at least 4",
        ),
        (
            {"position_embedding_type": "learned", "sinusoid_layout": "halves"},
            r"sinusoid_layout='halves' has no meaning with position_embedding_type='learned'",
        ),
        (
            {"decoder_vocab_size": 20_000},
            r"decoder_vocab_size=20000 differs from vocab_size=37000.*share_encoder_decoder_embeddings=False",
        ),
        ({"decoder_start_token_id": 37_000}, r"decoder_start_token_id=37000 is outside a vocabulary of 37000"),
        ({"pad_token_id": 37_000}, r"pad_token_id=37000 is outside a vocabulary of 37000"),
        (
            {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 9, "pad_token_id": 9},
            r"pad_token_id=9 is outside a vocabulary of 9",
        ),
        (
            {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 9, "decoder_start_token_id": 9},
            r"decoder_start_token_id=9 is outside a vocabulary of 9",
        ),
    ],
)
def test_values_that_do_not_fit_together_are_named(fields, message):
    with pytest.raises(ValueError, match=message):
        VanillaTransformerConfig(**fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"encoder_attention_heads": 7, "d_k": 11, "d_v": 13},
        {
            "d_model": 5,
            "encoder_attention_heads": 1,
            "decoder_attention_heads": 5,
            "position_embedding_type": "learned",
        },
        {"eos_token_id": [1, 3], "bos_token_id": None},
        {"eos_token_id": None},
        {"dropout": 0, "label_smoothing": 0.999},
        {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 12},
        {"decoder_vocab_size": 37_000},
        {"sinusoid_layout": "halves"},
        {"position_embedding_type": "sinusoidal_tensor2tensor", "sinusoid_layout": "interleaved"},
        {"activation_function": "swish"},
    ],
)
def test_unusual_values_that_fit_are_taken_and_survive_json(fields, tmp_path):
    config = VanillaTransformerConfig(**fields)
    assert {name: getattr(config, name) for name in fields} == fields
    config.save_pretrained(tmp_path)
    assert VanillaTransformerConfig.from_pretrained(tmp_path).to_dict() == config.to_dict()


# ---------------------------------------------------------------------------------------- the library's habits


def test_json_round_trip_is_equal(tmp_path):
    fields = {
        "vocab_size": 60,
        "decoder_vocab_size": 41,
        "d_model": 24,
        "encoder_layers": 1,
        "decoder_layers": 2,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 4,
        "d_k": 5,
        "d_v": 6,
        "encoder_ffn_dim": 7,
        "decoder_ffn_dim": 8,
        "dropout": 0.2,
        "attention_dropout": 0.3,
        "activation_dropout": 0.4,
        "activation_function": "gelu",
        "label_smoothing": 0.05,
        "norm_position": "pre",
        "final_norm": False,
        "position_embedding_type": "sinusoidal_tensor2tensor",
        "position_offset": 3,
        "sinusoid_layout": "interleaved",
        "max_position_embeddings": 99,
        "scale_embedding": False,
        "attention_bias": True,
        "output_bias": True,
        "layer_norm_eps": 1e-5,
        "init_std": 0.02,
        "share_encoder_decoder_embeddings": False,
        "tie_word_embeddings": False,
        "pad_token_id": 5,
        "eos_token_id": 6,
        "bos_token_id": 7,
        "decoder_start_token_id": 8,
        "use_cache": False,
    }
    assert set(fields) == set(RULES)  # every field, none at its default
    defaults = VanillaTransformerConfig(position_embedding_type="learned", sinusoid_layout=None)
    assert all(getattr(defaults, name) != value for name, value in fields.items())
    config = VanillaTransformerConfig(**fields)
    config.save_pretrained(tmp_path)
    for loaded in (
        VanillaTransformerConfig.from_pretrained(tmp_path),
        AutoConfig.from_pretrained(tmp_path),
        VanillaTransformerConfig(**json.loads((tmp_path / "config.json").read_text())),
        VanillaTransformerConfig.from_dict(config.to_dict()),
    ):
        assert type(loaded) is VanillaTransformerConfig
        assert {name: getattr(loaded, name) for name in fields} == fields
        assert {**loaded.to_dict(), "_name_or_path": ""} == {**config.to_dict(), "_name_or_path": ""}
    assert {name: json.loads((tmp_path / "config.json").read_text())[name] for name in fields} == fields


def test_the_librarys_usual_names():
    config = VanillaTransformerConfig(d_model=24, encoder_layers=3, encoder_attention_heads=4)
    assert (config.hidden_size, config.num_hidden_layers, config.num_attention_heads) == (24, 3, 4)
    config.hidden_size = 48
    assert config.d_model == 48
    assert config.keys_to_ignore_at_inference == ["past_key_values", "cache"]
    decoder = VanillaTransformerConfig(decoder_layers=2, decoder_attention_heads=16).get_text_config(decoder=True)
    assert (decoder.num_hidden_layers, decoder.num_attention_heads) == (2, 16)  # what static caches are sized by


def test_arguments_that_are_not_ours_are_the_librarys(tmp_path):
    config = VanillaTransformerConfig(id2label={0: "a"}, output_hidden_states=True, corpus="of one's own")
    config.save_pretrained(tmp_path)
    loaded = VanillaTransformerConfig.from_pretrained(tmp_path)
    for trial in (config, loaded):
        assert trial.id2label == {0: "a"}
        assert trial.output_hidden_states is True
        assert trial.corpus == "of one's own"


def test_a_shared_vocabulary_has_one_size():
    config = VanillaTransformerConfig()
    config.vocab_size = 100
    assert config.decoder_vocab_size == 100
    config = VanillaTransformerConfig(share_encoder_decoder_embeddings=False)
    config.vocab_size = 100
    assert config.decoder_vocab_size == 37_000


def test_the_local_class_hides_its_pipelines_and_its_files_have_them(tmp_path):
    # transformers.pipeline() asks for trust where a config shows `custom_pipelines`.
    config = VanillaTransformerConfig()
    assert not config.custom_pipelines
    config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())["custom_pipelines"]
    assert {task: entry["impl"] for task, entry in saved.items()} == {
        "translation": "pipeline_vanilla_transformer.TranslationPipeline",
        "summarization": "pipeline_vanilla_transformer.SummarizationPipeline",
        "text2text-generation": "pipeline_vanilla_transformer.Text2TextGenerationPipeline",
    }
    loaded = VanillaTransformerConfig.from_pretrained(tmp_path)
    assert not loaded.custom_pipelines
    assert loaded.to_dict()["custom_pipelines"] == saved
    others = {"scoring": {"impl": "elsewhere.ScoringPipeline", "pt": ["AutoModel"], "type": "text"}}
    loaded.custom_pipelines = {**saved, **others}
    assert dict(loaded.custom_pipelines) == others
    assert loaded.to_dict()["custom_pipelines"] == {**saved, **others}


def test_the_limits_are_the_classs_and_are_raised_there(monkeypatch):
    small = {"vocab_size": 9, "d_model": 2, "encoder_attention_heads": 1, "decoder_attention_heads": 1}
    small |= {"encoder_ffn_dim": 1, "decoder_ffn_dim": 1}
    assert VanillaTransformerConfig(**small, encoder_layers=1_000).encoder_layers == 1_000
    deep = {**small, "decoder_layers": 1_001}
    with pytest.raises(ValueError, match=r"^decoder_layers=1001 is more than the 1,000 layers .* raise .*max_layers"):
        VanillaTransformerConfig(**deep)
    monkeypatch.setattr(VanillaTransformerConfig, "max_layers", 1_001)
    config = VanillaTransformerConfig(**deep)
    assert not {"max_layers", "max_parameters"} & set(config.to_dict())
    parameters = config.num_trainable_parameters()
    monkeypatch.setattr(VanillaTransformerConfig, "max_parameters", parameters)
    VanillaTransformerConfig(**deep)
    monkeypatch.setattr(VanillaTransformerConfig, "max_parameters", parameters - 1)
    with pytest.raises(ValueError, match=f" make {parameters:,} parameters, .*raise .*max_parameters"):
        VanillaTransformerConfig(**deep)


@pytest.mark.parametrize("reference", ["owner/name--modeling.Model", "my_modeling.Model"])
def test_only_references_to_files_beside_it_are_saved(reference, tmp_path):
    config = VanillaTransformerConfig(auto_map={"AutoModel": reference, "AutoModelForMaskedLM": reference})
    config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())["auto_map"]
    beside = "--" not in reference
    assert saved["AutoModel"] == (reference if beside else "modeling_vanilla_transformer.VanillaTransformerModel")
    assert saved["AutoModelForMaskedLM"] == reference  # not a class of ours: whoever wrote it meant it


def test_the_caller_chooses_the_attention_and_a_file_does_not(tmp_path):
    VanillaTransformerConfig().save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path, attn_implementation="owner/kernel")
    assert config._attn_implementation == "owner/kernel"
    config.save_pretrained(tmp_path)
    assert "owner/kernel" not in (tmp_path / "config.json").read_text()
    with pytest.raises(ValueError, match=r"^attn_implementation='owner/kernel' is not valid in a config\.json"):
        VanillaTransformerConfig.from_dict({"attn_implementation": "owner/kernel"})
