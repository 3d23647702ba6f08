"""Averages against numpy's mean of the files and the closed formula of the moving average."""

import json
import shutil
import weakref

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from tiny_models import SHARING, TINY, batch, randomise
from transformers import AutoModelForSeq2SeqLM, Seq2SeqTrainer, Seq2SeqTrainingArguments, TrainerCallback

import vanilla_transformer as vt
from vanilla_transformer.averaging import (
    ExponentialMovingAverageCallback,
    _OpenCheckpoint,
    average_checkpoints,
    best_checkpoints,
    last_checkpoints,
)
from vanilla_transformer.checkpointing import mark_complete


def make_model(**fields):
    return vt.VanillaTransformerForConditionalGeneration(vt.VanillaTransformerConfig(**{**TINY, **fields}))


def write_run(folder, steps, *, scores=None, options=None, **fields):
    """Write checkpoints of one model with other weights each, as a run leaves them."""
    log = [{"step": step, "eval_bleu": score, "eval_loss": -score} for step, score in (scores or {}).items()]
    for step in steps:
        model = make_model(**fields)
        generator = torch.Generator().manual_seed(step)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        place = folder / f"checkpoint-{step}"
        model.save_pretrained(place, **(options or {}))
        (place / "trainer_state.json").write_text(json.dumps({"log_history": [e for e in log if e["step"] <= step]}))
        (place / "optimizer.pt").write_bytes(b"not read")
        (place / "tokenizer.json").write_text(f"{step}")
    return [folder / f"checkpoint-{step}" for step in steps]


def tensors(folder):
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        found.update(load_file(path))
    return found


@pytest.mark.parametrize("sharing", SHARING)
@pytest.mark.parametrize("options", [{}, {"max_shard_size": "5KB"}], ids=["one file", "shards"])
def test_the_average_is_the_mean_of_the_files_and_loads(tmp_path, sharing, options):
    checkpoints = write_run(tmp_path, (1, 2, 5), options=options, **SHARING[sharing])
    files = [tensors(folder) for folder in checkpoints]
    average = average_checkpoints(checkpoints, tmp_path / "average")
    found = tensors(average)
    assert found.keys() == files[0].keys()
    for name, tensor in found.items():
        np.testing.assert_allclose(tensor, np.mean([f[name] for f in files], axis=0), rtol=1e-6, atol=1e-7)
    assert len(list(average.glob("*.safetensors"))) == len(list(checkpoints[0].glob("*.safetensors")))
    model, info = AutoModelForSeq2SeqLM.from_pretrained(average, output_loading_info=True)
    assert not any(info.values())
    assert torch.isfinite(model.eval()(**batch()).logits).all()


def test_it_is_a_whole_checkpoint_without_the_state_of_the_run(tmp_path):
    checkpoints = write_run(tmp_path, (1, 2))
    average = average_checkpoints(checkpoints, tmp_path / "average")
    names = {path.name for path in average.iterdir()}
    assert names == {path.name for path in checkpoints[1].iterdir()} - {"optimizer.pt", "trainer_state.json"}
    assert (average / "tokenizer.json").read_text() == "2"
    assert not list(tmp_path.glob(".*"))


def test_half_precision_is_summed_in_float32(tmp_path):
    # In bfloat16 itself 256 + 1 is 256 and the sum of these would stay there; their mean is 64.75, rounded 64.5.
    for step, value in enumerate((256.0, 1.0, 1.0, 1.0), start=1):
        model = make_model()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(value)
        model.to(torch.bfloat16).save_pretrained(tmp_path / f"checkpoint-{step}")
    average_checkpoints(last_checkpoints(tmp_path, 4), tmp_path / "average")
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "average", dtype="auto")
    assert model.dtype == torch.bfloat16
    want = torch.tensor(64.75).bfloat16()
    assert all((parameter == want).all() for parameter in model.parameters())


def test_a_few_tensors_are_in_memory_at_a_time(tmp_path, monkeypatch):
    checkpoints = write_run(tmp_path, (1, 2, 3, 4))
    read, alive, most = _OpenCheckpoint.tensor, set(), []

    def counted(checkpoint, name):
        tensor = read(checkpoint, name)
        alive.add(id(tensor))
        weakref.finalize(tensor, alive.discard, id(tensor))
        most.append(len(alive))
        return tensor

    monkeypatch.setattr(_OpenCheckpoint, "tensor", counted)
    average_checkpoints(checkpoints, tmp_path / "average")
    assert len(most) == 4 * len(tensors(checkpoints[0]))
    assert max(most) <= 3


def test_one_checkpoint_is_its_own_average(tmp_path):
    (checkpoint,) = write_run(tmp_path, (3,))
    average = average_checkpoints([checkpoint], tmp_path / "average")
    assert all(np.array_equal(tensor, tensors(average)[name]) for name, tensor in tensors(checkpoint).items())


def test_the_last_and_the_best_are_found(tmp_path):
    scores = {5: 30.0, 10: 10.0, 100: 20.0, 20: 25.0}
    folders = dict(zip((5, 10, 20, 100), write_run(tmp_path, (5, 10, 20, 100), scores=scores), strict=True))
    assert last_checkpoints(tmp_path, 3) == [folders[10], folders[20], folders[100]]
    assert best_checkpoints(tmp_path, 2, "bleu") == [folders[5], folders[20]]
    assert best_checkpoints(tmp_path, 2, "eval_loss") == [folders[5], folders[20]]
    assert best_checkpoints(tmp_path, 2, "bleu", greater_is_better=False) == [folders[10], folders[100]]


def test_a_checkpoint_that_was_cut_off_is_not_averaged(tmp_path, caplog):
    folders = write_run(tmp_path, (1, 2, 3, 4), scores={1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0})
    for folder in folders[:3]:
        mark_complete(folder)
    (folders[0] / "optimizer.pt").unlink()  # as one does for its size
    (folders[3] / "trainer_state.json").unlink()
    assert last_checkpoints(tmp_path, 3) == folders[:3]
    assert best_checkpoints(tmp_path, 2, "bleu") == folders[1:3]
    assert "checkpoint-4 is left out: it has no complete.json" in caplog.text
    with pytest.raises(ValueError, match=r"4 checkpoints were asked for, .* has 3"):
        last_checkpoints(tmp_path, 4)
    (folders[2] / "trainer_state.json").unlink()
    with pytest.raises(ValueError, match=r"trainer_state.json, where the values of 'bleu' stand, is gone"):
        best_checkpoints(tmp_path, 2, "bleu")


def test_what_cannot_be_averaged_is_named_and_nothing_is_written(tmp_path):
    first, second = write_run(tmp_path, (1, 2), scores={1: 1.0})
    (wide,) = write_run(tmp_path / "wide", (1,), d_model=32)
    output = tmp_path / "average"
    with pytest.raises(ValueError, match=r"not checkpoints of one model: their configurations differ in d_model"):
        average_checkpoints([first, wide], output)
    with pytest.raises(ValueError, match="at least one checkpoint"):
        average_checkpoints([], output)
    with pytest.raises(ValueError, match=r"given twice: .*checkpoint-1"):
        average_checkpoints([first, second, first], output)
    with pytest.raises(ValueError, match="is not empty"):
        average_checkpoints([first, second], first)
    with pytest.raises(FileNotFoundError, match=r"no config\.json"):
        average_checkpoints([first, tmp_path], output)
    for call, message in (
        (
            lambda: last_checkpoints(tmp_path, 3),
            r"3 checkpoints were asked for, .* has 2 \(checkpoint-1, checkpoint-2",
        ),
        (lambda: last_checkpoints(tmp_path, 0), "At least one"),
        (lambda: best_checkpoints(tmp_path, 2, "bleu"), "1 of the 2 .* Metrics there: bleu, loss"),
        (lambda: best_checkpoints(tmp_path, 1, "comet"), "Metrics there: bleu, loss"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    weights = first / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-100])
    with pytest.raises(ValueError, match=r"cannot be read .* cut off"):
        average_checkpoints([first, second], output)
    weights.unlink()
    with pytest.raises(FileNotFoundError, match=r"no model\.safetensors"):
        average_checkpoints([first, second], output)
    assert not output.exists()


def test_tensors_that_differ_under_one_configuration_are_named(tmp_path):
    first, second = write_run(tmp_path, (1, 2))
    shutil.copy(write_run(tmp_path / "wide", (1,), d_model=32)[0] / "model.safetensors", first)
    with pytest.raises(ValueError, match=r"tensors differ: model\."):
        average_checkpoints([first, second], tmp_path / "average")


class Copies(ExponentialMovingAverageCallback):
    """Notes the weights that go into the average."""

    def on_train_begin(self, *arguments, **options):
        super().on_train_begin(*arguments, **options)
        self.weights = []

    def on_step_end(self, *arguments, model=None, **options):
        self.weights.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
        super().on_step_end(*arguments, model=model, **options)


def collate(rows):
    return {name: torch.tensor([row[name] for row in rows]) for name in rows[0]}


def train(folder, callback, *, max_steps, resume=False):
    torch.manual_seed(0)
    model = randomise(make_model()).train()
    rows = [{"input_ids": [5, 6, 7 + n, 1], "labels": [9, 8 + n, 1]} for n in range(8)]
    arguments = Seq2SeqTrainingArguments(
        output_dir=str(folder), max_steps=max_steps, save_steps=2, per_device_train_batch_size=2, learning_rate=0.01,
        report_to="none", use_cpu=True, disable_tqdm=True, lr_scheduler_type="constant", seed=1,
    )  # fmt: skip
    arguments.resume_from_checkpoint = resume if isinstance(resume, str) else None  # as VanillaTransformerTrainer does
    trainer = Seq2SeqTrainer(model, arguments, train_dataset=rows, data_collator=collate, callbacks=[callback])
    trainer.train(resume_from_checkpoint=resume or None)
    return trainer.model


def test_the_moving_average_is_that_of_its_formula_and_resumes(tmp_path, monkeypatch):
    decay = 0.7
    callback = Copies(decay)
    train(tmp_path / "whole", callback, max_steps=6)
    want = callback.weights[0]  # the first weights, then 0.7 · average + 0.3 · weights
    for weights in callback.weights[1:]:
        want = {name: decay * tensor + (1 - decay) * weights[name] for name, tensor in want.items()}
    for folder in (tmp_path / "whole", tmp_path / "whole" / "checkpoint-6"):
        model = AutoModelForSeq2SeqLM.from_pretrained(folder, subfolder="ema")
        for name, tensor in model.state_dict().items():
            torch.testing.assert_close(tensor, want[name], rtol=1e-5, atol=1e-6)

    train(tmp_path / "parts", ExponentialMovingAverageCallback(decay), max_steps=4)
    (tmp_path / "ema").mkdir()
    monkeypatch.chdir(tmp_path)
    train(tmp_path / "parts", ExponentialMovingAverageCallback(decay), max_steps=6, resume=True)
    resumed = load_file(tmp_path / "parts" / "ema" / "model.safetensors")
    # And from a folder of another run, by its name; whatever lies in the working directory.
    shutil.copytree(tmp_path / "parts" / "checkpoint-2" / "ema", tmp_path / "here" / "ema")
    monkeypatch.chdir(tmp_path / "here")
    train(
        tmp_path / "other", ExponentialMovingAverageCallback(decay), max_steps=6,
        resume=str(tmp_path / "parts" / "checkpoint-4"),
    )  # fmt: skip
    elsewhere = load_file(tmp_path / "other" / "ema" / "model.safetensors")
    for name, array in load_file(tmp_path / "whole" / "ema" / "model.safetensors").items():
        assert np.array_equal(array, resumed[name]), name
        assert np.array_equal(array, elsewhere[name]), name


def test_a_resumed_run_without_an_average_says_so(tmp_path, caplog):
    train(tmp_path, TrainerCallback(), max_steps=4)
    train(tmp_path, ExponentialMovingAverageCallback(0.7), max_steps=6, resume=True)
    assert "The moving average begins with the weights as they are" in caplog.text


@pytest.mark.parametrize("decay", [0.0, 1.0, -0.1, 1.5])
def test_a_decay_without_sense_is_refused(decay):
    with pytest.raises(ValueError, match=f"got {decay}"):
        ExponentialMovingAverageCallback(decay)
