"""What is tried with one release of transformers: load, forward, generate, train a step, save, load.

    python probe.py make FOLDER               a checkpoint, its outputs in outputs.json and outputs.safetensors
    python probe.py try FOLDER NEXT [MODE]    everything with it; NEXT gets it back, one training step later
    python probe.py again FOLDER [MODE]       only load and translate: FOLDER comes from another release

MODE is "package" (imported, no trust) or "folder" (the package cannot be imported, the folder's own code is trusted).
The last line printed is a JSON object: check → "ok", or what went wrong in one line. `run.py` makes a table of it.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
TEXTS = ["a small bird sings", "two old trains", "the red house near the quiet river is cold", "birds", "a a a a the"]
TARGETS = ["ein kleiner Vogel singt", "zwei alte Züge", "das rote Haus ist kalt", "Vögel", "der die das"]
TASKS = ("translation", "translation_en_to_de", "summarization", "text2text-generation")


class _PackageHidden:
    """An importer in front of all others that does not find the package."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.partition(".")[0] == "vanilla_transformer":
            raise ModuleNotFoundError(f"No module named {name!r}")


def main() -> None:
    action, folder, *rest = sys.argv[1:]
    mode = rest.pop() if rest and rest[-1] in ("package", "folder") else "package"
    if mode == "folder":
        sys.meta_path.insert(0, _PackageHidden())
    else:
        import vanilla_transformer  # noqa: F401 - registers

    import torch
    from transformers.utils import logging

    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    trust = mode == "folder"
    if action == "make":
        make(Path(folder))
        return
    checks = try_all(Path(folder), Path(rest[0]), trust) if action == "try" else try_again(Path(folder), trust)
    print(json.dumps({name: outcome(check) for name, check in checks}))


def outcome(check: Callable[[], None]) -> str:
    """Return "ok" or the error in one line; the traceback goes to stderr."""
    try:
        check()
    except Exception as error:
        traceback.print_exc()
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return "ok"


def make(folder: Path) -> None:
    """Save a model that has learnt `TEXTS` by heart, so that it has something to say, and what it answers."""
    import torch

    import vanilla_transformer as vt

    torch.manual_seed(5)
    tokenizer = vt.train_tokenizer(TEXTS + TARGETS, vocab_size=280)
    config = vt.VanillaTransformerConfig.tiny(
        vocab_size=len(tokenizer), d_model=32, encoder_ffn_dim=48, decoder_ffn_dim=48, dropout=0.0
    )
    model = vt.VanillaTransformerForConditionalGeneration(config)
    inputs = tokenizer(TEXTS, padding=True, return_tensors="pt")
    labels = tokenizer(text_target=TARGETS, padding=True, return_tensors="pt")["input_ids"]
    labels = labels.masked_fill(labels == tokenizer.pad_token_id, -100)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(200):
        model(inputs["input_ids"], attention_mask=inputs["attention_mask"], labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval().save_pretrained(folder)
    vt.save_tokenizer(tokenizer, folder)
    write_outputs(folder, model, tokenizer)
    print(json.dumps(tokenizer.batch_decode(tokens(model, tokenizer, 4), skip_special_tokens=True)))


def write_outputs(folder: Path, model: Any, tokenizer: Any) -> None:
    """Write what a model answers beside it."""
    from safetensors.torch import save_file

    save_file({"logits": logits(model, tokenizer)}, folder / "outputs.safetensors")
    answers = {name: tokens(model, tokenizer, beams) for name, beams in (("greedy", 1), ("beam", 4))}
    (folder / "outputs.json").write_text(json.dumps(answers), encoding="utf-8")


def logits(model: Any, tokenizer: Any) -> Any:
    """Return the logits of all text, [B, T, V]."""
    import torch

    inputs = tokenizer(TEXTS, padding=True, return_tensors="pt")
    labels = tokenizer(text_target=TARGETS, padding=True, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        return model(inputs["input_ids"], attention_mask=inputs["attention_mask"], labels=labels).logits


def tokens(model: Any, tokenizer: Any, num_beams: int) -> list[list[int]]:
    """Return what `generate` gives for all text in one batch."""
    inputs = tokenizer(TEXTS, padding=True, return_tensors="pt")
    inputs.pop("token_type_ids", None)
    return model.generate(**inputs, num_beams=num_beams, max_length_offset=8).tolist()


def load(folder: Path, trust: bool) -> tuple[Any, Any]:
    """Return model and tokenizer by the Auto classes, loaded without a weight that is missing or too many."""
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    options = {"trust_remote_code": True} if trust else {}
    model, found = AutoModelForSeq2SeqLM.from_pretrained(folder, output_loading_info=True, **options)
    wrong = {name: keys for name, keys in found.items() if keys}
    if wrong:
        raise AssertionError(f"not all weights were found: {wrong}")
    where = type(model).__module__.partition(".")[0]
    if where != ("transformers_modules" if trust else "vanilla_transformer"):
        raise AssertionError(f"the model's class comes from {where}")
    return model.eval(), AutoTokenizer.from_pretrained(folder, **options)


def try_again(folder: Path, trust: bool) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield the checks of a checkpoint from another release."""
    state: dict[str, Any] = {}

    def loads() -> None:
        state["model"], state["tokenizer"] = load(folder, trust)

    yield "load", loads
    if state:
        yield "forward", lambda: same_logits(folder, state["model"], state["tokenizer"])
        yield "greedy", lambda: same_tokens(folder, state["model"], state["tokenizer"], "greedy", 1)
        yield "beam 4", lambda: same_tokens(folder, state["model"], state["tokenizer"], "beam", 4)
        yield "pipelines", lambda: same_texts(folder, state["tokenizer"], trust)


def try_all(folder: Path, following: Path, trust: bool) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield all checks; `following` gets the checkpoint after a training step, with what it answers."""
    yield from try_again(folder, trust)
    yield "Trainer step", lambda: train_a_step(folder, following, trust)
    if (following / "config.json").is_file():
        yield "save, load", lambda: same_after_saving(folder, following, trust)


def same_logits(folder: Path, model: Any, tokenizer: Any) -> None:
    """The logits written beside the checkpoint."""
    import torch
    from safetensors.torch import load_file

    torch.testing.assert_close(
        logits(model, tokenizer), load_file(folder / "outputs.safetensors")["logits"], rtol=1e-5, atol=1e-5
    )


def same_tokens(folder: Path, model: Any, tokenizer: Any, name: str, num_beams: int) -> None:
    """The tokens written beside the checkpoint."""
    want = json.loads((folder / "outputs.json").read_text(encoding="utf-8"))[name]
    found = tokens(model, tokenizer, num_beams)
    if found != want:
        raise AssertionError(f"other tokens: {found} instead of {want}")


def same_texts(folder: Path, tokenizer: Any, trust: bool) -> None:
    """Every task gives the text of the tokens written beside the checkpoint."""
    from transformers import pipeline

    want = json.loads((folder / "outputs.json").read_text(encoding="utf-8"))["beam"]
    texts = tokenizer.batch_decode(want, skip_special_tokens=True)
    for task in TASKS:
        translate = pipeline(task, model=str(folder), **({"trust_remote_code": True} if trust else {}))
        found = [next(iter(record.values())) for record in translate(TEXTS, batch_size=2, max_length_offset=8)]
        if found != texts:
            raise AssertionError(f"{task}: {found} instead of {texts}")


def train_a_step(folder: Path, following: Path, trust: bool) -> None:
    """One step of the library's Trainer and, where the package is there, of ours; saved with what comes out then."""
    import torch
    from transformers import DataCollatorForSeq2Seq, Seq2SeqTrainer, Seq2SeqTrainingArguments

    options = {
        "output_dir": str(following),
        "max_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
    }
    trainers: list[tuple[Any, Any]] = [
        (Seq2SeqTrainer, Seq2SeqTrainingArguments(**options, adam_beta2=0.98, adam_epsilon=1e-9, max_grad_norm=0.0))
    ]
    if not trust:
        import vanilla_transformer as vt

        ours = vt.VanillaTransformerTrainingArguments(
            **options,
            bf16=False,
            max_tokens_per_batch=0,
            lr_schedule="library",
            learning_rate=5e-5,
            warmup_steps=0,
        )
        trainers.append((vt.VanillaTransformerTrainer, ours))
    weights = []
    for trainer_class, arguments in trainers:
        model, tokenizer = load(folder, trust)
        rows = [
            {"input_ids": source, "labels": target}
            for source, target in zip(
                tokenizer(TEXTS)["input_ids"], tokenizer(text_target=TARGETS)["input_ids"], strict=True
            )
        ]
        trainer = trainer_class(
            model=model,
            args=arguments,
            train_dataset=rows,
            data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
            processing_class=tokenizer,
        )
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        trainer.train()
        if all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items()):
            raise AssertionError(f"{trainer_class.__name__} changed no weight")
        weights.append(model.state_dict())
    for name, tensor in weights[0].items():
        torch.testing.assert_close(tensor, weights[-1][name], msg=lambda text, name=name: f"{name}: {text}")
    trainer.save_model()
    write_outputs(following, model.eval(), tokenizer)


def same_after_saving(folder: Path, following: Path, trust: bool) -> None:
    """Nothing that makes a checkpoint is lost; loaded again it answers as it did when it was saved."""
    lost = {path.name for path in folder.iterdir()} - {path.name for path in following.iterdir()}
    if lost:
        raise AssertionError(f"files lost: {sorted(lost)}")
    model, tokenizer = load(following, trust)
    same_logits(following, model, tokenizer)
    for name, beams in (("greedy", 1), ("beam", 4)):
        same_tokens(following, model, tokenizer, name, beams)


if __name__ == "__main__":
    main()
