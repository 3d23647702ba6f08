"""Pairs of text with everything that a line reader may trip over, and what a dataset holds."""

PAIRS = [
    ("A dog.", "Ein Hund."),
    ("Two\u2028lines, one pair", 'Zwei\x85Zeilen, "ein" Paar'),
    ("form\x0cfeed\x0b and \rreturn", "  Leerzeichen  "),
    ("Straße 👩‍👩‍👧‍👦", "naïve e\u0301 \ufeff"),
]


def pairs_of(dataset):
    return [(row["source"], row["target"]) for row in dataset]
