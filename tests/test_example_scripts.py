"""The library's public example scripts fine-tune a checkpoint folder of ours, and so does code of the same shape.

The scripts themselves (run_translation.py, run_summarization.py and their _no_trainer versions, from
examples/pytorch of huggingface/transformers) run unchanged where the environment variable TRANSFORMERS_EXAMPLES names
a folder that holds them, at any depth. What runs always are the two functions below that make the same calls in the
same order; a process in which this package cannot be imported runs them as a script.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import evaluate
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from datasets import load_dataset
from torch.utils.data import DataLoader
from transformers import (
    AutoConfig,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    get_scheduler,
    pipeline,
    set_seed,
)

# No import of our package up here: most processes that run this file do without.

EXAMPLES = os.environ.get("TRANSFORMERS_EXAMPLES")
TRUST = {"trust_remote_code": True}
MAX_LENGTH = 80
RATE = 5e-4
NO_DECAY = ["bias", "LayerNorm.weight", "layer_norm.weight"]  # the scripts' own list

# The scripts load "sacrebleu" and "rouge", which are downloads; evaluate prefers a local folder of that name. The
# second metric is a stand-in, ROUGE-1 by words; nltk only splits sentences there.
WORK_FILES = {
    "sacrebleu/sacrebleu.py": """
import datasets
import evaluate
from sacrebleu.metrics import BLEU

class Sacrebleu(evaluate.Metric):
    def _info(self):
        text = datasets.Value("string")
        features = datasets.Features({"predictions": text, "references": datasets.List(text)})
        return evaluate.MetricInfo(description="", citation="", features=features)

    def _compute(self, predictions, references):
        return {"score": BLEU().corpus_score(predictions, [list(row) for row in zip(*references)]).score}
""",
    "rouge/rouge.py": """
import collections
import datasets
import evaluate

class Rouge(evaluate.Metric):
    def _info(self):
        text = datasets.Value("string")
        features = datasets.Features({"predictions": text, "references": text})
        return evaluate.MetricInfo(description="", citation="", features=features)

    def _compute(self, predictions, references, use_stemmer=False):
        scores = []
        for pair in zip(predictions, references):
            one, two = (collections.Counter(text.split()) for text in pair)
            scores.append(2 * (one & two).total() / max(1, one.total() + two.total()))
        return {"rouge1": sum(scores) / len(scores)}
""",
    "nltk.py": """
import re

class data:
    find = staticmethod(lambda name: name)

def sent_tokenize(text):
    return re.split(r"(?<=[.!?])\\s+", text)
""",
    # Runs a script as `python script` does. Those of 4.57 import `is_offline_mode` from where 5.x does not have it.
    "launch.py": """
import os, runpy, sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "vanilla_transformer":
            raise ModuleNotFoundError(name)

package, script, *arguments = sys.argv[1:]
if package == "hidden":
    sys.meta_path.insert(0, Hidden())
else:
    import vanilla_transformer
import huggingface_hub, transformers.utils
if not hasattr(transformers.utils, "is_offline_mode"):
    transformers.utils.is_offline_mode = huggingface_hub.is_offline_mode
sys.argv = [script, *arguments]
sys.path.insert(0, os.path.dirname(script))
runpy.run_path(script, run_name="__main__")
assert ("vanilla_transformer" in sys.modules) == (package == "imported")
""",
}


# ---------------------------------------------------------------------------------------------- what the scripts do


def load_everything(checkpoint: str) -> tuple[Any, Any]:
    """Load tokenizer and model as the scripts do; the tokenizer may have more tokens than the model."""
    common = {"cache_dir": None, "revision": "main", "token": None, **TRUST}
    config = AutoConfig.from_pretrained(checkpoint, **common)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint, use_fast=True, **common)
    model = AutoModelForSeq2SeqLM.from_pretrained(checkpoint, config=config, **common)
    if len(tokenizer) > model.get_input_embeddings().weight.shape[0]:
        model.resize_token_embeddings(len(tokenizer))
    if model.config.decoder_start_token_id is None:
        raise ValueError("Make sure that `config.decoder_start_token_id` is correctly defined")
    if hasattr(model.config, "max_position_embeddings") and model.config.max_position_embeddings < 1024:
        raise ValueError("`--max_source_length` is set to 1024, but the model has fewer position encodings")
    return tokenizer, model


def tokenized(path: str, tokenizer: Any, source: str, target: str) -> Any:
    def preprocess(examples: dict[str, list[str]]) -> Any:
        inputs = tokenizer(examples[source], max_length=1024, padding=False, truncation=True)
        labels = tokenizer(text_target=examples[target], max_length=128, padding=False, truncation=True)
        inputs["labels"] = labels["input_ids"]
        return inputs

    rows = load_dataset("json", data_files={"rows": path}, split="rows")
    return rows.map(preprocess, batched=True, remove_columns=rows.column_names)


def decoded(tokenizer: Any, ids: Any) -> list[str]:
    texts = tokenizer.batch_decode(np.where(ids != -100, ids, tokenizer.pad_token_id), skip_special_tokens=True)
    return [text.strip() for text in texts]


def train_with_trainer(checkpoint: str, output: str) -> dict[str, Any]:
    """What run_translation.py does with --do_train --do_eval --do_predict --predict_with_generate."""
    arguments = Seq2SeqTrainingArguments(
        output_dir=output, do_train=True, do_eval=True, do_predict=True, predict_with_generate=True, max_steps=4,
        eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=2, learning_rate=RATE, use_cpu=True,
        report_to="none", disable_tqdm=True,
    )  # fmt: skip
    set_seed(arguments.seed)
    tokenizer, model = load_everything(checkpoint)
    parts = {name: tokenized(f"{name}.json", tokenizer, "source", "target") for name in ("train", "val", "test")}
    metric = evaluate.load("sacrebleu", cache_dir=None)

    def compute_metrics(prediction: Any) -> dict[str, float]:
        predictions = decoded(tokenizer, prediction.predictions)
        references = [[text] for text in decoded(tokenizer, prediction.label_ids)]
        lengths = [np.count_nonzero(row != tokenizer.pad_token_id) for row in prediction.predictions]
        score = metric.compute(predictions=predictions, references=references)["score"]
        return {"bleu": score, "gen_len": float(np.mean(lengths))}

    trainer = Seq2SeqTrainer(
        model=model,
        args=arguments,
        train_dataset=parts["train"],
        eval_dataset=parts["val"],
        processing_class=tokenizer,
        data_collator=DataCollatorForSeq2Seq(
            tokenizer, model=model, label_pad_token_id=-100, pad_to_multiple_of=8 if arguments.fp16 else None
        ),
        compute_metrics=compute_metrics,
    )
    trainer.train(resume_from_checkpoint=None)
    trainer.save_model()
    trainer.save_state()
    metrics = trainer.evaluate(max_length=MAX_LENGTH, num_beams=2, metric_key_prefix="eval")
    predicted = trainer.predict(parts["test"], metric_key_prefix="predict", max_length=MAX_LENGTH, num_beams=2)
    trainer.create_model_card(finetuned_from=checkpoint, tasks="translation", language=["en", "de"])
    return {"metrics": metrics, "predictions": decoded(tokenizer, predicted.predictions)}


def train_with_accelerate(checkpoint: str, output: str) -> dict[str, Any]:
    """What run_summarization_no_trainer.py does for one epoch."""
    accelerator = Accelerator(gradient_accumulation_steps=2)
    set_seed(0)
    tokenizer, model = load_everything(checkpoint)
    with accelerator.main_process_first():
        parts = {name: tokenized(f"{name}.json", tokenizer, "source", "target") for name in ("train", "val")}
    collate = DataCollatorForSeq2Seq(tokenizer, model=model, label_pad_token_id=-100, pad_to_multiple_of=None)
    loaders = (
        DataLoader(parts["train"], shuffle=True, collate_fn=collate, batch_size=4),
        DataLoader(parts["val"], collate_fn=collate, batch_size=4),
    )
    groups: dict[bool, list[Any]] = {True: [], False: []}
    for name, parameter in model.named_parameters():
        groups[not any(part in name for part in NO_DECAY)].append(parameter)
    optimizer = torch.optim.AdamW(
        [{"params": parameters, "weight_decay": 0.1 * decay} for decay, parameters in groups.items()], lr=RATE
    )
    scheduler = get_scheduler(name="linear", optimizer=optimizer, num_warmup_steps=0, num_training_steps=50)
    decayed = sorted({parameter.dim() for parameter in groups[True]})
    model, optimizer, train_loader, val_loader, scheduler = accelerator.prepare(model, optimizer, *loaders, scheduler)

    steps = 0
    model.train()
    for batch in train_loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        steps += int(accelerator.sync_gradients)
    outcome = evaluate_with_accelerate(accelerator, model.eval(), val_loader, tokenizer)

    accelerator.wait_for_everyone()
    unwrapped = accelerator.unwrap_model(model)
    unwrapped.save_pretrained(output, is_main_process=accelerator.is_main_process, save_function=accelerator.save)
    if accelerator.is_main_process:
        tokenizer.save_pretrained(output)
    accelerator.wait_for_everyone()
    accelerator.end_training()
    return {**outcome, "steps": steps, "decayed": decayed, "main": accelerator.is_main_process}


def evaluate_with_accelerate(accelerator: Any, model: Any, loader: Any, tokenizer: Any) -> dict[str, Any]:
    """The scripts' loop of evaluation; they pass num_beams=None by default."""
    metric = evaluate.load("sacrebleu")
    predictions = []
    for batch in loader:
        with torch.no_grad():
            generated = accelerator.unwrap_model(model).generate(
                batch["input_ids"], attention_mask=batch["attention_mask"], max_length=MAX_LENGTH, num_beams=None
            )
        generated = accelerator.pad_across_processes(generated, dim=1, pad_index=tokenizer.pad_token_id)
        labels = accelerator.pad_across_processes(batch["labels"], dim=1, pad_index=tokenizer.pad_token_id)
        generated, labels = accelerator.gather_for_metrics((generated, labels))
        texts = decoded(tokenizer, generated.cpu().numpy())
        references = [[text] for text in decoded(tokenizer, labels.cpu().numpy())]
        metric.add_batch(predictions=texts, references=references)
        predictions += texts
    return {"metrics": {"eval_bleu": metric.compute()["score"]}, "predictions": predictions}


WALKS = {"trainer": train_with_trainer, "accelerate": train_with_accelerate}


def load_back(output: str, sources: list[str]) -> dict[str, Any]:
    """What somebody does with the folder afterwards."""
    model, info = AutoModelForSeq2SeqLM.from_pretrained(output, output_loading_info=True, **TRUST)
    pipe = pipeline("translation", model=output, **TRUST)
    return {
        "module": type(model).__module__,
        "wrong": [key for kind in ("missing_keys", "unexpected_keys", "mismatched_keys") for key in info[kind]],
        "sum": float(sum(parameter.double().abs().sum() for parameter in model.parameters())),
        "translations": [result["translation_text"] for result in pipe(sources)],
    }


# ---------------------------------------------------------------------------------------------- the tests' side


def learn_by_heart(model: Any, tokenizer: Any, pairs: list[tuple[str, str]]) -> None:
    """Train until the translations of a few sentences are mostly right, so that scores say something."""
    rows = [tokenizer(source, text_target=target) for source, target in pairs]
    batch = DataCollatorForSeq2Seq(tokenizer, model=model)([dict(row) for row in rows])
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    model.train()
    for _ in range(120):
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> SimpleNamespace:
    """A folder with a checkpoint whose tokenizer has a token more than its model, text, metrics and the launcher."""
    from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
    from vanilla_transformer.phrase_grammar import generate_splits
    from vanilla_transformer.tokenizer_training import save_tokenizer, train_tokenizer

    folder = tmp_path_factory.mktemp("working")
    for name, content in WORK_FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content.lstrip(), encoding="utf-8")
    splits = generate_splits(train_size=4000, valid_size=20, test_size=20)
    pairs = {"train": splits.train[:32], "val": splits.valid[:6], "test": splits.test[:5]}
    for name, rows in pairs.items():
        lines = {
            name: [{"source": source, "target": target} for source, target in rows],
            f"{name}_translation": [{"translation": {"en": source, "de": target}} for source, target in rows],
        }
        for file, records in lines.items():
            text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
            (folder / f"{file}.json").write_text(text, encoding="utf-8")
    tokenizer = train_tokenizer([text for pair in splits.train[:300] for text in pair], vocab_size=320)
    torch.manual_seed(0)
    config = VanillaTransformerConfig.tiny(
        vocab_size=len(tokenizer), d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=48, decoder_ffn_dim=48, dropout=0.1,
    )  # fmt: skip
    model = VanillaTransformerForConditionalGeneration(config)
    learn_by_heart(model, tokenizer, [*pairs["val"], *pairs["test"]])
    model.generation_config.max_length_offset = 4
    model.save_pretrained(folder / "checkpoint")
    tokenizer.add_tokens(["<added>"])
    save_tokenizer(tokenizer, folder / "checkpoint")
    return SimpleNamespace(folder=folder, pairs=pairs, vocabulary=len(tokenizer))


def launch(place: SimpleNamespace, package: str, script: str | Path, *arguments: str, processes: int = 1) -> str:
    """Run a script in the working folder, in a fresh interpreter with empty caches, no network and a closed stdin."""
    environment = {
        **os.environ,
        "HF_HOME": str(place.folder / f"home-{package}"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "ACCELERATE_USE_CPU": "true",
        "PYTHONPATH": str(Path(__file__).parents[1]) if package == "imported" else "",
    }
    environment.pop("HF_MODULES_CACHE", None)
    several = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    done = subprocess.run(
        [sys.executable, *(several if processes > 1 else []), "launch.py", package, str(script), *arguments],
        env=environment, cwd=place.folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    for complaint in ("newly initialized", "were not used", "MISSING", "UNEXPECTED"):
        assert complaint not in done.stdout + done.stderr
    return done.stdout


def results_of(place: SimpleNamespace, output: Path, part: str, **settings: Any) -> SimpleNamespace:
    """What the package makes of a saved folder: sentence by sentence, the loss by F.cross_entropy."""
    tokenizer = AutoTokenizer.from_pretrained(output)
    model = AutoModelForSeq2SeqLM.from_pretrained(output).eval()
    assert type(model).__module__.startswith("vanilla_transformer.")
    texts, nll, smoothed, tokens = [], 0.0, 0.0, 0
    for source, target in place.pairs[part]:
        inputs = tokenizer(source, return_tensors="pt")
        labels = tokenizer(text_target=target, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            logits = model(**inputs, labels=labels).logits
        nll += F.cross_entropy(logits[0], labels[0], reduction="sum").item()
        smoothed += F.cross_entropy(logits[0], labels[0], reduction="sum", label_smoothing=0.1).item()
        tokens += labels.numel()
        assert labels.shape[1] <= MAX_LENGTH  # else the scripts cut it
        texts += decoded(tokenizer, model.generate(**inputs, max_length=MAX_LENGTH, **settings).numpy())
    assert len(set(texts)) > 1  # no constant
    losses = {0.0: nll / tokens, 0.1: smoothed / tokens}
    return SimpleNamespace(model=model, tokenizer=tokenizer, texts=texts, losses=losses)


def score(place: SimpleNamespace, name: str, texts: list[str], part: str) -> float:
    references = [[target] if name == "sacrebleu" else target for _, target in place.pairs[part]]
    metric = evaluate.load(str(place.folder / name / f"{name}.py"))
    (value,) = metric.compute(predictions=texts, references=references).values()
    assert value > 0.2  # not the zero that anything would give
    return float(value)


def check_folder(place: SimpleNamespace, output: Path, results: SimpleNamespace) -> None:
    """Trained, complete, with the larger vocabulary, and free of the library's own decoding defaults."""
    before = AutoModelForSeq2SeqLM.from_pretrained(place.folder / "checkpoint")
    name = "model.encoder.layers.0.fc1.weight"
    assert not torch.equal(before.state_dict()[name], results.model.state_dict()[name])
    assert results.model.config.vocab_size == results.model.config.decoder_vocab_size == place.vocabulary
    assert results.model.get_output_embeddings().weight.shape[0] == place.vocabulary
    assert len(results.tokenizer) == place.vocabulary
    shipped = {path.name for path in (place.folder / "checkpoint").glob("*.py")}
    assert {path.name for path in output.glob("*.py")} == shipped
    settings = []
    for path in (place.folder / "checkpoint", output):
        settings.append(json.loads((path / "generation_config.json").read_text()))
        settings[-1]["eos_token_id"] = np.atleast_1d(settings[-1]["eos_token_id"]).tolist()  # 5.0's trainer: a list
    assert settings[0] == settings[1]


@pytest.mark.parametrize("package", ["hidden", "imported"])
def test_code_like_the_scripts_trains_evaluates_and_saves(place, package) -> None:
    """Both in one process, one after the other: most of its time is imports."""
    sources = [source for source, _ in place.pairs["test"]]
    stdout = launch(place, package, __file__, "checkpoint", package, json.dumps(sources), *WALKS)
    outcomes = json.loads(stdout.rpartition("RESULT ")[2])
    for walk, outcome in outcomes.items():
        output = place.folder / f"{package}-{walk}"
        model = check_walk(place, walk, output, outcome)
        back = outcome["back"]
        if package == "hidden":  # else it depends on the release: before 5.5 the folder's code wins
            assert back["module"].startswith("transformers_modules.")
        assert back["wrong"] == []
        assert back["sum"] == pytest.approx(sum(p.double().abs().sum().item() for p in model.parameters()))
        pipe = pipeline("translation", model=str(output))
        assert back["translations"] == [result["translation_text"] for result in pipe(sources)]
    assert list(outcomes) == list(WALKS)


def check_walk(place: SimpleNamespace, walk: str, output: Path, outcome: dict[str, Any]) -> torch.nn.Module:
    part, settings = ("test", {"num_beams": 2}) if walk == "trainer" else ("val", {"num_beams": 4})
    results = results_of(place, output, part, **settings)
    check_folder(place, output, results)
    assert outcome["predictions"] == results.texts
    if walk == "trainer":
        evaluation = results_of(place, output, "val", **settings)
        assert outcome["metrics"]["eval_loss"] == pytest.approx(evaluation.losses[0.0], abs=1e-4)
        assert outcome["metrics"]["eval_bleu"] == pytest.approx(score(place, "sacrebleu", evaluation.texts, "val"))
        assert outcome["metrics"]["eval_gen_len"] <= MAX_LENGTH
        assert "checkpoint" in (output / "README.md").read_text()
    else:
        assert outcome["metrics"]["eval_bleu"] == pytest.approx(score(place, "sacrebleu", results.texts, "val"))
        assert outcome["decayed"] == [2]  # matrices only: no bias, no LayerNorm
    return results.model


@pytest.mark.slow
def test_accelerate_on_two_processes(place) -> None:
    """The model is wrapped for training, unwrapped for decoding; padded, gathered, without the repeated rows."""
    stdout = launch(place, "hidden", __file__, "checkpoint", "two", json.dumps(["a house"]), "accelerate", processes=2)
    outcome = json.loads(stdout.rpartition("RESULT ")[2])["accelerate"]
    check_walk(place, "accelerate", place.folder / "two-accelerate", outcome)
    assert outcome["steps"] == 2  # 32 pairs, 4 on each of two processes, two batches an update


# ---------------------------------------------------------------------------------------------- the scripts themselves

LENGTHS = ["--max_target_length", str(MAX_LENGTH), "--num_beams", "2"]
TRAINER = ["--do_train", "--do_eval", "--do_predict", "--predict_with_generate", "--use_cpu", "--report_to", "none",
           "--max_steps", "4", "--learning_rate", str(RATE), "--save_strategy", "no"]  # fmt: skip
ACCELERATE = ["--max_train_steps", "4", "--learning_rate", str(RATE)]
SCRIPTS = {
    "run_translation.py": ("sacrebleu", [*LENGTHS, *TRAINER]),
    "run_translation_no_trainer.py": ("sacrebleu", [*LENGTHS, *ACCELERATE]),
    "run_summarization.py": ("rouge", [*LENGTHS, *TRAINER, "--label_smoothing_factor", "0.1"]),
    "run_summarization_no_trainer.py": ("rouge", [*LENGTHS, *ACCELERATE]),
}


@pytest.mark.skipif(not EXAMPLES, reason="TRANSFORMERS_EXAMPLES does not name a folder with the library's scripts")
@pytest.mark.parametrize("package", ["hidden", "imported"])
@pytest.mark.parametrize("name", SCRIPTS)
def test_the_librarys_scripts_run_unchanged(place, name, package) -> None:
    found = sorted(Path(str(EXAMPLES)).rglob(name))
    assert found, f"TRANSFORMERS_EXAMPLES={EXAMPLES} has no {name}"
    metric, options = SCRIPTS[name]
    stem = "{}_translation.json" if metric == "sacrebleu" else "{}.json"
    files = ["--train_file", stem.format("train"), "--validation_file", stem.format("val")]
    if "no_trainer" not in name:
        files += ["--test_file", stem.format("test")]
    if metric == "sacrebleu":
        files += ["--source_lang", "en", "--target_lang", "de"]
    output = place.folder / f"{name}-{package}"
    launch(
        place, package, found[-1], "--model_name_or_path", "checkpoint", "--trust_remote_code",
        "--output_dir", str(output), *files, *options,
    )  # fmt: skip

    results = results_of(place, output, "val", num_beams=2)
    check_folder(place, output, results)
    metrics = json.loads((output / "all_results.json").read_text())
    key, scale = ("bleu", 1) if metric == "sacrebleu" else ("rouge1", 100)
    expected = scale * score(place, metric, results.texts, "val")
    assert metrics[f"eval_{key}"] == pytest.approx(expected, abs=1e-3)  # the scripts round
    if "no_trainer" not in name:
        predictions = (output / "generated_predictions.txt").read_text(encoding="utf-8").split("\n")
        assert predictions == results_of(place, output, "test", num_beams=2).texts
        smoothing = 0.1 if "--label_smoothing_factor" in options else 0.0
        assert metrics["eval_loss"] == pytest.approx(results.losses[smoothing], abs=1e-4)


def main(checkpoint: str, prefix: str, sources: str, *walks: str) -> None:
    """Train in each of the ways, load the folder back, and print what came out."""
    outcomes = {}
    for walk in walks:
        output = f"{prefix}-{walk}"
        outcomes[walk] = WALKS[walk](checkpoint, output)
        if outcomes[walk].pop("main", True):
            outcomes[walk]["back"] = load_back(output, json.loads(sources))
    if int(os.environ.get("RANK", "0")) == 0:
        print("RESULT", json.dumps(outcomes))


if __name__ == "__main__":
    main(*sys.argv[1:])
