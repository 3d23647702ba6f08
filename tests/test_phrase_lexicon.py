"""The lexicon of the phrase grammar: its size, its unambiguous forms, and number words against known values."""

import pytest

from vanilla_transformer import phrase_grammar
from vanilla_transformer.phrase_lexicon import (
    ADJECTIVES,
    NOUNS,
    TIME_UNITS,
    TIMES,
    VERBS,
    english_number,
    english_number_parts,
    german_number,
    german_number_parts,
)


@pytest.mark.parametrize(
    ("number", "english", "german"),
    [
        (1, "one", "eins"),
        (2, "two", "zwei"),
        (11, "eleven", "elf"),
        (12, "twelve", "zwölf"),
        (16, "sixteen", "sechzehn"),
        (17, "seventeen", "siebzehn"),
        (20, "twenty", "zwanzig"),
        (21, "twenty-one", "einundzwanzig"),
        (30, "thirty", "dreißig"),
        (40, "forty", "vierzig"),
        (66, "sixty-six", "sechsundsechzig"),
        (77, "seventy-seven", "siebenundsiebzig"),
        (99, "ninety-nine", "neunundneunzig"),
        (100, "one hundred", "einhundert"),
        (101, "one hundred and one", "einhunderteins"),
        (117, "one hundred and seventeen", "einhundertsiebzehn"),
        (247, "two hundred and forty-seven", "zweihundertsiebenundvierzig"),
        (380, "three hundred and eighty", "dreihundertachtzig"),
        (531, "five hundred and thirty-one", "fünfhunderteinunddreißig"),
        (700, "seven hundred", "siebenhundert"),
        (999, "nine hundred and ninety-nine", "neunhundertneunundneunzig"),
    ],
)
def test_number_words(number, english, german):
    assert (english_number(number), german_number(number)) == (english, german)


def test_number_words_are_all_different():
    assert len({english_number(n) for n in range(1, 1000)}) == 999
    assert len({german_number(n) for n in range(1, 1000)}) == 999


@pytest.mark.parametrize("spell", [english_number, english_number_parts, german_number, german_number_parts])
@pytest.mark.parametrize("number", [-1, 0, 1000])
def test_numbers_outside_the_tables_are_refused(spell, number):
    with pytest.raises(ValueError, match=f"number={number}: .*from 1 to 999"):
        spell(number)


def test_lexicon_has_the_stated_size():
    words = [*NOUNS, *TIME_UNITS, *ADJECTIVES, *VERBS]
    assert len({(type(word), word.english) for word in words}) == len(words)
    others = {"today", "yesterday", "tomorrow", "Monday", "Sunday", "morning", "evening", "winter", "year"}
    assert others <= set(" ".join(time.english for time in TIMES).split())
    assert 70 <= len(words) + len(others) <= 150
    assert f"in {len(words) + len(others)} content words" in phrase_grammar.__doc__.replace("\n", " ")


def test_no_two_words_of_the_lexicon_look_alike():
    # A form that two verbs shared would make a sentence ambiguous.
    forms = [(form, verb.english) for verb in VERBS for form in {verb.english, verb.third, verb.past}]
    assert len({form for form, _ in forms}) == len(forms)
