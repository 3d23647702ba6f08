"""The model card: a checkpoint's README.md, filled from the facts of its run.

A run writes its card as README.md, and what the card was made of as model_card.json beside it. Whoever edits README.md
by hand keeps the edits: an edited card is never written over.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import logging
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # public, though not in its __all__

logger = logging.getLogger(__name__)

TEMPLATE = Path(__file__).with_name("model_card.md")
CARD = "README.md"
FACTS = "model_card.json"
MODEL_TYPE = "vanilla_transformer"
TAGS = ("vanilla-transformer", "attention-is-all-you-need")
# What the model does, by the name of its pipeline.
TASKS = {
    "translation": "This model translates {what}.",
    "summarization": "This model summarises text.",
    "text2text-generation": "This model turns text into text.",
}
SCORE_COLUMNS = {
    "num_sentences": "sentences",
    "bleu": "BLEU",
    "chrf": "chrF",
    "exact_match": "exact match, %",
    "loss": "loss a token",
    "perplexity": "perplexity",
}

# Identifiers of huggingface.co/docs/hub/repositories-licenses. The list grows, so that another one is only a warning.
LICENSES = set(
    """
    apache-2.0 mit openrail bigscience-openrail-m creativeml-openrail-m bigscience-bloom-rail-1.0 bigcode-openrail-m
    afl-3.0 artistic-2.0 bsl-1.0 bsd bsd-2-clause bsd-3-clause bsd-3-clause-clear c-uda cc cc0-1.0 cc-by-2.0 cc-by-2.5
    cc-by-3.0 cc-by-4.0 cc-by-sa-3.0 cc-by-sa-4.0 cc-by-nc-2.0 cc-by-nc-3.0 cc-by-nc-4.0 cc-by-nd-4.0 cc-by-nc-nd-3.0
    cc-by-nc-nd-4.0 cc-by-nc-sa-2.0 cc-by-nc-sa-3.0 cc-by-nc-sa-4.0 cdla-sharing-1.0 cdla-permissive-1.0
    cdla-permissive-2.0 wtfpl ecl-2.0 epl-1.0 epl-2.0 etalab-2.0 eupl-1.1 agpl-3.0 gfdl gpl gpl-2.0 gpl-3.0 lgpl
    lgpl-2.1 lgpl-3.0 isc lppl-1.3c ms-pl mpl-2.0 odc-by odbl openrail++ osl-3.0 postgresql ofl-1.1 ncsa unlicense zlib
    pddl lgpl-lr deepfloyd-if-license llama2 gemma unknown other
    """.split()  # noqa: SIM905 - one a word is easier to read and to compare
)


@dataclass
class RunFacts:
    """What is known of a model; each goes into the card as it stands, and what is not known is left out.

    Args:
        parameters: Number of trainable parameters.
        architecture: Sizes in words.
        decoding: How `generate()` decodes by default.
        training: Rows of the training table, such as "updates": "4,000".
        example_source: A sentence for the usage block.
        scores: Results such as those of `TranslationScore` by name of the set.
        languages: Language codes, source first.
        license: Identifier of the licence that the weights are under.
        datasets: Hub ids of the data sets trained on.
        base_model: Hub id of the model that training started from.
        task: What the model does, the name of a pipeline: one of `TASKS`.
        tags: Further tags.
        synthetic: Whether the data is generated.

    Raises:
        ValueError: If the task is none of `TASKS`.
    """

    parameters: int
    architecture: str
    decoding: str
    training: Mapping[str, str] = field(default_factory=dict)
    example_source: str | None = None
    scores: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    languages: Sequence[str] = ()
    license: str | None = None
    datasets: Sequence[str] = ()
    base_model: str | None = None
    task: str = "translation"
    tags: Sequence[str] = ()
    synthetic: bool = False

    def __post_init__(self) -> None:
        if self.task not in TASKS:
            raise ValueError(f"The task {self.task!r} of the model card must be one of {', '.join(TASKS)}.")


# Facts


def facts_of_run(trainer: Any, *, data: str | None = None, weights: str | None = None, **known: Any) -> RunFacts:
    """What a `VanillaTransformerTrainer` knows of its run and of its model, after training or during it.

    Args:
        trainer: The trainer.
        data: What the training text is, in words.
        weights: Which weights are saved, in words, if not those that the trainer's model has, such as an average.
        **known: Fields of `RunFacts` that the trainer can't know, such as `languages` and `license`, or knows worse,
            such as `scores` on a test set and `example_source`.
    """
    args, tokenizer = trainer.args, trainer.processing_class
    model = trainer.accelerator.unwrap_model(trainer.model)
    origin, is_local = model.name_or_path, Path(model.name_or_path).exists()
    rows = {
        "data": data,
        "pairs used": _pairs(trainer),
        "started from": Path(origin).name if is_local else origin,
        "tokenizer": None if tokenizer is None else _tokenizer(tokenizer),
        "updates": _updates(trainer),
        "weights": weights,
        "batches": (
            f"at most {args.max_tokens_per_batch:,} source and {args.max_tokens_per_batch:,} target tokens a device, "
            "padding included"
            if args.max_tokens_per_batch
            else f"{args.per_device_train_batch_size} pairs a device"
        )
        + f", {args.world_size} device(s), {args.gradient_accumulation_steps} accumulation step(s)",
        "optimizer and schedule": _optimizer(trainer),
        "regularisation": f"dropout {model.config.dropout}, label smoothing {model.config.label_smoothing}",
        "precision, device": f"{'bf16' if args.bf16 else 'fp16' if args.fp16 else 'fp32'}, {args.device.type}",
        "time": _time(trainer),
        "software": _software(),
    }
    facts = {
        "parameters": model.num_parameters(only_trainable=True),
        "example_source": _first_source(trainer),
        "scores": _evaluations(trainer),
        "base_model": None if is_local else origin or None,
        **facts_of_configs(model.config, model.generation_config),
    }
    return RunFacts(**{**facts, **known, "training": {name: row for name, row in rows.items() if row}})


def facts_of_configs(config: Any, generation_config: Any) -> dict[str, str]:
    """The fields "architecture" and "decoding" of `RunFacts`."""
    beams = generation_config.num_beams or 1
    most = generation_config.max_new_tokens or generation_config.max_length
    offset = getattr(generation_config, "max_length_offset", None)
    alpha = None if generation_config.length_penalty is not None else getattr(generation_config, "gnmt_alpha", None)
    ranking = "" if beams == 1 or alpha is None else f", ranked as by Wu et al. 2016 with α = {alpha}"
    limit = f"at most {most or 20} tokens a sentence"  # the library's default is 20
    if not most and offset is not None:
        limit = f"at most source length + {offset} tokens a sentence"
    return {
        "architecture": (
            f"{config.encoder_layers}+{config.decoder_layers} layers, d_model {config.d_model}, d_ff "
            f"{config.encoder_ffn_dim}, {config.encoder_attention_heads} heads, {config.norm_position}-norm, "
            f"{config.position_embedding_type} positions"
        ),
        "decoding": f"{'greedy' if beams == 1 else f'beam {beams}'}{ranking}, {limit}",
    }


def _pairs(trainer: Any) -> str | None:
    if trainer.train_dataset is None:
        return None
    if not hasattr(trainer.train_dataset, "__len__"):
        return "a stream"
    loader = trainer.callback_handler.train_dataloader  # knows of pairs dropped as too long; None before training
    return f"{len(trainer.train_dataset) if loader is None else trainer.num_examples(loader):,}"


def _tokenizer(tokenizer: Any) -> str:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    kind = type(tokenizer if backend is None else backend.model).__name__
    if type(getattr(backend, "decoder", None)).__name__ == "ByteLevel":
        kind = f"byte-level {kind}"
    return f"{kind} of {len(tokenizer):,} tokens"


def _updates(trainer: Any) -> str:
    best = _best_step(trainer)
    text = f"{trainer.state.global_step:,}"
    return text if best in (None, trainer.state.global_step) else f"{text}; the weights are those of update {best:,}"


def _best_step(trainer: Any) -> int | None:
    """The update whose weights the model has been given back at the end of training, None if those of the last."""
    ended = any("train_runtime" in entry for entry in trainer.state.log_history)
    return trainer.state.best_global_step if ended and trainer.args.load_best_model_at_end else None


def _optimizer(trainer: Any) -> str | None:
    if trainer.optimizer is None:
        return None
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)  # accelerate wraps it
    groups, name = optimizer.param_groups, type(optimizer).__name__
    decay = max(group.get("weight_decay", 0.0) for group in groups)
    parts = ["Adam" if name == "AdamW" and decay == 0 else name]
    if "betas" in groups[0]:
        parts.append(f"β = {tuple(groups[0]['betas'])}")
    if "eps" in groups[0]:
        parts.append(f"ε = {groups[0]['eps']}")
    args = trainer.args
    if args.lr_schedule == "noam":
        kind = "the paper's schedule"
        height = f"peak rate {args.peak_lr}" if args.peak_lr else f"factor {args.noam_factor or 1.0}"
    else:
        kind = f"{getattr(args.lr_scheduler_type, 'value', args.lr_scheduler_type)} schedule"
        height = f"learning rate {args.learning_rate}"
    schedule = f"{kind}, {args.get_warmup_steps(trainer.state.max_steps):,} warm-up updates, {height}"
    return ", ".join([*parts, f"weight decay {decay}"]) + f"; {schedule}"


def _time(trainer: Any) -> str | None:
    seconds = [entry["train_runtime"] for entry in trainer.state.log_history if "train_runtime" in entry]
    # The library's clock begins anew when a run is resumed.
    return f"{seconds[-1] / 60:.1f} minutes from the run's last start or resume" if seconds else None


def _software() -> str:
    import torch
    import transformers

    return f"transformers {transformers.__version__}, torch {torch.__version__}, Python {platform.python_version()}"


def _first_source(trainer: Any) -> str | None:
    """The first sentence of the evaluation or training data as text, None where it cannot be had."""
    dataset = trainer.eval_dataset if trainer.eval_dataset is not None else trainer.train_dataset
    if isinstance(dataset, Mapping):
        dataset = next(iter(dataset.values()), None)
    # A stream has no first row that could be had without reading from it; some have `__getitem__` and no length.
    if trainer.processing_class is None or not hasattr(type(dataset), "__len__") or not len(dataset):
        return None
    row = dataset[0]
    if "input_ids" not in row:
        return None
    return str(trainer.processing_class.decode(row["input_ids"], skip_special_tokens=True)) or None


def _evaluations(trainer: Any) -> dict[str, dict[str, Any]]:
    """What the log says of the weights that the model has now, by name of the evaluation set."""
    sets = trainer.eval_dataset
    names = {f"eval_{name}_": name for name in sets} if isinstance(sets, Mapping) else {"eval_": "validation"}
    log, best, last = trainer.state.log_history, _best_step(trainer), trainer.state.global_step
    end = max((index for index, entry in enumerate(log) if "train_runtime" in entry), default=len(log))
    found: dict[str, dict[str, Any]] = {}
    for prefix, name in names.items():
        logged = [(index, entry) for index, entry in enumerate(log) if f"{prefix}loss" in entry]
        # After training the model holds the last weights, or the best: what was measured then counts first.
        now = [entry for index, entry in logged if index > end]
        now = now or [entry for _, entry in logged if entry["step"] == (best or last)]
        if not now and not logged:
            continue
        entry = now[-1] if now else logged[-1][1]
        shown = name if now else f"{name}, update {entry['step']:,}"
        found[shown] = {key: entry[prefix + key] for key in SCORE_COLUMNS if prefix + key in entry}
        dataset = sets[name] if isinstance(sets, Mapping) else sets
        if hasattr(dataset, "__len__"):
            found[shown]["num_sentences"] = len(dataset)
    return found


class ModelCardMixin:
    """A `create_model_card` for a Trainer that writes this package's card; `push_to_hub` calls it."""

    accelerator: Any
    args: Any
    hub_model_id: str | None
    is_world_process_zero: Any
    model: Any

    def create_model_card(
        self,
        language: str | Sequence[str] | None = None,
        license: str | None = None,
        tags: str | Sequence[str] | None = None,
        model_name: str | None = None,
        finetuned_from: str | None = None,
        tasks: str | Sequence[str] | None = None,
        dataset_tags: str | Sequence[str] | None = None,
        dataset: str | Sequence[str] | None = None,
        dataset_args: str | Sequence[str] | None = None,
    ) -> None:
        """Write the card of the run as README.md into `args.output_dir`; one edited by hand is kept.

        For a model of another kind than this package's, or one wrapped by PEFT, the library's card is written.

        Args:
            language: Language codes, source first.
            license: Licence of the weights.
            tags: Further tags.
            model_name: The heading; the folder's name by default.
            finetuned_from: Hub id of the model that training started from; by default known if it was loaded by it.
            tasks: What the model does, one of `TASKS`; "translation" by default.
            dataset_tags: Hub ids of the data sets.
            dataset: What the training data is, in words; the Hub ids by default.
            dataset_args: Which part or version of it.
        """
        if not self.is_world_process_zero():
            return
        model = self.accelerator.unwrap_model(self.model)
        if getattr(model.config, "model_type", None) != MODEL_TYPE or not hasattr(model, "name_or_path"):
            super().create_model_card(  # type: ignore[misc]  # the Trainer beside this class
                language, license, tags, model_name, finetuned_from, tasks, dataset_tags, dataset, dataset_args
            )
            return
        known: dict[str, Any] = {
            "languages": _listed(language),
            "license": license,
            "tags": _listed(tags),
            "base_model": finetuned_from,
            "task": next(iter(_listed(tasks)), None),
            "datasets": _listed(dataset_tags),
        }
        data = ", ".join([*(_listed(dataset) or _listed(dataset_tags)), *_listed(dataset_args)])
        facts = facts_of_run(self, data=data, **{name: value for name, value in known.items() if value})
        folder = self.args.output_dir
        write_model_card(folder, facts, model_name=model_name, model_path=self.hub_model_id or folder)


def _listed(value: str | Sequence[str] | None) -> list[str]:
    return [value] if isinstance(value, str) else list(value or ())


# The card


def write_model_card(
    folder: str | Path, facts: RunFacts, *, model_name: str | None = None, model_path: str | None = None
) -> Path:
    """Fill the template `model_card.md`, write it as README.md into `folder`, and the facts as model_card.json.

    A README.md that is not as this function wrote it last is kept, with a warning.

    Args:
        folder: Checkpoint folder.
        facts: What to say.
        model_name: The heading; the folder's name by default.
        model_path: What the usage block loads; the folder itself by default.

    Returns:
        The path of the card.
    """
    folder = Path(folder)
    path, record = folder / CARD, read_record(folder)
    if path.exists() and _digest(path.read_text(encoding="utf-8")) != record.get("card_sha256"):
        logger.warning(
            "%s was not written by this package, or has been edited since, and is kept; remove it to have it written "
            "from %s.",
            path,
            FACTS,
        )
    else:
        record["model_name"] = model_name or folder.resolve().name
        record["model_path"] = model_path or str(folder)
        text = render_card(facts, model_name=record["model_name"], model_path=record["model_path"])
        path.write_text(text, encoding="utf-8")
        record["card_sha256"] = _digest(text)
    record["facts"] = asdict(facts)
    (folder / FACTS).write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return path


def render_card(facts: RunFacts, *, model_name: str, model_path: str) -> str:
    """Return the template `model_card.md` filled with the facts."""
    from vanilla_transformer import __version__

    keys = [key for key in SCORE_COLUMNS if any(key in scores for scores in facts.scores.values())]
    signatures = {
        f"`{scores[key]}`": None
        for scores in facts.scores.values()
        for key in ("bleu_signature", "chrf_signature")
        if key in scores
    }
    languages = " to ".join(facts.languages) if len(facts.languages) == 2 else "text"
    card = ModelCard.from_template(
        card_metadata(model_name, facts),
        template_path=str(TEMPLATE),
        model_name=model_name,
        model_path=json.dumps(model_path, ensure_ascii=False),
        package_version=__version__,
        task=facts.task,
        task_sentence=TASKS[facts.task].format(what=languages),
        parameters=f"{facts.parameters:,}",
        architecture=facts.architecture,
        decoding=facts.decoding,
        example_source=repr(facts.example_source or "Put a sentence here."),
        training=facts.training,
        columns=[SCORE_COLUMNS[key] for key in keys],
        scores={name: [_shown(scores.get(key, "")) for key in keys] for name, scores in facts.scores.items()},
        signatures=", ".join(signatures),
        synthetic=facts.synthetic,
    )
    return f"{str(card).rstrip()}\n"


def card_metadata(name: str, facts: RunFacts) -> ModelCardData:
    """The metadata block of the card of a model of this name."""
    data = ", ".join(facts.datasets) or facts.training.get("data")
    results = [
        EvalResult(
            task_type=facts.task,
            dataset_type=facts.datasets[0] if facts.datasets else "text",
            dataset_name=f"{set_name} of {data}" if data else set_name,
            metric_type=metric,
            metric_name=SCORE_COLUMNS[metric],
            metric_value=round(scores[metric], 2),
        )
        for set_name, scores in facts.scores.items()
        for metric in ("bleu", "chrf")
        if metric in scores
    ]
    # The Hub knows languages by their ISO 639 codes alone.
    codes = [re.fullmatch(r"([a-z]{2,3})(?:[-_].*)?", language) for language in facts.languages]
    return ModelCardData(
        language=list(dict.fromkeys(code[1] for code in codes if code)) or None,
        license=facts.license,
        library_name="transformers",
        pipeline_tag=facts.task,
        tags=[facts.task, *TAGS, *facts.tags],
        datasets=list(facts.datasets) or None,
        base_model=facts.base_model,
        metrics=sorted({result.metric_type for result in results}) or None,
        eval_results=results or None,
        model_name=name if results else None,
    )


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.2f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def read_record(folder: Path) -> dict[str, Any]:
    """What model_card.json holds: the facts, and how the card was written; empty without the file."""
    path = folder / FACTS
    if not path.exists():
        return {}
    try:
        record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        record["facts"] = asdict(RunFacts(**record["facts"]))
    except (ValueError, TypeError, KeyError, AttributeError) as problem:
        raise ValueError(f"{path} does not hold the facts of a model card ({problem}): remove it.") from None
    return record


def split_card(text: str) -> tuple[dict[str, Any], str, str]:
    """The metadata of a card, the block in which they stand, and what follows it.

    Raises:
        ValueError: If the block can't be read.
    """
    found = re.match(r"\s*---[ \t]*\n(.*?)^---[ \t]*(?:\n|\Z)", text, flags=re.DOTALL | re.MULTILINE)
    if found is None:
        return {}, "", text
    try:
        metadata = yaml.safe_load(found[1]) or {}
    except yaml.YAMLError as problem:
        raise ValueError(f"{CARD}: the metadata block is not YAML: {' '.join(str(problem).split())}") from None
    if not isinstance(metadata, dict):
        raise ValueError(f"{CARD}: the metadata block must hold `key: value` lines, not a {type(metadata).__name__}.")
    return metadata, found[0], text[found.end() :]


def check_metadata(metadata: Mapping[str, Any]) -> list[str]:
    """Check the metadata of a card without a network, by the rules of the Hub.

    Args:
        metadata: The block at the head of README.md.

    Returns:
        What the Hub accepts but a reader will miss, a sentence each.

    Raises:
        ValueError: What the Hub would refuse, or could not read.
    """
    for name in ("license_name", "license_link", "library_name", "pipeline_tag"):
        if not isinstance(metadata.get(name, ""), str):
            raise ValueError(f"{CARD}: {name} must be text, and is {metadata[name]!r}.")
    texts = {
        name: _texts(metadata, name) for name in ("language", "license", "tags", "datasets", "metrics", "base_model")
    }
    for code in texts["language"]:
        if not re.fullmatch(r"[a-z]{2,3}|code|multilingual", code):
            raise ValueError(f"{CARD}: language {code!r} is no ISO 639 code of two or three letters, such as en.")
    for name in ("datasets", "base_model"):
        for repo_id in texts[name]:
            check_repo_id(f"{CARD}: {name}", repo_id)
    try:
        ModelCardData(**metadata)
    except (ValueError, TypeError, AttributeError) as problem:
        raise ValueError(f"{CARD}: {' '.join(str(problem).split())}") from None
    warnings = [f"{CARD} names no language" if not texts["language"] else ""]
    if not texts["license"]:
        warnings.append(f"{CARD} names no license, and without one nobody may use the model: give --license")
    warnings += [check_license(name) for name in texts["license"]]
    if "other" in texts["license"] and not metadata.get("license_name"):
        warnings.append(f"license: other goes with a license_name in the metadata of {CARD} and a file LICENSE")
    return [warning for warning in warnings if warning]


def check_repo_id(what: str, repo_id: str) -> None:
    """Raise a ValueError that begins with `what` if no repository on the Hub can have this name."""
    try:
        validate_repo_id(repo_id)
    except ValueError as problem:
        raise ValueError(f"{what} {repo_id!r} is no name of a repository on the Hub: {problem}") from None


def _texts(metadata: Mapping[str, Any], name: str) -> list[str]:
    """A field that may be one text or a list of them, as a list."""
    value = metadata.get(name)
    values = value if isinstance(value, list) else [] if value is None else [value]
    for item in values:
        if not isinstance(item, str):  # YAML reads `no`, Norwegian, as False
            raise ValueError(f"{CARD}: {name} must be text, and is {item!r}: put it in quotes.")
    return values


def check_license(name: str) -> str:
    """Return what to say of a licence that the Hub may not know, "" of others.

    Raises:
        ValueError: If no identifier looks like that.
    """
    near = difflib.get_close_matches(name.lower().replace(" ", "-"), sorted(LICENSES), n=1, cutoff=0.6)
    hint = f"; did you mean {near[0]}?" if near else ""
    if not re.fullmatch(r"[a-z0-9][a-z0-9.+-]*", name):
        raise ValueError(f"license {name!r} is no identifier of a licence, such as apache-2.0{hint}")
    return "" if name in LICENSES else f"the Hub may not know the license {name}{hint}"
