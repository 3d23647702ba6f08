"""What the library does for its own models: loading, sharded files, assisted generation, checkpointing."""

from __future__ import annotations

import json
import warnings

import pytest
import torch
from safetensors import safe_open
from tiny_models import SEPARATE, SHARING, batch, pad, randomise
from torch import Tensor, nn
from torch.testing import assert_close

from vanilla_transformer import VanillaTransformerForConditionalGeneration, VanillaTransformerModel

# Which matrices are one (section 3.4): the names of all others that are the first.
TIES = {
    "tied": {"model.shared", "model.encoder.embed_tokens", "model.decoder.embed_tokens", "lm_head"},
    "untied": {"model.shared", "model.encoder.embed_tokens", "model.decoder.embed_tokens"},
    "separate": {"model.decoder.embed_tokens", "lm_head"},
    "separate, untied": set(),
}
MATRICES = TIES["tied"]


def ties(model: nn.Module) -> set[str]:
    """Return the modules whose weight is the same parameter as another one's."""
    modules = dict(model.named_modules())
    weights = {name: modules[name].weight for name in MATRICES if name in modules}
    return {name for name, weight in weights.items() if sum(other is weight for other in weights.values()) > 1}


def load(folder, **options) -> VanillaTransformerForConditionalGeneration:
    """Load, and see that the library found every weight and no other."""
    model, info = VanillaTransformerForConditionalGeneration.from_pretrained(
        folder, output_loading_info=True, **options
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")), info
    return model


def equal_weights(one: nn.Module, two: nn.Module) -> bool:
    ours, theirs = one.state_dict(), two.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(weight, theirs[name]) for name, weight in ours.items())


# ---------------------------------------------------------------------------------------- loading

OPTIONS = {
    "plain": {},
    "device_map auto": {"device_map": "auto"},
    "device_map cpu": {"device_map": {"": "cpu"}},
    "low_cpu_mem_usage": {"low_cpu_mem_usage": True},
    "dtype auto": {"dtype": "auto"},
}


@pytest.mark.parametrize("sharing", SHARING)
def test_every_way_to_load_gives_the_same_model_with_the_same_ties(make_model, tmp_path, sharing):
    model = make_model(**SHARING[sharing], output_bias=True)
    model.save_pretrained(tmp_path)
    expected = model(**batch()).logits
    for name, options in OPTIONS.items():
        loaded = load(tmp_path, **options)
        assert ties(loaded) == TIES[sharing], name
        assert equal_weights(model, loaded), name
        assert torch.equal(loaded(**batch()).logits, expected), name
        assert {parameter.device.type for parameter in loaded.parameters()} == {"cpu"}


def test_a_device_map_with_little_room_puts_whole_layers_on_disk(make_model, tmp_path):
    model = make_model(decoder_layers=4)
    model.save_pretrained(tmp_path / "model")
    loaded = load(
        tmp_path / "model",
        device_map="auto",
        max_memory={"cpu": "20KB"},
        offload_folder=str(tmp_path / "offload"),
    )
    places = loaded.hf_device_map
    assert set(places.values()) == {"cpu", "disk"}
    assert any(parameter.device.type == "meta" for parameter in loaded.parameters())
    assert not [name for name in places if "attn" in name or ".fc" in name]  # no layer was split
    assert torch.equal(loaded(**batch()).logits, model(**batch()).logits)


def test_a_layer_is_the_smallest_part_to_place(make_model):
    model = make_model()
    layers = {"VanillaTransformerEncoderLayer", "VanillaTransformerDecoderLayer"}
    assert set(model._no_split_modules) == layers
    assert isinstance(VanillaTransformerModel._no_split_modules, list)  # what the library's annotation says
    assert layers <= {type(module).__name__ for module in model.modules()}


@pytest.mark.parametrize("sharing", SHARING)
def test_a_model_made_without_memory_takes_weights_by_assignment(make_model, sharing):
    model = make_model(**SHARING[sharing])
    with torch.device("meta"):
        blank = VanillaTransformerForConditionalGeneration(model.config)
    assert {parameter.device.type for parameter in blank.parameters()} == {"meta"}
    blank.load_state_dict(model.state_dict(), assign=True)
    blank.tie_weights()
    assert ties(blank) == TIES[sharing]
    assert torch.equal(blank.eval()(**batch()).logits, model(**batch()).logits)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("sharing", ["tied", "separate, untied"])
def test_half_precision_loading_rounds_each_weight_once(make_model, tmp_path, sharing, dtype):
    model = make_model(**SHARING[sharing])
    model.save_pretrained(tmp_path / "wide")
    for asked in (dtype, str(dtype).removeprefix("torch.")):
        half = load(tmp_path / "wide", dtype=asked)
        assert half.dtype == dtype
        assert ties(half) == TIES[sharing]
        for name, weight in model.state_dict().items():
            assert torch.equal(half.state_dict()[name], weight.to(dtype)), name
    assert half(**batch()).logits.dtype == dtype
    assert half.generate(batch()["input_ids"]).shape[0] == 3
    half.save_pretrained(tmp_path / "half")
    with safe_open(tmp_path / "half" / "model.safetensors", "pt") as file:
        assert {file.get_tensor(name).dtype for name in file.keys()} == {dtype}  # noqa: SIM118 - no dictionary
    assert load(tmp_path / "half", dtype="auto").dtype == dtype


# ---------------------------------------------------------------------------------------- sharded files


@pytest.mark.parametrize("sharing", SHARING)
def test_sharded_files_hold_each_matrix_once_and_load_bit_equal(make_model, tmp_path, sharing):
    model = make_model(**SHARING[sharing])
    model.resize_token_embeddings(61)
    if "separate" in sharing:
        model.resize_decoder_token_embeddings(44)
    model.save_pretrained(tmp_path, max_shard_size="4KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert len(files) > 3
    assert sorted(set(index["weight_map"].values())) == files
    stored = {}
    for name in files:
        with safe_open(tmp_path / name, "pt") as file:
            stored |= dict.fromkeys(file.keys(), name)
    assert stored == index["weight_map"]
    unique = {id(parameter): parameter for parameter in model.parameters()}
    assert len(stored) == len(unique)
    assert index["metadata"]["total_size"] == sum(4 * parameter.numel() for parameter in unique.values())

    loaded = load(tmp_path)
    assert ties(loaded) == TIES[sharing]
    assert equal_weights(model, loaded)
    assert (loaded.config.vocab_size, loaded.config.decoder_vocab_size) == (61, 44 if "separate" in sharing else 61)


# ---------------------------------------------------------------------------------------- ties that others undo


def test_saved_config_says_tied_where_the_projection_is(make_model, tmp_path):
    model = make_model(**SEPARATE)
    model.config.tie_word_embeddings = False  # as PEFT does after a merge, see test_peft.py
    model.save_pretrained(tmp_path)
    loaded = load(tmp_path)
    assert ties(loaded) == TIES["separate"]
    assert equal_weights(model, loaded)
    untied = make_model(**SHARING["separate, untied"])
    untied.save_pretrained(tmp_path)
    assert not load(tmp_path).config.tie_word_embeddings


# ---------------------------------------------------------------------------------------- assisted generation


def test_a_draft_model_changes_no_token_and_saves_steps(make_model):
    """The draft is the model itself with some noise: it is often right, and sometimes not."""
    model = randomise(make_model())
    draft = randomise(make_model())
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.03)
    draft.generation_config.num_assistant_tokens = 4
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    draft.generation_config.assistant_confidence_threshold = 0.0
    steps: list[int] = []
    model.model.decoder.register_forward_hook(lambda module, args, output: steps.append(1))
    plain_steps = assisted_steps = 0
    for source in (torch.tensor([[9, 8, 7, 1]]), torch.tensor([[30, 21, 12, 40, 41, 1]]), torch.tensor([[44, 1]])):
        for limits in ({}, {"max_new_tokens": 7}):
            steps.clear()
            greedy = model.generate(source, num_beams=1, **limits)
            plain_steps += len(steps)
            steps.clear()
            assisted = model.generate(source, num_beams=1, assistant_model=draft, **limits)
            assisted_steps += len(steps)
            assert torch.equal(greedy, assisted)
            assert torch.equal(model.generate(source, num_beams=1, prompt_lookup_num_tokens=2, **limits), greedy)
    assert plain_steps > 30  # there was something to save
    assert assisted_steps < plain_steps


# ---------------------------------------------------------------------------------------- gradient checkpointing


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_by_its_new_name(make_model, use_reentrant):
    if not hasattr(VanillaTransformerForConditionalGeneration, "activation_checkpointing_enable"):
        pytest.skip("the name is there since 5.23; the older one is tested in test_modeling.py")
    inputs = batch()
    labels = inputs.pop("decoder_input_ids")

    def train(model: nn.Module) -> tuple[int, Tensor, list[Tensor]]:
        calls: list[int] = []
        handles = [
            layer.fc1.register_forward_hook(lambda *args: calls.append(1))
            for stack in (model.model.encoder, model.model.decoder)
            for layer in stack.layers
        ]
        torch.manual_seed(8)
        model.zero_grad()
        loss = model(**inputs, labels=labels).loss
        loss.backward()
        for handle in handles:
            handle.remove()
        return len(calls), loss.detach(), [parameter.grad for parameter in model.parameters()]

    model = make_model(dropout=0.3).train()
    calls, loss, gradients = train(model)
    assert calls == 5
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": use_reentrant})
        assert model.is_activation_checkpointing
        again, again_loss, again_gradients = train(model)
        model.activation_checkpointing_disable()
        assert not model.is_activation_checkpointing
    assert again == 10  # each layer ran twice
    assert torch.equal(again_loss, loss)
    for one, two in zip(gradients, again_gradients, strict=True):
        assert_close(one, two, rtol=1e-5, atol=1e-6)  # the order in which a tied matrix gets its share
    assert train(model)[0] == 5


# ---------------------------------------------------------------------------------------- labels


def test_the_collators_decoder_inputs_are_those_the_model_makes_itself(make_model):
    """`DataCollatorForSeq2Seq` calls `prepare_decoder_input_ids_from_labels`; BART's shift is the library's."""
    from transformers.models.bart.modeling_bart import shift_tokens_right

    model = make_model()
    labels = torch.tensor([[17, 18, 1, -100, -100], [23, 24, 25, 26, 1], [1, -100, -100, -100, -100]])
    made = model.prepare_decoder_input_ids_from_labels(labels=labels)
    assert torch.equal(made, shift_tokens_right(labels, 0, 2))
    source, mask = pad([[5, 6, 7, 1], [8, 1], [9, 10, 1]])
    loss = model(input_ids=source, attention_mask=mask, labels=labels).loss
    assert torch.equal(model(input_ids=source, attention_mask=mask, labels=labels, decoder_input_ids=made).loss, loss)
