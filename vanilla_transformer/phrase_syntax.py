"""From words to sentences: noun phrases, clauses and sentences of the phrase grammar, in English and in German.

Word order of the German clause, by the field model of German grammar books (between the two brackets: subject if it
did not come first, time, dative object, place, accusative object, direction, predicative adjective):

| order         | front    | left   | middle                 | right                                      |
|---------------|----------|--------|------------------------|--------------------------------------------|
| subject first | der Mann | macht  | heute die Tür          | auf                                        |
| time first    | heute    | hat    | der Mann die Tür       | aufgemacht                                 |
| verb first    |          | muss   | der Mann heute die Tür | aufmachen                                  |
| verb last     |          | (weil) | der Mann heute die Tür | aufmacht / aufgemacht hat / aufmachen muss |

`verb first` makes questions, and main clauses that follow their subordinate clause; `verb last` makes subordinate
clauses.

Tenses: the English simple past is the German perfect (`sein` alone stands in the preterite: `war müde`); `will`,
`can` and `has to` are `werden`, `können` and `müssen` with the infinitive.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from .phrase_lexicon import (
    BARE,
    BE_FORMS,
    CONTRACTIONS,
    DEFINITE,
    FINITE_FORMS,
    INDEFINITE,
    PLANNED,
    Adjective,
    Case,
    Determiner,
    Noun,
    Pronoun,
    Tense,
    Time,
    Verb,
    english_number,
    english_number_parts,
    german_number,
)

Combination = tuple[Literal["adjective+noun", "verb+object", "number"], str, str]
"""Two parts of the English text whose meeting can be held out: (kind, first part, second part)."""

Order = Literal["subject first", "time first", "verb first", "verb last"]
Conjunction = Literal["that", "because", "when", "although", "before"]

_CONJUNCTIONS: MappingProxyType[Conjunction, str] = MappingProxyType(
    {"that": "dass", "because": "weil", "when": "wenn", "although": "obwohl", "before": "bevor"}
)


def number_combination(number: int) -> Combination:
    """The number as a meeting of its hundreds and the rest: `("number", "two hundred", "forty-seven")`."""
    return ("number", *english_number_parts(number))


@dataclass(frozen=True)
class Phrase:
    """One sentence pair and the combinations of words it is made of."""

    source: str
    target: str
    combinations: frozenset[Combination]


@dataclass(frozen=True)
class NounPhrase:
    """A noun with what stands before it.

    Attributes:
        noun: The head.
        determiner: Article, demonstrative, possessive, or `BARE` for none.
        adjective: Attributive adjective, if any.
        plural: Whether the phrase is plural.
        count: Number word before the adjective (2 to 999, plural only).
        possessor: Owner: `the old man's` before the noun in English, a genitive after it in German. The head then has
            the definite article in German and none in English.
        label: Number after the noun (`room twelve`, `Zimmer zwölf`).

    Raises:
        ValueError: For phrases that neither language has: `a` with a plural, the plural of a mass noun, a count with
            a singular, a possessor together with a determiner other than the definite article.
    """

    noun: Noun
    determiner: Determiner = DEFINITE
    adjective: Adjective | None = None
    plural: bool = False
    count: int | None = None
    possessor: NounPhrase | None = None
    label: int | None = None

    def __post_init__(self) -> None:
        if self.plural and self.determiner is INDEFINITE:
            raise ValueError(f"{self.noun.english!r}: the indefinite article has no plural; use BARE or a count")
        if self.plural and not self.noun.plural:
            raise ValueError(f"{self.noun.english!r} is a mass noun and has no plural")
        if self.count is not None and not (self.plural and self.count >= 2):
            raise ValueError(f"{self.noun.english!r}: count={self.count} needs plural=True and at least 2")
        if self.possessor is not None and self.determiner is not DEFINITE:
            raise ValueError(f"{self.noun.english!r}: a possessor replaces the determiner; leave it at DEFINITE")

    @property
    def agreement(self) -> int:
        """Column of the finite verb forms: 1 for the third person singular, 2 for the plural."""
        return 2 if self.plural else 1

    def english(self) -> str:
        """The phrase in English."""
        words = []
        if self.count is not None:
            words.append(english_number(self.count))
        if self.adjective is not None:
            words.append(self.adjective.english)
        words.append(self.noun.english_plural if self.plural else self.noun.english)
        if self.label is not None:
            words.append(english_number(self.label))
        return " ".join([*self._english_opening(words[0]), *words])

    def _english_opening(self, next_word: str) -> list[str]:
        """Determiner or possessor in English."""
        if self.possessor is not None:
            owner = self.possessor.english()
            return [owner + ("'" if self.possessor.plural and owner.endswith("s") else "'s")]
        if self.determiner is INDEFINITE:  # the lexicon has no silent h and no u- as in "use": the letter decides
            return ["an" if next_word[0] in "aeiou" else "a"]
        word = self.determiner.english_plural if self.plural else self.determiner.english
        return [word] if word else []

    def german(self, case: Case) -> str:
        """The phrase in German in one case."""
        words = [self.determiner.declined(case, self.noun, self.plural)]
        if self.count is not None:
            words.append(german_number(self.count))
        if self.adjective is not None:
            words.append(self.adjective.declined(case, self.noun, self.plural, self.determiner.declension))
        words.append(self.noun.declined(case, self.plural))
        if self.label is not None:
            words.append(german_number(self.label))
        if self.possessor is not None:
            words.append(self.possessor.german("genitive"))
        return " ".join(filter(None, words))

    def combinations(self) -> Iterator[Combination]:
        """The pairs and numbers inside the phrase."""
        if self.adjective is not None:
            yield ("adjective+noun", self.adjective.english, self.noun.english)
        for number in (self.count, self.label):
            if number is not None:
                yield number_combination(number)
        if self.possessor is not None:
            yield from self.possessor.combinations()


@dataclass(frozen=True)
class Place:
    """Where something happens (dative), or where it leads (`into`, accusative)."""

    phrase: NounPhrase
    direction: bool = False

    def english(self) -> str:
        """The prepositional phrase in English."""
        preposition = "on" if self.phrase.noun.on else "in"
        return f"{preposition}{'to' if self.direction else ''} {self.phrase.english()}"

    def german(self) -> str:
        """The prepositional phrase in German, contracted where it must be (`im`, `ins`)."""
        text = f"{'auf' if self.phrase.noun.on else 'in'} "
        text += self.phrase.german("accusative" if self.direction else "dative")
        first_two = " ".join(text.split()[:2])
        if self.phrase.determiner is DEFINITE and first_two in CONTRACTIONS:
            text = CONTRACTIONS[first_two] + text.removeprefix(first_two)
        return text


@dataclass(frozen=True)
class Clause:
    """Subject and predicate with what belongs to them.

    Attributes:
        subject: Noun phrase or pronoun.
        verb: The verb, or None for `to be` with a predicative adjective.
        tense: Tense, or the modal that stands with the infinitive.
        object: Object in the case that the verb governs.
        recipient: Dative object of give, show, send.
        quality: Predicative adjective, with `verb=None` only; its tenses are present and past.
        negated: `is not` / `ist nicht`, with `verb=None` only.
        place: Place or direction.
        time: Adverbial of time.

    Raises:
        ValueError: If `verb` and `quality` are both given or both missing, if `negated` comes with a verb, or if `to
            be` is asked for in another tense.
    """

    subject: NounPhrase | Pronoun
    verb: Verb | None = None
    tense: Tense = "present"
    object: NounPhrase | None = None
    recipient: NounPhrase | None = None
    quality: Adjective | None = None
    negated: bool = False
    place: Place | None = None
    time: Time | None = None

    def __post_init__(self) -> None:
        if (self.verb is None) == (self.quality is None):
            raise ValueError("a clause has either a verb or a predicative adjective (quality), and not both")
        if self.verb is not None and self.negated:
            raise ValueError("negated=True is part of this grammar for predicative adjectives only")
        if self.verb is None and self.tense not in BE_FORMS:
            raise ValueError(f"tense={self.tense!r}: `to be` stands in {' or '.join(BE_FORMS)} in this grammar")

    def english(self, order: Order = "subject first") -> str:
        """The clause in English; `verb first` makes it a question."""
        auxiliary, rest = self._english_verb(question=order == "verb first")
        words = [auxiliary] if auxiliary else []
        if self.time is not None and order == "time first":
            words.append(self.time.english)
        words += [self.subject.english(), *rest]
        words += [part.english() for part in (self.recipient, self.object) if part is not None]
        if self.quality is not None:
            words.append(self.quality.english)
        if self.place is not None:
            words.append(self.place.english())
        if self.time is not None and order != "time first":
            words.append(self.time.english)
        return " ".join(words)

    def _english_verb(self, question: bool) -> tuple[str, list[str]]:
        """What stands before the subject in a question (else empty), and the predicate after it."""
        third = self.subject.agreement == 1
        if self.verb is None:
            auxiliary, rest = BE_FORMS[self.tense][self.subject.agreement], ["not"] * self.negated
        elif self.tense in ("will", "can"):
            auxiliary, rest = self.tense, [self.verb.english]
        elif question:
            auxiliary = "did" if self.tense == "past" else "does" if third else "do"
            rest = [self.tense] * (self.tense == "have to") + [self.verb.english]
        else:
            finite = {
                "past": self.verb.past,
                "present": self.verb.third if third else self.verb.english,
                "have to": f"{'has to' if third else 'have to'} {self.verb.english}",
            }
            return "", [finite[self.tense]]
        return (auxiliary, rest) if question else ("", [auxiliary, *rest])

    def german(self, order: Order = "subject first") -> str:
        """The clause in German, without conjunction and punctuation."""
        finite, bracket = self._german_verb(last=order == "verb last")
        subject = self.subject.german("nominative")
        time = self.time.german if self.time is not None else ""
        if order == "subject first":
            words = [subject, finite, time]
        elif order == "time first":
            words = [time, finite, subject]
        else:  # with the verb last, the finite form is part of the right bracket
            words = [finite, subject, time]
        return " ".join(filter(None, [*words, *self._german_middle(), bracket]))

    def _german_middle(self) -> list[str]:
        """The middle field after subject and time."""
        dative = self.verb is not None and self.verb.object_case == "dative"
        target = self.object.german("dative" if dative else "accusative") if self.object is not None else ""
        place = self.place.german() if self.place is not None else ""
        direction = self.place is not None and self.place.direction
        return [
            self.recipient.german("dative") if self.recipient is not None else "",
            target if dative else "",
            "" if direction else place,
            "" if dative else target,
            place if direction else "",
            "nicht" if self.negated else "",
            self.quality.german if self.quality is not None else "",
        ]

    def _german_verb(self, last: bool) -> tuple[str, str]:
        """Left and right bracket; with the verb last everything is in the right one."""
        column = self.subject.agreement
        if self.verb is None:
            finite, nonfinite, prefix = FINITE_FORMS["sein (past)" if self.tense == "past" else "sein"][column], "", ""
        elif self.tense == "present":
            finite, nonfinite, prefix = self.verb.present[column], "", self.verb.prefix
        elif self.tense == "past":
            finite, nonfinite, prefix = FINITE_FORMS[self.verb.auxiliary][column], self.verb.participle, ""
        else:
            finite, nonfinite, prefix = FINITE_FORMS[self.tense][column], self.verb.prefix + self.verb.infinitive, ""
        if last:
            return "", f"{nonfinite} {prefix}{finite}".lstrip()
        return finite, nonfinite or prefix

    def combinations(self) -> Iterator[Combination]:
        """The pairs and numbers of the clause; a predicative adjective counts as a pair with its subject."""
        if isinstance(self.subject, NounPhrase):
            yield from self.subject.combinations()
            if self.quality is not None:
                yield ("adjective+noun", self.quality.english, self.subject.noun.english)
        if self.verb is not None and self.object is not None:
            yield ("verb+object", self.verb.english, self.object.noun.english)
        for part in (self.object, self.recipient, self.place.phrase if self.place is not None else None):
            if part is not None:
                yield from part.combinations()
        if self.time is not None and self.time.number:
            yield number_combination(self.time.number)


def _punctuated(text: str, mark: str) -> str:
    """Initial capital and final mark."""
    return text[0].upper() + text[1:] + mark


def simple_sentence(clause: Clause, order: Order = "subject first") -> Phrase:
    """A statement, a statement with the time in front, or (`verb first`) a yes/no question."""
    mark = "?" if order == "verb first" else "."
    return Phrase(
        _punctuated(clause.english(order), mark),
        _punctuated(clause.german(order), mark),
        frozenset(clause.combinations()),
    )


def complex_sentence(
    main: Clause, conjunction: Conjunction, subordinate: Clause, *, question: bool = False, main_first: bool = True
) -> Phrase:
    """A main clause with a subordinate clause after or before it.

    `when` is `als` for what happened once in the past and `wenn` otherwise. The German comma stands always, the
    English one only after a subordinate clause that comes first.

    Raises:
        ValueError: If a question, or a `that` clause, is asked for with the subordinate clause first.
    """
    if not main_first and (question or conjunction == "that"):
        raise ValueError("questions and `that` clauses have the main clause first in this grammar")
    german_conjunction = _CONJUNCTIONS[conjunction]
    if conjunction == "when" and subordinate.tense == "past":
        german_conjunction = "als"
    english = f"{conjunction} {subordinate.english()}"
    german = f"{german_conjunction} {subordinate.german('verb last')}"
    order: Order = "verb first" if question or not main_first else "subject first"
    if main_first:
        english, german = f"{main.english(order)} {english}", f"{main.german(order)}, {german}"
    else:
        english, german = f"{english}, {main.english()}", f"{german}, {main.german(order)}"
    mark = "?" if question else "."
    combinations = frozenset([*main.combinations(), *subordinate.combinations()])
    return Phrase(_punctuated(english, mark), _punctuated(german, mark), combinations)


def numbered_time(number: int, unit: Noun, past: bool) -> Time:
    """`three weeks ago` / `vor drei Wochen`, or `in three weeks` / `in drei Wochen`."""
    english = f"{english_number(number)} {unit.english_plural}"
    german = NounPhrase(unit, BARE, plural=True, count=number).german("dative")
    if past:
        return Time(f"{english} ago", f"vor {german}", ("past",), number)
    return Time(f"in {english}", f"in {german}", PLANNED, number)
