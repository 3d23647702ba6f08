"""Datasets of parallel text, and text turned into ids: every pair accounted for, nothing silent.

What is expected comes from the strings the tests write themselves, through `datasets` (`save_to_disk`), and from the
tokenizers' own calls on one text at a time.
"""

import json

import datasets
import pytest
from parallel_pairs import PAIRS, pairs_of
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import DataCollatorForSeq2Seq, MarianTokenizer, PreTrainedTokenizerFast

from vanilla_transformer import corpus
from vanilla_transformer.corpus import encode_pairs, load_parallel_dataset
from vanilla_transformer.tokenizer_training import bpe_dropout, train_tokenizer

# Datasets -------------------------------------------------------------------------


def make_folder(tmp_path, kind, splits):
    """A dataset folder that `datasets` itself wrote or understands."""
    folder = tmp_path / kind
    if kind == "files":
        folder.mkdir()
        for split, rows in splits.items():
            (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        datasets.DatasetDict({name: datasets.Dataset.from_list(rows) for name, rows in splits.items()}).save_to_disk(
            folder
        )
    return folder


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


ROWS = {
    "columns": [{"n": i, "en": a, "de": b} for i, (a, b) in enumerate(PAIRS)],
    "translation": [{"n": i, "translation": {"de": b, "en": a}} for i, (a, b) in enumerate(PAIRS)],
    "swapped": [{"target": a, "source": b} for a, b in PAIRS],
}


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("kind", ["files", "saved"])
@pytest.mark.parametrize("layout", ROWS)
def test_dataset_folders(tmp_path, kind, layout, streaming):
    folder = make_folder(tmp_path, kind, {"train": ROWS[layout] * 300, "test": ROWS[layout][:1]})
    arguments = {"source_lang": "en", "target_lang": "de", "streaming": streaming}
    if layout == "swapped":
        arguments |= {"source_column": "target", "target_column": "source"}
    dataset, report = load_parallel_dataset(folder, split="train", **arguments)
    assert isinstance(dataset, datasets.IterableDataset if streaming else datasets.Dataset)
    assert dataset.column_names == ["source", "target"]
    assert dataset.features["target"] == datasets.Value("string")
    assert pairs_of(dataset) == PAIRS * 300
    assert str(report) == f"1,200 pairs read from {folder}, split train: 1,200 kept, 0 dropped"
    assert len(pairs_of(load_parallel_dataset(folder, split="test", **arguments)[0])) == 1


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("kind", ["files", "saved"])
@pytest.mark.parametrize("nested", [False, True])
def test_bad_pairs_in_datasets(tmp_path, kind, nested, streaming):
    pairs = [("a", "b"), ("", "b"), (None, "b"), ("a", "\0"), ("c", "d")]
    rows = [{"en": a, "de": b} for a, b in pairs]
    folder = make_folder(tmp_path, kind, {"train": [{"translation": row} for row in rows] if nested else rows})
    arguments = {"split": "train", "source_lang": "en", "target_lang": "de", "streaming": streaming}
    with pytest.raises(ValueError, match=r"(?s)3 of 5 pairs read from .*--on_bad_pair drop") as error:
        list(load_parallel_dataset(folder, **arguments)[0])
    assert f"{folder} train row 3: not a string (the source is None)" in str(error.value)
    dataset, report = load_parallel_dataset(folder, **arguments, on_bad_pair="drop")
    assert pairs_of(dataset) == [("a", "b"), ("c", "d")]
    assert report.dropped == {"empty": 1, "not a string": 1, "NUL character": 1}
    assert (report.read, report.kept) == (5, 2)


@pytest.mark.parametrize("streaming", [False, True])
def test_places_in_datasets_count_from_the_start(tmp_path, streaming):
    folder = make_folder(tmp_path, "saved", {"train": [*ROWS["columns"] * 600, {"n": 0, "en": "a", "de": ""}]})
    arguments = {"source_lang": "en", "target_lang": "de", "streaming": streaming}
    with pytest.raises(ValueError, match=r"train row 2401: empty \(no text in the target\)"):
        list(load_parallel_dataset(folder, split="train", **arguments)[0])


def test_dataset_slices_and_single_datasets(tmp_path):
    folder = make_folder(tmp_path, "files", {"train": ROWS["columns"]})
    arguments = {"source_lang": "en", "target_lang": "de"}
    assert pairs_of(load_parallel_dataset(folder, split="train[1:3]", **arguments)[0]) == PAIRS[1:3]
    single = tmp_path / "single"
    datasets.Dataset.from_list(ROWS["columns"], split="validation").save_to_disk(single)
    assert pairs_of(load_parallel_dataset(single, split="validation", **arguments)[0]) == PAIRS
    with pytest.raises(ValueError, match="no split 'train'; it has 'validation'"):
        load_parallel_dataset(single, split="train", **arguments)


@pytest.mark.parametrize("streaming", [False, True])
def test_dataset_errors_come_before_any_work(tmp_path, streaming):
    saved = make_folder(tmp_path, "saved", {"train": ROWS["columns"]})
    arguments = {"source_lang": "en", "target_lang": "de", "streaming": streaming}
    with pytest.raises(ValueError, match=r"has the columns 'n', 'en', 'de'; looked .*--source_column"):
        load_parallel_dataset(saved, split="train", source_lang="en", target_lang="fr", streaming=streaming)
    with pytest.raises(ValueError, match="no split 'dev'; it has 'train'"):
        load_parallel_dataset(saved, split="dev", **arguments)
    with pytest.raises(ValueError, match="no configurations, got 'de-en'"):
        load_parallel_dataset(saved, "de-en", split="train", **arguments)
    with pytest.raises(ValueError, match=r"is a file.*load_parallel_files"):
        load_parallel_dataset(saved / "dataset_dict.json", split="train", **arguments)
    with pytest.raises(ValueError, match="on_bad_pair"):
        load_parallel_dataset(saved, split="train", on_bad_pair="skip", **arguments)
    datasets.Dataset.from_dict({"en": [], "de": []}, split="train").save_to_disk(tmp_path / "empty")
    with pytest.raises(ValueError, match="is empty"):
        load_parallel_dataset(tmp_path / "empty", split="train", **arguments)


@pytest.mark.parametrize("streaming", [False, True])
def test_a_split_without_rows_is_an_error(tmp_path, streaming):
    (tmp_path / "train.csv").write_text("en,de\n")
    with pytest.raises(ValueError, match=r"no pairs read from .*, split train: it is empty|corresponds to no data"):
        load_parallel_dataset(tmp_path, split="train", source_lang="en", target_lang="de", streaming=streaming)


def test_a_damaged_file_in_a_dataset_folder_is_a_clear_error(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"en": "a", "de": "b"}\n{"en": broken')
    with pytest.raises(ValueError, match=f"{tmp_path} can't be loaded: .*JSON"):
        load_parallel_dataset(tmp_path, split="train", source_lang="en", target_lang="de")


# Encoding -------------------------------------------------------------------------

TEXTS = [("the dog sees the house", "der Hund sieht das Haus"), ("the cat", "die Katze"), ("a dog", "ein Hund")] * 4


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([text for pair in TEXTS for text in pair], vocab_size=280)


def as_dataset(pairs, streaming=False):
    dataset = datasets.Dataset.from_list([{"source": a, "target": b} for a, b in pairs])
    return dataset.to_iterable_dataset() if streaming else dataset


@pytest.mark.parametrize("num_proc", [None, 2])
def test_encoding_gives_what_the_tokenizer_gives(tokenizer, num_proc):
    encoded, report = encode_pairs(as_dataset(TEXTS), tokenizer, num_proc=num_proc)
    assert encoded.column_names == ["input_ids", "labels"]
    assert encoded["input_ids"][:] == [tokenizer.encode(a) for a, _ in TEXTS]
    assert encoded["labels"][:] == [tokenizer.encode(b) for _, b in TEXTS]
    assert all(row[-1] == tokenizer.eos_token_id for row in encoded["labels"][:])
    assert str(report) == "12 pairs encoded: 12 kept, 0 dropped"


@pytest.mark.parametrize("streaming", [False, True])
def test_lengths_count_the_end_token_exactly(tokenizer, streaming):
    source_length, target_length = (max(len(tokenizer.encode(pair[side])) for pair in TEXTS) for side in (0, 1))

    def encode(max_source_length, max_target_length, too_long):
        encoded, report = encode_pairs(
            as_dataset(TEXTS, streaming),
            tokenizer,
            max_source_length=max_source_length,
            max_target_length=max_target_length,
            too_long=too_long,
        )
        return list(encoded), report

    rows, report = encode(source_length, target_length, "error")
    assert len(rows) == report.kept == 12
    rows, report = encode(source_length - 1, None, "drop")
    assert len(rows) == 8
    assert str(report) == "12 pairs encoded: 8 kept, 4 dropped (4 source too long)"
    rows, report = encode(None, target_length - 1, "drop")
    assert report.dropped == {"target too long": 4}
    rows, report = encode(source_length - 1, target_length - 1, "drop")
    assert report.dropped == {"source too long": 4}, "a pair counts once"
    rows, report = encode(source_length - 1, target_length - 2, "truncate")
    assert str(report) == "12 pairs encoded: 12 kept, of which truncated: 4 source, 4 target, 0 dropped"
    assert rows[0]["input_ids"] == [*tokenizer.encode(TEXTS[0][0])[: source_length - 2], 1]
    assert rows[0]["labels"] == [*tokenizer.encode(TEXTS[0][1])[: target_length - 3], 1]
    assert rows[1]["labels"] == tokenizer.encode(TEXTS[1][1])
    with pytest.raises(ValueError, match=r"4 of 12 pairs are too long \(4 source too long\)") as error:
        encode(source_length - 1, None, "error")
    place = f"pair 1: source of {source_length} tokens where {source_length - 1} are allowed: 'the dog sees the house'"
    assert place in str(error.value)
    assert "--too_long drop or truncate" in str(error.value)


def test_encoded_rows_feed_the_stock_collator(tokenizer):
    encoded, _ = encode_pairs(as_dataset(TEXTS), tokenizer)
    batch = DataCollatorForSeq2Seq(tokenizer)([encoded[i] for i in range(3)])
    lengths = [len(tokenizer.encode(a)) for a, _ in TEXTS[:3]]
    assert batch["attention_mask"].sum(1).tolist() == lengths
    assert batch["labels"][1].tolist().count(-100) == batch["labels"].shape[1] - len(tokenizer.encode(TEXTS[1][1]))


def test_dropping_all_pairs_is_an_error(tokenizer):
    with pytest.raises(ValueError, match=r"nothing is left: 12 pairs encoded: .*12 source too long"):
        encode_pairs(as_dataset(TEXTS), tokenizer, max_source_length=2)
    with pytest.raises(ValueError, match="it is empty"):
        encode_pairs(as_dataset(TEXTS).select([]), tokenizer)


def test_report_is_right_when_the_result_comes_from_the_cache(tokenizer, tmp_path):
    as_dataset(TEXTS).save_to_disk(tmp_path / "saved")
    dataset = datasets.load_from_disk(tmp_path / "saved")
    longest = len(tokenizer.encode(TEXTS[0][0]))
    reports = [encode_pairs(dataset, tokenizer, max_source_length=longest - 1)[1] for _ in range(3)]
    assert [str(report) for report in reports] == ["12 pairs encoded: 8 kept, 4 dropped (4 source too long)"] * 3


def test_bpe_dropout_draws_anew_each_time(tokenizer, tmp_path):
    as_dataset(TEXTS).save_to_disk(tmp_path / "saved")
    dataset = datasets.load_from_disk(tmp_path / "saved")
    with bpe_dropout(tokenizer, 0.5):
        first, second = (encode_pairs(dataset, tokenizer)[0]["input_ids"][:] for _ in range(2))
    assert first != second
    assert [tokenizer.decode(row, skip_special_tokens=True) for row in second] == [a for a, _ in TEXTS]


def test_encode_pairs_refuses_what_it_cannot_honour(tokenizer):
    dataset = as_dataset(TEXTS)
    for limit in (1, 0, -5, True, 2.5):
        with pytest.raises(ValueError, match=f"max_target_length must be at least 2 .* got {limit}"):
            encode_pairs(dataset, tokenizer, max_target_length=limit)
    with pytest.raises(ValueError, match="too_long must be one of 'error', 'drop', 'truncate', got 'cut'"):
        encode_pairs(dataset, tokenizer, too_long="cut")
    with pytest.raises(ValueError, match=r"'source' and 'target', the dataset has \['text'\]"):
        encode_pairs(datasets.Dataset.from_dict({"text": ["a"]}), tokenizer)
    with pytest.raises(ValueError, match="num_proc=2 can't be used with a stream"):
        encode_pairs(as_dataset(TEXTS, streaming=True), tokenizer, num_proc=2)


def test_lone_surrogates_get_our_error(tokenizer):
    with pytest.raises(ValueError, match=r"lone surrogate, U\+D83D"):
        corpus._Encode(tokenizer, corpus._Limits(None, None, "drop"))({"source": ["a"], "target": ["\ud83d"]})


def test_a_tokenizer_without_end_token_on_labels_is_refused():
    backend = Tokenizer(models.WordLevel({"a": 0, "</s>": 1}, unk_token="a"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    forgetful = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    with pytest.raises(ValueError, match="does not put its end token '</s>' on targets"):
        encode_pairs(as_dataset(TEXTS), forgetful)


def test_marian_with_a_target_vocabulary_of_its_own(tmp_path):
    sentencepiece = pytest.importorskip("sentencepiece")
    vocabularies = {}
    for side, name in enumerate(["source", "target"]):
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter([pair[side] for pair in TEXTS * 10]),
            model_prefix=str(tmp_path / name),
            vocab_size=30,
            hard_vocab_limit=False,
            minloglevel=2,
        )
        pieces = [row.split("\t")[0] for row in (tmp_path / f"{name}.vocab").read_text().splitlines()]
        ids = {piece: i for i, piece in enumerate([p for p in pieces if p[0] != "<"], start=3 + 100 * side)}
        vocabularies[name] = tmp_path / f"{name}.json"
        vocabularies[name].write_text(json.dumps({"</s>": 0, "<unk>": 1, "<pad>": 2, **ids}))
    marian = MarianTokenizer(
        source_spm=str(tmp_path / "source.model"),
        target_spm=str(tmp_path / "target.model"),
        vocab=str(vocabularies["source"]),
        target_vocab_file=str(vocabularies["target"]),
        separate_vocabs=True,
        eos_token="</s>",
    )
    encoded, report = encode_pairs(as_dataset(TEXTS), marian, max_target_length=12, too_long="truncate")
    assert encoded["input_ids"][:] == [marian(a)["input_ids"] for a, _ in TEXTS]
    assert encoded["labels"][:] == [
        marian(text_target=b, truncation=True, max_length=12)["input_ids"] for _, b in TEXTS
    ]
    assert max(map(len, encoded["labels"][:])) <= 12
    assert report.truncated["target"] > 0
    assert all(row[-1] == 0 and min(row[:-1]) >= 103 for row in encoded["labels"][:])
    assert all(row[-1] == 0 and max(row) < 103 for row in encoded["input_ids"][:])
