"""History, curves and warnings of a training, by the entries a Trainer would log."""

import builtins
import logging
import math
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from vanilla_transformer.monitoring import RunHistoryCallback, TroubleWarningCallback, draw_curves, read_history


def state(step, *, main=True):
    return SimpleNamespace(global_step=step, epoch=step / 10, is_world_process_zero=main)


def play(callback, folder, entries, *, resumed_at=0, main=True):
    """Let a callback see a training with these (step, entry) logs."""
    args = SimpleNamespace(output_dir=str(folder))
    callback.on_train_begin(args, state(resumed_at, main=main), None)
    for step, entry in entries:
        callback.on_log(args, state(step, main=main), None, logs=entry)
    callback.on_train_end(args, state(entries[-1][0], main=main), None)


TRAINING = [(step, {"loss": 5.0 - step / 10, "grad_norm": 0.5, "learning_rate": 1e-4 * step}) for step in range(1, 11)]
EVALUATION = [(5, {"eval_loss": 4.0, "eval_bleu": 10.0}), (10, {"eval_loss": 3.5, "eval_bleu": 20.0})]


def test_the_history_holds_every_entry_and_is_drawn(tmp_path):
    play(RunHistoryCallback(), tmp_path, TRAINING + EVALUATION)
    entries = read_history(tmp_path / "history.jsonl")
    assert [(entry["step"], entry["epoch"]) for entry in entries] == [(s, s / 10) for s, _ in TRAINING + EVALUATION]
    kept = [{k: v for k, v in entry.items() if k not in ("step", "epoch", "seconds")} for entry in entries]
    assert kept == [entry for _, entry in TRAINING + EVALUATION]
    assert all(entry["seconds"] >= 0 for entry in entries)
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_the_curves_show_what_was_logged(tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    play(RunHistoryCallback(), tmp_path, TRAINING + EVALUATION)
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *args, **options: drawn.append(figure))
    draw_curves(tmp_path / "history.jsonl", tmp_path / "curves.png")
    lines = {axes.get_title(): [line.get_xydata().tolist() for line in axes.lines] for axes in drawn[0].axes}
    assert lines["loss a token (nats)"] == [
        [[step, entry["loss"]] for step, entry in TRAINING],
        [[5, 4.0], [10, 3.5]],
    ]
    assert lines["validation score"] == [[[5, 10.0], [10, 20.0]]]
    assert lines["real target tokens a second"] == []


def test_a_resumed_run_drops_what_came_after_its_checkpoint_and_a_fresh_one_everything(tmp_path):
    play(RunHistoryCallback(), tmp_path, TRAINING)
    with (tmp_path / "history.jsonl").open("a") as file:
        file.write('{"step": 11, "lo')  # killed while writing
    play(RunHistoryCallback(), tmp_path, [(7, {"loss": 9.0})], resumed_at=6)
    assert [entry["step"] for entry in read_history(tmp_path / "history.jsonl")] == [1, 2, 3, 4, 5, 6, 7]
    play(RunHistoryCallback(), tmp_path, [(1, {"loss": 9.0})])
    assert len(read_history(tmp_path / "history.jsonl")) == 1


def test_text_with_a_line_separator_inside_stays_one_entry(tmp_path):
    play(RunHistoryCallback(), tmp_path, [(1, {"eval_samples": "one\u2028two\nthree"}), (2, {"loss": math.nan})])
    first, second = read_history(tmp_path / "history.jsonl")
    assert first["eval_samples"] == "one\u2028two\nthree"
    assert math.isnan(second["loss"])


def test_only_the_first_process_writes(tmp_path):
    play(RunHistoryCallback(), tmp_path, TRAINING, main=False)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_was_cleared_away_does_not_end_the_training(tmp_path):
    callback, args = RunHistoryCallback(), SimpleNamespace(output_dir=str(tmp_path / "run"))
    callback.on_train_begin(args, state(0), None)
    for step in (1, 2):
        callback.on_log(args, state(step), None, logs={"loss": 2.0})
        if step == 1:
            shutil.rmtree(tmp_path / "run")
    assert [entry["step"] for entry in read_history(tmp_path / "run" / "history.jsonl")] == [2]
    shutil.rmtree(tmp_path / "run")
    callback.on_train_end(args, state(2), None)
    assert not (tmp_path / "run").exists()


def test_a_damaged_history_is_named(tmp_path):
    path = tmp_path / "history.jsonl"
    path.write_text('{"step": 1}\nnonsense\n{"step": 2}\n')
    with pytest.raises(ValueError, match="line 2, is no entry of a training history: 'nonsense'"):
        read_history(path)


def test_without_matplotlib_the_log_says_what_to_install(tmp_path, monkeypatch, caplog):
    found = builtins.__import__

    def absent(name, *args, **options):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return found(name, *args, **options)

    monkeypatch.setattr(builtins, "__import__", absent)
    with caplog.at_level(logging.INFO, logger="vanilla_transformer"):
        play(RunHistoryCallback(), tmp_path, TRAINING)
    assert "vanilla-transformer[plot]" in caplog.text
    assert not (tmp_path / "curves.png").exists()


def healthy(steps=30):
    return [(step, {"loss": 5.0 - step / 20, "grad_norm": 0.5 + step % 3 / 10}) for step in range(1, steps)]


def evaluations(training, validation):
    """A training loss before each evaluation, and the validation loss then."""
    entries = []
    for step, (before, after) in enumerate(zip(training, validation, strict=True), start=1):
        entries += [(step, {"loss": before, "grad_norm": 0.5}), (step, {"eval_loss": after})]
    return entries


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([(3, {"loss": math.nan, "grad_norm": 1.0})], "Update 3: loss nan.*Lower peak_lr.*max_grad_norm=1"),
        ([(3, {"loss": 4.0, "grad_norm": math.inf})], "norm of the gradients inf.*last checkpoint"),
        (
            [*healthy(), (30, {"loss": 3.5, "grad_norm": 7.0})],
            "Update 30: norm of the gradients 7, its median was 0.6",
        ),
        (evaluations([4, 3, 2, 1], [3.0, 3.1, 3.2, 3.3]), "rose 3 times, to 3.300.*raise dropout"),
        ([(4, {"eval_loss": 3.0, "eval_unended_percent": 40.0})], "40% of the translations had no end"),
        ([(4, {"eval_loss": 3.0, "eval_copied_percent": 25.0})], "25% of the translations were their source"),
    ],
)
def test_each_known_trouble_is_told_once_with_its_remedy(tmp_path, caplog, entries, message):
    play(TroubleWarningCallback(), tmp_path, entries + [(step + 100, entry) for step, entry in entries])
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1
    assert re.search(message, warnings[0])
    assert warnings[0].endswith("docs/troubleshooting.md.")


def test_translations_that_go_wrong_again_are_told_again(tmp_path, caplog):
    percentages = [100.0, 60.0, 2.0, 30.0, 40.0]  # untrained, better, good, broken
    entries = [(step, {"eval_loss": 3.0, "eval_unended_percent": p}) for step, p in enumerate(percentages)]
    play(TroubleWarningCallback(), tmp_path, entries)
    assert [record.getMessage()[:15] for record in caplog.records] == ["Update 0: 100% ", "Update 3: 30% o"]


@pytest.mark.parametrize(
    "entries",
    [
        healthy(),
        [(1, {"loss": 9.0, "grad_norm": 50.0}), *healthy()],  # the first updates have large gradients
        evaluations([4, 3, 2, 1], [3.0, 3.1, 3.0, 3.1]),
        evaluations([1, 2, 3, 4], [3.0, 3.1, 3.2, 3.3]),  # both rise: something else
        evaluations([4, 3, 2], [3.0, 3.1, 3.2]),
        [(4, {"eval_loss": 3.0, "eval_unended_percent": 2.0, "eval_copied_percent": 5.0})],
    ],
)
def test_nothing_is_said_of_a_healthy_training(tmp_path, caplog, entries):
    play(TroubleWarningCallback(), tmp_path, entries)
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def test_every_trouble_is_in_the_documentation():
    text = Path(__file__).parents[1].joinpath("docs", "troubleshooting.md").read_text(encoding="utf-8")
    for phrase in ("not finite", "norm of the gradients", "validation loss rose", "had no end", "were their source"):
        assert phrase in text
