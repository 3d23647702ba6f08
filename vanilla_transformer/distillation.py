"""Sequence-level knowledge distillation (Kim and Rush 2016, arXiv 1606.07947).

A teacher translates the training sources by beam search, and a smaller student trains on its translations in place of
the references. What is written here is the student's target text; training on it is training like any other.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import sacrebleu
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .corpus_formats import check_file, is_named_gzip, iterate_lines
from .translation import translate_sentences

METRICS = {"bleu": lambda: sacrebleu.BLEU(effective_order=True), "chrf": sacrebleu.CHRF}


class DistilledText(NamedTuple):
    """What `distil_targets` wrote: the file, its lines, and how many of them are empty."""

    path: Path
    lines: int
    empty: int


def distil_targets(
    teacher: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    source_file: str | Path,
    output: str | Path,
    *,
    reference_file: str | Path | None = None,
    n_best: int | None = None,
    closest_by: str = "bleu",
    buffer_size: int = 2048,
    batch_size: int = 64,
    max_tokens_per_batch: int | None = 4096,
    show_progress: bool = False,
    **generate_kwargs: Any,
) -> DistilledText:
    """Write the teacher's translation of each line of a file as the same line of another file.

    The text grows in a file beside `output`, named `<output>.incomplete`, and gets its own name when it is whole. Of
    a process that was killed the next call with the same arguments takes over what is there, and ends with the same
    text, byte for byte.

    With references each line is, of the teacher's best translations, the one nearest to the reference: the paper's
    sequence-level interpolation, which keeps a student nearer to the real text.

    Args:
        teacher: Any sequence-to-sequence model, on the device where it shall run.
        tokenizer: Its tokenizer.
        source_file: A sentence a line, gzip-compressed or not. An empty line gives an empty line.
        output: The file to write; it must not exist.
        reference_file: The lines' real translations.
        n_best: With references: among how many translations to choose; by default as many as beams.
        closest_by: With references: what is nearest, by sentence "bleu" or "chrf" of sacreBLEU. The teacher's better
            one of equals.
        buffer_size: Lines that are sorted by length and translated together.
        batch_size: Most sentences a batch.
        max_tokens_per_batch: Most source tokens a batch, padding included; None is no such limit.
        show_progress: Show a progress bar of lines.
        **generate_kwargs: For `teacher.generate`, such as `num_beams` and `length_penalty`.

    Returns:
        Where the text is, and how long.

    Raises:
        FileNotFoundError: There is no such source or reference file.
        ValueError: `output` exists; source and references differ in length; an argument is out of its range; or an
            unfinished text lies there that other arguments, another teacher or another source have made.
    """
    output = Path(output)
    if reference_file is None and n_best not in (None, 1):
        raise ValueError(f"n_best={n_best} chooses by a reference_file: give one, or leave n_best out.")
    if reference_file is not None and n_best is None:
        n_best = generate_kwargs.get("num_beams") or teacher.generation_config.num_beams
    _check_arguments(output, buffer_size, closest_by)
    count = _count_lines(source_file, reference_file)
    options: dict[str, Any] = {
        "n_best": 1 if n_best is None else n_best,
        "batch_size": batch_size,
        "max_tokens_per_batch": max_tokens_per_batch,
    }
    options |= generate_kwargs
    translate_sentences(teacher, tokenizer, [], **options)  # checks them
    made_by = {
        "teacher": _fingerprint_of_model(teacher),
        "precision": f"{teacher.dtype}, {teacher.get_output_embeddings()}",  # the second shows int8
        "generation settings": json.loads(teacher.generation_config.to_json_string()),
        "source": _fingerprint(Path(source_file)),
        "reference": None if reference_file is None else [_fingerprint(Path(reference_file)), closest_by],
        "arguments": {name: repr(value) for name, value in sorted({**options, "buffer_size": buffer_size}.items())},
    }
    partial = _Partial(output, buffer_size, made_by)
    rest = itertools.islice(_pairs(source_file, reference_file), done := partial.begin(), None)
    with tqdm(total=count, initial=done, unit=" lines", desc="Distilling", disable=not show_progress) as bar:
        while chunk := list(itertools.islice(rest, buffer_size)):
            found = translate_sentences(teacher, tokenizer, [source for source, _ in chunk], **options)
            texts = [[" ".join(text.splitlines()) for text, _ in hypotheses] for hypotheses in found]
            references = [reference for _, reference in chunk]
            partial.add([nearest(t, r, closest_by) for t, r in zip(texts, references, strict=True)])
            bar.update(len(chunk))
    partial.finish()
    return DistilledText(output, count, sum(not line.strip() for line in iterate_lines(output)))


def nearest(texts: Sequence[str], reference: str | None, closest_by: str = "bleu") -> str:
    """Return the one of `texts` with the highest sentence score, the first of equals; without a reference the first.

    Args:
        texts: Translations of one sentence, best first.
        reference: Its real translation.
        closest_by: "bleu", with as many n-gram orders as the sentence has, or "chrf".
    """
    if reference is None or len(texts) == 1:
        return texts[0]
    metric = METRICS[closest_by]()
    return max(texts, key=lambda text: metric.sentence_score(text, [reference]).score)


class _Partial:
    """The unfinished text beside its place, and what made it."""

    def __init__(self, output: Path, buffer_size: int, made_by: dict[str, Any]) -> None:
        self.output, self.buffer_size, self.made_by = output, buffer_size, made_by
        self.path = output.with_name(f"{output.name}.incomplete")
        self.record = output.with_name(f"{output.name}.incomplete.json")

    def begin(self) -> int:
        """Return how many lines of an earlier call are kept: whole buffers, so that batches are what they were."""
        if not self.path.exists():
            return 0
        try:
            before = json.loads(self.record.read_text(encoding="utf-8"))
            other = [name for name in self.made_by if before.get(name) != self.made_by[name]]
        except (OSError, ValueError, AttributeError):
            other = ["record"]
        if other:
            raise ValueError(
                f"{self.path} is an unfinished text that was made otherwise ({', '.join(other)} differ): give the "
                f"arguments it was made with, or remove it and {self.record.name} to start anew."
            )
        with self.path.open("r+b") as file:
            ends = list(itertools.accumulate(len(line) for line in file if line.endswith(b"\n")))
            done = len(ends) // self.buffer_size * self.buffer_size
            file.truncate(ends[done - 1] if done else 0)
        return done

    def add(self, lines: Sequence[str]) -> None:
        """Append lines, and see that they are on the disk; nothing is written before there are any."""
        if not self.path.exists():
            self.output.parent.mkdir(parents=True, exist_ok=True)
            self.record.write_text(json.dumps(self.made_by, indent=2) + "\n", encoding="utf-8")
        with self.path.open("ab") as file:
            file.write("".join(f"{line}\n" for line in lines).encode("utf-8"))
            file.flush()
            os.fsync(file.fileno())

    def finish(self) -> None:
        """Give the text its name."""
        self.path.rename(self.output)
        self.record.unlink()


def _check_arguments(output: Path, buffer_size: int, closest_by: str) -> None:
    if output.exists():
        raise ValueError(f"{output} exists already: remove it or choose another name.")
    if is_named_gzip(output):
        raise ValueError(f"{output} is to be plain text: choose a name without .gz.")
    if buffer_size < 1:
        raise ValueError(f"buffer_size={buffer_size} must be at least 1.")
    if closest_by not in METRICS:
        raise ValueError(f"closest_by={closest_by!r} is unknown: choose one of {', '.join(METRICS)}.")


def _pairs(source_file: str | Path, reference_file: str | Path | None) -> Iterator[tuple[str, str | None]]:
    references: Iterator[str | None] = iterate_lines(reference_file) if reference_file else itertools.repeat(None)
    return zip(iterate_lines(source_file), references, strict=False)


def _count_lines(source_file: str | Path, reference_file: str | Path | None) -> int:
    """Read both files once: what is wrong with them shows before any translating."""
    files = [Path(source_file), *([Path(reference_file)] if reference_file else [])]
    for file in files:
        check_file(file)
    counts = [sum(1 for _ in iterate_lines(file)) for file in files]
    if counts[0] == 0:
        raise ValueError(f"{source_file} is empty: there is nothing to translate.")
    if len(set(counts)) > 1:
        raise ValueError(
            f"{source_file} has {counts[0]:,} lines and {reference_file} {counts[1]:,}: line n must translate line n."
        )
    return counts[0]


def _fingerprint_of_model(teacher: PreTrainedModel) -> list[str]:
    """Return checksums of weights and tokenizer, for a model of the Hub its name and commit."""
    name = str(teacher.name_or_path)
    folder = Path(name)
    kinds = ("*.safetensors", "*.spm", "tokenizer.json")
    files = sorted(file for kind in kinds for file in folder.glob(kind)) if name and folder.is_dir() else []
    commit = getattr(teacher.config, "_commit_hash", None)
    return [f"{file.name} {_fingerprint(file)}" for file in files] or [f"{name} {commit}"]


def _fingerprint(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
