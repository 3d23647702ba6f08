"""The embedded default data: a seeded, synthetic English-German phrase grammar.

    python -m vanilla_transformer.phrase_grammar FOLDER [--seed N]

writes `train.en`, `train.de`, `valid.en`, … Standard library only, no download, the same files everywhere.

What it is: made-up sentences of 4 to 16 words about people, things and places, in 130 content words. They cover
noun phrases (three genders, plural, four cases; definite, indefinite, demonstrative, possessive and no article; weak,
mixed and strong adjective declension; weak nouns; genitive owners), separable verbs, dative objects, the perfect with
`haben` and `sein`, `werden` and modals, place against direction (`im Garten`, `in den Garten`), statements, fronted
time, yes/no questions, subordinate clauses with that, because, when, although and before, and numbers up to 999 in
words. Each English sentence has exactly one German reference. The words are in `phrase_lexicon`, the rules that make
sentences of them in `phrase_syntax`, what is said how often in `phrase_sampling`.

What it is not: natural language. It shows in minutes that a model trains, generalises to unseen combinations and
decodes; a score on it says nothing about translation quality on real text.

What is held out: valid and test sentences each contain at least one pair of adjective and noun, pair of verb and
object, or number that no training sentence contains, made of words that training does contain.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from types import MappingProxyType

from .phrase_lexicon import (
    ADJECTIVES,
    NOUNS,
    POSSESSIVES,
    TRANSITIVE_VERBS,
    english_number,
    german_number,
    german_number_parts,
)
from .phrase_sampling import OBJECTS, QUALITIES, phrases
from .phrase_syntax import Combination, Phrase, number_combination

PUBLISHED_SHA256: MappingProxyType[str, str] = MappingProxyType(
    {
        "train.en": "e087666d0b0a5782893d5e0734860d103cd283320c8d6d16b43069172619f4c2",
        "train.de": "1a4b9c01e27e1d665b139de6bee6548b5d00beacf0b82e003562bf58bb4baf1c",
        "valid.en": "ee50c372e48e703da2f21e451f1bb28da59a8b28f0910704bea695b44159e5c2",
        "valid.de": "d178d6a839b6edfcb364ea50a73c367dab8788937c28d7ab03c95f76d28a3504",
        "test.en": "99dc3d1a0c1f669004a3a9e8b2da9ac2ca75d2f72f25e0cb8b16f6ac7f53fa8e",
        "test.de": "c02f60835217f2cdf0102ede7e0effd3dc61d292c207ab7001d9a87d8d62b290",
    }
)
"""SHA-256 of the files that `write_splits` makes of `generate_splits()` with its default arguments."""

MAX_PAIRS = 200_000
"""Largest sum of the three sizes: about half a minute of generation, and far from exhausting the grammar."""

_HELD_OUT_SHARE = MappingProxyType({"adjective+noun": 0.15, "verb+object": 0.15, "number": 0.2})
_HELD_OUT_LIMIT = 0.25  # no word loses more than this share of its combinations
_DRAWS_PER_PAIR, _SPARE_DRAWS = 100, 10_000


@dataclass(frozen=True)
class PhraseGrammarSplits:
    """Three lists of (English, German) pairs without a sentence in common."""

    train: list[tuple[str, str]]
    valid: list[tuple[str, str]]
    test: list[tuple[str, str]]


# ------------------------------------------------------------------------------------------ held out


def _inventory() -> Iterator[list[Combination]]:
    """Everything that could be held out, by kind. Of the numbers, those that are a composition of others."""
    yield [("adjective+noun", adjective.english, noun) for noun, fits in QUALITIES.items() for adjective in fits]
    yield [("verb+object", verb, noun.english) for verb, nouns in OBJECTS.items() for noun in nouns]
    yield [number_combination(n) for n in range(21, 1000) if (n % 10 if n < 100 else n % 100)]


def _held_out(rng: random.Random) -> frozenset[Combination]:
    """Decide by `rng` which combinations training must not see; every word keeps most of its own."""
    held: set[Combination] = set()
    for inventory in _inventory():
        sides = list(chain.from_iterable(((0, left), (1, right)) for _, left, right in inventory))
        allowed = {side: int(total * _HELD_OUT_LIMIT) for side, total in Counter(sides).items()}
        wanted = int(len(inventory) * _HELD_OUT_SHARE[inventory[0][0]])
        for combination in sorted(inventory, key=lambda _: rng.random()):
            left, right = (0, combination[1]), (1, combination[2])
            if wanted and allowed[left] and allowed[right]:
                held.add(combination)
                wanted, allowed[left], allowed[right] = wanted - 1, allowed[left] - 1, allowed[right] - 1
    return frozenset(held)


# ------------------------------------------------------------------- reading the text, independently

_NOUN_OF_FORM = {form: noun.english for noun in NOUNS for form in (noun.english, noun.english_plural) if form}
_ADJECTIVE_FORMS = frozenset(adjective.english for adjective in ADJECTIVES)
_VERB_OF_FORM = {form: verb.english for verb in TRANSITIVE_VERBS for form in (verb.english, verb.third, verb.past)}
_SMALL_NUMBERS = {english_number(n): n for n in range(1, 100)}
_NUMBER_WORDS = frozenset([*_SMALL_NUMBERS, "hundred", "and"])
_OBJECT_WORDS = frozenset(["the", "a", "an", "this", "these", *(word.english for word in POSSESSIVES)])
_GERMAN_PARTS = {german_number(n): german_number_parts(n) for n in range(2, 1000)}


def combinations(source: str) -> frozenset[Combination]:
    """Read the combinations of an English sentence off its text, without knowledge of how it was made.

    Args:
        source: An English sentence of this grammar.

    Returns:
        Pairs `("adjective+noun", "old", "man")` (attributive or predicative), `("verb+object", "read", "book")`, in
        base forms, and numbers `("number", "two hundred", "forty-seven")`.
    """
    # A possessive is a word of its own after its owner, a comma ends what it stands after.
    words = re.sub(r"('s|'|,)(?= )", r" \1", source.rstrip(".?")).split()
    words[:1] = [word.lower() for word in words[:1]]
    return frozenset(chain(_read_adjectives(words), _read_objects(words), _read_numbers(words)))


def _read_adjectives(words: list[str]) -> Iterator[Combination]:
    """Pairs of an adjective with the noun after it, or of a predicative one with the noun before it."""
    subject = ""
    for index, word in enumerate(words):
        following = words[index + 1] if index + 1 < len(words) else ""
        if word in _ADJECTIVE_FORMS:
            noun = _NOUN_OF_FORM.get(following) or subject
            if noun:
                yield ("adjective+noun", word, noun)
        elif word in _NOUN_OF_FORM and not following.startswith("'"):
            subject = _NOUN_OF_FORM[word]
        elif word in ("I", "he", "she", "we", "they"):
            subject = ""


def _read_objects(words: list[str]) -> Iterator[Combination]:
    """Pairs of a verb with the last noun of the noun phrases that follow it."""
    for index, word in enumerate(words):
        with_particle = " ".join(words[index : index + 2])
        verb = _VERB_OF_FORM.get(with_particle) or _VERB_OF_FORM.get(word)
        if verb is None:
            continue
        target = ""
        for position in range(index + len(verb.split()), len(words)):
            if words[position] in _NOUN_OF_FORM:
                target = _NOUN_OF_FORM[words[position]]
            elif words[position] not in _OBJECT_WORDS | _ADJECTIVE_FORMS | _NUMBER_WORDS | {"'", "'s"}:
                break
        yield ("verb+object", verb, target)


def _read_numbers(words: list[str]) -> Iterator[Combination]:
    """Numbers in words."""
    number = 0
    for word in [*words, ""]:
        if word == "hundred":
            number *= 100
        elif word in _SMALL_NUMBERS:
            number += _SMALL_NUMBERS[word]
        elif word != "and" and number:
            yield number_combination(number)
            number = 0


def _forms(source: str, target: str) -> Iterator[str]:
    """Word forms of a pair as they are written; numbers come apart, as they are put together anew."""
    yield from (f"en {form}" for form in re.findall(r"\w+|[^\w\s]", source))
    for form in re.findall(r"\w+|[^\w\s]", target):
        parts = _GERMAN_PARTS.get(form.lower(), (form,))
        for part in (parts[0].capitalize() if form[0].isupper() and len(parts) > 1 else parts[0], *parts[1:]):
            yield f"de {part}"


def check_splits(splits: PhraseGrammarSplits) -> None:
    """Check, from the text alone, what the splits promise.

    Args:
        splits: Splits to check.

    Raises:
        RuntimeError: If a sentence occurs twice, in a split or across splits; if a valid or test sentence has no
            combination that is missing from train; or if it has a word form that is missing from train.
    """
    seen: set[str] = set()
    for name, pairs in (("train", splits.train), ("valid", splits.valid), ("test", splits.test)):
        for side in chain.from_iterable(pairs):
            if side in seen:
                raise RuntimeError(f"the {name} split repeats a sentence: {side!r}")
            seen.add(side)
    trained = frozenset(chain.from_iterable(combinations(source) for source, _ in splits.train))
    forms = frozenset(chain.from_iterable(_forms(*pair) for pair in splits.train))
    for name, pairs in (("valid", splits.valid), ("test", splits.test)):
        for source, target in pairs:
            if combinations(source) <= trained:
                raise RuntimeError(f"the {name} split has a sentence without a held-out combination: {source!r}")
            unknown = sorted(set(_forms(source, target)) - forms)
            if unknown:
                raise RuntimeError(f"the {name} split has forms that train lacks, {unknown}, in {source!r}")


# -------------------------------------------------------------------------------------------- splits


def generate_splits(
    seed: int = 2017, train_size: int = 20_000, valid_size: int = 500, test_size: int = 1_000
) -> PhraseGrammarSplits:
    """Generate train, valid and test pairs; the same arguments give the same text on every machine.

    Args:
        seed: Not negative. Decides the sentences and which combinations are held out.
        train_size: Training pairs, at least 1.
        valid_size: Validation pairs.
        test_size: Test pairs.

    Returns:
        The splits, already checked by `check_splits`.

    Raises:
        ValueError: If an argument is negative, `train_size` is 0, the sizes sum to more than `MAX_PAIRS`, or so few
            training pairs are asked for that their words do not suffice for the other splits.
        TypeError: If an argument is not an int.
        RuntimeError: If the result breaks its promise (a defect of the grammar, not of the call).
    """
    for name, value, least in (
        ("seed", seed, 0),
        ("train_size", train_size, 1),
        ("valid_size", valid_size, 0),
        ("test_size", test_size, 0),
    ):
        if not isinstance(value, int):
            raise TypeError(f"{name}={value!r}: must be an int, got {type(value).__name__}")
        if value < least:
            raise ValueError(f"{name}={value}: must be at least {least}")
    if train_size + valid_size + test_size > MAX_PAIRS:
        raise ValueError(
            f"train_size + valid_size + test_size = {train_size + valid_size + test_size:,}: the grammar makes at most"
            f" {MAX_PAIRS:,} pairs; ask for fewer"
        )
    rng = random.Random(seed)
    held = _held_out(rng)
    stream = phrases(rng)
    seen: set[str] = set()

    def draw(name: str, size: int, suits: Callable[[Phrase], bool]) -> list[tuple[str, str]]:
        pairs: list[tuple[str, str]] = []
        for _ in range(size * _DRAWS_PER_PAIR + _SPARE_DRAWS):
            if len(pairs) == size:
                return pairs
            phrase = next(stream)
            if phrase.source not in seen and phrase.target not in seen and suits(phrase):
                seen.update((phrase.source, phrase.target))
                pairs.append((phrase.source, phrase.target))
        raise ValueError(
            f"{name}_size={size}: found only {len(pairs)} suitable sentences for train_size={train_size}; a larger"
            f" train_size brings the words they are made of, a smaller {name}_size needs fewer"
        )

    train = draw("train", train_size, lambda phrase: held.isdisjoint(phrase.combinations))
    forms = frozenset(chain.from_iterable(_forms(*pair) for pair in train))

    def is_new_but_known(phrase: Phrase) -> bool:
        """Held-out combination, familiar words."""
        return not held.isdisjoint(phrase.combinations) and forms.issuperset(_forms(phrase.source, phrase.target))

    splits = PhraseGrammarSplits(
        train=train,
        valid=draw("valid", valid_size, is_new_but_known),
        test=draw("test", test_size, is_new_but_known),
    )
    check_splits(splits)
    return splits


def write_splits(folder: str | Path, splits: PhraseGrammarSplits) -> dict[str, str]:
    """Write `train.en`, `train.de`, `valid.en`, … as UTF-8 text with one sentence a line.

    Args:
        folder: Folder to write to; made if it does not exist.
        splits: The pairs.

    Returns:
        SHA-256 by file name, in lower-case hexadecimal.

    Raises:
        ValueError: If a sentence holds a line break, so that lines would no longer be sentences.
        FileExistsError: If one of the files exists with other content; nothing is written then.
    """
    contents: dict[str, bytes] = {}
    for name, pairs in (("train", splits.train), ("valid", splits.valid), ("test", splits.test)):
        for side, language in enumerate(("en", "de")):
            sentences = [pair[side] for pair in pairs]
            for sentence in sentences:
                if len(sentence.splitlines()) != 1:
                    raise ValueError(f"the {name} split has a sentence that is not one line of text: {sentence!r}")
            contents[f"{name}.{language}"] = "".join(f"{sentence}\n" for sentence in sentences).encode("utf-8")
    folder = Path(folder)
    for file_name, content in contents.items():
        path = folder / file_name
        if path.exists() and path.read_bytes() != content:
            raise FileExistsError(f"{path} exists with other content; choose another folder or remove the file")
    folder.mkdir(parents=True, exist_ok=True)
    for file_name, content in contents.items():
        (folder / file_name).write_bytes(content)
    return {file_name: hashlib.sha256(content).hexdigest() for file_name, content in contents.items()}


# ------------------------------------------------------------------------------------------ baseline


class NearestSentenceMemoriser:
    """The baseline beside a trained model: answers with the translation of the most similar training sentence.

    Similarity is the Dice coefficient of the sets of words and of neighbouring word pairs; of equally similar
    sentences the first in the training data is taken. What it scores shows how much of a test set can be had by
    looking up instead of composing.

    Args:
        train: (source, target) pairs, at least one.

    Raises:
        ValueError: If `train` is empty.
    """

    def __init__(self, train: Sequence[tuple[str, str]]) -> None:
        if not train:
            raise ValueError("train is empty: the memoriser needs at least one pair to remember")
        self._targets = [target for _, target in train]
        self._sizes: list[int] = []
        self._postings: dict[str, list[int]] = {}
        for index, (source, _) in enumerate(train):
            features = self._features(source)
            self._sizes.append(len(features))
            for feature in features:
                self._postings.setdefault(feature, []).append(index)

    @staticmethod
    def _features(sentence: str) -> set[str]:
        """Words and neighbouring word pairs; punctuation counts as a word."""
        words = re.findall(r"\w+|[^\w\s]", sentence.lower())
        return {*words, *(f"{left} {right}" for left, right in pairwise(words))}

    def translate(self, sources: Iterable[str]) -> list[str]:
        """Translate by looking up.

        Args:
            sources: Source sentences.

        Returns:
            One training target a source, in order; the first one where no training sentence shares a word.
        """
        return [self._targets[self._nearest(self._features(source))] for source in sources]

    def _nearest(self, features: set[str]) -> int:
        """Index of the most similar training sentence."""
        shared: Counter[int] = Counter()
        for feature in features:
            shared.update(self._postings.get(feature, ()))
        best, best_score = 0, 0.0
        for index, overlap in shared.items():
            score = 2 * overlap / (len(features) + self._sizes[index])
            if score > best_score or (score == best_score and index < best):
                best, best_score = index, score
        return best


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the splits to a folder and print their checksums in the format of `sha256sum`."""
    parser = argparse.ArgumentParser(description="Write the synthetic English-German phrase grammar as text files.")
    parser.add_argument("folder", type=Path, help="folder for train.en, train.de, valid.en, …")
    parser.add_argument("--seed", type=int, default=2017, help="decides sentences and held-out combinations (2017)")
    options = parser.parse_args(arguments)
    try:
        checksums = write_splits(options.folder, generate_splits(options.seed))
    except (ValueError, OSError) as error:
        parser.error(str(error))
    for file_name, checksum in checksums.items():
        print(f"{checksum}  {file_name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
