"""PEFT adapters train, save, reload and merge without changing an output; torchao's int8 weights translate.

A merged model has to give what the adapted one gave, also where a matrix is embedding and projection at once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from tiny_models import SHARING
from torch import Tensor, nn
from torch.testing import assert_close
from torchao.quantization import Int8Tensor, Int8WeightOnlyConfig, quantize_
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, TorchAoConfig

from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from vanilla_transformer.loss_vanilla_transformer import is_plain_linear

pytestmark = pytest.mark.filterwarnings("ignore:.*tie_word_embeddings:UserWarning")
PAD, EOS = 0, 1
SIZES = {
    "vocab_size": 24,
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "dropout": 0.0,
}


def sources(rows: int, seed: int) -> Tensor:
    """Return random sentences of 2 to 10 tokens with their end token, padded on the right."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 24, (rows, 10), generator=generator)
    last = torch.randint(1, 10, (rows, 1), generator=generator)
    return ids.masked_fill(torch.arange(10) > last, PAD).scatter(1, last, EOS)


def arguments(source: Tensor, backwards: bool = False) -> dict[str, Tensor]:
    """Return a batch whose targets are the sources, or the sources backwards (what the adapters learn)."""
    labels = source.masked_fill(source == PAD, -100)
    return {
        "input_ids": source,
        "attention_mask": source.ne(PAD).long(),
        "labels": labels.flip(1) if backwards else labels,
    }


def train(model: nn.Module, steps: int, backwards: bool = False) -> None:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.Adam(parameters, lr=3e-3, betas=(0.9, 0.98))
    model.train()
    for step in range(steps):
        model(**arguments(sources(32, seed=step), backwards)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()


@pytest.fixture(scope="module")
def bases(tmp_path_factory) -> dict[str, Path]:
    """Return folders of models that have half learnt to copy, one for each way to share matrices."""
    folders = {}
    for name in ("tied", "untied", "separate"):
        torch.manual_seed(0)
        sizes = {**SIZES, **SHARING[name], "decoder_vocab_size": 24}
        model = VanillaTransformerForConditionalGeneration(VanillaTransformerConfig(**sizes))
        train(model, 60)
        folders[name] = tmp_path_factory.mktemp("base")
        model.save_pretrained(folders[name])
    return folders


def load(folder: Path, **options: Any) -> VanillaTransformerForConditionalGeneration:
    return VanillaTransformerForConditionalGeneration.from_pretrained(folder, **options)


def outputs(model: nn.Module) -> tuple[Tensor, Tensor]:
    """Return the logits and the translations of the same sentences."""
    batch = arguments(sources(16, seed=99))
    with torch.no_grad():
        logits = model(**batch).logits
    return logits, model.generate(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])


def same(ours: tuple[Tensor, Tensor], theirs: tuple[Tensor, Tensor], **tolerance: float) -> None:
    assert_close(ours[0], theirs[0], **tolerance)
    assert torch.equal(ours[1], theirs[1])


ADAPTERS: dict[str, dict[str, Any]] = {
    "attention": {"target_modules": ["q_proj", "v_proj"]},
    "all linear layers": {"target_modules": "all-linear"},
    "lm_head": {"target_modules": ["lm_head"]},
    "embed_tokens": {"target_modules": ["embed_tokens"]},
    "embed_tokens and lm_head": {"target_modules": ["embed_tokens", "lm_head"]},
    "lm_head saved whole": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "embeddings and head saved whole": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
    "some tokens": {"target_modules": ["q_proj"], "trainable_token_indices": [3, 4]},
}
CASES = [
    *((adapter, "tied") for adapter in ADAPTERS),
    *((adapter, "untied") for adapter in ("attention", "lm_head", "embed_tokens")),
    *((adapter, "separate") for adapter in ("attention", "lm_head", "embed_tokens")),
]


@pytest.mark.parametrize(("adapter", "sharing"), CASES)
def test_an_adapter_trains_saves_reloads_and_merges_to_the_same_outputs(bases, tmp_path, adapter, sharing):
    options = ADAPTERS[adapter]
    base = load(bases[sharing])
    frozen = outputs(base)
    model = get_peft_model(base, LoraConfig(r=4, lora_alpha=16, task_type="SEQ_2_SEQ_LM", **options))
    same(outputs(model.eval()), frozen)  # a fresh adapter adds nothing, bit by bit
    train(model, 15, backwards=True)
    adapted = outputs(model)
    assert (adapted[0] - frozen[0]).abs().max() > 0.5

    model.save_pretrained(tmp_path / "adapter")
    reloaded = PeftModel.from_pretrained(load(bases[sharing]), tmp_path / "adapter").eval()
    same(outputs(reloaded), adapted, rtol=0, atol=0)

    merged = reloaded.merge_and_unload()
    assert type(merged) is VanillaTransformerForConditionalGeneration
    assert not any("lora" in name for name in merged.state_dict())
    same(outputs(merged), adapted, rtol=1e-4, atol=1e-4)
    merged.save_pretrained(tmp_path / "merged")
    same(outputs(load(tmp_path / "merged")), outputs(merged), rtol=0, atol=0)


def test_lora_trains_under_the_stock_trainer_and_touches_nothing_else(bases, tmp_path):
    base = load(bases["tied"])
    before = {name: weight.clone() for name, weight in base.state_dict().items()}
    names = ("q_proj", "v_proj")
    model = get_peft_model(base, LoraConfig(r=4, target_modules=list(names), task_type="SEQ_2_SEQ_LM"))
    rows = [{"input_ids": row[row != PAD].tolist(), "labels": row[row != PAD].tolist()} for row in sources(32, seed=5)]

    def collate(batch: list[dict[str, list[int]]]) -> dict[str, Tensor]:
        width = max(len(row["labels"]) for row in batch)
        ids = torch.tensor([row["input_ids"] + [PAD] * (width - len(row["input_ids"])) for row in batch])
        return arguments(ids, backwards=True)

    trainer = Seq2SeqTrainer(
        model,
        Seq2SeqTrainingArguments(
            str(tmp_path),
            max_steps=4,
            learning_rate=0.01,
            logging_steps=1,
            use_cpu=True,
            report_to=[],
            save_strategy="steps",
            save_steps=4,
            disable_tqdm=True,
        ),
        train_dataset=rows,
        data_collator=collate,
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0]
    state = model.get_base_model().state_dict()
    for name, weight in before.items():
        stem, _, kind = name.rpartition(".")
        wrapped = f"{stem}.base_layer.{kind}" if stem.endswith(names) else name
        assert torch.equal(state[wrapped], weight), name
    saved = load_file(tmp_path / "checkpoint-4" / "adapter_model.safetensors")
    # Two matrices for each of two projections of three attentions; nothing of the base.
    assert len(saved) == 2 * 2 * 3
    assert any(weight.abs().sum() > 0 for name, weight in saved.items() if "lora_B" in name)


def test_the_loss_goes_through_an_adapted_projection(bases):
    """The fused loss multiplies by a weight; with an adapter on `lm_head` that would leave the adapter out."""
    base = load(bases["tied"])
    assert is_plain_linear(base.lm_head)
    model = get_peft_model(base, LoraConfig(r=4, target_modules=["lm_head"], task_type="SEQ_2_SEQ_LM"))
    nn.init.normal_(model.base_model.model.lm_head.lora_B["default"].weight)
    assert not is_plain_linear(model.base_model.model.lm_head)
    batch = arguments(sources(8, seed=7))
    loss = model.train()(**batch).loss
    logits = model.eval()(**batch).logits
    expected = nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), label_smoothing=0.1)
    assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    assert (loss - base.train()(**batch, return_logits=True).loss).abs() < 1e-6
    with model.disable_adapter():
        assert (model.train()(**batch).loss - loss).abs() > 0.1


@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["shared"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["shared"]},
        {"target_modules": ["embed_tokens", "lm_head"], "ensure_weight_tying": True},
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    ],
)
def test_an_adapter_that_would_do_nothing_or_be_lost_is_refused(bases, options):
    """With `ensure_weight_tying` PEFT 0.21 loses the adapter in saving, or calls an embedding as a projection."""
    base = load(bases["tied"])
    with pytest.raises(ValueError, match=r"adapter on 'shared' would do nothing.*'embed_tokens' and 'lm_head'"):
        get_peft_model(base, LoraConfig(r=4, task_type="SEQ_2_SEQ_LM", **options))


# ---------------------------------------------------------------------------------------- quantisation


def test_int8_weights_translate_save_and_reload(bases, tmp_path):
    model = load(bases["tied"])
    train(model, 240)  # until it copies
    model.save_pretrained(tmp_path / "wide")
    config = TorchAoConfig(Int8WeightOnlyConfig())
    quantised = load(tmp_path / "wide", quantization_config=config)
    kinds = {name: isinstance(p.data, Int8Tensor) for name, p in quantised.named_parameters() if p.dim() == 2}
    # Every projection; not the embeddings, to which the output projection is tied.
    assert kinds == {name: name != "model.shared.weight" for name in kinds}
    assert quantised.lm_head.weight is quantised.model.shared.weight
    for name, parameter in quantised.named_parameters():
        if kinds.get(name):
            wide = model.get_parameter(name)
            step = wide.abs().amax(dim=1, keepdim=True) / 127  # one scale a row
            assert ((parameter.dequantize() - wide).abs() <= step * 0.51).all(), name

    source = sources(64, seed=99)
    ours, theirs = (m.generate(source, attention_mask=source.ne(PAD).long()) for m in (quantised, model))
    width = min(ours.shape[1], theirs.shape[1])
    assert (ours[:, :width] == theirs[:, :width]).all(dim=1).float().mean() > 0.95
    quantised.save_pretrained(tmp_path / "int8")
    assert torch.equal(load(tmp_path / "int8").generate(source, attention_mask=source.ne(PAD).long()), ours)


def test_a_quantised_projection_is_called_by_the_loss(bases):
    """Where the projection is a matrix of its own it can be quantised too; the fused loss steps aside."""
    model = load(bases["untied"])
    quantize_(model, Int8WeightOnlyConfig())
    assert isinstance(model.lm_head.weight.data, Int8Tensor)
    assert not is_plain_linear(model.lm_head)
    batch = arguments(sources(8, seed=7))
    with torch.no_grad():
        loss, logits = model.train()(**batch).loss, model.eval()(**batch).logits
    expected = nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), label_smoothing=0.1)
    assert_close(loss, expected, rtol=1e-5, atol=1e-6)
