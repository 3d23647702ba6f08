"""Markers of complete checkpoints, and what is resumed from when some are not."""

import errno
import json
import logging
import re
from pathlib import Path
from types import SimpleNamespace

import datasets
import pytest
import torch
from safetensors import SafetensorError
from tiny_models import TINY
from transformers import Seq2SeqTrainer, Trainer, TrainerCallback

from vanilla_transformer import (
    VanillaTransformerConfig,
    VanillaTransformerForConditionalGeneration,
    VanillaTransformerTrainer,
    VanillaTransformerTrainingArguments,
)
from vanilla_transformer.checkpointing import (
    MARKER_FILE,
    CompleteCheckpointCallback,
    check_resumable,
    is_disk_full,
    last_complete_checkpoint,
    mark_complete,
    what_is_missing,
    whole_checkpoints,
)


def write(run, step, *, complete=True):
    folder = run / f"checkpoint-{step}"
    (folder / "ema").mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"x" * 100)
    (folder / "ema" / "model.safetensors").write_bytes(b"y" * 50)
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    if complete:
        mark_complete(folder)
    return folder


def test_the_newest_complete_one_is_found_and_the_skipped_ones_are_told(tmp_path, caplog):
    folders = {step: write(tmp_path, step, complete=step != 100) for step in (9, 20, 50, 100)}
    (folders[50] / "ema" / "model.safetensors").write_bytes(b"y" * 49)
    (tmp_path / "checkpoint-best").mkdir()
    assert last_complete_checkpoint(tmp_path) == folders[20]
    assert "checkpoint-100: it has no complete.json" in caplog.text
    assert "checkpoint-50: ema/model.safetensors has 49 bytes and had 50" in caplog.text
    (folders[20] / "model.safetensors").unlink()
    assert what_is_missing(folders[20]) == "model.safetensors is gone"
    assert last_complete_checkpoint(tmp_path) == folders[9]


def test_none_is_not_the_same_as_none_complete(tmp_path):
    assert last_complete_checkpoint(tmp_path) is None
    assert last_complete_checkpoint(tmp_path / "absent") is None
    write(tmp_path, 3, complete=False)
    with pytest.raises(
        ValueError, match=r"No checkpoint in .* is complete\. .*checkpoint-3: it has no complete.json.*name"
    ):
        last_complete_checkpoint(tmp_path)


def test_a_named_folder_is_checked(tmp_path, caplog):
    folder = write(tmp_path, 5)
    check_resumable(folder)
    with pytest.raises(
        FileNotFoundError, match=r"checkpoint-6: it does not exist\. Checkpoints beside it: checkpoint-5"
    ):
        check_resumable(tmp_path / "checkpoint-6")
    (tmp_path / "model").mkdir()
    with pytest.raises(FileNotFoundError, match="it is not a checkpoint of a run"):
        check_resumable(tmp_path / "model")
    with caplog.at_level(logging.WARNING):
        check_resumable(write(tmp_path, 7, complete=False))
    assert "as asked, though it has no complete.json" in caplog.text
    (folder / "model.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match="0 bytes and had 100"):
        check_resumable(folder)


@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="a device that is always full is Linux's")
def test_what_torch_says_of_a_full_disk_is_understood():
    with pytest.raises((OSError, RuntimeError)) as caught:
        torch.save({"weights": torch.zeros(100_000)}, "/dev/full")
    assert is_disk_full(caught.value)


@pytest.mark.parametrize(
    ("error", "full"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), True),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), True),
        # safetensors 0.6, seen on a full disk
        (SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"), True),
        (PermissionError(errno.EACCES, "Permission denied"), False),
        (RuntimeError("CUDA out of memory"), False),
    ],
)
def test_a_full_disk_is_told_from_other_errors(error, full):
    assert is_disk_full(error) is full


def test_the_best_checkpoint_of_a_moved_run_is_found(tmp_path):
    folder = write(tmp_path, 5)
    args = SimpleNamespace(output_dir=str(tmp_path))
    for best, found in (
        ("/gone/checkpoint-5", str(folder)),
        ("/gone/checkpoint-6", "/gone/checkpoint-6"),
        (str(folder), str(folder)),
        (None, None),
    ):
        state = SimpleNamespace(best_model_checkpoint=best)
        CompleteCheckpointCallback().on_train_begin(args, state, None)
        assert state.best_model_checkpoint == found


def test_the_callback_marks_what_was_saved_and_unmarks_what_is_written_over(tmp_path):
    folder = write(tmp_path, 5, complete=False)
    args = SimpleNamespace(output_dir=str(tmp_path), save_on_each_node=False, save_strategy="steps")
    state = SimpleNamespace(global_step=5, is_world_process_zero=True, is_local_process_zero=True)
    callback = CompleteCheckpointCallback()
    callback.on_save(args, state, None)
    assert what_is_missing(folder) is None
    assert sorted(json.loads((folder / MARKER_FILE).read_text())["files"]) == [
        "ema/model.safetensors",
        "model.safetensors",
        "trainer_state.json",
    ]
    callback.on_step_end(args, state, SimpleNamespace(should_save=False, should_evaluate=False))
    assert what_is_missing(folder) is None
    callback.on_step_end(args, state, SimpleNamespace(should_save=True, should_evaluate=False))
    assert "no complete.json" in what_is_missing(folder)
    state.is_world_process_zero = False
    callback.on_save(args, state, None)
    assert "no complete.json" in what_is_missing(folder)


def test_a_checkpoint_that_is_not_written_over_keeps_its_mark(tmp_path):
    # A run that went back evaluates where a checkpoint of before stands; with the strategy "best" it may write there.
    folder = write(tmp_path, 5)
    mark = (folder / MARKER_FILE).read_text()
    state = SimpleNamespace(global_step=5, is_world_process_zero=True, is_local_process_zero=True)
    evaluates = SimpleNamespace(should_save=False, should_evaluate=True)
    callback = CompleteCheckpointCallback()
    args = SimpleNamespace(output_dir=str(tmp_path), save_on_each_node=False, save_strategy="steps")
    callback.on_step_end(args, state, evaluates)
    assert what_is_missing(folder) is None
    args.save_strategy = "best"
    for go_on in (callback.on_step_begin, callback.on_train_end):
        callback.on_step_end(args, state, evaluates)
        assert "no complete.json" in what_is_missing(folder)
        go_on(args, state, None)
        assert (folder / MARKER_FILE).read_text() == mark
    # A training that failed leaves nothing to the next one, nor do processes other than the first take a mark.
    callback.on_step_end(args, state, evaluates)
    state.best_model_checkpoint = None
    callback.on_train_begin(args, state, None)
    callback.on_step_begin(args, state, None)
    assert "no complete.json" in what_is_missing(folder)
    mark_complete(folder)
    state.is_world_process_zero = False
    callback.on_step_end(args, state, evaluates)
    assert what_is_missing(folder) is None
    state.is_world_process_zero = True
    callback.on_step_end(args, state, evaluates)
    (folder / "model.safetensors").write_bytes(b"half")
    callback.on_save(args, state, None)
    callback.on_step_begin(args, state, None)
    assert json.loads((folder / MARKER_FILE).read_text())["files"]["model.safetensors"] == 4


def test_whole_checkpoints_leave_out_what_was_cut_off(tmp_path, caplog):
    folders = {step: write(tmp_path, step) for step in (5, 10, 15, 20)}
    (folders[20] / MARKER_FILE).unlink()
    (folders[10] / "model.safetensors").write_bytes(b"")
    (folders[5] / "trainer_state.json").unlink()
    assert whole_checkpoints(tmp_path) == {15: folders[15]}
    assert [record.args[0] for record in caplog.records] == [folders[5], folders[10], folders[20]]
    assert whole_checkpoints(tmp_path, besides=re.compile(r"trainer_state\.json")) == {
        step: folders[step] for step in (5, 15)
    }
    for folder in folders.values():
        (folder / MARKER_FILE).unlink(missing_ok=True)
    assert whole_checkpoints(tmp_path) == folders  # another Trainer wrote them


def test_the_marker_is_written_after_what_later_callbacks_write(tmp_path):
    class Notes(TrainerCallback):
        """Writes into a checkpoint when the library has."""

        def on_save(self, args, state, control, **kwargs):
            Path(args.output_dir, f"checkpoint-{state.global_step}", "notes.txt").write_text("mine")

    rows = datasets.Dataset.from_dict({"input_ids": [[5, 6, 1]] * 4, "labels": [[7, 1]] * 4})
    arguments = VanillaTransformerTrainingArguments(
        str(tmp_path), max_steps=2, save_steps=2, max_tokens_per_batch=64, use_cpu=True, bf16=False,
        report_to="none", disable_tqdm=True,
    )  # fmt: skip
    trainer = VanillaTransformerTrainer(
        VanillaTransformerForConditionalGeneration(VanillaTransformerConfig(**TINY)),
        arguments,
        lambda rows: {name: torch.tensor([row[name] for row in rows]) for name in ("input_ids", "labels")},
        rows,
    )
    trainer.add_callback(Notes())
    trainer.train()
    folder = tmp_path / "checkpoint-2"
    assert what_is_missing(folder) is None
    (folder / "notes.txt").unlink()
    assert what_is_missing(folder) == "notes.txt is gone"


def test_no_private_code_of_saving_is_overridden():
    private = {name for name in vars(Trainer) if name.startswith(("_save", "_load", "_rotate", "_sorted"))}
    assert len(private) > 5
    classes = VanillaTransformerTrainer.__mro__
    for ours in classes[: classes.index(Seq2SeqTrainer)]:
        assert not (private | {"save_model"}) & vars(ours).keys()
