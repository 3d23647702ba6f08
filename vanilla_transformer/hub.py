"""The model card: a checkpoint's README.md, filled from the facts of its run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

TEMPLATE = Path(__file__).with_name("model_card.md")
TAGS = ("translation", "vanilla-transformer", "attention-is-all-you-need")


@dataclass
class RunFacts:
    """What a run knows of itself; each goes into the card as it stands.

    Args:
        task_sentence: What the model does, one sentence.
        parameters: Number of trainable parameters.
        architecture: Sizes in words.
        decoding: How `generate()` decodes by default.
        training: Rows of the training table: data, pairs, tokenizer, updates, batches, optimizer, regularisation,
            device, time, software.
        example_source: A sentence for the usage block.
        scores: Results of `TranslationScore` by name of the set.
        languages: ISO codes, source first.
        license: Identifier of the licence that the weights are under, None if nobody said.
        dataset: Hub id of the data set, None for local files.
        synthetic: Whether the data is generated.
    """

    task_sentence: str
    parameters: int
    architecture: str
    decoding: str
    training: Mapping[str, str]
    example_source: str
    scores: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    languages: Sequence[str] = ()
    license: str | None = None
    dataset: str | None = None
    synthetic: bool = False


def write_model_card(folder: str | Path, facts: RunFacts, *, model_path: str | None = None) -> Path:
    """Fill the template `model_card.md` and write it as README.md into `folder`.

    Args:
        folder: Checkpoint folder.
        facts: What to say.
        model_path: What the usage block loads; the folder itself by default.

    Returns:
        The path of the card.
    """
    from vanilla_transformer import __version__

    folder = Path(folder)
    rows = [
        {"name": name, **{key: _shown(value) for key, value in scores.items()}}
        for name, scores in facts.scores.items()
    ]
    first = next(iter(facts.scores.values()), {})
    card = ModelCard.from_template(
        _metadata(folder.resolve().name, facts),
        template_path=str(TEMPLATE),
        model_name=folder.resolve().name,
        model_path=model_path or str(folder),
        package_version=__version__,
        task_sentence=facts.task_sentence,
        parameters=f"{facts.parameters:,}",
        architecture=facts.architecture,
        decoding=facts.decoding,
        example_source=repr(facts.example_source),
        scores=rows,
        bleu_signature=first.get("bleu_signature", ""),
        chrf_signature=first.get("chrf_signature", ""),
        synthetic=facts.synthetic,
        **facts.training,
    )
    path = folder / "README.md"
    card.save(path)
    return path


def _metadata(name: str, facts: RunFacts) -> ModelCardData:
    results = [
        EvalResult(
            task_type="translation",
            dataset_type=facts.dataset or "text",
            dataset_name=f"{set_name} of {facts.dataset or facts.training['data']}",
            metric_type=metric,
            metric_name=shown,
            metric_value=round(scores[metric], 2),
        )
        for set_name, scores in facts.scores.items()
        for metric, shown in (("bleu", "BLEU"), ("chrf", "chrF"))
    ]
    return ModelCardData(
        language=list(facts.languages) or None,
        license=facts.license,
        library_name="transformers",
        pipeline_tag="translation",
        tags=list(TAGS),
        datasets=[facts.dataset] if facts.dataset else None,
        metrics=["bleu", "chrf"] if results else None,
        eval_results=results or None,
        model_name=name if results else None,
    )


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.2f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
