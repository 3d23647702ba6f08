"""A run that is killed and resumed ends as one that was not: bit for bit, from complete checkpoints alone."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from packaging.version import Version
from safetensors.torch import load_file
from test_trainer import RecordingTrainer, make_dataset, make_trainer
from transformers import TrainerCallback

from vanilla_transformer.averaging import ExponentialMovingAverageCallback
from vanilla_transformer.checkpointing import MARKER_FILE, what_is_missing

STEPS = 30
OPTIONS = {"max_steps": STEPS, "save_strategy": "steps", "save_steps": 4, "save_total_limit": 3}

# Where a process is killed, as in `kill -9`: no handler runs, no file is closed.
KILLED = """
import os, shutil, signal, sys
import torch
from test_trainer import make_dataset, make_trainer
from test_resuming import OPTIONS, evaluation_options
from transformers import TrainerCallback

folder, where = sys.argv[1:]

def kill():
    os.kill(os.getpid(), signal.SIGKILL)

class Killer(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if where == "step" and state.global_step == 15:
            kill()
        if where == "save" and state.global_step == 16:
            write = torch.save
            def torn(content, path, *more, **options):
                write(content, path, *more, **options)
                os.truncate(path, os.path.getsize(path) // 2)
                kill()
            torch.save = torn
        if where == "deletion" and state.global_step == 16:
            def half_gone(folder, *more, **options):
                os.unlink(os.path.join(folder, "model.safetensors"))
                kill()
            shutil.rmtree = half_gone

    def on_save(self, args, state, control, **kwargs):
        if where == "mark" and state.global_step == 16:  # all is written but the mark
            kill()

    def on_prediction_step(self, args, state, control, **kwargs):
        if where == "evaluation" and state.global_step == 14:
            kill()

make_trainer(folder, callbacks=[Killer()], **OPTIONS, **evaluation_options()).train(where == "resume" or None)
"""


def evaluation_options():
    return {"eval_strategy": "steps", "eval_steps": 7, "eval_dataset": make_dataset(6), "generation_max_length": 4}


def final(folder: Path) -> dict:
    """Weights, optimizer, schedule and random numbers at the end."""
    last = folder / f"checkpoint-{STEPS}"
    parts = {"weights": load_file(last / "model.safetensors")}
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
        parts[name] = torch.load(last / name, weights_only=False)
    return parts


def assert_same(first, second) -> None:
    if isinstance(first, torch.Tensor):
        assert torch.equal(first, second)
    elif isinstance(first, dict):
        assert first.keys() == second.keys()
        for key in first:
            assert_same(first[key], second[key])
    elif isinstance(first, (list, tuple)):
        assert len(first) == len(second)
        for pair in zip(first, second, strict=True):
            assert_same(*pair)
    elif hasattr(first, "tolist"):
        assert first.tolist() == second.tolist()
    else:
        assert first == second


def launched(folder: Path, where: str, processes: int) -> subprocess.CompletedProcess[str]:
    """Run `KILLED` in one process, or under torchrun in several."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    script = folder.parent / f"{folder.name}.py"
    script.write_text(KILLED, encoding="utf-8")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    command = [sys.executable, *(torchrun if processes > 1 else []), str(script), str(folder), where]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The run that nobody killed."""
    folder = tmp_path_factory.mktemp("whole")
    make_trainer(folder, **OPTIONS, save_only_model=False, **evaluation_options()).train()
    return folder


@pytest.fixture(scope="module")
def whole_of_two(tmp_path_factory):
    """The same, of two processes."""
    folder = tmp_path_factory.mktemp("two") / "whole"
    done = launched(folder, "nowhere", 2)
    assert done.returncode == 0, done.stderr[-2000:]
    return folder


@pytest.mark.parametrize("where", ["step", "save", "deletion", "mark", "evaluation"])
def test_a_killed_run_ends_as_the_whole_one(tmp_path, whole, where) -> None:
    tmp_path = tmp_path / "run"
    done = launched(tmp_path, where, 1)
    assert done.returncode == -signal.SIGKILL, done.stderr
    if where in ("save", "deletion", "mark"):
        assert (tmp_path / "checkpoint-16" / "model.safetensors").is_file()
        assert what_is_missing(tmp_path / "checkpoint-16")
    if where == "deletion":  # of the oldest, before the newest is marked
        assert what_is_missing(tmp_path / "checkpoint-4") == "model.safetensors is gone"
    began = []

    class Beginning(TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            began.append(state.global_step)

    trainer = make_trainer(tmp_path, callbacks=[Beginning()], **OPTIONS, **evaluation_options())
    trainer.train(resume_from_checkpoint=True)
    assert began == [12]
    assert_same(final(tmp_path), final(whole))
    assert what_is_missing(tmp_path / f"checkpoint-{STEPS}") is None


@pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.1"),
    reason="transformers 5.0 asks torch to load the optimizer of several CPU processes to 'cpu:0', which it refuses",
)
@pytest.mark.parametrize("where", ["step", "save", "evaluation"])
def test_a_killed_run_of_two_processes_ends_as_the_whole_one(tmp_path, whole_of_two, where) -> None:
    done = launched(tmp_path / "killed", where, 2)
    assert done.returncode != 0
    assert "SIGKILL" in done.stderr
    assert not (tmp_path / "killed" / f"checkpoint-{STEPS}").exists()
    if where == "save":
        assert what_is_missing(tmp_path / "killed" / "checkpoint-16")
    resumed = launched(tmp_path / "killed", "resume", 2)
    assert resumed.returncode == 0, resumed.stderr[-2000:]
    assert ("checkpoint-16: it has no complete.json" in resumed.stderr) == (where == "save")
    last = [folder / f"checkpoint-{STEPS}" for folder in (tmp_path / "killed", whole_of_two)]
    assert_same(load_file(last[0] / "model.safetensors"), load_file(last[1] / "model.safetensors"))
    for name in ("optimizer.pt", "scheduler.pt", "rng_state_0.pth", "rng_state_1.pth"):
        assert_same(*(torch.load(folder / name, weights_only=False) for folder in last))


def test_a_stream_resumes_where_it_was(tmp_path) -> None:
    options = {"train_dataset": make_dataset(60).to_iterable_dataset(), "max_steps": 30}
    straight = make_trainer(tmp_path / "a", RecordingTrainer, **options)
    straight.train()
    first = make_trainer(tmp_path / "b", RecordingTrainer, **{**options, "save_strategy": "steps", "save_steps": 13})
    first.train()
    second = make_trainer(tmp_path / "b", RecordingTrainer, **options)
    second.train(resume_from_checkpoint=str(tmp_path / "b" / "checkpoint-26"))
    assert second.seen == straight.seen[26:]
    for name, tensor in straight.model.state_dict().items():
        assert torch.equal(tensor, second.model.state_dict()[name])


def test_a_stream_is_batched_by_tokens_each_pair_once_a_pass_with_a_worker_too(tmp_path) -> None:
    dataset = make_dataset(60)
    rows = sorted(map(tuple, dataset["input_ids"]))
    for workers in (0, 1):
        trainer = make_trainer(
            tmp_path, RecordingTrainer, train_dataset=dataset.to_iterable_dataset(), max_steps=24,
            dataloader_num_workers=workers,
        )  # fmt: skip
        trainer.train()
        seen, passes = [], []
        for batch in trainer.seen:
            assert len(batch) * len(batch[0]) <= 100
            seen += [tuple(token for token in row if token) for row in batch]
            if len(seen) == len(rows):
                passes.append(seen)
                seen = []
        assert len(passes) >= 2
        assert all(sorted(part) == rows for part in passes)
        assert passes[0] != passes[1]


def test_what_is_not_complete_is_not_resumed_from(tmp_path, caplog) -> None:
    options = {**OPTIONS, "max_steps": 12, "callbacks": [ExponentialMovingAverageCallback(0.9)]}
    make_trainer(tmp_path, **options).train()
    files = json.loads((tmp_path / "checkpoint-12" / MARKER_FILE).read_text())["files"]
    assert {"model.safetensors", "optimizer.pt", "rng_state.pth", "ema/model.safetensors"} <= set(files)
    (tmp_path / "checkpoint-12" / "optimizer.pt").write_bytes(b"short")
    trainer = make_trainer(tmp_path, RecordingTrainer, **{**OPTIONS, "max_steps": 12})
    trainer.train(resume_from_checkpoint=True)
    assert len(trainer.seen) == 4  # from 8 on
    assert "checkpoint-12: optimizer.pt has 5 bytes" in caplog.text
    assert what_is_missing(tmp_path / "checkpoint-12") is None  # written again


def test_nothing_to_resume_from_is_an_error(tmp_path) -> None:
    trainer = make_trainer(tmp_path, **OPTIONS)
    with pytest.raises(FileNotFoundError, match=r"There is no checkpoint in .* leave the option out"):
        trainer.train(resume_from_checkpoint=True)
    with pytest.raises(FileNotFoundError, match="checkpoint-99: it does not exist"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-99"))


@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="a device that is always full is Linux's")
def test_a_full_disk_is_told_and_what_was_saved_before_stays(tmp_path, monkeypatch) -> None:
    write = torch.save

    def full(content, path, *more, **options):
        return write(content, "/dev/full" if "checkpoint-8" in str(path) else path, *more, **options)

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(
        OSError, match=r"The disk is full: update 8 could not be saved in .* go on with resume_from"
    ) as e:
        make_trainer(tmp_path, **OPTIONS).train()
    assert e.value.errno == errno.ENOSPC
    monkeypatch.undo()
    trainer = make_trainer(tmp_path, RecordingTrainer, **{**OPTIONS, "max_steps": 6})
    trainer.train(resume_from_checkpoint=True)
    assert len(trainer.seen) == 2  # from 4 on
