"""Chance in the phrase grammar: which words meet, and how often each kind of phrase and sentence is drawn."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import MappingProxyType
from typing import TypeVar

from .phrase_lexicon import (
    ADJECTIVES,
    ANY_TENSE,
    BARE,
    BE_FORMS,
    DEFINITE,
    INDEFINITE,
    INTRANSITIVE_VERBS,
    NOUNS,
    PEOPLE,
    PLACES,
    PLANNED,
    POSSESSIVES,
    PRONOUNS,
    THAT_VERBS,
    THINGS,
    THIS,
    TIME_UNITS,
    TIMES,
    TRANSITIVE_VERBS,
    Adjective,
    Determiner,
    Noun,
    Pronoun,
    Tense,
    Time,
    Verb,
)
from .phrase_syntax import (
    Clause,
    Conjunction,
    NounPhrase,
    Phrase,
    Place,
    complex_sentence,
    numbered_time,
    simple_sentence,
)

MIN_WORDS, MAX_WORDS = 4, 16
"""Length of an English sentence in words; others are drawn again."""

_T = TypeVar("_T")

OBJECTS = MappingProxyType(
    {
        verb.english: tuple(
            noun for noun in NOUNS if noun.is_any_of(verb.objects) and (noun.plural or not verb.plural_object)
        )
        for verb in TRANSITIVE_VERBS
    }
)
"""Nouns that each transitive verb takes as object, by the verb's English base form."""

QUALITIES = MappingProxyType(
    {noun.english: tuple(adjective for adjective in ADJECTIVES if noun.is_any_of(adjective.kinds)) for noun in NOUNS}
)
"""Adjectives that can describe each noun, by its English singular."""

_MOODS = tuple(adjective for adjective in ADJECTIVES if adjective.kinds == "person")
_TIMES = {tense: tuple(time for time in TIMES if tense in time.tenses) for tense in ANY_TENSE}
# Drawn twice as often, so that their endings are seen as often as those of the others: neuter people and "I".
_PEOPLE_TO_DRAW = PEOPLE + tuple(noun for noun in PEOPLE if noun.gender == "neuter")
_PRONOUNS_TO_DRAW = (*PRONOUNS, PRONOUNS[0])
_ROOM = next(noun for noun in PLACES if noun.english == "room")


class _Sampler:
    """Draws words, phrases and sentences."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._detail = 1.0  # scales the chance of everything that a phrase could do without

    def chance(self, probability: float) -> bool:
        return self._rng.random() < probability

    def pick(self, options: Sequence[_T]) -> _T:
        return options[int(self._rng.random() * len(options))]

    def choose(self, weighted: Sequence[tuple[float, _T]]) -> _T:
        """Draw by weights that sum to 1."""
        point = self._rng.random()
        for weight, option in weighted:
            point -= weight
            if point < 0:
                return option
        return weighted[-1][1]

    def number(self, limit: int) -> int:
        """2 to `limit`; small numbers more often than their share."""
        low, high = self.choose(((0.2, (2, 20)), (0.3, (21, 99)), (0.5, (100, 999))))
        low, high = (2, limit) if low > limit else (low, min(high, limit))
        return low + int(self._rng.random() * (high - low + 1))

    def count(self, limit: int) -> int:
        """A number before a noun: German usage is divided on how to inflect 101, 201, …, so those are left out."""
        number = self.number(limit)
        return number + 1 if number % 100 == 1 else number

    def adjective(self, noun: Noun, probability: float) -> Adjective | None:
        return self.pick(QUALITIES[noun.english]) if self.chance(probability * self._detail) else None

    def person(self, avoid: Iterable[Noun] = ()) -> NounPhrase:
        """Somebody: a noun phrase about a person who is not in `avoid`."""
        noun = self.pick([noun for noun in _PEOPLE_TO_DRAW if noun not in avoid])
        plural = self.chance(0.22)
        if noun.is_any_of("relative"):  # one's own, as a rule; "this aunt" would be odd
            determiner = self.choose(((0.7, self.pick(POSSESSIVES)), (0.3, DEFINITE)))
        elif noun.is_any_of("own"):
            mine = self.pick(POSSESSIVES)
            determiner = self.choose(((0.2, mine), (0.4, DEFINITE), (0.25, INDEFINITE), (0.15, THIS)))
        else:
            determiner = self.choose(((0.5, DEFINITE), (0.3, INDEFINITE), (0.2, THIS)))
        count = None
        if plural and (determiner is INDEFINITE or self.chance(0.2)):
            determiner, count = (BARE if determiner is INDEFINITE else determiner), self.count(12)
        return NounPhrase(noun, determiner, self.adjective(noun, 0.35), plural, count)

    def owner(self, avoid: Iterable[Noun]) -> NounPhrase:
        """A possessor: definite or possessive, singular or plural."""
        noun = self.pick([noun for noun in _PEOPLE_TO_DRAW if noun not in avoid])
        own = noun.is_any_of("relative own") and self.chance(0.5)
        determiner = self.pick(POSSESSIVES) if own else DEFINITE
        return NounPhrase(noun, determiner, self.adjective(noun, 0.3), self.chance(0.25))

    def thing(self, verb: Verb, avoid: Iterable[Noun]) -> NounPhrase:
        """The object of `verb`."""
        noun = self.pick(OBJECTS[verb.english])
        if noun.is_any_of("person"):
            return self.person(avoid)
        adjective = self.adjective(noun, 0.35)
        if self.chance(0.08 * self._detail):
            plural = bool(noun.plural) and self.chance(0.2)
            return NounPhrase(noun, DEFINITE, adjective, plural, possessor=self.owner(avoid))
        if noun.plural and (verb.plural_object or self.chance(0.55 if verb.many else 0.3)):
            determiner = self.choose(((0.4, BARE), (0.3, DEFINITE), (0.18, self.pick(POSSESSIVES)), (0.12, THIS)))
            counted = self.chance(0.8 if verb.many else 0.25) and noun not in PLACES
            count = self.count(999 if verb.many else 12) if counted else None
            return NounPhrase(noun, determiner, adjective, True, count)
        return NounPhrase(noun, self.singular_determiner(noun), adjective)

    def singular_determiner(self, noun: Noun) -> Determiner:
        indefinite = INDEFINITE if noun.plural else BARE
        return self.choose(((0.35, DEFINITE), (0.35, indefinite), (0.18, self.pick(POSSESSIVES)), (0.12, THIS)))

    def place(self, direction: bool) -> Place:
        if self.chance(0.3):
            return Place(NounPhrase(_ROOM, BARE, label=self.number(999)), direction)
        noun = self.pick(PLACES)
        determiner = self.choose(((0.7, DEFINITE), (0.18, self.pick(POSSESSIVES)), (0.12, THIS)))
        return Place(NounPhrase(noun, determiner, self.adjective(noun, 0.3)), direction)

    def time(self, tense: Tense, numbered: float = 0.3) -> Time:
        if tense != "present" and self.chance(numbered):
            unit = self.pick(TIME_UNITS)
            return numbered_time(self.count(999 if unit is TIME_UNITS[0] else 99), unit, past=tense == "past")
        return self.pick(_TIMES[tense])

    def subject(self, pronouns: float = 0.25) -> NounPhrase | Pronoun:
        return self.pick(_PRONOUNS_TO_DRAW) if self.chance(pronouns) else self.person()

    def resumed(self, first: NounPhrase | Pronoun) -> NounPhrase | Pronoun:
        """Subject of a second clause: often a pronoun for the first clause's subject."""
        if self.chance(0.5):
            if isinstance(first, Pronoun):
                return first
            word = "they" if first.plural else first.noun.pronoun
            if word:
                return next(pronoun for pronoun in PRONOUNS if pronoun.word == word)
        return self.person([first.noun] if isinstance(first, NounPhrase) else ())

    def tense(self) -> Tense:
        return self.choose(((0.36, "present"), (0.32, "past"), (0.32, self.pick(PLANNED))))

    def quality_clause(self, subject: NounPhrase | Pronoun, tense: Tense, timed: bool) -> Clause:
        """`the man is (not) tired`, with a time only for moods: nobody is young on Monday."""
        noun = self.pick(PEOPLE)
        negated = self.chance(0.2)
        if isinstance(subject, NounPhrase):
            noun = subject.noun
            # An adjective before the noun might contradict the one after the verb; "a man is not" is "kein Mann ist".
            subject = NounPhrase(noun, subject.determiner, None, subject.plural, subject.count)
            negated = negated and subject.determiner not in (INDEFINITE, BARE)
        if not timed:
            return Clause(subject, tense=tense, quality=self.pick(QUALITIES[noun.english]), negated=negated)
        time = self.time(tense)
        while time.repeated:
            time = self.time(tense)
        return Clause(subject, tense=tense, quality=self.pick(_MOODS), negated=negated, time=time)

    def placing(self, verb: Verb) -> float:
        """How often a verb has a place: always where its meaning needs one (to go), seldom after an object."""
        if verb.place == "into":
            return self._detail * 0.6 if verb.objects else 1
        return self._detail * (0.2 if verb.objects else 0.6)

    def action_clause(self, subject: NounPhrase | Pronoun, tense: Tense, timed: bool) -> Clause:
        """A clause with a verb, its objects and perhaps a place."""
        avoid = [subject.noun] if isinstance(subject, NounPhrase) else []
        verb = self.pick(TRANSITIVE_VERBS if self.chance(0.86) else INTRANSITIVE_VERBS)
        while verb.hides_tense and subject.agreement != 1 and tense in BE_FORMS:
            verb = self.pick(TRANSITIVE_VERBS)
        recipient = self.person(avoid) if verb.recipient else None
        if recipient is not None:
            avoid.append(recipient.noun)
        target = self.thing(verb, avoid) if verb.objects else None
        place = None
        if verb.place and self.chance(self.placing(verb)):
            place = self.place(direction=verb.place == "into")
        # "in room two hundred forty days ago" would be two readings
        numbered = 0 if place is not None and place.phrase.label is not None else 0.3
        time = self.time(tense, numbered) if timed else None
        return Clause(subject, verb, tense, target, recipient, place=place, time=time)

    def clause(self, subject: NounPhrase | Pronoun, tense: Tense, timed: float, quality: float = 0.1) -> Clause:
        if tense in BE_FORMS and self.chance(quality):
            return self.quality_clause(subject, tense, self.chance(timed))
        return self.action_clause(subject, tense, self.chance(timed))

    def statement(self) -> Phrase:
        if self.chance(0.06):  # the only place where a thing is the subject
            noun = self.pick(THINGS)
            plural = bool(noun.plural) and self.chance(0.3)
            determiner = self.choose(((0.5, DEFINITE), (0.25, self.pick(POSSESSIVES)), (0.25, THIS)))
            return simple_sentence(
                self.quality_clause(NounPhrase(noun, determiner, plural=plural), self.pick(tuple(BE_FORMS)), False)
            )
        return simple_sentence(self.clause(self.subject(), self.tense(), timed=0.35))

    def fronted_time(self) -> Phrase:
        return simple_sentence(self.clause(self.subject(), self.tense(), timed=1), "time first")

    def question(self) -> Phrase:
        return simple_sentence(self.clause(self.subject(), self.tense(), timed=0.3), "verb first")

    def that_clause(self) -> Phrase:
        main = Clause(self.subject(), self.pick(THAT_VERBS))
        subordinate = self.clause(self.resumed(main.subject), self.tense(), timed=0.2)
        return complex_sentence(main, "that", subordinate, question=self.chance(0.2))

    def subordinate_clause(self) -> Phrase:
        conjunction: Conjunction = self.pick(("because", "when", "although", "before"))
        reason = conjunction in ("because", "although")
        main_tense: Tense = self.tense() if reason else self.pick(("present", "past"))
        tense: Tense = "past" if main_tense == "past" else "present"
        main_first = self.chance(0.6)
        first = self.subject(0.2)
        second = self.resumed(first)
        if not main_first:
            first, second = second, first
        main = self.clause(first, main_tense, timed=0.12, quality=0)
        subordinate = main
        while subordinate.verb is main.verb:  # the same action twice would hardly be a reason or a time
            subordinate = self.clause(second, tense, timed=0.08 if reason else 0, quality=0.4 if reason else 0)
        return complex_sentence(main, conjunction, subordinate, main_first=main_first)

    def phrase(self) -> Phrase:
        """One sentence pair within the limits of length."""
        kinds: tuple[tuple[float, tuple[Callable[[], Phrase], float]], ...] = (
            (0.32, (self.statement, 0.9)),
            (0.2, (self.fronted_time, 0.9)),
            (0.16, (self.question, 0.9)),
            (0.12, (self.that_clause, 0.5)),
            (0.2, (self.subordinate_clause, 0.35)),
        )
        while True:
            make, self._detail = self.choose(kinds)
            phrase = make()
            if MIN_WORDS <= len(phrase.source.split()) <= MAX_WORDS:
                return phrase


def phrases(rng: random.Random) -> Iterator[Phrase]:
    """An endless stream of sentence pairs, of which some repeat; nothing is held out.

    Args:
        rng: Source of chance; only its `random()` is called, whose sequence for a seed is the same everywhere.

    Yields:
        Sentence pairs with the combinations they are made of.
    """
    sampler = _Sampler(rng)
    while True:
        yield sampler.phrase()
