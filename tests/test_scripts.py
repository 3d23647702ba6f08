"""The scripts as a user calls them: one whole run on generated text, and one clear error for each wrong input."""

import gzip
import inspect
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import datasets
import numpy as np
import pytest
import sacrebleu
import torch
import transformers
import yaml
from packaging.version import Version
from safetensors.numpy import load_file
from script_modules import SCRIPTS, load

from vanilla_transformer import (
    VanillaTransformerConfig,
    VanillaTransformerForConditionalGeneration,
    VanillaTransformerTrainingArguments,
    modeling_vanilla_transformer,
    train_tokenizer,
)
from vanilla_transformer.phrase_grammar import generate_splits

ROOT = Path(__file__).resolve().parents[1]
TINY = "--preset tiny --d_model 32 --encoder_layers 1 --decoder_layers 1 --encoder_ffn_dim 64 --decoder_ffn_dim 64"
SHORT = "--max_steps 6 --warmup_steps 4 --peak_lr 0.003 --max_tokens_per_batch 1500 --bf16 false --report_to none"


def run(
    script: str, *arguments: object, stdin: str = "", status: int = 0, launcher: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    """Run a script in a process of its own, or in those of a launcher, without a network, and check how it ended."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8"}
    result = subprocess.run(
        [sys.executable, *launcher, SCRIPTS / script, *map(str, arguments)],
        input=stdin,
        capture_output=True,
        text=True,
        encoding="utf-8",
        env=environment,
        check=False,
        timeout=300,
    )
    assert result.returncode == status, result.stderr
    return result


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Train, validation and test text in two plain files each."""
    folder = tmp_path_factory.mktemp("corpus")
    splits = generate_splits(train_size=4000, valid_size=20, test_size=20)
    for name, pairs in (("train", splits.train[:300]), ("val", splits.valid), ("test", splits.test)):
        for side, language in enumerate(("en", "de")):
            text = "".join(pair[side] + "\n" for pair in pairs)
            (folder / f"{name}.{language}").write_text(text, encoding="utf-8")
    return folder


def train_on(corpus, folder, *more: object, launcher: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """Train for six updates."""
    files = {name: [corpus / f"{name}.en", corpus / f"{name}.de"] for name in ("train", "val", "test")}
    return run(
        "train.py",
        *("--train_file", *files["train"], "--validation_file", *files["val"], "--test_file", *files["test"]),
        *("--source_lang", "en", "--target_lang", "de", "--vocab_size", 400, "--output_dir", folder),
        *TINY.split(),
        *SHORT.split(),
        *("--eval_strategy", "steps", "--eval_steps", 3, "--save_steps", 3, "--license", "cc0-1.0"),
        *("--load_best_model_at_end", "true", "--metric_for_best_model", "loss", "--generation_max_length", 8),
        *("--early_stopping_patience", 5, *more),
        launcher=launcher,
    )


@pytest.fixture(scope="module")
def trained(corpus, tmp_path_factory):
    """A checkpoint of six updates, and what the run printed."""
    folder = tmp_path_factory.mktemp("runs") / "model"
    return folder, train_on(corpus, folder)


def test_train_writes_a_whole_checkpoint(trained):
    folder, result = trained
    files = {path.name for path in folder.iterdir() if path.is_file()}
    assert {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "README.md",
        "metrics.json",
        "modeling_vanilla_transformer.py",
        "configuration_vanilla_transformer.py",
        "attention_vanilla_transformer.py",
        "pretrained_vanilla_transformer.py",
        "loss_vanilla_transformer.py",
        "generation_vanilla_transformer.py",
        "pipeline_vanilla_transformer.py",
    } <= files
    assert not [name for name in files if name.endswith((".bin", ".pt", ".pkl"))]  # nothing to unpickle
    metrics = json.loads((folder / "metrics.json").read_text())
    assert metrics["updates"] == 6
    assert metrics["training_pairs"] == 300
    assert metrics["scores"]["test"]["num_sentences"] == 20
    last = result.stdout.strip().splitlines()[-1]
    assert last.startswith("result: test BLEU ")
    assert metrics["scores"]["test"]["bleu_signature"] in last
    assert str(folder) in last


def test_train_stops_early_if_asked(trained):
    state = json.loads((trained[0] / "checkpoint-6" / "trainer_state.json").read_text())
    assert state["stateful_callbacks"]["EarlyStoppingCallback"]["args"]["early_stopping_patience"] == 5


def test_train_goes_on_from_the_last_complete_checkpoint_and_ends_the_same(trained, corpus, tmp_path):
    whole, _ = trained
    folder = shutil.copytree(whole, tmp_path / "model")
    os.truncate(folder / "checkpoint-6" / "optimizer.pt", 100)
    (folder / "model.safetensors").unlink()
    result = train_on(corpus, folder, "--resume_from_checkpoint", "true")
    assert "checkpoint-6: optimizer.pt has 100 bytes" in result.stderr
    assert (folder / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    histories = [
        [json.loads(line)["step"] for line in (run / "history.jsonl").read_text().splitlines()]
        for run in (folder, whole)
    ]
    assert histories[0] == histories[1]


def test_train_in_two_processes_writes_everything_once(corpus, tmp_path):
    folder = tmp_path / "model"
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
    result = train_on(corpus, folder, "--use_cpu", "true", launcher=launcher)
    assert result.stdout.count("result: test BLEU ") == 1
    history = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    assert [entry["step"] for entry in history if "eval_loss" in entry] == [3, 6]
    assert [entry["train_loss"] for entry in history if "train_loss" in entry] != []
    metrics = json.loads((folder / "metrics.json").read_text())
    assert (metrics["updates"], metrics["scores"]["test"]["num_sentences"]) == (6, 20)
    assert {"README.md", "model.safetensors", "tokenizer.json", "curves.png"} <= {
        path.name for path in folder.iterdir()
    }
    assert {path.name for path in (folder / "checkpoint-6").glob("rng_state_*")} == {
        "rng_state_0.pth",
        "rng_state_1.pth",
    }


def test_train_fills_the_model_card_from_the_run(trained):
    folder, _ = trained
    card = (folder / "README.md").read_text(encoding="utf-8")
    for fact in ("license: cc0-1.0", "- en\n- de", "pipeline_tag: translation", "6", "300", "train.en and train.de"):
        assert fact in card
    assert "{{" not in card
    assert "None" not in card


def test_train_reads_a_data_set_folder_and_its_first_pairs(corpus, tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    for name, split in (("train", "train"), ("val", "validation"), ("test", "test")):
        sides = [(corpus / f"{name}.{language}").read_text(encoding="utf-8").splitlines() for language in ("en", "de")]
        rows = [json.dumps({"translation": {"en": en, "de": de}}) + "\n" for en, de in zip(*sides, strict=True)]
        (data / f"{split}.jsonl").write_text("".join(rows[:40]), encoding="utf-8")
    folder = tmp_path / "model"
    languages = ("--source_lang", "en", "--target_lang", "de")
    result = run(
        "train.py",
        *("--dataset_name", data, *languages, "--max_train_pairs", 25, "--vocab_size", 300, "--output_dir", folder),
        *TINY.split(),
        *SHORT.split(),
    )
    metrics = json.loads((folder / "metrics.json").read_text())
    assert metrics["training_pairs"] == 25
    assert metrics["scores"]["test"]["num_sentences"] == 20
    assert "40 pairs read" in result.stderr


def test_train_averages_keeps_a_moving_average_and_leaves_out_merges(corpus, tmp_path):
    folder = tmp_path / "model"
    result = run(
        "train.py",
        *("--train_file", corpus / "train.en", corpus / "train.de", "--vocab_size", 400, "--output_dir", folder),
        *("--save_steps", 2, "--average_last", 2, "--ema_decay", 0.5, "--bpe_dropout", 0.1, "--max_source_length", 60),
        *TINY.split(),
        *SHORT.split(),
    )
    assert "The model is the average of checkpoint-4, checkpoint-6." in result.stderr
    files = [load_file(folder / name / "model.safetensors") for name in ("checkpoint-4", "checkpoint-6", ".")]
    for name, tensor in files[2].items():
        np.testing.assert_allclose(tensor, (files[0][name] + files[1][name]) / 2, rtol=1e-5, atol=1e-6)
    assert {path.name for path in (folder / "ema").iterdir()} >= {"model.safetensors", "tokenizer.json"}
    assert (folder / "curves.png").is_file()
    history = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    assert history[-1]["step"] == 6
    assert not list(folder.glob(".*"))
    averaged = run("average_checkpoints.py", "--run", folder, "--last", 2, "--output_dir", tmp_path / "average").stdout
    assert averaged == f"average of checkpoint-4, checkpoint-6, saved in {tmp_path / 'average'}\n"
    again = load_file(tmp_path / "average" / "model.safetensors")
    assert all(np.array_equal(tensor, again[name]) for name, tensor in files[2].items())


def test_train_leaves_out_merges_of_the_training_text_only(tmp_path, monkeypatch):
    train = load("train")
    monkeypatch.syspath_prepend(str(SCRIPTS))
    tokenizer = train_tokenizer(["a man and a woman and a dog"] * 3, vocab_size=280)
    texts = datasets.Dataset.from_dict({"source": ["a man and a dog"] * 20, "target": ["a woman and a man"] * 20})
    training = VanillaTransformerTrainingArguments(
        str(tmp_path), max_tokens_per_batch=64, max_steps=4, eval_strategy="steps", use_cpu=True, report_to="none"
    )
    model = VanillaTransformerForConditionalGeneration(VanillaTransformerConfig.tiny(vocab_size=len(tokenizer)))
    corpora = {"train": texts, "validation": texts}
    trainer = train.make_trainer(train.RunArguments(bpe_dropout=0.5), training, model, tokenizer, corpora)
    batches = itertools.islice(trainer.get_train_dataloader(), 4)
    seen = {tuple(row) for batch in batches for row in batch["input_ids"].tolist()}
    assert len(seen) > 5
    assert trainer.eval_dataset["input_ids"][:] == [tokenizer("a man and a dog")["input_ids"]] * 20
    callbacks = {type(callback).__name__ for callback in trainer.callback_handler.callbacks}
    assert {"RunHistoryCallback", "TroubleWarningCallback"} <= callbacks


def test_train_streams_a_data_set_in_batches_of_tokens(corpus, tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    sides = [(corpus / f"train.{language}").read_text(encoding="utf-8").splitlines() for language in ("en", "de")]
    rows = [json.dumps({"translation": {"en": en, "de": de}}) + "\n" for en, de in zip(*sides, strict=True)]
    (data / "train.jsonl").write_text("".join(rows), encoding="utf-8")
    folder = tmp_path / "model"
    run(
        "train.py",
        *("--dataset_name", data, "--streaming", "true", "--source_lang", "en", "--target_lang", "de"),
        *("--vocab_size", 400, "--output_dir", folder, "--logging_steps", 2),
        *TINY.split(),
        *SHORT.split(),
    )
    history = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    assert [entry["step"] for entry in history if "loss" in entry] == [2, 4, 6]
    assert all(entry["padding_percent"] < 25 for entry in history if "loss" in entry)  # of 300 pairs in all
    assert json.loads((folder / "metrics.json").read_text())["training_pairs"] is None


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("", "one of the two"),
        ("--run {tmp} --checkpoints a b", "one of the two"),
        ("--run {tmp}", "--last or --best"),
        ("--run {tmp} --last 1 --best 1", "--last or --best"),
        ("--checkpoints a b --last 2", "leave them out"),
        ("--run {tmp} --last 3", "has 0"),
        ("--checkpoints {tmp}", "no config.json"),
    ],
)
def test_average_checkpoints_refuses(arguments, expected, tmp_path, monkeypatch, capsys):
    words = [*arguments.format(tmp=tmp_path).split(), "--output_dir", tmp_path / "new"]
    assert expected in refused(load("average_checkpoints"), words, monkeypatch, capsys)
    assert not (tmp_path / "new").exists()


def test_averages_of_the_best_and_of_named_checkpoints(trained, tmp_path, monkeypatch, capsys):
    from transformers import pipeline

    folder, _ = trained
    checkpoints = [folder / "checkpoint-3", folder / "checkpoint-6"]
    scores = {  # of each checkpoint, as its run wrote them down
        entry["step"]: entry["eval_loss"]
        for entry in json.loads((checkpoints[1] / "trainer_state.json").read_text())["log_history"]
        if "eval_loss" in entry
    }
    monkeypatch.setattr(sys, "path", [*sys.path, str(SCRIPTS)])
    for name, words in (
        ("best", ["--run", str(folder), "--best", "1", "--metric", "loss"]),
        ("named", ["--checkpoints", *map(str, checkpoints)]),
    ):
        monkeypatch.setattr(sys, "argv", ["average_checkpoints.py", *words, "--output_dir", str(tmp_path / name)])
        load("average_checkpoints").main()
        assert str(tmp_path / name) in capsys.readouterr().out
    files = [load_file(path / "model.safetensors") for path in checkpoints]
    best = files[0] if scores[3] < scores[6] else files[1]
    for name, tensor in load_file(tmp_path / "best" / "model.safetensors").items():
        np.testing.assert_array_equal(tensor, best[name])
    for name, tensor in load_file(tmp_path / "named" / "model.safetensors").items():
        np.testing.assert_allclose(tensor, (files[0][name] + files[1][name]) / 2, rtol=1e-5, atol=1e-6)
    (translation,) = pipeline("translation", model=str(tmp_path / "named"))("the house", max_new_tokens=5)
    assert isinstance(translation["translation_text"], str)


def test_the_first_pairs_of_the_grammar(monkeypatch):
    train = load("train")
    monkeypatch.syspath_prepend(str(SCRIPTS))
    corpora = train.load_corpora(train.RunArguments(max_train_pairs=7))
    assert {name: len(corpus) for name, corpus in corpora.items()} == {"train": 7, "validation": 500, "test": 1000}


def test_auto_classes_and_pipeline_load_what_train_wrote(trained, corpus):
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, pipeline

    folder, _ = trained
    model = AutoModelForSeq2SeqLM.from_pretrained(folder)
    assert type(model).__name__ == "VanillaTransformerForConditionalGeneration"
    assert model.config.d_model == 32
    assert len(AutoTokenizer.from_pretrained(folder)) == model.config.vocab_size
    translate = pipeline("translation", model=str(folder))
    sentences = (corpus / "test.en").read_text(encoding="utf-8").splitlines()[:3]
    assert [set(result) for result in translate(sentences, max_new_tokens=5)] == [{"translation_text"}] * 3


def test_evaluate_scores_as_sacrebleu_does(trained, corpus, tmp_path):
    folder, _ = trained
    result = run(
        "evaluate.py",
        *("--model", folder, "--test_file", corpus / "test.en", corpus / "test.de"),
        *("--output", tmp_path / "out.de", "--json", tmp_path / "scores.json", "--max_new_tokens", 12),
    )
    scores = json.loads((tmp_path / "scores.json").read_text())["model"]
    translations = (tmp_path / "out.de").read_text(encoding="utf-8").splitlines()
    references = (corpus / "test.de").read_text(encoding="utf-8").splitlines()
    assert len(translations) == 20
    assert scores["bleu"] == pytest.approx(sacrebleu.corpus_bleu(translations, [references]).score)
    assert scores["chrf"] == pytest.approx(sacrebleu.corpus_chrf(translations, [references]).score)
    assert f"BLEU {scores['bleu']:.2f}" in result.stdout
    assert scores["bleu_signature"] in result.stdout


def test_translate_is_line_for_line(trained, tmp_path):
    folder, _ = trained
    lines = ["We see the house.", "", "  ", "Ünïcödé 🙂 </s> <pad>", "The old man buys a red book."]
    text = "\n".join(lines)  # no line feed at the end
    options = ("--model", folder, "--max_new_tokens", 6)
    output = run("translate.py", *options, stdin=text).stdout
    translations = output.splitlines()
    assert len(translations) == len(lines)
    assert translations[1] == translations[2] == ""
    (tmp_path / "in.gz").write_bytes(gzip.compress(text.encode()))
    side_by_side = ("--batch_size", 1, "--inter_threads", 2)
    run("translate.py", *options, "--input", tmp_path / "in.gz", "--output", tmp_path / "out", *side_by_side)
    assert (tmp_path / "out").read_text(encoding="utf-8") == output


def test_translate_gives_the_n_best_with_scores(trained):
    folder, _ = trained
    output = run(
        "translate.py",
        *("--model", folder, "--max_new_tokens", 6, "--n_best", 3, "--num_beams", 3),
        stdin="We see the house.\nWe see the boy.\n",
    ).stdout
    rows = [line.split(" ||| ") for line in output.splitlines()]
    assert [row[0] for row in rows] == ["0"] * 3 + ["1"] * 3
    for number in "01":
        scores = [float(row[2]) for row in rows if row[0] == number]
        assert scores == sorted(scores, reverse=True)


def test_translate_answers_a_line_before_the_input_ends(trained):
    folder, _ = trained
    process = subprocess.Popen(
        [sys.executable, SCRIPTS / "translate.py", "--model", folder, "--max_new_tokens", "5"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        for _ in range(2):
            process.stdin.write("We see the house.\n")
            process.stdin.flush()
            assert process.stdout.readline().endswith("\n")
    finally:
        process.stdin.close()
        process.wait(timeout=60)
    assert process.returncode == 0


def test_train_tokenizer_writes_what_autotokenizer_loads(corpus, tmp_path):
    from transformers import AutoTokenizer

    folder = tmp_path / "tokenizer"
    files = ("--files", corpus / "train.en", corpus / "train.de")
    run("train_tokenizer.py", *files, "--vocab_size", 350, "--languages", "de", "--output_dir", folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert len(tokenizer) == 350
    assert tokenizer.convert_tokens_to_ids(">>de<<") == 3
    assert tokenizer("We see </s>")["input_ids"].count(tokenizer.eos_token_id) == 1


@pytest.mark.parametrize("script", ["train.py", "evaluate.py", "translate.py", "train_tokenizer.py"])
def test_help_opens_with_the_command_and_loads_nothing_heavy(script):
    # Transformers 5.0's own argument parser imports torch.
    heavy = ("datasets",) if Version(transformers.__version__) < Version("5.1") else ("torch", "datasets")
    program = (
        "import runpy, sys\n"
        f"sys.argv = [{script!r}, '--help']\n"
        f"sys.path.insert(0, {str(SCRIPTS)!r})\n"
        "try:\n"
        f"    runpy.run_path({str(SCRIPTS / script)!r}, run_name='__main__')\n"
        "except SystemExit as end:\n"
        f"    print('LOADED', end.code, [name for name in {heavy!r} if name in sys.modules])\n"
    )
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert f"python scripts/{script}" in output
    assert "--output" in output
    assert output.rstrip().endswith("LOADED 0 []")


# ------------------------------------------------------------------------------------------- wrong input


def refused(module, arguments, monkeypatch, capsys) -> str:
    """Return the error that a script prints when it refuses its input."""
    monkeypatch.setattr(sys, "argv", [f"{module.__name__}.py", *map(str, arguments)])
    monkeypatch.syspath_prepend(str(SCRIPTS))
    monkeypatch.setattr(sys, "path", [*sys.path[1:], sys.path[0]])
    with pytest.raises(SystemExit) as end:
        module.main()
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert "Traceback" not in error
    assert error.count("error: ") == 1
    return error.partition("error: ")[2]


def bad_files(corpus, tmp_path):
    """Return files that are wrong in one way each."""
    lines = (corpus / "train.de").read_text(encoding="utf-8").splitlines(keepends=True)
    (tmp_path / "short.de").write_text("".join(lines[:-1]), encoding="utf-8")
    (tmp_path / "latin.de").write_bytes("".join(lines).encode("latin-1"))
    (tmp_path / "empty.en").touch()
    (tmp_path / "empty.de").touch()
    (tmp_path / "table.csv").write_text("english,german\nA house.,Ein Haus.\n", encoding="utf-8")
    (tmp_path / "cut.en.gz").write_bytes(gzip.compress((corpus / "train.en").read_bytes())[:-40])
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    (tmp_path / "list.yaml").write_text("- a\n- b\n")
    (tmp_path / "typo.yaml").write_text("max_stepps: 3\n")


CASES = {
    "missing file": ("--train_file nowhere.en {corpus}/train.de", "nowhere.en"),
    "unequal line counts": ("--train_file {corpus}/train.en {tmp}/short.de", "299"),
    "invalid UTF-8": ("--train_file {corpus}/train.en {tmp}/latin.de", "latin.de"),
    "empty corpus": ("--train_file {tmp}/empty.en {tmp}/empty.de", "empty.en"),
    "truncated gzip": ("--train_file {tmp}/cut.en.gz {corpus}/train.de", "cut.en.gz"),
    "missing column": ("--train_file {tmp}/table.csv --source_lang en --target_lang de", "german"),
    "unknown preset": ("--preset huge", "base, big, tiny"),
    "heads do not divide": ("--d_model 30 --encoder_attention_heads 4", "divisible"),
    "negative size": ("--encoder_layers -1", "encoder_layers=-1"),
    "unknown activation": ("--activation_function rellu", "rellu"),
    "dropout of 1": ("--dropout 1.5", "dropout=1.5"),
    "folder not empty": ("--output_dir {tmp}/full", "not empty"),
    "unknown flag": ("--max_stepps 3", "--max_steps"),
    "recipe without keys": ("{tmp}/list.yaml", "list.yaml"),
    "recipe with a typo": ("{tmp}/typo.yaml", "max_steps"),
    "missing recipe": ("{tmp}/no.yaml", "no.yaml"),
    "two schedules": ("--noam_factor 2 --peak_lr 0.1", "one of the two"),
    "two sources of text": ("--train_file a b --dataset_name c", "choose one"),
    "stopping without a metric": ("--early_stopping_patience 3", "--metric_for_best_model"),
    "evaluation without text": (
        "--train_file {corpus}/train.en {corpus}/train.de --vocab_size 400 --eval_strategy steps --eval_steps 3",
        "--validation_file",
    ),
    "average without checkpoints": ("--average_last 5 --save_strategy no", "needs so many checkpoints"),
    "average of more than are kept": ("--average_last 5 --save_total_limit 3", "--save_total_limit 5"),
    "average of more than are written": ("--average_last 5 --max_steps 20 --save_steps 10", "leave 2 checkpoints"),
    "average and best": (
        "--average_last 2 --load_best_model_at_end true --eval_strategy steps --metric_for_best_model loss",
        "choose one",
    ),
    "average of none": ("--average_last 0", "at least one"),
    "moving average": ("--ema_decay 1", "got 1"),
    "BPE-dropout by epochs": ("--bpe_dropout 0.1 --num_train_epochs 2", "--max_steps"),
    "BPE-dropout and truncation": ("--bpe_dropout 0.1 --max_steps 9 --over_length truncate", "--over_length drop"),
    "BPE-dropout out of range": ("--bpe_dropout 1.1 --max_steps 9 --max_train_pairs 400", "1.1"),
    "a licence in words": ("--license Apache_2.0", "did you mean apache-2.0"),
    "resuming from nothing": (
        "--resume_from_checkpoint true --train_file {corpus}/train.en {corpus}/train.de --vocab_size 400",
        "there is no checkpoint",
    ),
    "vocabulary too small": ("--train_file {corpus}/train.en {corpus}/train.de --vocab_size 100", "100"),
}


@pytest.mark.parametrize("case", CASES)
def test_train_refuses(case, corpus, tmp_path, monkeypatch, capsys):
    arguments, expected = CASES[case]
    bad_files(corpus, tmp_path)
    words = arguments.format(corpus=corpus, tmp=tmp_path).split()
    if "--output_dir" not in words:
        words += ["--output_dir", str(tmp_path / "new")]
    before = sorted(path for path in tmp_path.rglob("*") if path.name not in ("tokenizer.json",))
    error = refused(load("train"), [*words, *(() if "--max_stepps" in words else ("--use_cpu",))], monkeypatch, capsys)
    assert expected in error
    assert sorted(path for path in before if path.exists()) == before  # nothing is lost
    assert not list((tmp_path / "new").glob("model*"))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--model {tmp}", "config.json"),
        ("--model {model} --device cuda:77", "cuda:77"),
        ("--model {model} --dtype int3", "int3"),
        ("--model {model} --device cpu --dtype int8 --torch_compile true", "choose another --dtype"),
        ("--model {model} --n_best 9", "num_beams"),
        ("--model {model} --input {tmp}/nowhere.txt", "nowhere.txt"),
        ("--model {model} --output {model}/config.json", "exists already"),
        ("--model {model} --input {tmp}/bytes.txt", "bytes.txt"),
        ("--model {model} --batch_size 0", "--batch_size 0 must be at least 1"),
        ("--model {model} --inter_threads 0", "--inter_threads 0 must be at least 1"),
        ("--model {model} --max_tokens_per_batch -1", "--max_tokens_per_batch -1 must be at least 0"),
        ("--model {model} --buffer_size 0", "--buffer_size 0 must be at least 1"),
    ],
)
def test_translate_refuses(arguments, expected, trained, tmp_path, monkeypatch, capsys):
    (tmp_path / "bytes.txt").write_bytes(b"good\nbad \xff\n")
    monkeypatch.setattr("sys.stdin", open(os.devnull))  # noqa: SIM115, PTH123 - the script reads it
    words = arguments.format(model=trained[0], tmp=tmp_path).split()
    if "--n_best" in words:
        (tmp_path / "in.txt").write_text("We see.\n")
        words += ["--input", str(tmp_path / "in.txt")]
    assert expected in refused(load("translate"), words, monkeypatch, capsys)


@pytest.mark.parametrize("words", ["--batch_size 0", "--max_tokens_per_batch -1", "--inter_threads 0"])
def test_evaluate_refuses_batches_of_nothing(words, monkeypatch, capsys):
    assert f"{words} must be at least" in refused(
        load("evaluate"), ["--model", "x", *words.split()], monkeypatch, capsys
    )


@pytest.mark.parametrize("script", ["translate", "evaluate"])
def test_batches_keep_to_the_token_budget(script, trained, corpus, tmp_path, monkeypatch):
    shapes = []
    model = modeling_vanilla_transformer.VanillaTransformerForConditionalGeneration
    generate = model.generate

    def spy(self, **kwargs):
        shapes.append(tuple(kwargs["input_ids"].shape))
        return generate(self, **kwargs)

    monkeypatch.setattr(model, "generate", spy)
    monkeypatch.setattr(sys, "path", [*sys.path, str(SCRIPTS)])
    files = {
        "translate": ["--input", corpus / "test.en"],
        "evaluate": ["--test_file", corpus / "test.en", corpus / "test.de"],
    }[script]
    for budget in (90, 0):
        shapes.clear()
        words = [*files, "--output", tmp_path / f"out{budget}", "--max_tokens_per_batch", budget]
        words += ["--model", trained[0], "--max_new_tokens", 2]
        monkeypatch.setattr(sys, "argv", [f"{script}.py", *map(str, words)])
        load(script).main()
        assert sum(rows for rows, _ in shapes) == 20
        if budget:
            assert len(shapes) > 2
            assert max(rows for rows, _ in shapes) > 1
            assert max(rows * width for rows, width in shapes) <= budget
    assert (tmp_path / "out90").read_text(encoding="utf-8") == (tmp_path / "out0").read_text(encoding="utf-8")


def test_evaluate_refuses_to_overwrite(trained, corpus, tmp_path, monkeypatch, capsys):
    (tmp_path / "old").write_text("kept")
    words = [
        "--model",
        trained[0],
        "--test_file",
        corpus / "test.en",
        corpus / "test.de",
        "--output",
        tmp_path / "old",
    ]
    assert "exists already" in refused(load("evaluate"), words, monkeypatch, capsys)
    assert (tmp_path / "old").read_text() == "kept"


def test_a_flag_wins_over_the_recipe(tmp_path, monkeypatch, capsys):
    (tmp_path / "recipe.yaml").write_text("preset: huge\n")
    words = [tmp_path / "recipe.yaml", "--preset", "gigantic", "--output_dir", tmp_path / "new"]
    assert "gigantic" in refused(load("train"), words, monkeypatch, capsys)


@pytest.mark.parametrize("recipe", sorted((SCRIPTS / "recipes").glob("*.yaml")), ids=lambda path: path.stem)
def test_recipes_hold_known_flags_and_values(recipe, tmp_path, monkeypatch, capsys):
    # A recipe that parses is stopped only by the text that is not there.
    source = ("--dataset_name", "nowhere") if "dataset_name" in recipe.read_text() else ("--train_file", "nowhere.tsv")
    words = [recipe, "--output_dir", tmp_path / "new", "--use_cpu", *source]
    assert "nowhere" in refused(load("train"), words, monkeypatch, capsys)


@pytest.mark.parametrize("recipe", sorted((SCRIPTS / "recipes").glob("*.yaml")), ids=lambda path: path.stem)
def test_recipes_say_what_they_need_and_what_they_give(recipe):
    text = recipe.read_text(encoding="utf-8")
    for fact in ("Data", "Size", "Hardware", "Time", "Score"):
        assert re.search(rf"^# {fact}: .{{10}}", text, re.MULTILINE), fact
    (score,) = re.findall(r"^# Score: (.*(?:\n#   .*)*)", text, re.MULTILINE)
    if recipe.stem == "own_files":
        assert "docs/results.md" in score  # what others gave
    else:
        assert re.search(r"\d\d\.\d\s", score)
        assert re.search(r"docs/|the paper's|et al\.", score), "where it comes from"
    settings = yaml.safe_load(text)
    parameters = inspect.signature(VanillaTransformerConfig.__init__).parameters
    fields = {name: value for name, value in settings.items() if name in parameters}
    config = getattr(VanillaTransformerConfig, settings["preset"])(**fields)
    (millions,) = re.findall(r"([\d.]+) million parameters", text)
    assert float(millions) == pytest.approx(config.num_trainable_parameters() / 1e6, rel=0.02)


@pytest.mark.parametrize(
    ("name", "steps", "dropout", "averaged"), [("base", 100_000, 0.1, 5), ("big", 300_000, 0.3, 20)]
)
def test_wmt_recipes_have_the_settings_of_the_paper(name, steps, dropout, averaged, tmp_path):
    # Sections 5.1 to 5.4, 6.1 and 7, and Table 3.
    settings = yaml.safe_load((SCRIPTS / "recipes" / f"wmt14_en_de_{name}.yaml").read_text(encoding="utf-8"))
    fields = VanillaTransformerTrainingArguments.__dataclass_fields__
    training = VanillaTransformerTrainingArguments(
        output_dir=str(tmp_path), **{key: value for key, value in settings.items() if key in fields and key != "bf16"}
    )
    assert 8 * training.max_tokens_per_batch * training.gradient_accumulation_steps == 25_000
    assert (training.max_steps, training.warmup_steps) == (steps, 4000)
    assert (training.adam_beta1, training.adam_beta2, training.adam_epsilon) == (0.9, 0.98, 1e-9)
    assert (training.weight_decay, training.max_grad_norm, training.label_smoothing_factor) == (0.0, 0.0, 0.0)
    assert (training.lr_schedule, training.noam_factor, training.peak_lr) == ("noam", None, None)
    assert settings["average_last"] == averaged < training.save_total_limit
    assert settings["vocab_size"] == 37_000
    parameters = inspect.signature(VanillaTransformerConfig.__init__).parameters
    overrides = {key: value for key, value in settings.items() if key in parameters and key != "vocab_size"}
    config = getattr(VanillaTransformerConfig, settings["preset"])(**overrides)
    assert (config.dropout, config.label_smoothing) == (dropout, 0.1)
    assert (config.attention_dropout, config.activation_dropout, config.norm_position) == (0.0, 0.0, "post")
    assert (config.d_model, config.encoder_ffn_dim) == {"base": (512, 2048), "big": (1024, 4096)}[name]


@pytest.mark.parametrize(
    "config", sorted((SCRIPTS / "recipes" / "accelerate").glob("*.yaml")), ids=lambda path: path.stem
)
def test_accelerate_reads_its_configurations(config):
    from accelerate.commands.config.config_args import load_config_from_file

    found = load_config_from_file(str(config))
    assert str(found.distributed_type).rpartition(".")[2] in ("MULTI_GPU", "MULTI_CPU", "FSDP", "DEEPSPEED")
    wrapped = (getattr(found, "fsdp_config", None) or {}).get("fsdp_transformer_layer_cls_to_wrap", "")
    assert all(hasattr(modeling_vanilla_transformer, name) for name in filter(None, wrapped.split(",")))


def test_moses_lines_are_lower_cased_normalised_tokenised_and_escaped():
    # By the conventions of the Moses scripts: quotes made plain, then &quot; and &apos;; hyphens stay inside words.
    lines = load("evaluate").moses_lines(["Ein \u201eJAZZ\u201c-Sänger, gut-gelaunt.", "It\u2019s A & B"], "en")
    assert lines == ["ein &quot; jazz &quot; -sänger , gut-gelaunt .", "it &apos;s a &amp; b"]


@pytest.mark.parametrize("script", ["translate", "evaluate"])
@pytest.mark.parametrize("dtype", ["int8", "bfloat16"])
def test_the_type_asked_for_is_that_of_the_model(trained, corpus, tmp_path, monkeypatch, capsys, script, dtype):
    used = []
    generate = VanillaTransformerForConditionalGeneration.generate

    def noting(self, *arguments, **options):
        layer = self.model.decoder.layers[0]
        used.append((type(layer.fc1).__module__, layer.final_layer_norm.weight.dtype))
        return generate(self, *arguments, **options)

    (tmp_path / "in.txt").write_text("the house\n\nthe man\n")
    files = {
        "translate": ["--input", str(tmp_path / "in.txt")],
        "evaluate": ["--test_file", str(corpus / "test.en"), str(corpus / "test.de")],
    }
    monkeypatch.setattr(sys, "argv", [script, "--model", str(trained[0]), *files[script], "--dtype", dtype])
    monkeypatch.setattr(sys, "path", [*sys.path, str(SCRIPTS)])
    monkeypatch.setattr(
        f"{modeling_vanilla_transformer.__name__}.VanillaTransformerForConditionalGeneration.generate", noting
    )
    load(script).main()
    output = capsys.readouterr().out.split("\n")
    assert used
    for module, norms in used:
        assert ("quantized" in module) == (dtype == "int8")
        assert norms == (torch.float32 if dtype == "int8" else torch.bfloat16)
    if script == "translate":
        assert len(output) == 4
        assert output[1] == ""


def test_torch_compile_without_a_compiler_is_refused_in_one_line(trained, tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", str(tmp_path / "no-compiler"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    words = ("--model", trained[0], "--device", "cpu", "--torch_compile", "true")
    problem = run("translate.py", *words, stdin="We see the house.\n", status=2).stderr.splitlines()[-1]
    assert "error: --torch_compile true cannot be used on cpu, leave it out: " in problem
    assert "no-compiler" in problem


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no C++ compiler")
def test_torch_compile_gives_the_same_translations(trained, corpus, tmp_path):
    for name in ("false", "true"):
        result = run(
            "evaluate.py",
            *("--model", trained[0], "--test_file", corpus / "test.en", corpus / "test.de", "--max_new_tokens", 12),
            *("--device", "cpu", "--torch_compile", name, "--output", tmp_path / name),
        )
        assert ("compiling included" in result.stdout) == (name == "true")
    assert (tmp_path / "true").read_text(encoding="utf-8") == (tmp_path / "false").read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("seed", [2017, 7])
def test_the_quickstart_recipe_learns_the_grammar(seed, tmp_path):
    # The threshold is the project's promise; a memoriser gets under a fifth of it, see test_phrase_grammar.
    folder = tmp_path / "model"
    run_long("train.py", SCRIPTS / "recipes" / "phrase_grammar.yaml", "--grammar_seed", seed, "--output_dir", folder)
    scores = json.loads((folder / "metrics.json").read_text())["scores"]["test"]
    assert scores["bleu"] >= 90
    assert scores["exact_match"] >= 70


def run_long(script: str, *arguments: object) -> None:
    """Run a script that trains for minutes, on all cores."""
    subprocess.run([sys.executable, SCRIPTS / script, *map(str, arguments)], check=True, timeout=3600)
