"""A teacher's text: line for line what it says of each sentence alone, whole or not there, the same after a kill."""

import gzip
import sys
import warnings
from types import SimpleNamespace

import pytest
import sacrebleu
import torch
from script_modules import SCRIPTS, load
from tiny_models import randomise
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration, distillation
from vanilla_transformer.distillation import distil_targets, nearest
from vanilla_transformer.phrase_grammar import generate_splits
from vanilla_transformer.tokenizer_training import save_tokenizer, train_tokenizer

PAIRS = generate_splits(train_size=1200, valid_size=20, test_size=20).train[:60]
SOURCES = [source for source, _ in PAIRS[:11]]
SOURCES[4] = ""  # an empty line stays one
SHORT = {"max_new_tokens": 6, "num_beams": 3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A teacher of random weights, its sources, and their references."""
    place = tmp_path_factory.mktemp("teacher")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tokenizer = train_tokenizer([text for pair in PAIRS for text in pair], vocab_size=320)
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1}
    config = VanillaTransformerConfig.tiny(vocab_size=len(tokenizer), **sizes)
    randomise(VanillaTransformerForConditionalGeneration(config)).save_pretrained(place / "model")
    save_tokenizer(tokenizer, place / "model")
    (place / "train.en").write_text("".join(f"{line}\n" for line in SOURCES), encoding="utf-8")
    (place / "train.de").write_text("".join(f"{target}\n" for _, target in PAIRS[:11]), encoding="utf-8")
    return place


@pytest.fixture
def teacher(folder):
    return AutoModelForSeq2SeqLM.from_pretrained(folder / "model").eval()


@pytest.fixture
def tokenizer(folder):
    return AutoTokenizer.from_pretrained(folder / "model")


@pytest.fixture
def distil(folder, teacher, tokenizer, tmp_path):
    """Distil with buffers of four lines; what is not given is as in `SHORT`."""

    def call(output="out.de", source=None, **options):
        options = {"buffer_size": 4, **SHORT, **options}
        return distil_targets(teacher, tokenizer, source or folder / "train.en", tmp_path / output, **options)

    return call


def alone(teacher, tokenizer, sentence, n_best=1):
    """What the teacher says of a sentence in a batch of its own."""
    if not sentence:
        return [""] * n_best
    ids = tokenizer(sentence, return_tensors="pt").input_ids
    output = teacher.generate(ids, num_return_sequences=n_best, **SHORT)
    return [" ".join(text.splitlines()) for text in tokenizer.batch_decode(output, skip_special_tokens=True)]


def lines(path):
    text = path.read_text(encoding="utf-8")
    assert text.endswith("\n")
    return text[:-1].split("\n")


def test_each_line_is_what_the_teacher_says_of_it_alone(distil, teacher, tokenizer, folder, tmp_path):
    done = distil()
    expected = [alone(teacher, tokenizer, sentence)[0] for sentence in SOURCES]
    assert len(set(expected)) > 5
    assert lines(done.path) == expected
    assert done == (tmp_path / "out.de", 11, sum(not line.strip() for line in expected))
    assert done.empty >= 1
    assert list(tmp_path.iterdir()) == [done.path]
    (tmp_path / "train.gz").write_bytes(gzip.compress((folder / "train.en").read_bytes()))
    assert lines(distil("again.de", tmp_path / "train.gz").path) == expected


@pytest.mark.parametrize("metric", ["bleu", "chrf"])
def test_with_references_each_line_is_the_nearest_of_the_beam(distil, teacher, tokenizer, tmp_path, metric):
    # The references are what stands first, second or third in the beam, with a word more.
    score = {"bleu": sacrebleu.sentence_bleu, "chrf": sacrebleu.sentence_chrf}[metric]
    beams = [alone(teacher, tokenizer, sentence, n_best=3) for sentence in SOURCES]
    references = [f"{texts[row % 3]} und" for row, texts in enumerate(beams)]
    (tmp_path / "references").write_text("".join(f"{line}\n" for line in references), encoding="utf-8")
    expected = []
    for texts, reference in zip(beams, references, strict=True):
        scores = [score(text, [reference]).score for text in texts]
        expected.append(texts[scores.index(max(scores))])
    assert lines(distil(reference_file=tmp_path / "references", closest_by=metric).path) == expected
    assert expected != [texts[0] for texts in beams]
    (tmp_path / "out.de").unlink()
    two = lines(distil(reference_file=tmp_path / "references", closest_by=metric, n_best=2).path)
    assert all(text in texts[:2] for text, texts in zip(two, beams, strict=True))


def test_the_nearest_is_the_first_of_equals_and_of_words_not_of_order_in_the_beam():
    texts = ["ein Haus", "das alte Haus war grün .", "das alte Haus war rot .", "das alte Haus war rot ."]
    assert nearest(texts, "das alte Haus war rot .") is texts[2]
    assert nearest(texts, "ganz anders") is texts[0]
    assert nearest(texts, None) is texts[0]


def kill_in_chunk(monkeypatch, number, asked):
    """Let the process be stopped while it translates a chunk; collect the chunks that it began."""
    translate = distillation.translate_sentences

    def stopped(model, tokenizer, sentences, **options):
        if not sentences:  # the check of the options
            return translate(model, tokenizer, sentences, **options)
        asked.append(list(sentences))
        if len(asked) == number:
            raise KeyboardInterrupt
        return translate(model, tokenizer, sentences, **options)

    monkeypatch.setattr(distillation, "translate_sentences", stopped)


@pytest.mark.parametrize("cut", [b"", b"half a line", b"a line of the third chunk\nand half"])
def test_a_killed_run_goes_on_and_ends_the_same(distil, tmp_path, monkeypatch, cut):
    whole = distil("whole.de").path.read_bytes()
    asked = []
    with monkeypatch.context() as patch:
        kill_in_chunk(patch, 3, asked)
        with pytest.raises(KeyboardInterrupt):
            distil()
    assert not (tmp_path / "out.de").exists()
    with (tmp_path / "out.de.incomplete").open("ab") as file:
        file.write(cut)  # what reached the disk of the write that was cut off
    asked.clear()
    kill_in_chunk(monkeypatch, 99, asked)
    done = distil()
    assert asked == [SOURCES[8:]]
    assert done.path.read_bytes() == whole
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.de", "whole.de"]


def test_what_another_command_left_is_not_taken_over(distil, folder, teacher, tokenizer, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        kill_in_chunk(patch, 3, [])
        with pytest.raises(KeyboardInterrupt):
            distil()
    kept = (tmp_path / "out.de.incomplete").read_bytes()
    assert kept.count(b"\n") == 8
    (tmp_path / "other.en").write_text("We see the house.\n" * 11, encoding="utf-8")
    reference = {"reference_file": folder / "train.de"}
    for other, named in (
        ({"source": tmp_path / "other.en"}, r"\(source differ"),
        ({"num_beams": 2}, r"\(arguments differ"),
        ({"buffer_size": 2}, r"\(arguments differ"),
        ({"length_penalty": 2.0}, r"\(arguments differ"),
        (reference, "reference, arguments differ"),
    ):
        with pytest.raises(ValueError, match=named):
            distil(**other)
    changed = tmp_path / "changed"
    with torch.no_grad():
        teacher.lm_head.weight[5] += 1
    teacher.save_pretrained(changed)
    save_tokenizer(tokenizer, changed)
    other_teacher = AutoModelForSeq2SeqLM.from_pretrained(changed).eval()
    arguments = {"buffer_size": 4, **SHORT}
    with pytest.raises(ValueError, match=r"\(teacher differ"):
        distil_targets(other_teacher, tokenizer, folder / "train.en", tmp_path / "out.de", **arguments)
    (tmp_path / "out.de.incomplete.json").unlink()
    with pytest.raises(ValueError, match="remove it"):
        distil()
    assert (tmp_path / "out.de.incomplete").read_bytes() == kept


def test_what_cannot_work_is_refused_before_any_translating(distil, folder, tmp_path, monkeypatch):
    kill_in_chunk(monkeypatch, 1, [])  # no call with sentences may come
    (tmp_path / "old.de").write_text("kept")
    (tmp_path / "empty").touch()
    (tmp_path / "latin1").write_bytes(b"\xe4\n" * 11)
    (tmp_path / "three").write_text("a\nb\nc\n")
    before = sorted(tmp_path.iterdir())
    for options, message in (
        ({"output": "old.de"}, "exists already"),
        ({"output": "new.gz"}, r"without \.gz"),
        ({"buffer_size": 0}, "buffer_size=0"),
        ({"closest_by": "ter"}, "closest_by='ter'"),
        ({"n_best": 3}, "n_best=3"),
        ({"n_best": 4, "reference_file": folder / "train.de"}, "n_best=4"),
        ({"n_best": 0, "reference_file": folder / "train.de"}, "n_best=0"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"source": tmp_path / "empty"}, "empty"),
        ({"source": tmp_path / "latin1"}, "invalid UTF-8"),
        ({"reference_file": tmp_path / "three"}, "11 lines and .*three 3"),
        ({"source": tmp_path}, "is a folder"),
    ):
        with pytest.raises(ValueError, match=message):
            distil(**options)
    with pytest.raises(KeyboardInterrupt):  # stopped before its first lines
        distil("folder/new.de")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        distil(reference_file=tmp_path / "nowhere")
    assert sorted(tmp_path.iterdir()) == before
    assert (tmp_path / "old.de").read_text() == "kept"


# ---------------------------------------------------------------------------------------- the script


def call(words, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["distil.py", *map(str, words)])
    monkeypatch.setattr(sys, "path", [*sys.path, str(SCRIPTS)])
    load("distil").main()


def test_the_script_writes_the_text_and_passes_its_options_on(
    folder, teacher, tokenizer, tmp_path, monkeypatch, capsys
):
    words = ["--model", folder / "model", "--source_file", folder / "train.en", "--device", "cpu"]
    words += ["--num_beams", 3, "--max_new_tokens", 6]
    call([*words, "--output", tmp_path / "out.de"], monkeypatch)
    assert lines(tmp_path / "out.de") == [alone(teacher, tokenizer, sentence)[0] for sentence in SOURCES]
    assert f"11 lines in {tmp_path / 'out.de'}, 1 of them empty" in capsys.readouterr().out
    seen = {}

    def instead(model, tokenizer, source, output, **options):
        seen.update(options)
        return SimpleNamespace(path=output, lines=0, empty=0)

    monkeypatch.setattr(distillation, "distil_targets", instead)
    words += ["--length_penalty", 0.5, "--reference_file", folder / "train.de", "--n_best", 2, "--closest_by", "chrf"]
    words += ["--batch_size", 5, "--max_tokens_per_batch", 0, "--buffer_size", 7]
    call([*words, "--output", tmp_path / "other.de"], monkeypatch)
    assert seen == {
        "reference_file": str(folder / "train.de"),
        "n_best": 2,
        "closest_by": "chrf",
        "buffer_size": 7,
        "batch_size": 5,
        "max_tokens_per_batch": None,
        "show_progress": sys.stderr.isatty(),
        "num_beams": 3,
        "max_new_tokens": 6,
        "length_penalty": 0.5,
    }


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--batch_size 0", "--batch_size 0"),
        ("--num_beams 0", "--num_beams 0"),
        ("--n_best 2", "--reference_file"),
        ("--reference_file {folder}/train.de --n_best 5 --num_beams 3", "n_best=5"),
        ("--source_file {folder}/nowhere", "no such file"),
        ("--model {folder}", "no config.json"),
        ("--dtype float8", "--dtype float8"),
    ],
)
def test_the_script_refuses(folder, words, message, tmp_path, monkeypatch, capsys):
    options = ["--model", folder / "model", "--source_file", folder / "train.en", "--output", tmp_path / "out.de"]
    with pytest.raises(SystemExit) as stopped:
        call([*options, *words.format(folder=folder).split()], monkeypatch)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
