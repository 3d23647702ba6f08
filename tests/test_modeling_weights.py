"""The model's parameters: their names, number and files, tied and resized."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import reference
import torch
from tiny_models import SEPARATE, SHARING, batch
from torch import nn
from torch.testing import assert_close

from vanilla_transformer import (
    VanillaTransformerConfig,
    VanillaTransformerForConditionalGeneration,
    VanillaTransformerModel,
)

# ---------------------------------------------------------------------------------------- names and files

POST_NORM_NAMES = [
    "model.shared.weight",
    "model.encoder.embed_tokens.weight",
    "model.encoder.layers.0.self_attn.q_proj.weight",
    "model.encoder.layers.0.self_attn.k_proj.weight",
    "model.encoder.layers.0.self_attn.v_proj.weight",
    "model.encoder.layers.0.self_attn.out_proj.weight",
    "model.encoder.layers.0.self_attn_layer_norm.weight",
    "model.encoder.layers.0.self_attn_layer_norm.bias",
    "model.encoder.layers.0.fc1.weight",
    "model.encoder.layers.0.fc1.bias",
    "model.encoder.layers.0.fc2.weight",
    "model.encoder.layers.0.fc2.bias",
    "model.encoder.layers.0.final_layer_norm.weight",
    "model.encoder.layers.0.final_layer_norm.bias",
    "model.decoder.embed_tokens.weight",
    "model.decoder.layers.0.self_attn.q_proj.weight",
    "model.decoder.layers.0.self_attn.k_proj.weight",
    "model.decoder.layers.0.self_attn.v_proj.weight",
    "model.decoder.layers.0.self_attn.out_proj.weight",
    "model.decoder.layers.0.self_attn_layer_norm.weight",
    "model.decoder.layers.0.self_attn_layer_norm.bias",
    "model.decoder.layers.0.encoder_attn.q_proj.weight",
    "model.decoder.layers.0.encoder_attn.k_proj.weight",
    "model.decoder.layers.0.encoder_attn.v_proj.weight",
    "model.decoder.layers.0.encoder_attn.out_proj.weight",
    "model.decoder.layers.0.encoder_attn_layer_norm.weight",
    "model.decoder.layers.0.encoder_attn_layer_norm.bias",
    "model.decoder.layers.0.fc1.weight",
    "model.decoder.layers.0.fc1.bias",
    "model.decoder.layers.0.fc2.weight",
    "model.decoder.layers.0.fc2.bias",
    "model.decoder.layers.0.final_layer_norm.weight",
    "model.decoder.layers.0.final_layer_norm.bias",
    "lm_head.weight",
]
ATTENTIONS = ["encoder.layers.0.self_attn", "decoder.layers.0.self_attn", "decoder.layers.0.encoder_attn"]


@pytest.mark.parametrize(
    ("fields", "more", "fewer"),
    [
        ({}, set(), set()),
        (
            {"norm_position": "pre"},
            {f"model.{side}.layer_norm.{part}" for side in ("encoder", "decoder") for part in ("weight", "bias")},
            set(),
        ),
        (
            {"position_embedding_type": "learned"},
            {"model.encoder.embed_positions.weight", "model.decoder.embed_positions.weight"},
            set(),
        ),
        ({"tie_word_embeddings": False}, set(), set()),
        (SEPARATE, set(), {"model.shared.weight"}),
        (
            {"attention_bias": True},
            {f"model.{name}.{part}_proj.bias" for name in ATTENTIONS for part in ("q", "k", "v", "out")},
            set(),
        ),
        ({"output_bias": True}, {"final_logits_bias"}, set()),
        ({"position_embedding_type": "sinusoidal_tensor2tensor"}, set(), set()),
    ],
)
def test_parameter_names_are_a_contract(make_model, fields, more, fewer):
    names = list(make_model(encoder_layers=1, decoder_layers=1, **fields).state_dict())
    assert len(names) == len(set(names))
    assert set(names) == (set(POST_NORM_NAMES) | more) - fewer


FILES = {
    **SHARING,
    "pre-norm": {"norm_position": "pre"},
    "learned": {"position_embedding_type": "learned", "max_position_embeddings": 9, "position_offset": 2},
    "biases": {"attention_bias": True, "output_bias": True},
}
TIES = {
    "tied": {"model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight", "lm_head.weight"},
    "untied": {"model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight"},
    "separate": {"lm_head.weight"},
    "separate, untied": set(),
}


@pytest.mark.parametrize("mode", FILES)
def test_saved_and_loaded_model_is_bit_equal(make_model, tmp_path, mode):
    model = make_model(**FILES[mode])
    model.save_pretrained(tmp_path)
    weight_files = [path.name for path in tmp_path.iterdir() if path.suffix in {".safetensors", ".bin", ".pt"}]
    assert weight_files == ["model.safetensors"]
    loaded, info = VanillaTransformerForConditionalGeneration.from_pretrained(tmp_path, output_loading_info=True)
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        assert not info[problem], (problem, info)
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, loaded.state_dict()[name]), name
    with torch.no_grad():
        assert torch.equal(model(**batch()).logits, loaded(**batch()).logits)

    for trial in (model, loaded):
        pointers = {name: weight.data_ptr() for name, weight in trial.state_dict().items()}
        source = "model.decoder.embed_tokens.weight" if "separate" in mode else "model.shared.weight"
        ties = {name for name, pointer in pointers.items() if pointer == pointers[source]} - {source}
        assert ties == TIES.get(mode, TIES["tied"])
    with torch.no_grad():
        loaded.get_output_embeddings().weight.add_(1.0)
    assert torch.equal(loaded.lm_head.weight, loaded.model.decoder.embed_tokens.weight) == ("untied" not in mode)


def test_checkpoint_of_the_whole_loads_into_the_model_without_head(make_model, tmp_path):
    model = make_model()
    model.save_pretrained(tmp_path)
    base = VanillaTransformerModel.from_pretrained(tmp_path)
    expected = model.model(**batch()).last_hidden_state
    assert torch.equal(base(**batch()).last_hidden_state, expected)
    base.save_pretrained(tmp_path / "base")
    again = VanillaTransformerModel.from_pretrained(tmp_path / "base")
    assert torch.equal(again(**batch()).last_hidden_state, expected)


def test_config_file_serves_people_without_the_package(make_model, tmp_path):
    make_model().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["model_type"] == "vanilla_transformer"
    assert config["architectures"] == ["VanillaTransformerForConditionalGeneration"]
    assert config["auto_map"] == {
        "AutoConfig": "configuration_vanilla_transformer.VanillaTransformerConfig",
        "AutoModel": "modeling_vanilla_transformer.VanillaTransformerModel",
        "AutoModelForSeq2SeqLM": "modeling_vanilla_transformer.VanillaTransformerForConditionalGeneration",
    }
    assert set(config["custom_pipelines"]) == {"translation", "summarization", "text2text-generation"}


def test_generation_defaults_are_the_papers_and_are_saved(make_model, tmp_path):
    model = make_model()
    assert (model.generation_config.num_beams, model.generation_config.max_length_offset) == (4, 50)
    model.generation_config.num_beams = 3
    model.generation_config.max_length_offset = 7
    model.save_pretrained(tmp_path)
    loaded = VanillaTransformerForConditionalGeneration.from_pretrained(tmp_path)
    assert (loaded.generation_config.num_beams, loaded.generation_config.max_length_offset) == (3, 7)
    saved = json.loads((tmp_path / "generation_config.json").read_text())
    assert (saved["num_beams"], saved["max_length_offset"], saved["eos_token_id"]) == (3, 7, 1)


def test_sinusoids_survive_meta_device_loading_and_dtypes(make_model, tmp_path):
    model = make_model(dtype=torch.float64)
    expected = model(**batch()).logits
    with torch.device("meta"):
        blank = VanillaTransformerForConditionalGeneration(model.config)
    blank = blank.to_empty(device="cpu").double()
    blank.load_state_dict(model.state_dict())
    blank.tie_weights()
    assert torch.equal(blank.eval()(**batch()).logits, expected)
    model.save_pretrained(tmp_path)
    loaded = VanillaTransformerForConditionalGeneration.from_pretrained(tmp_path, dtype=torch.float64)
    assert torch.equal(loaded(**batch()).logits, expected)
    half = VanillaTransformerForConditionalGeneration.from_pretrained(tmp_path, dtype=torch.bfloat16)
    positions = torch.arange(10_000, 10_004)
    table = torch.tensor([reference.position_encoding(int(place), 16) for place in positions], dtype=torch.float64)
    for trial in (half, half.float(), half.double()):
        assert_close(trial.model.encoder.embed_positions(positions), table, rtol=0, atol=1e-10)


# ---------------------------------------------------------------------------------------- size (Table 3)


def torch_count(d_model: int, heads: int, d_ff: int, layers: int, vocab_size: int = 37_000) -> int:
    """Count torch's layers (whose heads have width d_model / h), less the biases that the paper's attention lacks."""
    with torch.device("meta"):
        encoder = nn.TransformerEncoderLayer(d_model, heads, d_ff)
        decoder = nn.TransformerDecoderLayer(d_model, heads, d_ff)
    parameters = sum(p.numel() for layer in (encoder, decoder) for p in layer.parameters())
    return layers * (parameters - 3 * 4 * d_model) + vocab_size * d_model


@pytest.mark.parametrize(
    ("fields", "sizes"),
    [
        ({}, (512, 8, 2048, 6)),
        ({"encoder_layers": 2, "decoder_layers": 2}, (512, 8, 2048, 2)),
        ({"d_model": 256}, (256, 8, 2048, 6)),
        ({"d_model": 1024}, (1024, 8, 2048, 6)),
        ({"encoder_ffn_dim": 4096, "decoder_ffn_dim": 4096}, (512, 8, 4096, 6)),
    ],
)
def test_number_of_parameters_equals_that_of_torchs_layers(fields, sizes):
    with torch.device("meta"):
        model = VanillaTransformerForConditionalGeneration(VanillaTransformerConfig(**fields))
        model.tie_weights()  # 5.0 ties nothing on this device
    assert model.num_parameters() == model.config.num_trainable_parameters() == torch_count(*sizes)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"norm_position": "pre"},
        {"position_embedding_type": "learned", "position_offset": 2},
        {"d_k": 3, "d_v": 5, "attention_bias": True},
        {"output_bias": True, "tie_word_embeddings": False},
        {**SEPARATE, "output_bias": True},
        {**SEPARATE, "tie_word_embeddings": False},
    ],
)
def test_closed_formula_counts_every_mode(make_model, fields):
    model = make_model(**fields)
    unique = {id(p): p.numel() for p in model.parameters()}
    assert model.config.num_trainable_parameters() == sum(unique.values()) == model.num_parameters()


# ---------------------------------------------------------------------------------------- resizing vocabularies


@pytest.mark.parametrize("output_bias", [False, True])
@pytest.mark.parametrize("sharing", ["tied", "untied"])
def test_resizing_a_shared_vocabulary(make_model, tmp_path, sharing, output_bias):
    model = make_model(output_bias=output_bias, **SHARING[sharing])
    old = {name: weight.clone() for name, weight in model.state_dict().items()}
    for arguments, size in (((57,), 57), ((57, 16), 64), ((40,), 40)):
        embeddings = model.resize_token_embeddings(*arguments)
        assert embeddings is model.get_input_embeddings()
        assert model.config.vocab_size == model.config.decoder_vocab_size == size
        assert model.lm_head.out_features == size
        for name, weight in model.state_dict().items():
            previous = old[name]
            if name == "final_logits_bias":
                kept = min(size, previous.shape[1])
                assert weight.shape == (1, size)
                assert torch.equal(weight[:, :kept], previous[:, :kept])
                assert not weight[:, kept:].any()
            elif weight.shape != previous.shape:
                kept = min(size, len(previous))
                assert weight.shape == (size, 16)
                assert torch.equal(weight[:kept], previous[:kept]), name
            else:
                assert torch.equal(weight, previous), name
        shared = model.model.shared.weight
        assert model.model.encoder.embed_tokens.weight is shared
        assert model.model.decoder.embed_tokens.weight is shared
        assert (model.lm_head.weight is shared) == (sharing == "tied")
        check_that_it_still_works(model, tmp_path, size, size)
        old = {name: weight.clone() for name, weight in model.state_dict().items()}


def check_that_it_still_works(model, folder: Path, source_size: int, target_size: int) -> None:
    """Step the optimizer, generate, save and reload, with ids that only the new vocabulary has."""
    ids = torch.tensor([[5, source_size - 1, 1], [6, 7, 1]])
    labels = torch.tensor([[target_size - 1, 1], [6, 1]])
    before = model.lm_head.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loss = model.train()(input_ids=ids, labels=labels).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    assert loss.isfinite()
    assert not torch.equal(before, model.lm_head.weight)
    model.eval()
    generated = model.generate(ids)
    assert generated.max() < target_size
    model.save_pretrained(folder)
    loaded = VanillaTransformerForConditionalGeneration.from_pretrained(folder)
    assert (loaded.config.vocab_size, loaded.config.decoder_vocab_size) == (source_size, target_size)
    with torch.no_grad():
        arguments = {"input_ids": ids, "decoder_input_ids": labels}
        assert torch.equal(model(**arguments).logits, loaded(**arguments).logits)


@pytest.mark.parametrize("sharing", ["separate", "separate, untied"])
def test_resizing_separate_vocabularies_side_by_side(make_model, tmp_path, sharing):
    model = make_model(output_bias=True, **SHARING[sharing])
    old = {name: weight.clone() for name, weight in model.state_dict().items()}
    model.resize_token_embeddings(64)
    assert (model.config.vocab_size, model.config.decoder_vocab_size) == (64, 37)
    assert model.lm_head.weight.shape == (37, 16)
    assert torch.equal(model.model.encoder.embed_tokens.weight[:50], old["model.encoder.embed_tokens.weight"])
    assert model.resize_decoder_token_embeddings(41, 8) is model.model.decoder.embed_tokens
    assert (model.config.vocab_size, model.config.decoder_vocab_size) == (64, 48)
    assert model.lm_head.out_features == 48
    assert torch.equal(model.model.decoder.embed_tokens.weight[:37], old["model.decoder.embed_tokens.weight"])
    assert torch.equal(model.lm_head.weight[:37], old["lm_head.weight"])
    assert (model.lm_head.weight is model.model.decoder.embed_tokens.weight) == (sharing == "separate")
    assert torch.equal(model.final_logits_bias[:, :37], old["final_logits_bias"])
    check_that_it_still_works(model, tmp_path, 64, 48)
    model.resize_token_embeddings(20)
    model.resize_decoder_token_embeddings(30)
    check_that_it_still_works(model, tmp_path, 20, 30)


@pytest.mark.parametrize("sharing", SHARING)
@pytest.mark.parametrize("mean_resizing", [True, False])
def test_new_rows_are_the_mean_of_the_old_or_drawn_as_fresh_ones(make_model, sharing, mean_resizing):
    model = make_model(**SHARING[sharing])
    tables = {id(p): p for name, p in model.named_parameters() if "embed_tokens" in name or "shared" in name}
    with torch.no_grad():
        for number, weight in enumerate([*tables.values(), model.lm_head.weight]):
            weight.add_(number + 1.0)  # means that no fresh matrix has
    old = {name: weight.clone() for name, weight in model.state_dict().items()}
    model.resize_token_embeddings(450, mean_resizing=mean_resizing)
    if "separate" in sharing:
        model.resize_decoder_token_embeddings(437, mean_resizing=mean_resizing)
    grown = {name: weight for name, weight in model.state_dict().items() if len(weight) > len(old[name])}
    assert len(grown) == (3 if "separate" in sharing else 4)
    for name, weight in grown.items():
        new = weight[len(old[name]) :]
        assert len(new) == 400
        if mean_resizing:
            # Hewitt (2021): the old rows' mean; the library draws with 1e-9 times their covariance.
            assert_close(new, old[name].mean(0).expand_as(new), rtol=0, atol=1e-3)
        else:  # embeddings d_model^-0.5, a projection of its own Xavier's sqrt(2 / (rows + columns))
            std = (2 / (len(weight) + 16)) ** 0.5 if name == "lm_head.weight" and "untied" in sharing else 16**-0.5
            assert new.mean().item() == pytest.approx(0.0, abs=0.02)  # 6,400 draws, standard error 0.003
            assert new.std().item() == pytest.approx(std, rel=0.05)


def test_resizing_to_a_multiple_alone(make_model):
    model = make_model()
    model.resize_token_embeddings(pad_to_multiple_of=16)
    assert model.config.vocab_size == model.lm_head.out_features == len(model.lm_head.weight) == 64
    model = make_model(**SEPARATE)
    model.resize_token_embeddings(pad_to_multiple_of=16)
    model.resize_decoder_token_embeddings(pad_to_multiple_of=8)
    assert (model.config.vocab_size, model.config.decoder_vocab_size) == (64, 40)
    assert len(model.model.encoder.embed_tokens.weight) == 64
    assert len(model.lm_head.weight) == 40


def test_resizing_the_model_without_head(make_config, tmp_path):
    model = VanillaTransformerModel(make_config())
    model.resize_token_embeddings(60)
    assert model.config.decoder_vocab_size == 60
    model.save_pretrained(tmp_path)
    assert VanillaTransformerModel.from_pretrained(tmp_path).shared.weight.shape == (60, 16)


def test_resizing_that_makes_no_sense_is_refused_and_changes_nothing(make_model):
    model = make_model(pad_token_id=30)
    with pytest.raises(ValueError, match=r"pad_token_id=30 is outside a vocabulary of 30 tokens"):
        model.resize_token_embeddings(30)
    assert model.config.vocab_size == 50
    assert model.lm_head.weight.shape == (50, 16)
    with pytest.raises(ValueError, match=r"call resize_token_embeddings"):
        model.resize_decoder_token_embeddings(60)
    model = make_model(**SEPARATE, decoder_start_token_id=33)
    with pytest.raises(ValueError, match=r"decoder_start_token_id=33 is outside a vocabulary of 33 tokens"):
        model.resize_decoder_token_embeddings(33)
    model.resize_token_embeddings(33)  # the source has no start token
    assert math.prod(model.lm_head.weight.shape) == 37 * 16


def test_vocabulary_size_given_at_loading_changes_both_sides(make_config, tmp_path):
    make_config().save_pretrained(tmp_path)
    config = VanillaTransformerConfig.from_pretrained(tmp_path, vocab_size=60)
    model = VanillaTransformerForConditionalGeneration(config)
    assert model.lm_head.weight.shape == model.model.encoder.embed_tokens.weight.shape == (60, 16)


def test_config_made_wrong_after_its_construction_is_refused_by_the_model(make_config):
    config = make_config()
    config.dropout = 2.0
    with pytest.raises(ValueError, match=r"dropout=2.0 is not valid"):
        VanillaTransformerForConditionalGeneration(config)


@pytest.mark.parametrize("init_std", [None, 0.02])
def test_fresh_weights_have_the_spread_that_is_asked_for(make_model, init_std):
    sizes = {"d_model": 64, "encoder_ffn_dim": 256, "decoder_ffn_dim": 256, "vocab_size": 500}
    model = make_model(**sizes, tie_word_embeddings=False, init_std=init_std)
    for name, weight in model.named_parameters():
        if weight.dim() < 2:
            continue
        rows, columns = weight.shape
        expected = init_std or (64**-0.5 if name == "model.shared.weight" else (2 / (rows + columns)) ** 0.5)  # Glorot
        assert weight.std().item() == pytest.approx(expected, rel=0.05), name
        uniform = init_std is None and name != "model.shared.weight"
        assert (weight.abs().max() < expected * 3**0.5 * 1.001) == uniform, name
