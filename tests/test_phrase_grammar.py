"""The splits of the phrase grammar against their promise, its published files, and the memoriser."""

import hashlib
import random
import re
import subprocess
import sys
from itertools import islice
from pathlib import Path
from typing import ClassVar

import pytest

from vanilla_transformer import phrase_grammar
from vanilla_transformer.phrase_grammar import (
    PUBLISHED_SHA256,
    NearestSentenceMemoriser,
    PhraseGrammarSplits,
    check_splits,
    combinations,
    generate_splits,
    main,
    write_splits,
)
from vanilla_transformer.phrase_lexicon import ADJECTIVES, NOUNS, VERBS, english_number
from vanilla_transformer.phrase_sampling import phrases

# ------------------------------------------------------------------------------------------- sentences


@pytest.fixture(scope="module")
def stream():
    return list(islice(phrases(random.Random(11)), 15_000))


def test_an_english_sentence_has_one_german_reference(stream):
    references = {}
    for phrase in stream:
        assert references.setdefault(phrase.source, phrase.target) == phrase.target


def test_sentences_have_the_promised_shape(stream):
    for phrase in stream:
        assert 4 <= len(phrase.source.split()) <= 20
        for text in (phrase.source, phrase.target):
            assert text[0].isupper()
            assert re.fullmatch(r"[\w', -]+[.?]", text)
            assert "  " not in text
        assert phrase.source[-1] == phrase.target[-1]
        clauses = re.findall(r"\b(?:that|because|when|although|before)\b", phrase.source.lower())
        assert phrase.target.count(",") == len(clauses) <= 1


def test_present_and_past_can_always_be_told_apart(stream):
    # "they read" could be either. After an auxiliary or in a question with one, the auxiliary tells.
    told = {"will", "can", "to", "he", "she", *(noun.english for noun in NOUNS)}
    found = 0
    for phrase in stream:
        asked = phrase.source.endswith("?")
        statement = phrase.source.partition(" that ")[2] if asked else phrase.source
        for before in re.findall(r"(\w+) (?:read|put on)\b", statement):
            assert before.lower() in told, phrase.source
            found += 1
    assert found > 300


def test_the_text_tells_the_combinations(stream):
    for phrase in stream:
        assert combinations(phrase.source) == phrase.combinations, phrase.source


# ---------------------------------------------------------------------------------------------- splits


@pytest.fixture(scope="module")
def splits():
    return generate_splits()


def _alternatives(words):
    return "(?:" + "|".join(sorted(words, key=len, reverse=True)) + ")"


class CrudeReader:
    """A second reader of the English text, made of regular expressions, to check the program's own."""

    adjective_words: ClassVar[list] = [a.english for a in ADJECTIVES]
    noun_lemma: ClassVar[dict] = {form: n.english for n in NOUNS for form in (n.english, n.english_plural) if form}
    verb_lemma: ClassVar[dict] = {form: v.english for v in VERBS for form in (v.english, v.third, v.past)}
    noun = _alternatives(noun_lemma)
    adjective = _alternatives(adjective_words)
    number_word = _alternatives([*(english_number(n) for n in range(1, 100)), "hundred", "and"])
    number = rf"{number_word}(?: {number_word})*"
    determiner = "(?:the|an?|this|these|my|our|his|her|their)"
    phrase = rf"(?:{determiner} )?(?:{number} )?(?:{adjective} )?{noun}\b(?:'s|')?"

    attributive = re.compile(rf"\b({adjective}) ({noun})\b")
    predicative = re.compile(rf"\b({noun}) (?:is|are|was|were) (?:not )?({adjective})\b(?! {noun}\b)")
    asked = re.compile(rf"^(?:is|are|was|were) (?:{determiner} )?(?:{number} )?({noun}) (?:not )?({adjective})\b")
    government = re.compile(rf"\b({_alternatives(verb_lemma)})((?: {phrase})+)")
    numeral = re.compile(rf"\b{number}\b")

    def __call__(self, sentence):
        text = sentence[0].lower() + sentence[1:]
        facts = {(adjective, self.noun_lemma[noun]) for adjective, noun in self.attributive.findall(text)}
        for pattern in (self.predicative, self.asked):
            facts |= {(adjective, self.noun_lemma[noun]) for noun, adjective in pattern.findall(text)}
        for verb, objects in self.government.findall(text):
            target = re.findall(rf"\b({self.noun})\b(?!')", objects)
            facts |= {(self.verb_lemma[verb], self.noun_lemma[target[-1]])} if target else set()
        return facts | {("number", number) for number in self.numeral.findall(text)}


def test_each_held_out_sentence_has_a_combination_that_train_lacks(splits):
    read = CrudeReader()
    trained = set().union(*(read(source) for source, _ in splits.train))
    kinds = {"number": 0, "adjective": 0, "verb": 0}
    for source, _ in splits.valid + splits.test:
        new = read(source) - trained
        assert new, source
        for left, _ in new:
            kinds["number" if left == "number" else "adjective" if left in read.adjective_words else "verb"] += 1
    assert min(kinds.values()) > 150, kinds


def test_each_word_of_valid_and_test_occurs_in_train(splits):
    numeral = re.compile(
        "(?:(?:ein|zwei|drei|vier|fünf|sechs|sieben|acht|neun)hundert)?"
        "(?:(?:(?:ein|zwei|drei|vier|fünf|sechs|sieben|acht|neun)und)?(?:zwan|drei|vier|fünf|sech|sieb|acht|neun)[zß]ig"
        "|eins|zwei|drei|vier|fünf|sechs|sieben|acht|neun|zehn|elf|zwölf|(?:drei|vier|fünf|sech|sieb|acht|neun)zehn)?",
        re.IGNORECASE,
    )

    def words(pairs):
        english = {word for source, _ in pairs for word in re.findall(r"\w+", source)}
        german = {word for _, target in pairs for word in re.findall(r"\w+", target)}
        return english, {word for word in german if not numeral.fullmatch(word)}

    english, german = words(splits.train)
    held_english, held_german = words(splits.valid + splits.test)
    assert held_english <= english
    assert held_german <= german
    # German numbers are new as wholes but not in their parts, each of which occurs at the end of a trained number.
    trained = {word for _, target in splits.train for word in re.findall(r"\w+", target) if numeral.fullmatch(word)}
    endings = {re.sub("^.*hundert", "", word.lower()) for word in trained}
    held = {word for _, target in splits.test for word in re.findall(r"\w+", target) if numeral.fullmatch(word)}
    assert {re.sub("^.*hundert", "", word.lower()) for word in held} <= endings
    assert len({word.lower() for word in held} - {word.lower() for word in trained}) > 50


def test_no_sentence_occurs_twice(splits):
    pairs = splits.train + splits.valid + splits.test
    assert [len(part) for part in (splits.train, splits.valid, splits.test)] == [20_000, 500, 1_000]
    assert len({source for source, _ in pairs}) == len({target for _, target in pairs}) == 21_500


def test_files_and_published_checksums(splits, tmp_path):
    checksums = write_splits(tmp_path / "made" / "here", splits)
    assert checksums == dict(PUBLISHED_SHA256)
    for name, checksum in checksums.items():
        content = (tmp_path / "made" / "here" / name).read_bytes()
        assert hashlib.sha256(content).hexdigest() == checksum
        assert b"\r" not in content
    english = (tmp_path / "made" / "here" / "test.en").read_text(encoding="utf-8").split("\n")
    german = (tmp_path / "made" / "here" / "test.de").read_text(encoding="utf-8").split("\n")
    assert list(zip(english, german, strict=True)) == [*splits.test, ("", "")]
    assert write_splits(tmp_path / "made" / "here", splits) == checksums  # the same content again is no conflict


@pytest.mark.parametrize("hash_seed", ["1", "2"])
def test_standard_library_alone_makes_the_published_text(hash_seed, tmp_path):
    # A bare package object stands in for the real one, whose import would bring torch.
    program = f"""
import sys, types
package = types.ModuleType("vanilla_transformer")
package.__path__ = [{str(Path(phrase_grammar.__file__).parent)!r}]
sys.modules["vanilla_transformer"] = package
from vanilla_transformer import phrase_grammar
phrase_grammar.main([{str(tmp_path)!r}])
foreign = {{name.split(".")[0] for name in sys.modules}} - sys.stdlib_module_names
assert foreign <= {{"vanilla_transformer", "__main__"}}, foreign
"""
    run = subprocess.run(
        [sys.executable, "-S", "-c", program],
        capture_output=True,
        text=True,
        env={"PYTHONHASHSEED": hash_seed},
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert dict(reversed(line.split("  ")) for line in run.stdout.splitlines()) == dict(PUBLISHED_SHA256)


@pytest.mark.parametrize("seed", [0, 1, 77])
def test_other_seeds_hold_out_other_combinations(seed, splits):
    other = generate_splits(seed, train_size=6_000, valid_size=100, test_size=200)
    assert other == generate_splits(seed, train_size=6_000, valid_size=100, test_size=200)
    read = CrudeReader()
    trained = set().union(*(read(source) for source, _ in other.train))
    assert all(read(source) - trained for source, _ in other.valid + other.test)
    default = set().union(*(combinations(source) for source, _ in splits.train))
    assert any(combinations(source) <= default for source, _ in other.test)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"seed": -1}, "seed=-1"),
        ({"train_size": 0}, "train_size=0: must be at least 1"),
        ({"valid_size": -1}, "valid_size=-1"),
        ({"test_size": -5}, "test_size=-5"),
        ({"train_size": 199_000, "valid_size": 1_000, "test_size": 1}, "at most 200,000 pairs"),
        ({"train_size": 3, "valid_size": 1, "test_size": 1}, "a larger train_size"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        generate_splits(**arguments)


def test_a_broken_promise_is_found(splits):
    small = PhraseGrammarSplits(splits.train, splits.valid[:5], splits.test[:5])
    check_splits(small)
    source, target = splits.train[0]
    with pytest.raises(RuntimeError, match="the test split repeats a sentence"):
        check_splits(PhraseGrammarSplits(small.train, small.valid, [*small.test, (source, "Etwas anderes.")]))
    with pytest.raises(RuntimeError, match="the valid split repeats a sentence"):
        check_splits(PhraseGrammarSplits(small.train, [*small.valid, ("Something else.", target)], small.test))
    familiar = source.replace(".", "?") if source.endswith(".") else source.replace("?", ".")
    with pytest.raises(RuntimeError, match="without a held-out combination"):
        check_splits(PhraseGrammarSplits(small.train, small.valid, [(familiar, "Etwas anderes.")]))
    new_source, new_target = small.test[0]
    with pytest.raises(RuntimeError, match=r"forms that train lacks, \['de Bahnhof'\]"):
        check_splits(PhraseGrammarSplits(small.train, small.valid, [(new_source, f"Bahnhof {new_target}")]))


def test_files_with_other_content_are_not_overwritten(splits, tmp_path):
    small = PhraseGrammarSplits(splits.train[:3], splits.valid[:2], splits.test[:2])
    (tmp_path / "test.de").write_text("mine\n", encoding="utf-8")
    with pytest.raises(FileExistsError, match=r"test\.de exists with other content"):
        write_splits(tmp_path, small)
    assert [path.name for path in tmp_path.iterdir()] == ["test.de"]
    with pytest.raises(ValueError, match="the valid split has a sentence that is not one line"):
        write_splits(tmp_path, PhraseGrammarSplits(small.train, [("A\u2028B", "C")], []))


def test_command_line(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(phrase_grammar, "generate_splits", lambda seed: generate_splits(seed, 2_000, 20, 20))
    assert main([str(tmp_path), "--seed", "5"]) == 0
    printed = dict(reversed(line.split("  ")) for line in capsys.readouterr().out.splitlines())
    assert printed == {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in tmp_path.iterdir()}
    assert len(printed) == 6
    with pytest.raises(SystemExit):
        main([str(tmp_path), "--seed", "6"])
    assert "exists with other content" in capsys.readouterr().err


# -------------------------------------------------------------------------------------------- baseline


def test_memoriser_returns_what_it_has_seen(splits):
    memoriser = NearestSentenceMemoriser(splits.train)
    sources, targets = zip(*splits.train[:200], strict=True)
    assert memoriser.translate(sources) == list(targets)
    known = {target for _, target in splits.train}
    answers = memoriser.translate(source for source, _ in splits.test[:50])
    assert set(answers) <= known
    assert all(answer != target for answer, (_, target) in zip(answers, splits.test, strict=False))


def test_memoriser_takes_the_most_similar_and_of_equals_the_first():
    train = [("a b c d", "0"), ("a b x", "1"), ("a b y", "2"), ("q", "3")]
    memoriser = NearestSentenceMemoriser(train)
    # "a b" has the features a, b, a+b: 2·3/(3+7) for the first, 2·3/(3+5) for the next two.
    assert memoriser.translate(["a b", "A B", "q r", "none", ""]) == ["1", "1", "3", "0", "0"]
    assert memoriser.translate([]) == []
    with pytest.raises(ValueError, match="train is empty"):
        NearestSentenceMemoriser([])
