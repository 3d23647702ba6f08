"""What people do with a checkpoint, each in a process of their own; `test_round_trips.py` runs it.

python checkpoint_user.py HOW JOBS, where HOW is one of

- package: the package is imported.
- installed: it could be imported, and is not.
- folder: it cannot be imported; all there is of it lies in the checkpoint's folder.

JOBS is a JSON list of [name of a function below, arguments]; their results go to stdout as JSON behind "RESULT ".
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

PACKAGE = "vanilla_transformer"
TASKS = ("translation", "translation_en_to_de", "summarization", "text2text-generation")
AUTO_CLASSES = ("AutoConfig", "AutoModel", "AutoModelForSeq2SeqLM")
SOURCES = [[5, 6, 7, 8, 9, 1], [8, 7, 1]]
TARGETS = [[9, 8, 7, 1], [6, 5, 9, 9, 1]]


class Hidden:
    """A finder that knows the package and says that it is not there."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.partition(".")[0] == PACKAGE:
            raise ModuleNotFoundError(name, name=name)


def refusals(folder: str) -> dict[str, list[str]]:
    """Return what each way of loading raises without trust, absent and refused: error class and message."""
    import transformers

    found = {}
    for trust in ({}, {"trust_remote_code": False}):
        calls = {name: getattr(transformers, name).from_pretrained for name in AUTO_CLASSES}
        calls["pipeline"] = lambda model, **options: transformers.pipeline("translation", model=model, **options)
        for name, call in calls.items():
            try:
                call(folder, **trust)
            except Exception as error:
                found[f"{name} {trust}"] = [type(error).__name__, str(error)]
    return found


def load(folder: str, trust: dict[str, bool], texts: list[str]) -> dict[str, Any]:
    """Load a folder in every way; return the modules of the classes, and what each task makes of the texts."""
    import transformers

    loaded = [getattr(transformers, name).from_pretrained(folder, **trust) for name in AUTO_CLASSES]
    transformers.AutoTokenizer.from_pretrained(folder, **trust)
    results = {}
    for task in TASKS:
        pipe = transformers.pipeline(task, model=folder, **trust)
        loaded.append(pipe.model)
        results[task] = [*pipe(texts, batch_size=2), pipe(texts[0])[0]]
    return {
        "classes": [type(thing).__name__ for thing in loaded],
        "modules": sorted({type(thing).__module__.partition(".")[0] for thing in loaded}),
        "results": results,
    }


def train(source: str, target: str, trust: dict[str, bool], seed: int) -> dict[str, Any]:
    """Load a checkpoint, train one step with the library's Trainer, save it, load what was saved."""
    import transformers

    model, info = transformers.AutoModelForSeq2SeqLM.from_pretrained(source, output_loading_info=True, **trust)
    tokenizer = transformers.AutoTokenizer.from_pretrained(source, **trust)
    before = fingerprint(model)
    arguments = transformers.Seq2SeqTrainingArguments(
        f"{target}-run",
        max_steps=1,
        per_device_train_batch_size=2,
        learning_rate=0.01,
        seed=seed,
        use_cpu=True,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = transformers.Seq2SeqTrainer(
        model,
        arguments,
        train_dataset=[{"input_ids": ids, "labels": labels} for ids, labels in zip(SOURCES, TARGETS, strict=True)],
        data_collator=transformers.DataCollatorForSeq2Seq(tokenizer, model=model),
        processing_class=tokenizer,
    )
    trainer.train()
    trainer.save_model(target)
    after = fingerprint(model)
    again, more = transformers.AutoModelForSeq2SeqLM.from_pretrained(target, output_loading_info=True, **trust)
    return {
        "before": before,
        "after": after,
        "reloaded": fingerprint(again),
        "amiss": [str(value) for part in (info, more) for value in part.values() if value],
        "module": type(model).__module__.partition(".")[0],
    }


def fingerprint(model: Any) -> dict[str, str]:
    """Return hashes of the weights and of the logits, bit for bit, and the tokens that `generate()` gives."""
    import torch

    model.eval()
    width = max(map(len, SOURCES))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in SOURCES])
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=ids.ne(0).long(), decoder_input_ids=ids.roll(1, 1)).logits
    state = b"".join(name.encode() + tensor.numpy().tobytes() for name, tensor in sorted(model.state_dict().items()))
    tokens = model.generate(input_ids=ids, attention_mask=ids.ne(0).long(), max_new_tokens=6)
    return {
        "weights": hashlib.sha256(state).hexdigest(),
        "logits": hashlib.sha256(logits.numpy().tobytes()).hexdigest(),
        "tokens": str(tokens.tolist()),
    }


def evaluate(folder: str, texts: list[str], references: list[str]) -> dict[str, float]:
    """Measure a checkpoint by `evaluate.evaluator("translation")`, by its path and as a model."""
    import datasets
    import evaluate
    import transformers

    class ExactMatch(evaluate.Metric):
        def _info(self) -> evaluate.MetricInfo:
            text = datasets.Value("string")
            features = datasets.Features({"predictions": text, "references": text})
            return evaluate.MetricInfo(description="", citation="", features=features)

        def _compute(self, predictions: list[str], references: list[str]) -> dict[str, float]:
            return {"exact": sum(map(str.__eq__, predictions, references)) / len(references)}

    data = datasets.Dataset.from_dict({"text": texts, "label": references})
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder)
    found = {}
    for name, chosen in (
        ("path", {"model_or_pipeline": folder}),
        ("model", {"model_or_pipeline": model, "tokenizer": transformers.AutoTokenizer.from_pretrained(folder)}),
    ):
        evaluator = evaluate.evaluator("translation")
        found[name] = evaluator.compute(**chosen, data=data, metric=ExactMatch(), device=-1)["exact"]
    return found


def translate(folder: str, task: str, texts: list[str]) -> list[dict[str, str]]:
    """Translate with any model of the library."""
    import transformers

    return transformers.pipeline(task, model=folder)(texts, max_new_tokens=8)


def import_package() -> str:
    """Import the package now, in the middle of the process."""
    import vanilla_transformer

    return vanilla_transformer.__version__


def main(how: str, jobs: list[list[Any]]) -> None:
    """Do the jobs in their order."""
    if how == "folder":
        sys.meta_path.insert(0, Hidden())
    if how == "package":
        import_package()
    with contextlib.redirect_stdout(sys.stderr):  # the Trainer prints
        results = [globals()[name](*arguments) for name, arguments in jobs]
    used = any(name.partition(".")[0] == PACKAGE for name in sys.modules)
    assert used == (how == "package" or any(name == "import_package" for name, _ in jobs))
    print("RESULT", json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1], json.loads(Path(sys.argv[2]).read_text(encoding="utf-8")))
