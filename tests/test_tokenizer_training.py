"""The tokenizer: lossless on any Unicode, one end token a row, names of special tokens are text, same after reloading.

What is expected comes from the strings themselves (a round trip must give them back), from the contract of the ids,
and from the worked example of Sennrich et al. 2016 (arXiv 1508.07909, section 3.2).
"""

import copy
import gzip
import json
import pickle
import warnings

import datasets
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from vanilla_transformer.corpus import check_text
from vanilla_transformer.tokenizer_training import (
    add_language_tag,
    bpe_dropout,
    iterate_texts,
    language_token,
    save_tokenizer,
    train_tokenizer,
)

SENTENCES = [
    "the dog sees the small red house",
    "der Hund sieht das kleine rote Haus",
    "a man in a blue shirt is standing on a ladder",
    "ein Mann in einem blauen Hemd steht auf einer Leiter",
    # Were a name of a special token ever merged into one piece, it would collide with the special token.
    "</s> <pad> <s> >>de<< </s><pad><s>>>de<<",
] * 20

NASTY = [
    "",
    " ",
    "  two  spaces  ",
    "\r\n",
    "line\u2028separator\x85next\x0bvt\x0cff",
    "</s>",
    "<pad>",
    "<s>",
    ">>de<<",
    "a</s>b <pad>c>>de<<>>en<<",
    "Straße naïve e\u0301 é ﬁ",
    "👩‍👩‍👧‍👦 🇩🇪 👍🏽 \U0010ffff",
    "\0\x01\x1b\x7f\ufeff\ufffd\u200b\u202e",
    "日本語の文。ไทย العربية",
    "it's  don't , . ! ?  n't",
    "Ġ Ċ ĉ",
]


def train(texts=SENTENCES, vocab_size=400, **kwargs):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return train_tokenizer(texts, vocab_size=vocab_size, **kwargs)


@pytest.fixture(scope="module")
def tokenizer():
    return train(languages=["de", "en", "pt_BR"])


@pytest.fixture(scope="module", params=["save_tokenizer", "save_pretrained", "AutoTokenizer", "saved twice"])
def reloaded(request, tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer("a call that leaves truncation behind", truncation=True, max_length=4)
    if request.param == "save_pretrained":
        tokenizer.save_pretrained(folder)
    else:
        save_tokenizer(tokenizer, folder)
    loader = PreTrainedTokenizerFast if request.param == "save_tokenizer" else AutoTokenizer
    again = loader.from_pretrained(folder)
    if request.param == "saved twice":
        again.save_pretrained(folder)
        again = AutoTokenizer.from_pretrained(folder)
    return again


# Ids and the end token ------------------------------------------------------------


def test_ids_follow_the_contract(tokenizer):
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id) == (0, 1, 2)
    tags = [">>de<<", ">>en<<", ">>pt_BR<<"]
    assert tokenizer.convert_ids_to_tokens([0, 1, 2, 3, 4, 5]) == ["<pad>", "</s>", "<s>", *tags]
    assert tokenizer.unk_token is None
    assert len(tokenizer) == tokenizer.vocab_size == len(set(tokenizer.get_vocab().values()))
    assert type(tokenizer) is PreTrainedTokenizerFast
    assert tokenizer.padding_side == tokenizer.truncation_side == "right"
    assert tokenizer.model_max_length > 10**20


def test_every_row_ends_in_one_end_token_and_starts_with_none(tokenizer):
    long = SENTENCES[2]
    rows = [
        tokenizer(long)["input_ids"],
        tokenizer(long, truncation=True, max_length=8)["input_ids"],
        tokenizer("")["input_ids"],
        tokenizer("question", "context")["input_ids"],
        tokenizer(long, long, truncation=True, max_length=8)["input_ids"],
        tokenizer(text_target=long)["input_ids"],
        *tokenizer(SENTENCES[:5])["input_ids"],
        *tokenizer(["", long], text_target=[long, ""], truncation=True, max_length=8)["input_ids"],
        *tokenizer(["", long], text_target=[long, ""], truncation=True, max_length=8)["labels"],
        tokenizer.encode(long),
    ]
    for row in rows:
        assert row[-1] == 1
        assert row.count(1) == 1
        assert not {0, 2} & set(row)
    assert len(rows[1]) == len(rows[4]) == 8
    assert rows[2] == [1]


def test_padding_goes_to_the_right_with_the_mask(tokenizer):
    batch = tokenizer(["the", "the dog sees"], padding=True)
    assert set(batch) == {"input_ids", "attention_mask"}
    assert batch["input_ids"][0][-1] == 0
    assert [sum(mask) for mask in batch["attention_mask"]] == [
        len(tokenizer(t)["input_ids"]) for t in ["the", "the dog sees"]
    ]


def test_model_max_length_truncates():
    tokenizer = train(model_max_length=5)
    assert tokenizer.model_max_length == 5
    row = tokenizer(SENTENCES[0], truncation=True)["input_ids"]
    assert len(row) == 5
    assert row[-1] == 1


# Lossless -------------------------------------------------------------------------

unicode_text = st.text(st.characters(exclude_categories=["Cs"]))
nasty_text = st.lists(st.sampled_from(NASTY) | unicode_text, max_size=4).map("".join)


@settings(max_examples=300, deadline=None)
@given(nasty_text)
@example("".join(NASTY))
@example("".join(map(chr, range(0x250))))
def test_round_trip_gives_the_text_back(tokenizer, text):
    row = tokenizer(text)["input_ids"]
    assert tokenizer.decode(row, skip_special_tokens=True) == text
    assert row[-1] == 1
    assert not set(row[:-1]) & set(range(6)), "text became a special token"


@pytest.mark.parametrize("text", NASTY)
def test_every_way_of_encoding_gives_the_text_back(tokenizer, text):
    rows = [
        tokenizer.encode(text),
        tokenizer([text, "x"])["input_ids"][0],
        tokenizer(text_target=text)["input_ids"],
        [*tokenizer.convert_tokens_to_ids(tokenizer.tokenize(text)), 1],
    ]
    assert rows == [rows[0]] * 4
    assert tokenizer.batch_decode([rows[0]], skip_special_tokens=True) == [text]


def test_names_of_special_tokens_in_a_text_are_text(tokenizer):
    for token in tokenizer.all_special_tokens:
        row = tokenizer(token)["input_ids"][:-1]
        assert len(row) > 1
        assert min(row) >= 6
        assert tokenizer.decode(row) == token


# Saving ---------------------------------------------------------------------------


@pytest.mark.parametrize("text", [*NASTY, *SENTENCES[:5]])
def test_reloading_changes_no_id(tokenizer, reloaded, text):
    assert reloaded(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert reloaded.tokenize(text) == tokenizer.tokenize(text)
    assert reloaded(text, text_target=text, truncation=True, max_length=8) == tokenizer(
        text, text_target=text, truncation=True, max_length=8
    )
    assert reloaded.decode(reloaded.encode(text), skip_special_tokens=True) == text


def test_reloading_changes_no_setting(tokenizer, reloaded):
    assert type(reloaded) is PreTrainedTokenizerFast
    assert reloaded.split_special_tokens is True
    for name in ("padding_side", "model_max_length", "model_input_names", "all_special_ids", "special_tokens_map"):
        assert getattr(reloaded, name) == getattr(tokenizer, name), name
    assert reloaded.get_vocab() == tokenizer.get_vocab()
    assert reloaded("a", "b")["input_ids"] == tokenizer("a", "b")["input_ids"]
    for again in (copy.deepcopy(reloaded), pickle.loads(pickle.dumps(reloaded))):  # what workers get
        assert again("</s> a")["input_ids"] == tokenizer("</s> a")["input_ids"]


def test_save_tokenizer_names_the_class_all_releases_know(tokenizer, tmp_path):
    tokenizer(SENTENCES[:2], truncation=True, max_length=4, padding=True)
    save_tokenizer(tokenizer, tmp_path)
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["tokenizer_class"] == "PreTrainedTokenizerFast"
    backend = json.loads((tmp_path / "tokenizer.json").read_text())
    assert backend["truncation"] is None
    assert backend["padding"] is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tokenizer.json", "tokenizer_config.json"]


# Training -------------------------------------------------------------------------


def test_merges_are_those_of_the_papers_example():
    # "low" 5, "lower" 2, "newest" 6, "widest" 3: "est" comes first (9), then "low" (7).
    words = ["low"] * 5 + ["lower"] * 2 + ["newest"] * 6 + ["widest"] * 3
    tokenizer = train(words, vocab_size=3 + 256 + 4)
    assert len(tokenizer) == 263
    assert tokenizer.tokenize("newest") == ["n", "e", "w", "est"]
    assert tokenizer.tokenize("lower") == ["low", "e", "r"]


def test_same_texts_give_the_same_tokenizer():
    first, second = (train(iter(SENTENCES)).backend_tokenizer.to_str() for _ in range(2))
    assert first == second


def test_small_corpus_gives_a_smaller_vocabulary_and_says_so():
    with pytest.warns(UserWarning, match=r"tokens, not the 37,000 asked for") as caught:
        tokenizer = train_tokenizer(["the dog", "the cat"])
    assert f" {len(tokenizer)} tokens" in str(caught[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(train_tokenizer(SENTENCES, vocab_size=300)) == 300


def test_min_frequency_is_honoured():
    assert len(train(["abc"] * 3, min_frequency=4)) == 259
    assert len(train(["abc"] * 3, min_frequency=3)) == 261


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"vocab_size": 258}, "vocab_size=258 is too small.* make 259"),
        ({"vocab_size": 260, "languages": ["de", "en"]}, "2 language tags and 256 bytes make 261"),
        ({"languages": ["de", "de"]}, "twice"),
        ({"languages": ["d e"]}, "language code"),
        ({"languages": [""]}, "language code"),
        ({"min_frequency": 0}, "min_frequency"),
        ({"model_max_length": 1}, "model_max_length"),
        ({"texts": []}, "the corpus is empty"),
        ({"texts": ["", ""]}, "the corpus is empty"),
        ({"texts": "one string"}, "iterable of strings"),
        ({"texts": ["fine", None]}, "text 2 must be a string, got NoneType"),
        ({"texts": ["fine", "x\ud83d"]}, r"text 2 holds a lone surrogate, U\+D83D at index 1"),
    ],
)
def test_bad_input_is_one_clear_error(kwargs, message):
    with pytest.raises(ValueError, match=message):
        train_tokenizer(**{"texts": SENTENCES, "vocab_size": 300, **kwargs})


def test_least_vocabulary_is_accepted():
    assert len(train(vocab_size=259)) == 259


def test_errors_of_the_reader_come_through():
    def broken():
        yield "fine"
        raise OSError("disk gone")

    with pytest.raises(OSError, match="disk gone"):
        train_tokenizer(broken())


@given(st.text(st.characters(min_codepoint=0xD800, max_codepoint=0xDFFF), min_size=1), unicode_text)
def test_check_text_refuses_just_what_utf8_refuses(bad, good):
    check_text(good)
    with pytest.raises(ValueError, match=r"lone surrogate, U\+D[89A-F]"):
        check_text(good + bad)


# Sources of text ------------------------------------------------------------------


def test_iterate_texts_reads_files_line_by_line(tmp_path):
    (tmp_path / "a.en").write_bytes("one\u2028still one\r\ntwo\n".encode())
    (tmp_path / "b.de.gz").write_bytes(gzip.compress("\ufeffdrei\n\nfünf".encode()))
    files = [tmp_path / "a.en", tmp_path / "b.de.gz"]
    assert list(iterate_texts(files)) == ["one\u2028still one", "two", "drei", "", "fünf"]
    assert list(iterate_texts(str(files[0]))) == ["one\u2028still one", "two"]


@pytest.mark.parametrize("streaming", [False, True])
def test_iterate_texts_reads_columns(streaming):
    dataset = datasets.Dataset.from_dict({"source": ["a", "b"], "target": ["c", "d"], "id": [1, 2]})
    dataset = dataset.to_iterable_dataset() if streaming else dataset
    assert list(iterate_texts(dataset)) == ["a", "b", "c", "d"]
    assert list(iterate_texts(dataset, ["target"])) == ["c", "d"]
    with pytest.raises(ValueError, match=r"no column 'text'; it has \['source', 'target', 'id'\]"):
        iterate_texts(dataset, ["text"])


def test_iterate_texts_refuses_before_reading(tmp_path):
    good = tmp_path / "good.txt"
    good.write_text("x\n")
    with pytest.raises(FileNotFoundError, match="missing"):
        iterate_texts([good, tmp_path / "missing.txt"])
    (tmp_path / "pairs.tsv.gz").write_bytes(b"")
    with pytest.raises(ValueError, match="load_parallel_files"):
        iterate_texts(tmp_path / "pairs.tsv.gz")
    with pytest.raises(ValueError, match="no files"):
        iterate_texts([])


# Language tags --------------------------------------------------------------------


def test_language_tags_are_added_by_id(tokenizer):
    row = tokenizer("the dog")["input_ids"]
    tagged = add_language_tag(row, tokenizer, "en")
    assert tagged == [4, *row]
    assert tokenizer.decode(tagged, skip_special_tokens=True) == "the dog"
    assert language_token("pt_BR") == ">>pt_BR<<"
    with pytest.raises(ValueError, match=r"no tag >>fr<<; it has de, en, pt_BR"):
        add_language_tag(row, tokenizer, "fr")
    with pytest.raises(ValueError, match="no language tags"):
        add_language_tag(row, train(), "de")


# BPE-dropout ----------------------------------------------------------------------


def test_bpe_dropout_draws_segmentations_that_spell_the_same_text(tokenizer):
    text = SENTENCES[2]
    plain = tokenizer(text)["input_ids"]
    with bpe_dropout(tokenizer, 0.5):
        rows = [tokenizer(text)["input_ids"] for _ in range(50)]
    assert len({tuple(row) for row in rows}) > 10
    assert min(map(len, rows)) > len(plain)
    assert {tokenizer.decode(row, skip_special_tokens=True) for row in rows} == {text}
    assert all(row[-1] == 1 for row in rows)
    assert tokenizer(text)["input_ids"] == plain


def test_bpe_dropout_share_is_honoured(tokenizer):
    text = " ".join(SENTENCES[:4])
    with bpe_dropout(tokenizer, 0.0):
        assert tokenizer(text) == tokenizer(text)
    lengths = []
    for dropout in (0.0, 0.1, 0.5, 1.0):
        with bpe_dropout(tokenizer, dropout):
            lengths.append(sum(len(tokenizer(text)["input_ids"]) for _ in range(20)) / 20)
    assert lengths == sorted(set(lengths))
    assert lengths[-1] == len(text.encode()) + 1


@settings(max_examples=50, deadline=None)
@given(nasty_text)
def test_bpe_dropout_is_lossless(tokenizer, text):
    with bpe_dropout(tokenizer, 0.3):
        assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == text


def test_bpe_dropout_leaves_nothing_behind(tmp_path):
    tokenizer = train()
    before = tokenizer.backend_tokenizer.to_str()
    with pytest.raises(RuntimeError, match="stop"), bpe_dropout(tokenizer, 0.5):
        raise RuntimeError("stop")
    with bpe_dropout(tokenizer, 0.5), bpe_dropout(tokenizer, 0.1):
        tokenizer("the dog")
    assert tokenizer.backend_tokenizer.to_str() == before
    save_tokenizer(tokenizer, tmp_path)
    assert json.loads((tmp_path / "tokenizer.json").read_text())["model"]["dropout"] is None


@pytest.mark.parametrize("dropout", [-0.1, 1.1, float("nan")])
def test_bpe_dropout_refuses_what_is_no_probability(tokenizer, dropout):
    with pytest.raises(ValueError, match=r"must lie in \[0, 1\]"), bpe_dropout(tokenizer, dropout):
        pass


def test_bpe_dropout_needs_bpe():
    from tokenizers import Tokenizer, models

    unigram = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.Unigram([("a", -1.0)])))
    with pytest.raises(ValueError, match="BPE model"), bpe_dropout(unigram, 0.1):
        pass
