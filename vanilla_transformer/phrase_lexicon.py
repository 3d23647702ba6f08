"""Words and paradigms of the embedded English-German phrase grammar.

The tables are meant to be read by somebody who teaches German. Endings are looked up, never guessed from the
spelling: articles and adjectives in the paradigms (strong, weak and mixed declension), nouns and verbs by the
principal parts in their row. The one rule applied to spelling is the regular dative plural: `-n` is added unless
the plural already ends in `-n` or `-s`.

Conventions, so that every English word has exactly one German counterpart:

* English is British (`neighbour`, `two hundred and forty-seven`).
* Words for people that have two German forms stand for the masculine one (`neighbour` is `der Nachbar`).
* Numbers are one word and begin with `ein` (`einhundertsieben`, `zweihundertsiebenundvierzig`).
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

Case = Literal["nominative", "accusative", "dative", "genitive"]
Gender = Literal["masculine", "feminine", "neuter"]
Tense = Literal["present", "past", "will", "can", "have to"]

Paradigm = dict[Case, tuple[str, str, str, str]]
"""Forms by case, then in the order masculine, feminine, neuter, plural."""

_COLUMN: dict[Gender, int] = {"masculine": 0, "feminine": 1, "neuter": 2}
_PLURAL_COLUMN = 3

# ----------------------------------------------------------------------------------------- paradigms

DEFINITE_ARTICLE: Paradigm = {
    "nominative": ("der", "die", "das", "die"),
    "accusative": ("den", "die", "das", "die"),
    "dative": ("dem", "der", "dem", "den"),
    "genitive": ("des", "der", "des", "der"),
}
DIESER_ENDINGS: Paradigm = {  # dieser, diese, dieses, diese
    "nominative": ("er", "e", "es", "e"),
    "accusative": ("en", "e", "es", "e"),
    "dative": ("em", "er", "em", "en"),
    "genitive": ("es", "er", "es", "er"),
}
EIN_ENDINGS: Paradigm = {  # ein and the possessives; ein itself has no plural
    "nominative": ("", "e", "", "e"),
    "accusative": ("en", "e", "", "e"),
    "dative": ("em", "er", "em", "en"),
    "genitive": ("es", "er", "es", "er"),
}
NO_ARTICLE: Paradigm = {
    "nominative": ("", "", "", ""),
    "accusative": ("", "", "", ""),
    "dative": ("", "", "", ""),
    "genitive": ("", "", "", ""),
}

STRONG_DECLENSION: Paradigm = {  # no article, or a bare number: kaltes Wasser, drei alte Bücher
    "nominative": ("er", "e", "es", "e"),
    "accusative": ("en", "e", "es", "e"),
    "dative": ("em", "er", "em", "en"),
    "genitive": ("en", "er", "en", "er"),
}
WEAK_DECLENSION: Paradigm = {  # after der and dieser: das alte Buch
    "nominative": ("e", "e", "e", "en"),
    "accusative": ("en", "e", "e", "en"),
    "dative": ("en", "en", "en", "en"),
    "genitive": ("en", "en", "en", "en"),
}
MIXED_DECLENSION: Paradigm = {  # after ein and the possessives: ein altes Buch
    "nominative": ("er", "e", "es", "en"),
    "accusative": ("en", "e", "es", "en"),
    "dative": ("en", "en", "en", "en"),
    "genitive": ("en", "en", "en", "en"),
}

CONTRACTIONS = MappingProxyType({"in dem": "im", "in das": "ins"})
"""Preposition and definite article that German writes as one word."""

# Finite forms in the order ich, er / sie / es, wir / sie.
FINITE_FORMS = MappingProxyType(
    {
        "haben": ("habe", "hat", "haben"),
        "sein": ("bin", "ist", "sind"),
        "sein (past)": ("war", "war", "waren"),
        "will": ("werde", "wird", "werden"),
        "can": ("kann", "kann", "können"),
        "have to": ("muss", "muss", "müssen"),
    }
)
BE_FORMS: MappingProxyType[Tense, tuple[str, str, str]] = MappingProxyType(
    {"present": ("am", "is", "are"), "past": ("was", "was", "were")}
)


# --------------------------------------------------------------------------------- classes of words


@dataclass(frozen=True)
class Determiner:
    """An article, demonstrative or possessive with the adjective declension that follows it.

    Attributes:
        english: Form before a singular noun.
        english_plural: Form before a plural noun.
        german: German stem, to which the ending is added.
        endings: Endings by case and gender (whole words where the stem is empty).
        declension: Endings of an adjective after this determiner.
    """

    english: str
    english_plural: str
    german: str
    endings: Paradigm
    declension: Paradigm

    def declined(self, case: Case, noun: Noun, plural: bool) -> str:
        """The German form before `noun`; empty where no article is used."""
        return self.german + self.endings[case][noun.column(plural)]


@dataclass(frozen=True)
class Noun:
    """A noun with its principal parts.

    Attributes:
        english: Singular.
        english_plural: Plural; empty for mass nouns (bread, milk).
        gender: Grammatical gender of the German noun.
        german: Nominative singular.
        genitive: Genitive singular.
        plural: Nominative plural; empty for mass nouns.
        kinds: Classes of meaning that verbs, adjectives and determiners select by, separated by spaces.
        n_declension: Weak noun: every case but the nominative singular has the genitive's form (den Jungen).
        pronoun: `he` or `she` for people, empty where English could not choose.
        on: The place is stood on (`on the balcony`, `auf`), not in.
    """

    english: str
    english_plural: str
    gender: Gender
    german: str
    genitive: str
    plural: str
    kinds: str
    n_declension: bool = False
    pronoun: str = ""
    on: bool = False

    def column(self, plural: bool) -> int:
        """Column of this noun in a paradigm."""
        return _PLURAL_COLUMN if plural else _COLUMN[self.gender]

    def is_any_of(self, kinds: str) -> bool:
        """Whether the noun belongs to at least one of the classes in `kinds`."""
        return not set(self.kinds.split()).isdisjoint(kinds.split())

    def declined(self, case: Case, plural: bool) -> str:
        """The German noun in one case and number."""
        if plural:
            return self.plural + "n" if case == "dative" and self.plural[-1] not in "ns" else self.plural
        if case == "genitive" or (self.n_declension and case != "nominative"):
            return self.genitive
        return self.german


@dataclass(frozen=True)
class Adjective:
    """An adjective: predicative form, stem of the declined forms, and what it can describe."""

    english: str
    german: str
    stem: str
    kinds: str

    def declined(self, case: Case, noun: Noun, plural: bool, declension: Paradigm) -> str:
        """The German form before `noun`."""
        return self.stem + declension[case][noun.column(plural)]


@dataclass(frozen=True)
class Verb:
    """A verb with its principal parts in both languages.

    Attributes:
        english: Base form, with the particle (`turn on`).
        third: Third person singular present.
        past: Simple past.
        prefix: Separable prefix of the German verb, or empty.
        infinitive: German infinitive without the prefix; also the present plural.
        ich: First person singular present without the prefix.
        er: Third person singular present without the prefix.
        participle: Past participle, prefix included.
        objects: Kinds of nouns it takes as object; empty for intransitive verbs.
        object_case: Case of the object.
        auxiliary: Auxiliary of the perfect tense.
        recipient: Takes a person in the dative before the object (give, show, send).
        many: Makes sense with hundreds of things (buy, count).
        plural_object: Needs several things (count).
        place: `in` where it happens, `into` where it leads, empty if neither is natural.
    """

    english: str
    third: str
    past: str
    prefix: str
    infinitive: str
    ich: str
    er: str
    participle: str
    objects: str = ""
    object_case: Case = "accusative"
    auxiliary: Literal["haben", "sein"] = "haben"
    recipient: bool = False
    many: bool = False
    plural_object: bool = False
    place: Literal["in", "into", ""] = "in"

    @property
    def present(self) -> tuple[str, str, str]:
        """Present forms for ich, er / sie / es and wir / sie, without the prefix."""
        return self.ich, self.er, self.infinitive

    @property
    def hides_tense(self) -> bool:
        """Whether present and past look alike in English outside the third person (`they read`)."""
        return self.past == self.english


@dataclass(frozen=True)
class Time:
    """An adverbial of time, ready inflected.

    Attributes:
        english: English phrase.
        german: German phrase.
        tenses: Tenses it goes with.
        number: The number it contains (`in three weeks`), 0 if none.
        repeated: Says how often, not when (`every day`), which would not go with a passing state.
    """

    english: str
    german: str
    tenses: tuple[Tense, ...]
    number: int = 0
    repeated: bool = False


@dataclass(frozen=True)
class Pronoun:
    """A personal pronoun used as subject; `agreement` is the column of `FINITE_FORMS`."""

    word: str
    german_word: str
    agreement: int

    def english(self) -> str:
        """The English subject form."""
        return self.word

    def german(self, case: Case = "nominative") -> str:
        """The German subject form; other cases are not part of this grammar."""
        if case != "nominative":
            raise ValueError(f"case={case!r}: this grammar uses pronouns as subjects (nominative) only")
        return self.german_word


# ------------------------------------------------------------------------------------------ lexicon

DEFINITE = Determiner("the", "the", "", DEFINITE_ARTICLE, WEAK_DECLENSION)
INDEFINITE = Determiner("a", "", "ein", EIN_ENDINGS, MIXED_DECLENSION)
BARE = Determiner("", "", "", NO_ARTICLE, STRONG_DECLENSION)
THIS = Determiner("this", "these", "dies", DIESER_ENDINGS, WEAK_DECLENSION)
POSSESSIVES = (
    Determiner("my", "my", "mein", EIN_ENDINGS, MIXED_DECLENSION),
    Determiner("our", "our", "unser", EIN_ENDINGS, MIXED_DECLENSION),
    Determiner("his", "his", "sein", EIN_ENDINGS, MIXED_DECLENSION),
    Determiner("her", "her", "ihr", EIN_ENDINGS, MIXED_DECLENSION),
    Determiner("their", "their", "ihr", EIN_ENDINGS, MIXED_DECLENSION),
)

PRONOUNS = (
    Pronoun("I", "ich", 0),
    Pronoun("he", "er", 1),
    Pronoun("she", "sie", 1),
    Pronoun("we", "wir", 2),
    Pronoun("they", "sie", 2),
)

M: Gender = "masculine"
F: Gender = "feminine"
N: Gender = "neuter"

PEOPLE = (
    Noun("man", "men", M, "Mann", "Mannes", "Männer", "person adult", pronoun="he"),
    Noun("boy", "boys", M, "Junge", "Jungen", "Jungen", "person", n_declension=True, pronoun="he"),
    Noun("neighbour", "neighbours", M, "Nachbar", "Nachbarn", "Nachbarn", "person adult own", n_declension=True),
    Noun("doctor", "doctors", M, "Arzt", "Arztes", "Ärzte", "person adult own"),
    Noun("guest", "guests", M, "Gast", "Gastes", "Gäste", "person adult own"),
    Noun("uncle", "uncles", M, "Onkel", "Onkels", "Onkel", "person adult relative", pronoun="he"),
    Noun("brother", "brothers", M, "Bruder", "Bruders", "Brüder", "person adult relative", pronoun="he"),
    Noun("woman", "women", F, "Frau", "Frau", "Frauen", "person adult", pronoun="she"),
    Noun("waitress", "waitresses", F, "Kellnerin", "Kellnerin", "Kellnerinnen", "person adult", pronoun="she"),
    Noun("aunt", "aunts", F, "Tante", "Tante", "Tanten", "person adult relative", pronoun="she"),
    Noun("sister", "sisters", F, "Schwester", "Schwester", "Schwestern", "person adult relative", pronoun="she"),
    Noun("daughter", "daughters", F, "Tochter", "Tochter", "Töchter", "person adult relative", pronoun="she"),
    Noun("child", "children", N, "Kind", "Kindes", "Kinder", "person own"),
    Noun("girl", "girls", N, "Mädchen", "Mädchens", "Mädchen", "person"),
)

THINGS = (
    Noun("apple", "apples", M, "Apfel", "Apfels", "Äpfel", "food piece"),
    Noun("cake", "cakes", M, "Kuchen", "Kuchens", "Kuchen", "food piece"),
    Noun("potato", "potatoes", F, "Kartoffel", "Kartoffel", "Kartoffeln", "food piece cooked"),
    Noun("egg", "eggs", N, "Ei", "Eies", "Eier", "food piece cooked"),
    Noun("cheese", "", M, "Käse", "Käses", "", "food"),
    Noun("soup", "", F, "Suppe", "Suppe", "", "food cooked"),
    Noun("bread", "", N, "Brot", "Brotes", "", "food"),
    Noun("tea", "", M, "Tee", "Tees", "", "drink"),
    Noun("coffee", "", M, "Kaffee", "Kaffees", "", "drink"),
    Noun("milk", "", F, "Milch", "Milch", "", "drink"),
    Noun("water", "", N, "Wasser", "Wassers", "", "drink"),
    Noun("letter", "letters", M, "Brief", "Briefes", "Briefe", "text written paper"),
    Noun("newspaper", "newspapers", F, "Zeitung", "Zeitung", "Zeitungen", "text paper print"),
    Noun("story", "stories", F, "Geschichte", "Geschichte", "Geschichten", "text written"),
    Noun("book", "books", N, "Buch", "Buches", "Bücher", "text written paper print"),
    Noun("coat", "coats", M, "Mantel", "Mantels", "Mäntel", "clothes robe"),
    Noun("jacket", "jackets", F, "Jacke", "Jacke", "Jacken", "clothes"),
    Noun("shirt", "shirts", N, "Hemd", "Hemdes", "Hemden", "clothes"),
    Noun("dress", "dresses", N, "Kleid", "Kleides", "Kleider", "clothes robe"),
    Noun("chair", "chairs", M, "Stuhl", "Stuhles", "Stühle", "goods"),
    Noun("key", "keys", M, "Schlüssel", "Schlüssels", "Schlüssel", "goods"),
    Noun("suitcase", "suitcases", M, "Koffer", "Koffers", "Koffer", "goods openable"),
    Noun("cup", "cups", F, "Tasse", "Tasse", "Tassen", "goods"),
    Noun("bottle", "bottles", F, "Flasche", "Flasche", "Flaschen", "goods openable"),
    Noun("box", "boxes", F, "Kiste", "Kiste", "Kisten", "goods openable"),
    Noun("picture", "pictures", N, "Bild", "Bildes", "Bilder", "goods"),
    Noun("computer", "computers", M, "Computer", "Computers", "Computer", "device"),
    Noun("lamp", "lamps", F, "Lampe", "Lampe", "Lampen", "device"),
    Noun("machine", "machines", F, "Maschine", "Maschine", "Maschinen", "device"),
    Noun("radio", "radios", N, "Radio", "Radios", "Radios", "device"),
    Noun("door", "doors", F, "Tür", "Tür", "Türen", "opening openable"),
    Noun("window", "windows", N, "Fenster", "Fensters", "Fenster", "opening openable"),
    Noun("dog", "dogs", M, "Hund", "Hundes", "Hunde", "animal"),
    Noun("cat", "cats", F, "Katze", "Katze", "Katzen", "animal"),
    Noun("horse", "horses", N, "Pferd", "Pferdes", "Pferde", "animal"),
)

PLACES = (
    Noun("garden", "gardens", M, "Garten", "Gartens", "Gärten", "place"),
    Noun("cellar", "cellars", M, "Keller", "Kellers", "Keller", "place untidy"),
    Noun("kitchen", "kitchens", F, "Küche", "Küche", "Küchen", "place untidy"),
    Noun("house", "houses", N, "Haus", "Hauses", "Häuser", "place untidy"),
    Noun("office", "offices", N, "Büro", "Büros", "Büros", "place untidy"),
    Noun("room", "rooms", N, "Zimmer", "Zimmers", "Zimmer", "place untidy"),
    Noun("balcony", "balconies", M, "Balkon", "Balkons", "Balkone", "place untidy", on=True),
    Noun("terrace", "terraces", F, "Terrasse", "Terrasse", "Terrassen", "place", on=True),
)

NOUNS = PEOPLE + THINGS + PLACES

ADJECTIVES = (
    Adjective("old", "alt", "alt", "adult"),
    Adjective("young", "jung", "jung", "adult"),
    Adjective("tired", "müde", "müd", "person"),
    Adjective("friendly", "freundlich", "freundlich", "person"),
    Adjective("hungry", "hungrig", "hungrig", "person"),
    Adjective("happy", "glücklich", "glücklich", "person"),
    Adjective("sad", "traurig", "traurig", "person"),
    Adjective("rich", "reich", "reich", "adult"),
    Adjective("red", "rot", "rot", "clothes goods device opening"),
    Adjective("green", "grün", "grün", "clothes goods device opening"),
    Adjective("new", "neu", "neu", "text clothes goods device opening"),
    Adjective("cheap", "billig", "billig", "food drink clothes goods device"),
    Adjective("expensive", "teuer", "teur", "food drink clothes goods device"),
    Adjective("small", "klein", "klein", "piece goods device opening animal place"),
    Adjective("big", "groß", "groß", "piece goods device opening animal place"),
    Adjective("beautiful", "schön", "schön", "clothes goods animal place text"),
    Adjective("dirty", "schmutzig", "schmutzig", "clothes goods opening animal place"),
    Adjective("fresh", "frisch", "frisch", "food drink"),
    Adjective("cold", "kalt", "kalt", "food drink"),
    Adjective("warm", "warm", "warm", "food drink clothes"),
    Adjective("dark", "dunkel", "dunkl", "clothes place"),
    Adjective("long", "lang", "lang", "text robe"),
    Adjective("interesting", "interessant", "interessant", "text"),
)

_WARES = "food drink print clothes goods device"

TRANSITIVE_VERBS = (
    Verb("buy", "buys", "bought", "", "kaufen", "kaufe", "kauft", "gekauft", _WARES + " animal", many=True),
    Verb("sell", "sells", "sold", "", "verkaufen", "verkaufe", "verkauft", "verkauft", _WARES + " animal", many=True),
    Verb("order", "orders", "ordered", "", "bestellen", "bestelle", "bestellt", "bestellt", _WARES, many=True),
    Verb("find", "finds", "found", "", "finden", "finde", "findet", "gefunden", "goods clothes animal", many=True),
    Verb(
        "count", "counts", "counted", "", "zählen", "zähle", "zählt", "gezählt",
        "piece goods animal", many=True, plural_object=True,
    ),
    Verb("see", "sees", "saw", "", "sehen", "sehe", "sieht", "gesehen", "person animal device"),
    Verb("read", "reads", "read", "", "lesen", "lese", "liest", "gelesen", "text"),
    Verb("write", "writes", "wrote", "", "schreiben", "schreibe", "schreibt", "geschrieben", "written"),
    Verb("eat", "eats", "ate", "", "essen", "esse", "isst", "gegessen", "food"),
    Verb("drink", "drinks", "drank", "", "trinken", "trinke", "trinkt", "getrunken", "drink"),
    Verb("cook", "cooks", "cooked", "", "kochen", "koche", "kocht", "gekocht", "cooked"),
    Verb("wash", "washes", "washed", "", "waschen", "wasche", "wäscht", "gewaschen", "clothes animal"),
    Verb("carry", "carries", "carried", "", "tragen", "trage", "trägt", "getragen", "goods device", place="into"),
    Verb("bring", "brings", "brought", "", "bringen", "bringe", "bringt", "gebracht", "goods food", place="into"),
    Verb("feed", "feeds", "fed", "", "füttern", "füttere", "füttert", "gefüttert", "animal", place=""),
    Verb("visit", "visits", "visited", "", "besuchen", "besuche", "besucht", "besucht", "person", place=""),
    Verb("help", "helps", "helped", "", "helfen", "helfe", "hilft", "geholfen", "person", "dative"),
    Verb("thank", "thanks", "thanked", "", "danken", "danke", "dankt", "gedankt", "person", "dative", place=""),
    Verb("call", "calls", "called", "an", "rufen", "rufe", "ruft", "angerufen", "person", place=""),
    Verb("invite", "invites", "invited", "ein", "laden", "lade", "lädt", "eingeladen", "person", place=""),
    Verb("tidy up", "tidies up", "tidied up", "auf", "räumen", "räume", "räumt", "aufgeräumt", "untidy", place=""),
    Verb("turn on", "turns on", "turned on", "ein", "schalten", "schalte", "schaltet", "eingeschaltet", "device"),
    Verb("turn off", "turns off", "turned off", "aus", "schalten", "schalte", "schaltet", "ausgeschaltet", "device"),
    Verb("open", "opens", "opened", "auf", "machen", "mache", "macht", "aufgemacht", "openable"),
    Verb("close", "closes", "closed", "zu", "machen", "mache", "macht", "zugemacht", "openable"),
    Verb("put on", "puts on", "put on", "an", "ziehen", "ziehe", "zieht", "angezogen", "clothes"),
    Verb(
        "throw away", "throws away", "threw away", "weg", "werfen", "werfe", "wirft", "weggeworfen",
        "goods food paper clothes", place="",
    ),
    Verb("give", "gives", "gave", "", "geben", "gebe", "gibt", "gegeben", "goods food paper", recipient=True),
    Verb("show", "shows", "showed", "", "zeigen", "zeige", "zeigt", "gezeigt", "goods clothes animal", recipient=True),
)  # fmt: skip

INTRANSITIVE_VERBS = (
    Verb("sleep", "sleeps", "slept", "", "schlafen", "schlafe", "schläft", "geschlafen"),
    Verb("work", "works", "worked", "", "arbeiten", "arbeite", "arbeitet", "gearbeitet"),
    Verb("wait", "waits", "waited", "", "warten", "warte", "wartet", "gewartet"),
    Verb("go", "goes", "went", "", "gehen", "gehe", "geht", "gegangen", auxiliary="sein", place="into"),
    Verb("arrive", "arrives", "arrived", "an", "kommen", "komme", "kommt", "angekommen", auxiliary="sein", place=""),
    Verb("get up", "gets up", "got up", "auf", "stehen", "stehe", "steht", "aufgestanden", auxiliary="sein", place=""),
)

# Present only: after a past `said that` English shifts the tense of the clause and German need not.
THAT_VERBS = (
    Verb("know", "knows", "knew", "", "wissen", "weiß", "weiß", "gewusst", place=""),
    Verb("think", "thinks", "thought", "", "glauben", "glaube", "glaubt", "geglaubt", place=""),
    Verb("say", "says", "said", "", "sagen", "sage", "sagt", "gesagt", place=""),
    Verb("hope", "hopes", "hoped", "", "hoffen", "hoffe", "hofft", "gehofft", place=""),
)

VERBS = TRANSITIVE_VERBS + INTRANSITIVE_VERBS + THAT_VERBS

PLANNED: tuple[Tense, ...] = ("will", "can", "have to")
ANY_TENSE: tuple[Tense, ...] = ("present", "past", *PLANNED)

TIMES = (
    Time("today", "heute", ANY_TENSE),
    Time("yesterday", "gestern", ("past",)),
    Time("tomorrow", "morgen", PLANNED),
    Time("on Monday", "am Montag", ANY_TENSE),
    Time("on Sunday", "am Sonntag", ANY_TENSE),
    Time("in the morning", "am Morgen", ANY_TENSE),
    Time("in the evening", "am Abend", ANY_TENSE),
    Time("in winter", "im Winter", ANY_TENSE),
    Time("every day", "jeden Tag", ("present",), repeated=True),
    Time("every week", "jede Woche", ("present",), repeated=True),
    Time("last week", "letzte Woche", ("past",)),
    Time("last year", "letztes Jahr", ("past",)),
    Time("next week", "nächste Woche", PLANNED),
    Time("next year", "nächstes Jahr", PLANNED),
)
TIME_UNITS = (
    Noun("day", "days", M, "Tag", "Tages", "Tage", "unit"),
    Noun("week", "weeks", F, "Woche", "Woche", "Wochen", "unit"),
)

# ------------------------------------------------------------------------------------- number words

_ENGLISH_SMALL = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
)  # fmt: skip
_ENGLISH_TENS = ("", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
_GERMAN_SMALL = (
    "null", "eins", "zwei", "drei", "vier", "fünf", "sechs", "sieben", "acht", "neun", "zehn", "elf", "zwölf",
    "dreizehn", "vierzehn", "fünfzehn", "sechzehn", "siebzehn", "achtzehn", "neunzehn",
)  # fmt: skip
_GERMAN_TENS = ("", "", "zwanzig", "dreißig", "vierzig", "fünfzig", "sechzig", "siebzig", "achtzig", "neunzig")


def _check_number(number: int) -> None:
    """Refuse numbers that the tables do not cover."""
    if not 1 <= number <= 999:
        raise ValueError(f"number={number}: this grammar spells the numbers from 1 to 999")


def english_number_parts(number: int) -> tuple[str, str]:
    """Hundreds and rest of an English number, either of them possibly empty.

    Args:
        number: 1 to 999.

    Returns:
        For example `("two hundred", "forty-seven")`, `("", "twelve")`, `("three hundred", "")`.

    Raises:
        ValueError: If `number` is outside 1 to 999.
    """
    _check_number(number)
    hundreds, rest = divmod(number, 100)
    tens, ones = divmod(rest, 10)
    if rest < 20:
        below = _ENGLISH_SMALL[rest] if rest else ""
    else:
        below = _ENGLISH_TENS[tens] + (f"-{_ENGLISH_SMALL[ones]}" if ones else "")
    return (f"{_ENGLISH_SMALL[hundreds]} hundred" if hundreds else "", below)


def english_number(number: int) -> str:
    """An English number in British words: `two hundred and forty-seven`.

    Raises:
        ValueError: If `number` is outside 1 to 999.
    """
    return " and ".join(part for part in english_number_parts(number) if part)


def german_number_parts(number: int) -> tuple[str, ...]:
    """The morphemes of a German number word in order: zwei, hundert, sieben, und, vierzig.

    Raises:
        ValueError: If `number` is outside 1 to 999.
    """
    _check_number(number)
    hundreds, rest = divmod(number, 100)
    tens, ones = divmod(rest, 10)
    parts: list[str] = []
    if hundreds:
        parts += ["ein" if hundreds == 1 else _GERMAN_SMALL[hundreds], "hundert"]
    if rest and rest < 20:
        parts.append(_GERMAN_SMALL[rest])
    elif rest:
        if ones:
            parts += ["ein" if ones == 1 else _GERMAN_SMALL[ones], "und"]
        parts.append(_GERMAN_TENS[tens])
    return tuple(parts)


def german_number(number: int) -> str:
    """A German number as one word: `zweihundertsiebenundvierzig`, `einhunderteins`.

    Raises:
        ValueError: If `number` is outside 1 to 999.
    """
    return "".join(german_number_parts(number))
