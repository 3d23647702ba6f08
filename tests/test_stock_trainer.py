"""The library's own Seq2SeqTrainer and collator on our model, against F.cross_entropy and `generate()`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from packaging.version import Version
from test_trainer import VOCABULARY, make_dataset, make_tokenizer
from tiny_models import SHARING, SMALL, randomise
from transformers import (
    AutoModelForSeq2SeqLM,
    DataCollatorForSeq2Seq,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    TrainerCallback,
)
from transformers.trainer_pt_utils import LabelSmoother

from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration


def make_model(**fields: Any) -> VanillaTransformerForConditionalGeneration:
    """Without dropout, so that a loss can be computed twice."""
    config = VanillaTransformerConfig(**{**SMALL, "vocab_size": VOCABULARY, "dropout": 0.0, **fields})
    return randomise(VanillaTransformerForConditionalGeneration(config), std=0.2)


class RecordingTrainer(Seq2SeqTrainer):
    """Notes the micro-batches and the gradients of the first update."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.batches: list[dict[str, torch.Tensor]] = []
        self.add_callback(_Gradients(self))

    def training_step(self, model, inputs, *args, **kwargs):
        self.batches.append({name: value.clone() for name, value in inputs.items()})
        return super().training_step(model, inputs, *args, **kwargs)


class _Gradients(TrainerCallback):
    def __init__(self, trainer: RecordingTrainer) -> None:
        self.trainer = trainer

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        if not hasattr(self.trainer, "gradients"):
            self.trainer.gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def make_trainer(output: Path, model: Any, pairs: int = 8, collate: Any = None, **options: Any) -> RecordingTrainer:
    defaults = {
        "max_steps": 1, "per_device_train_batch_size": 4, "per_device_eval_batch_size": 8, "learning_rate": 1e-2,
        "lr_scheduler_type": "constant", "max_grad_norm": 0.0, "logging_steps": 1, "save_strategy": "no",
        "use_cpu": True, "report_to": "none", "disable_tqdm": True, "predict_with_generate": True,
    }  # fmt: skip
    dataset = make_dataset(pairs, seed=2)
    tokenizer = make_tokenizer()
    return RecordingTrainer(
        model,
        Seq2SeqTrainingArguments(output_dir=str(output), **{**defaults, **options}),
        data_collator=collate or DataCollatorForSeq2Seq(tokenizer, model=model, pad_to_multiple_of=8),
        train_dataset=dataset,
        eval_dataset=dataset,
        processing_class=tokenizer,
    )


def cross_entropy(model: Any, batch: dict[str, torch.Tensor], smoothing: float, reduction: str) -> torch.Tensor:
    """Of torch, from logits that the model computes without knowing of labels."""
    logits = model(**{name: value for name, value in batch.items() if name != "labels"}).logits
    return F.cross_entropy(logits.transpose(1, 2), batch["labels"], label_smoothing=smoothing, reduction=reduction)


def whole_batch(trainer: RecordingTrainer) -> dict[str, torch.Tensor]:
    rows = trainer.eval_dataset.select_columns(["input_ids", "labels"])
    return dict(trainer.data_collator(list(rows)))


# ---------------------------------------------------------------------------------------------- loss


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("factor", [0.0, 0.2])
def test_gradients_are_those_of_all_tokens_together(tmp_path, factor, accumulation) -> None:
    """Smoothed by the Trainer's factor if there is one, else by the config; never by both.

    The count of the tokens also pins that the library does not take us for a model with shifted labels, in which each
    row counts one token less.
    """
    model = make_model(label_smoothing=0.3)
    trainer = make_trainer(
        tmp_path, model, label_smoothing_factor=factor, gradient_accumulation_steps=accumulation,
        per_device_train_batch_size=8 // accumulation,
    )  # fmt: skip
    start = make_model(label_smoothing=0.3)
    start.load_state_dict(model.state_dict())
    trainer.train()

    counts = [int(batch["labels"].ne(-100).sum()) for batch in trainer.batches]
    assert len(counts) == accumulation
    assert len(set(counts)) == accumulation  # uneven, so that a mean of means would differ
    losses = [cross_entropy(start.train(), batch, factor or 0.3, "sum") for batch in trainer.batches]
    if factor and Version(transformers.__version__) < Version("5.15"):
        # The library's smoother took the mean of each micro-batch, and nothing divided their sum.
        expected = sum(loss / count for loss, count in zip(losses, counts, strict=True))
    else:
        expected = sum(losses) / sum(counts)
    expected.backward()
    for name, parameter in start.named_parameters():
        torch.testing.assert_close(trainer.gradients[name], parameter.grad, rtol=1e-4, atol=1e-6)
    assert trainer.state.log_history[0]["loss"] == pytest.approx(expected.item(), abs=1e-4)  # the log rounds


@pytest.mark.parametrize("factor", [0.0, 0.2])
def test_the_evaluation_loss_is_smoothed_by_the_factor_alone(tmp_path, factor) -> None:
    """Without a factor it is the plain negative log-likelihood, whatever the config smooths by in training."""
    model = make_model(label_smoothing=0.3)
    trainer = make_trainer(tmp_path, model, label_smoothing_factor=factor)
    batch = whole_batch(trainer)
    with torch.no_grad():
        outputs = model.eval()(**batch)
        expected = cross_entropy(model, batch, factor, "mean")
        library = LabelSmoother(epsilon=factor)(outputs, batch["labels"]) if factor else outputs.loss
    torch.testing.assert_close(library, expected)
    assert trainer.evaluate(max_length=4, num_beams=1)["eval_loss"] == pytest.approx(expected.item(), abs=1e-5)


def test_the_configs_smoothing_has_no_effect_beside_the_factor(tmp_path) -> None:
    results = []
    for smoothing in (0.0, 0.3):
        model = make_model(label_smoothing=smoothing)
        make_trainer(tmp_path, model, label_smoothing_factor=0.2, max_steps=3).train()
        results.append(model.state_dict())
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


def test_the_factor_without_a_model_in_the_collator_is_explained(tmp_path) -> None:
    """Nothing then makes the decoder's input; BART would quietly decode its own source."""
    model = make_model()
    trainer = make_trainer(
        tmp_path, model, collate=DataCollatorForSeq2Seq(make_tokenizer()), label_smoothing_factor=0.2
    )
    with pytest.raises(ValueError, match=r"DataCollatorForSeq2Seq\(tokenizer, model=model\)"):
        trainer.train()


# ---------------------------------------------------------------------------------------------- generation


def real_tokens(row: Any) -> list[int]:
    return [token for token in list(row) if token not in (-100, 0, 1, 2)]


def test_predictions_are_what_generate_gives_sentence_by_sentence(tmp_path) -> None:
    """Without arguments decoded as the model's own settings say, whatever the batch; padding is the collator's."""
    model = make_model()
    trainer = make_trainer(tmp_path, model, per_device_eval_batch_size=3)
    settings: list[tuple[dict[str, Any], int]] = [({}, 50), ({"max_length": 6, "num_beams": 2}, 5)]
    for options, longest in settings:
        predictions = trainer.predict(trainer.eval_dataset, **options).predictions
        for row, prediction in zip(trainer.eval_dataset, predictions, strict=True):
            alone = model.generate(torch.tensor([row["input_ids"]]), **options)
            assert real_tokens(prediction) == real_tokens(alone[0].tolist())
        # Without arguments longer than the library's 20 tokens.
        assert longest == 5 or max(len(real_tokens(row)) for row in predictions) > 20
        assert max(len(real_tokens(row)) for row in predictions) <= longest + 12
        assert len({tuple(real_tokens(row)) for row in predictions}) > 1


def test_generation_arguments_of_the_arguments_class_are_honoured(tmp_path) -> None:
    model = make_model()
    trainer = make_trainer(tmp_path, model, generation_max_length=5, generation_num_beams=1)
    predictions = trainer.predict(trainer.eval_dataset).predictions
    alone = model.generate(**{k: v for k, v in whole_batch(trainer).items() if "mask" in k or k == "input_ids"},
                           max_length=5, num_beams=1)  # fmt: skip
    assert [real_tokens(row) for row in predictions] == [real_tokens(row) for row in alone.tolist()]


def test_no_number_of_beams_means_the_models_own() -> None:
    """The _no_trainer example scripts pass None; the library's own models raise a TypeError."""
    model = make_model()
    source = torch.tensor([[5, 6, 7, 8, 1]])
    own = model.generate(source, max_length=12)
    assert torch.equal(model.generate(source, max_length=12, num_beams=None), own)
    assert not torch.equal(model.generate(source, max_length=12, num_beams=1), own)


def test_evaluation_leaves_the_generation_settings_alone(tmp_path) -> None:
    """The library's trainer fills every open field with its default, and would save them with the model.

    What somebody has set stays, also where it is the library's default.
    """
    chosen = {"length_penalty": 1.0, "num_beams": 2, "repetition_penalty": 1.5}
    for settings in ({}, chosen):
        model = make_model()
        model.generation_config.update(**settings)
        trainer = make_trainer(tmp_path / "trained", model, per_device_eval_batch_size=3)
        model.save_pretrained(tmp_path / "before")
        trainer.predict(trainer.eval_dataset)
        trainer.save_model()
        before, after = (
            json.loads((tmp_path / name / "generation_config.json").read_text()) for name in ("before", "trained")
        )
        assert after == before
        assert "max_length" not in before
        assert settings.items() <= before.items()


# ---------------------------------------------------------------------------------------------- saving


@pytest.mark.parametrize("sharing", SHARING)
def test_a_trained_model_saves_and_loads_bit_equal(tmp_path, sharing) -> None:
    model = make_model(**SHARING[sharing])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trainer = make_trainer(tmp_path, model, max_steps=2)
    trainer.train()
    trainer.save_model()
    loaded, info = AutoModelForSeq2SeqLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert all(torch.equal(value, loaded.state_dict()[name]) for name, value in model.state_dict().items())
    assert all(not torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_resuming_in_the_middle_of_an_epoch_is_exact(tmp_path) -> None:
    options = {"pairs": 30, "max_steps": 6, "save_strategy": "steps", "save_steps": 3, "label_smoothing_factor": 0.1}
    straight = make_model(dropout=0.1)
    make_trainer(tmp_path, straight, **options).train()
    resumed = make_model(dropout=0.1)
    torch.manual_seed(99)  # nothing of the random state may be left over
    make_trainer(tmp_path, resumed, **options).train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert all(torch.equal(value, resumed.state_dict()[name]) for name, value in straight.state_dict().items())
