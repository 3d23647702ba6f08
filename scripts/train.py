r"""Train a Transformer on parallel text, measure it, and save a checkpoint that the Auto classes and `pipeline` load.

    python scripts/train.py scripts/recipes/phrase_grammar.yaml --output_dir runs/first
    python scripts/train.py --train_file train.en train.de --validation_file val.en val.de --test_file test.en \
        test.de --source_lang en --target_lang de --preset tiny --max_steps 8000 --output_dir runs/en-de
    python scripts/train.py --dataset_name wmt/wmt14 --dataset_config_name de-en --source_lang en \
        --target_lang de --preset base --output_dir runs/wmt14

The text is two plain files, or one TSV, CSV, JSONL or Parquet file, gzip-compressed or not, or a data set of the Hub
or of a local folder. Without any it is the embedded phrase grammar. A YAML file stands for flags; flags after it win.
"""

from __future__ import annotations

import inspect
import json
import logging
import sys
import tempfile
from dataclasses import dataclass, field, make_dataclass
from pathlib import Path
from typing import Any, Optional

sys.path.append(sys.path.pop(0))  # this folder last: its evaluate.py must not hide the library of that name

from arguments import clear_errors, parse, wants_help

logger = logging.getLogger("train")

PRESETS = ("base", "big", "tiny")
FURTHER_HELP = """\
Model fields (--d_model, --dropout, --norm_position, ...: every field of VanillaTransformerConfig, over the preset's)
and training arguments (--output_dir, --max_steps, --max_tokens_per_batch, --noam_factor, --peak_lr, --warmup_steps,
--eval_strategy, --resume_from_checkpoint, ...: every field of VanillaTransformerTrainingArguments) are flags too:
--help_all lists them all."""


@dataclass
class RunArguments:
    """Which text, which tokenizer and which model."""

    preset: str = field(default="base", metadata={"help": "Sizes to start from: base or big (the paper's), or tiny."})
    model_name_or_path: str | None = field(
        default=None, metadata={"help": "Checkpoint to go on from, with its tokenizer, instead of a preset."}
    )
    tokenizer_name: str | None = field(
        default=None, metadata={"help": "Ready tokenizer; default: a joint BPE trained on the training text."}
    )
    vocab_size: int | None = field(
        default=None, metadata={"help": "Tokens of the BPE to train; default: the preset's, 37,000 or 10,000."}
    )
    train_file: list[str] | None = field(default=None, metadata={"help": "Training text: one file or two."})
    validation_file: list[str] | None = field(default=None, metadata={"help": "Validation text: one file or two."})
    test_file: list[str] | None = field(default=None, metadata={"help": "Test text: one file or two."})
    dataset_name: str | None = field(default=None, metadata={"help": "Hub data set or local data set folder."})
    dataset_config_name: str | None = field(default=None, metadata={"help": "Configuration of the data set."})
    train_split: str = field(default="train", metadata={"help": "Split of the data set to train on."})
    validation_split: str | None = field(
        default="validation", metadata={"help": "Split to validate on, if the data set has it."}
    )
    test_split: str | None = field(default="test", metadata={"help": "Split to test on, if the data set has it."})
    streaming: bool = field(default=False, metadata={"help": "Read the training split without downloading it whole."})
    source_lang: str | None = field(default=None, metadata={"help": "Source language code, such as en."})
    target_lang: str | None = field(default=None, metadata={"help": "Target language code, such as de."})
    source_column: str | None = field(default=None, metadata={"help": "Name of the source column."})
    target_column: str | None = field(default=None, metadata={"help": "Name of the target column."})
    on_bad_pair: str = field(
        default="error", metadata={"help": "What to do with a pair that cannot be used: error or drop (counted)."}
    )
    max_source_length: int | None = field(default=None, metadata={"help": "Longest source in tokens."})
    max_target_length: int | None = field(default=None, metadata={"help": "Longest target in tokens."})
    over_length: str = field(
        default="drop",
        metadata={"help": "What to do with training pairs over these limits: drop (counted), truncate or error."},
    )
    max_train_pairs: int | None = field(default=None, metadata={"help": "Use only the first pairs, for a trial."})
    grammar_seed: int | None = field(default=None, metadata={"help": "Seed of the embedded grammar's sentences."})
    sacrebleu_tokenize: str = field(default="13a", metadata={"help": "sacreBLEU's tokenizer, such as zh or none."})
    early_stopping_patience: int | None = field(
        default=None, metadata={"help": "Stop after this many evaluations without a better --metric_for_best_model."}
    )
    bpe_dropout: float = field(
        default=0.0, metadata={"help": "Encode the training text anew each time, leaving out merges so often: 0.1."}
    )
    average_last: int | None = field(
        default=None, metadata={"help": "Measure and save the average of the last so many checkpoints (paper: 5, 20)."}
    )
    ema_decay: float | None = field(
        default=None, metadata={"help": "Also keep a moving average of the weights, saved in the folder ema: 0.999."}
    )
    license: str | None = field(default=None, metadata={"help": "Licence of the weights, for the model card."})


def main() -> None:
    """Check everything, train, measure, save."""
    argv = sys.argv[1:]
    if wants_help(argv) or not argv:
        parse(["--help"], __doc__, [RunArguments], FURTHER_HELP)

    with clear_errors():  # all that can be wrong with the input shows before any training
        # What the end of a run needs is loaded here: days later another version may lie in its place.
        from vanilla_transformer import VanillaTransformerTrainingArguments, model_card, save_tokenizer, translation  # noqa: F401

        parts = [RunArguments, config_arguments(), VanillaTransformerTrainingArguments]
        run, fields, training = parse(["--help"] if "--help_all" in argv else argv, __doc__, parts)
        check_arguments(run, vars(fields), training)
        show_log(training)
        corpora = load_corpora(run)
        tokenizer = load_tokenizer(run, training, corpora["train"])
        model = make_model(run, vars(fields), tokenizer)
        trainer = make_trainer(run, training, model, tokenizer, corpora)
        point = resume_point(training)
        if trainer.is_world_process_zero():
            save_tokenizer(tokenizer, training.output_dir)  # a resumed run needs it; nothing was written before

    trainer.train(resume_from_checkpoint=point)
    if trainer.is_fsdp_enabled:
        trainer.save_model(training.output_dir)  # together: each process holds a part of the weights
    if trainer.is_world_process_zero():
        model = final_model(run, training, trainer)
        scores = measure(run, training, model, tokenizer, corpora)
        save(run, training, trainer, model, tokenizer, corpora, scores)
        if training.push_to_hub:
            with clear_errors():
                push(training, trainer)


def config_arguments() -> Any:
    """Return a dataclass of the model's fields, each None: what the preset says."""
    from vanilla_transformer import VanillaTransformerConfig

    own = ("vocab_size", "decoder_vocab_size", "use_cache")  # the tokenizer's matter; the library's
    parameters = inspect.signature(VanillaTransformerConfig.__init__).parameters.values()
    kinds = {"int": int, "float": float, "bool": bool, "str": str}
    fields = [
        (p.name, Optional[kinds[str(p.annotation).partition(" ")[0]]], field(default=None))  # noqa: UP045 - HfArgumentParser
        for p in parameters
        if p.default is not p.empty and p.name not in own and not p.name.endswith("token_id")
    ]
    return make_dataclass("ConfigArguments", fields)


def check_arguments(run: Any, fields: dict[str, Any], training: Any) -> None:
    """Refuse what cannot work before anything is read."""
    from vanilla_transformer.model_card import check_license
    from vanilla_transformer.output_folders import is_free

    folder = Path(training.output_dir)
    if not training.resume_from_checkpoint and not is_free(folder):
        raise ValueError(
            f"--output_dir {folder} is not empty: choose another folder, or go on with what is in it by "
            "--resume_from_checkpoint true"
        )
    if run.preset not in PRESETS:
        raise ValueError(f"--preset {run.preset} is unknown: choose one of {', '.join(PRESETS)}")
    preset_config(run, **chosen(fields))  # the model's fields check themselves
    if run.dataset_name and run.train_file:
        raise ValueError("--dataset_name and --train_file: choose one of the two")
    if (run.validation_file or run.test_file) and not run.train_file:
        raise ValueError("--validation_file and --test_file go with --train_file")
    if run.streaming and not run.dataset_name:
        raise ValueError("--streaming reads a data set: it needs --dataset_name")
    if run.model_name_or_path and (run.vocab_size or run.tokenizer_name):
        raise ValueError("--model_name_or_path brings its tokenizer: leave out --vocab_size and --tokenizer_name")
    if run.tokenizer_name and run.vocab_size:
        raise ValueError("--vocab_size is for a tokenizer trained here: leave it out with --tokenizer_name")
    if run.license:
        check_license(run.license)
    if run.early_stopping_patience and not (training.load_best_model_at_end and training.metric_for_best_model):
        raise ValueError(
            "--early_stopping_patience needs --load_best_model_at_end true and --metric_for_best_model bleu (or "
            "chrf, or loss)"
        )
    check_averages(run, training)
    if run.bpe_dropout:
        if run.streaming or not training.max_tokens_per_batch or training.max_steps <= 0:
            raise ValueError(
                "--bpe_dropout makes a stream of its own: it needs --max_tokens_per_batch and --max_steps, and no "
                "--streaming"
            )
        if run.over_length == "truncate":
            raise ValueError("--bpe_dropout cannot truncate, as pieces change: set --over_length drop")


def check_averages(run: Any, training: Any) -> None:
    """Refuse an average that there will be no checkpoints for."""
    from vanilla_transformer.averaging import ExponentialMovingAverageCallback

    if run.ema_decay is not None:
        ExponentialMovingAverageCallback(run.ema_decay)  # checks it
    if run.average_last is None:
        return
    if run.average_last < 1:
        raise ValueError(f"--average_last {run.average_last}: at least one checkpoint makes an average")
    if training.load_best_model_at_end:
        raise ValueError("--average_last and --load_best_model_at_end both say which weights to keep: choose one")
    limit = training.save_total_limit
    if training.save_strategy == "no" or (limit is not None and limit < run.average_last):
        raise ValueError(
            f"--average_last {run.average_last} needs so many checkpoints: set --save_strategy steps, --save_steps "
            f"and --save_total_limit {run.average_last} or more"
        )
    if training.save_strategy == "steps" and training.max_steps > 0:
        saved = -(-training.max_steps // max(1, int(training.save_steps)))
        if saved < run.average_last:
            raise ValueError(
                f"--average_last {run.average_last}: {training.max_steps} updates with --save_steps "
                f"{training.save_steps:g} leave {saved} checkpoints; save more often"
            )


def show_log(training: Any) -> None:
    """Print what this script and the package report; on the first process alone."""
    logging.basicConfig(format="%(message)s")
    if training.process_index == 0:
        for name in (logger.name, "vanilla_transformer"):
            logging.getLogger(name).setLevel(logging.INFO)


def load_corpora(run: Any) -> dict[str, Any]:
    """Return the data sets "train" and, where there are any, "validation" and "test"; print what was read."""
    if run.train_file:
        corpora = load_files(run)
    elif run.dataset_name:
        corpora = load_splits(run)
    else:
        corpora = load_grammar(run)
    if run.max_train_pairs:
        corpora["train"] = corpora["train"].take(run.max_train_pairs)
    return corpora


def load_files(run: Any) -> dict[str, Any]:
    """Return the text of the files."""
    from loading import column_options

    from vanilla_transformer.corpus import load_parallel_files

    corpora = {}
    for name in ("train", "validation", "test"):
        files = getattr(run, f"{name}_file")
        if files:
            corpora[name], report = load_parallel_files(files, **column_options(run))
            logger.info("%s: %s", name, report)
    return corpora


def load_splits(run: Any) -> dict[str, Any]:
    """Return the splits of the data set, the training split as a stream if asked for."""
    from loading import column_options

    from vanilla_transformer.corpus import load_parallel_dataset

    corpora, known = {}, split_names(run)
    for name in ("train", "validation", "test"):
        split = getattr(run, f"{name}_split")
        if name != "train" and split not in known:
            continue
        corpora[name], report = load_parallel_dataset(
            run.dataset_name,
            run.dataset_config_name,
            split=split,
            streaming=run.streaming and name == "train",
            **column_options(run),
        )
        logger.info("%s: %s", name, report)
    return corpora


def load_grammar(run: Any) -> dict[str, Any]:
    """Return the sentences of the embedded phrase grammar."""
    import datasets
    from loading import grammar_splits

    run.source_lang, run.target_lang = "en", "de"
    splits = grammar_splits(run.grammar_seed)
    logger.info("no corpus given: %d sentences of the embedded phrase grammar, synthetic text", len(splits.train))
    parts = {"train": splits.train, "validation": splits.valid, "test": splits.test}
    return {
        name: datasets.Dataset.from_dict({"source": [s for s, _ in pairs], "target": [t for _, t in pairs]})
        for name, pairs in parts.items()
    }


def split_names(run: Any) -> list[str]:
    """Return the splits of the data set."""
    import datasets

    if Path(run.dataset_name, "dataset_dict.json").is_file():
        return list(datasets.load_from_disk(run.dataset_name))
    return list(datasets.get_dataset_split_names(run.dataset_name, run.dataset_config_name))


def load_tokenizer(run: Any, training: Any, corpus: Any) -> Any:
    """Return the tokenizer: a ready one, that of a run to resume, or one trained on the training text.

    The same text gives the same tokenizer, so each process may train its own.
    """
    from transformers import AutoTokenizer

    from vanilla_transformer.tokenizer_training import iterate_texts, train_tokenizer

    name = run.tokenizer_name or run.model_name_or_path
    if training.resume_from_checkpoint and Path(training.output_dir, "tokenizer.json").is_file():
        name = training.output_dir
    if name:
        return AutoTokenizer.from_pretrained(name)
    size = run.vocab_size or preset_config(run).vocab_size
    return train_tokenizer(iterate_texts(corpus), vocab_size=size)


def chosen(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that the user set."""
    return {name: value for name, value in fields.items() if value is not None}


def preset_config(run: Any, **fields: Any) -> Any:
    """Return the preset's configuration with `fields` in place of its own."""
    from vanilla_transformer import VanillaTransformerConfig

    return getattr(VanillaTransformerConfig, run.preset)(**fields)


def make_model(run: Any, fields: dict[str, Any], tokenizer: Any) -> Any:
    """Return a fresh model that fits the tokenizer, or the checkpoint to go on from."""
    from transformers import AutoModelForSeq2SeqLM

    from vanilla_transformer import VanillaTransformerForConditionalGeneration

    if run.model_name_or_path:
        return AutoModelForSeq2SeqLM.from_pretrained(run.model_name_or_path, **chosen(fields))
    start = tokenizer.pad_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    config = preset_config(
        run,
        vocab_size=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=tokenizer.bos_token_id,
        decoder_start_token_id=start,
        **chosen(fields),
    )
    return VanillaTransformerForConditionalGeneration(config)


def make_trainer(run: Any, training: Any, model: Any, tokenizer: Any, corpora: dict[str, Any]) -> Any:
    """Return the Trainer over encoded pairs."""
    from transformers import EarlyStoppingCallback

    from vanilla_transformer import VanillaTransformerTrainer
    from vanilla_transformer.averaging import ExponentialMovingAverageCallback
    from vanilla_transformer.corpus import encode_pairs
    from vanilla_transformer.metrics import build_compute_metrics
    from vanilla_transformer.monitoring import RunHistoryCallback, TroubleWarningCallback
    from vanilla_transformer.streaming import BpeDropoutPairs

    encoded = {}
    for name in ("train", "validation"):
        if name not in corpora:
            continue
        with training.main_process_first(desc=f"encoding {name}"):
            encoded[name], report = encode_pairs(
                corpora[name],
                tokenizer,
                max_source_length=run.max_source_length,
                max_target_length=run.max_target_length,
                too_long=run.over_length if name == "train" else "truncate",
            )
        logger.info("%s: %s", name, report)
    if training.eval_strategy != "no" and "validation" not in encoded:
        raise ValueError(f"--eval_strategy {training.eval_strategy} needs validation text: --validation_file")
    training_pairs = encoded["train"]
    if run.bpe_dropout:
        texts = within_limits(run, corpora["train"], tokenizer)
        training_pairs = BpeDropoutPairs(texts, tokenizer, run.bpe_dropout, seed=training.seed)
    callbacks: list[Any] = [RunHistoryCallback(), TroubleWarningCallback()]
    if run.early_stopping_patience:
        callbacks.append(EarlyStoppingCallback(run.early_stopping_patience))
    if run.ema_decay is not None:
        callbacks.append(ExponentialMovingAverageCallback(run.ema_decay))
    return VanillaTransformerTrainer(
        model=model,
        args=training,
        train_dataset=training_pairs,
        eval_dataset=encoded.get("validation"),
        processing_class=tokenizer,
        compute_metrics=build_compute_metrics(tokenizer, tokenize=run.sacrebleu_tokenize),
        callbacks=callbacks,
    )


def within_limits(run: Any, texts: Any, tokenizer: Any) -> Any:
    """Return the pairs of text that are within the limits of length as the tokenizer cuts them without dropout."""
    limits = {"source": run.max_source_length, "target": run.max_target_length}
    if not any(limits.values()):
        return texts

    def fits(batch: Any) -> list[bool]:
        sides = [
            [limit is None or len(ids) <= limit for ids in tokenizer(batch[side])["input_ids"]]
            for side, limit in limits.items()
        ]
        return [all(pair) for pair in zip(*sides, strict=True)]

    return texts.filter(fits, batched=True, desc="Leaving out long pairs")


def resume_point(training: Any) -> str | None:
    """Return the checkpoint to go on from: the newest complete one, or the one named; None for a new run."""
    from vanilla_transformer.checkpointing import check_resumable, last_complete_checkpoint

    point = training.resume_from_checkpoint
    if not point or str(point).lower() == "false":
        return None
    if str(point).lower() != "true":
        check_resumable(point)
        return str(point)
    found = last_complete_checkpoint(training.output_dir)
    if found is None:
        raise ValueError(
            f"--resume_from_checkpoint true: there is no checkpoint in {training.output_dir}; leave it out"
        )
    return str(found)


def final_model(run: Any, training: Any, trainer: Any) -> Any:
    """Return the trained model, or the average of the last checkpoints if asked for."""
    from transformers import AutoModelForSeq2SeqLM

    if run.average_last is None:
        if trainer.is_fsdp_enabled:  # what is in memory is sharded
            return AutoModelForSeq2SeqLM.from_pretrained(training.output_dir).to(training.device)
        return trainer.accelerator.unwrap_model(trainer.model)
    from vanilla_transformer.averaging import average_checkpoints, averageable_checkpoints

    found = averageable_checkpoints(training.output_dir)
    count = min(run.average_last, len(found))
    if count < run.average_last:
        logger.warning("There are %d checkpoints, not %d: those are averaged.", count, run.average_last)
        run.average_last = count  # for the model card
    with tempfile.TemporaryDirectory(dir=training.output_dir) as scratch:
        checkpoints = [found[step] for step in sorted(found)[-count:]]
        average = average_checkpoints(checkpoints, Path(scratch, "average"))
        logger.info("The model is the average of %s.", ", ".join(path.name for path in checkpoints))
        return AutoModelForSeq2SeqLM.from_pretrained(average).to(training.device)


def measure(run: Any, training: Any, model: Any, tokenizer: Any, corpora: dict[str, Any]) -> dict[str, Any]:
    """Return BLEU and chrF on the test text, else on the validation text, by name of the set."""
    from vanilla_transformer.metrics import TranslationScore
    from vanilla_transformer.translation import translate_sentences

    name = next((name for name in ("test", "validation") if name in corpora), None)
    if name is None:
        return {}
    corpus = corpora[name]
    found = translate_sentences(model, tokenizer, corpus["source"][:], show_progress=not training.disable_tqdm)
    return {
        name: TranslationScore().compute(
            predictions=[best.text for best, *_ in found],
            references=corpus["target"][:],
            tokenize=run.sacrebleu_tokenize,
        )
    }


def save(
    run: Any,
    training: Any,
    trainer: Any,
    model: Any,
    tokenizer: Any,
    corpora: dict[str, Any],
    scores: dict[str, Any],
) -> None:
    """Write the checkpoint, its card and metrics.json, and print the result line."""
    from vanilla_transformer import save_tokenizer
    from vanilla_transformer.model_card import write_model_card

    folder = Path(training.output_dir)
    model.save_pretrained(folder)
    save_tokenizer(tokenizer, folder)
    log = {key: value for entry in trainer.state.log_history for key, value in entry.items()}
    metrics = {
        "scores": scores,
        "updates": trainer.state.global_step,
        "epochs": trainer.state.epoch,
        "train_runtime_seconds": log.get("train_runtime"),
        "validation": {key: log[key] for key in log if key.startswith("eval_") and not isinstance(log[key], str)},
        "parameters": model.num_parameters(),
        "training_pairs": len(trainer.train_dataset) if hasattr(trainer.train_dataset, "__len__") else None,
    }
    (folder / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n", encoding="utf-8")
    write_model_card(folder, run_facts(run, trainer, corpora, scores))
    shown = [
        f"{name} BLEU {score['bleu']:.2f} | chrF {score['chrf']:.2f} | exact match {score['exact_match']:.1f}%"
        f" | {score['bleu_signature']}"
        for name, score in scores.items()
    ]
    print(
        f"result: {' '.join(shown) or 'not measured, no test text'} | {trainer.state.global_step:,} updates | {folder}"
    )


def run_facts(run: Any, trainer: Any, corpora: dict[str, Any], scores: dict[str, Any]) -> Any:
    """Return what the model card says of this run; the trainer knows the most of it."""
    from vanilla_transformer.model_card import facts_of_run

    synthetic = not (run.dataset_name or run.train_file)
    data = "the embedded English-German phrase grammar (generated text)"
    if not synthetic:
        data = run.dataset_name or " and ".join(Path(file).name for file in run.train_file)
    return facts_of_run(
        trainer,
        data=data,
        weights=f"the average of the last {run.average_last} checkpoints" if run.average_last else None,
        example_source=next(iter(corpora.get("test", corpora["train"])))["source"],
        scores=scores,
        languages=[code for code in (run.source_lang, run.target_lang) if code],
        license=run.license,
        datasets=[run.dataset_name] if run.dataset_name and not Path(run.dataset_name).exists() else [],
        synthetic=synthetic,
    )


def push(training: Any, trainer: Any) -> None:
    """Push the checkpoint as scripts/push_to_hub.py does."""
    from vanilla_transformer.hub import push_checkpoint

    pushed = push_checkpoint(
        training.output_dir,
        trainer.hub_model_id,
        private=bool(training.hub_private_repo),
        revision=training.hub_revision,
        token=training.hub_token,
    )
    for warning in pushed.warnings:
        logger.warning("warning: %s", warning)
    print(f"pushed: {pushed.url}")


if __name__ == "__main__":
    main()
