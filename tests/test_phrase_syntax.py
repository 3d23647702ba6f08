"""Noun phrases, clauses and sentences against German written by hand.

The German expected here was written out from the paradigm tables of German school grammars (declension of articles,
adjectives and nouns; principal parts of verbs; place of the finite verb), not taken from the program's output.
"""

import pytest

from vanilla_transformer.phrase_lexicon import (
    ADJECTIVES,
    BARE,
    DEFINITE,
    INDEFINITE,
    NOUNS,
    POSSESSIVES,
    PRONOUNS,
    THIS,
    TIME_UNITS,
    TIMES,
    VERBS,
)
from vanilla_transformer.phrase_syntax import (
    Clause,
    NounPhrase,
    Place,
    complex_sentence,
    numbered_time,
    simple_sentence,
)

NOUN = {noun.english: noun for noun in NOUNS + TIME_UNITS}
ADJECTIVE = {adjective.english: adjective for adjective in ADJECTIVES}
VERB = {verb.english: verb for verb in VERBS}
TIME = {time.english: time for time in TIMES}
PRONOUN = {pronoun.word: pronoun for pronoun in PRONOUNS}
DETERMINER = {"the": DEFINITE, "a": INDEFINITE, "": BARE, "this": THIS, **{word.english: word for word in POSSESSIVES}}


def np(determiner: str, noun: str, adjective: str = "", plural: bool = False, **more) -> NounPhrase:
    """A noun phrase from English words."""
    quality = ADJECTIVE[adjective] if adjective else None
    return NounPhrase(NOUN[noun], DETERMINER[determiner], quality, plural, **more)


def clause(subject, verb: str, target=None, tense="present", time: str = "", **more) -> Clause:
    """A clause with a verb; subjects may be given as a pronoun's word."""
    who = PRONOUN[subject] if isinstance(subject, str) else subject
    return Clause(who, VERB[verb], tense, target, time=TIME[time] if time else None, **more)


def being(subject, quality: str, tense="present", time: str = "", negated: bool = False) -> Clause:
    """A clause with `to be`."""
    who = PRONOUN[subject] if isinstance(subject, str) else subject
    return Clause(who, tense=tense, quality=ADJECTIVE[quality], negated=negated, time=TIME[time] if time else None)


# --------------------------------------------------------------------------------- inflection, by hand

CASES = ("nominative", "accusative", "dative", "genitive")
DECLENSIONS = [
    # definite article: weak declension
    (np("the", "man", "old"), "der alte Mann | den alten Mann | dem alten Mann | des alten Mannes"),
    (np("the", "woman", "old"), "die alte Frau | die alte Frau | der alten Frau | der alten Frau"),
    (np("the", "child", "tired"), "das müde Kind | das müde Kind | dem müden Kind | des müden Kindes"),
    (
        np("the", "child", "sad", plural=True),
        "die traurigen Kinder | die traurigen Kinder | den traurigen Kindern | der traurigen Kinder",
    ),
    (np("the", "book", "new"), "das neue Buch | das neue Buch | dem neuen Buch | des neuen Buches"),
    (np("the", "lamp", "expensive"), "die teure Lampe | die teure Lampe | der teuren Lampe | der teuren Lampe"),
    (np("the", "apple", plural=True), "die Äpfel | die Äpfel | den Äpfeln | der Äpfel"),
    # dieser: weak declension
    (
        np("this", "coat", "dark"),
        "dieser dunkle Mantel | diesen dunklen Mantel | diesem dunklen Mantel | dieses dunklen Mantels",
    ),
    (np("this", "door", "green"), "diese grüne Tür | diese grüne Tür | dieser grünen Tür | dieser grünen Tür"),
    (
        np("this", "window", "big"),
        "dieses große Fenster | dieses große Fenster | diesem großen Fenster | dieses großen Fensters",
    ),
    (
        np("this", "box", "big", plural=True),
        "diese großen Kisten | diese großen Kisten | diesen großen Kisten | dieser großen Kisten",
    ),
    # ein and the possessives: mixed declension
    (np("a", "man", "young"), "ein junger Mann | einen jungen Mann | einem jungen Mann | eines jungen Mannes"),
    (
        np("a", "woman", "hungry"),
        "eine hungrige Frau | eine hungrige Frau | einer hungrigen Frau | einer hungrigen Frau",
    ),
    (np("a", "egg", "fresh"), "ein frisches Ei | ein frisches Ei | einem frischen Ei | eines frischen Eies"),
    (
        np("my", "brother", "happy"),
        "mein glücklicher Bruder | meinen glücklichen Bruder | meinem glücklichen Bruder | meines glücklichen Bruders",
    ),
    (
        np("our", "aunt", "rich"),
        "unsere reiche Tante | unsere reiche Tante | unserer reichen Tante | unserer reichen Tante",
    ),
    (np("our", "uncle"), "unser Onkel | unseren Onkel | unserem Onkel | unseres Onkels"),
    (np("her", "house", "small"), "ihr kleines Haus | ihr kleines Haus | ihrem kleinen Haus | ihres kleinen Hauses"),
    (
        np("his", "daughter", "old", plural=True),
        "seine alten Töchter | seine alten Töchter | seinen alten Töchtern | seiner alten Töchter",
    ),
    (
        np("their", "radio", "cheap", plural=True),
        "ihre billigen Radios | ihre billigen Radios | ihren billigen Radios | ihrer billigen Radios",
    ),
    # no article: strong declension
    (np("", "cheese", "fresh"), "frischer Käse | frischen Käse | frischem Käse | frischen Käses"),
    (np("", "milk", "cold"), "kalte Milch | kalte Milch | kalter Milch | kalter Milch"),
    (np("", "water", "warm"), "warmes Wasser | warmes Wasser | warmem Wasser | warmen Wassers"),
    (
        np("", "story", "long", plural=True),
        "lange Geschichten | lange Geschichten | langen Geschichten | langer Geschichten",
    ),
    # weak nouns
    (np("the", "boy"), "der Junge | den Jungen | dem Jungen | des Jungen"),
    (
        np("a", "neighbour", "friendly"),
        "ein freundlicher Nachbar | einen freundlichen Nachbarn | einem freundlichen Nachbarn"
        " | eines freundlichen Nachbarn",
    ),
    (np("the", "neighbour", plural=True), "die Nachbarn | die Nachbarn | den Nachbarn | der Nachbarn"),
    # a number: strong declension without, weak declension after an article
    (
        np("", "guest", "happy", plural=True, count=3),
        "drei glückliche Gäste | drei glückliche Gäste | drei glücklichen Gästen",
    ),
    (
        np("the", "guest", "happy", plural=True, count=12),
        "die zwölf glücklichen Gäste | die zwölf glücklichen Gäste | den zwölf glücklichen Gästen"
        " | der zwölf glücklichen Gäste",
    ),
    # dative plural: -n, but not after -n and -s
    (np("the", "office", plural=True), "die Büros | die Büros | den Büros | der Büros"),
    (np("the", "girl", plural=True), "die Mädchen | die Mädchen | den Mädchen | der Mädchen"),
    (np("the", "window", plural=True), "die Fenster | die Fenster | den Fenstern | der Fenster"),
    # owners stand in the genitive and do not change
    (
        np("the", "coat", "red", possessor=np("the", "man", "old")),
        "der rote Mantel des alten Mannes | den roten Mantel des alten Mannes | dem roten Mantel des alten Mannes"
        " | des roten Mantels des alten Mannes",
    ),
]


@pytest.mark.parametrize(("phrase", "forms"), DECLENSIONS, ids=lambda value: value if isinstance(value, str) else "")
def test_declension(phrase, forms):
    assert [phrase.german(case) for case, _ in zip(CASES, forms.split(" | "), strict=False)] == forms.split(" | ")


@pytest.mark.parametrize(
    ("phrase", "english"),
    [
        (np("a", "apple"), "an apple"),
        (np("a", "book", "interesting"), "an interesting book"),
        (np("a", "apple", "big"), "a big apple"),
        (np("this", "child", plural=True), "these children"),
        (np("the", "dress", "new", plural=True), "the new dresses"),
        (np("my", "story", plural=True, count=21), "my twenty-one stories"),
        (np("", "bread"), "bread"),
        (np("the", "coat", possessor=np("my", "sister", plural=True)), "my sisters' coat"),
        (np("the", "coat", "warm", possessor=np("the", "child", "sad", plural=True)), "the sad children's warm coat"),
        (np("the", "coat", possessor=np("the", "waitress")), "the waitress's coat"),
        (np("", "room", label=204), "room two hundred and four"),
    ],
)
def test_english_noun_phrases(phrase, english):
    assert phrase.english() == english


@pytest.mark.parametrize(
    ("phrase", "english", "german"),
    [
        (np("the", "garden"), "in the garden", "im Garten"),
        (np("the", "kitchen"), "in the kitchen", "in der Küche"),
        (np("the", "house", "dark"), "in the dark house", "im dunklen Haus"),
        (np("our", "office"), "in our office", "in unserem Büro"),
        (np("this", "cellar"), "in this cellar", "in diesem Keller"),
        (np("the", "balcony"), "on the balcony", "auf dem Balkon"),
        (np("", "room", label=12), "in room twelve", "in Zimmer zwölf"),
    ],
)
def test_place_is_dative(phrase, english, german):
    assert (Place(phrase).english(), Place(phrase).german()) == (english, german)


@pytest.mark.parametrize(
    ("phrase", "english", "german"),
    [
        (np("the", "garden"), "into the garden", "in den Garten"),
        (np("the", "kitchen"), "into the kitchen", "in die Küche"),
        (np("the", "house", "small"), "into the small house", "ins kleine Haus"),
        (np("their", "cellar"), "into their cellar", "in ihren Keller"),
        (np("the", "terrace"), "onto the terrace", "auf die Terrasse"),
        (np("this", "room"), "into this room", "in dieses Zimmer"),
    ],
)
def test_direction_is_accusative(phrase, english, german):
    assert (Place(phrase, direction=True).english(), Place(phrase, direction=True).german()) == (english, german)


# ---------------------------------------------------------------------------------- sentences, by hand

STATEMENTS = [
    (clause(np("the", "man", "old"), "read", np("a", "book", "new")),
     "The old man reads a new book.", "Der alte Mann liest ein neues Buch."),
    (clause("I", "eat", np("", "bread", "fresh")), "I eat fresh bread.", "Ich esse frisches Brot."),
    (clause("they", "wash", np("their", "dog", "dirty")),
     "They wash their dirty dog.", "Sie waschen ihren schmutzigen Hund."),
    (clause(np("the", "child"), "sleep", tense="past", place=Place(np("the", "garden"))),
     "The child slept in the garden.", "Das Kind hat im Garten geschlafen."),
    (clause("she", "go", tense="past", place=Place(np("the", "kitchen"), direction=True)),
     "She went into the kitchen.", "Sie ist in die Küche gegangen."),
    (clause(np("the", "guest", plural=True), "arrive", tense="past", time="on Sunday"),
     "The guests arrived on Sunday.", "Die Gäste sind am Sonntag angekommen."),
    (clause(np("the", "boy"), "turn on", np("the", "lamp"), time="today"),
     "The boy turns on the lamp today.", "Der Junge schaltet heute die Lampe ein."),
    (clause("he", "close", np("the", "window"), "past"), "He closed the window.", "Er hat das Fenster zugemacht."),
    (clause("we", "tidy up", np("this", "cellar"), "have to"),
     "We have to tidy up this cellar.", "Wir müssen diesen Keller aufräumen."),
    (clause(np("my", "aunt"), "invite", np("the", "neighbour"), "will", "next week"),
     "My aunt will invite the neighbour next week.", "Meine Tante wird nächste Woche den Nachbarn einladen."),
    (clause(np("the", "waitress"), "help", np("a", "guest", "old"), place=Place(np("the", "terrace"))),
     "The waitress helps an old guest on the terrace.", "Die Kellnerin hilft einem alten Gast auf der Terrasse."),
    (clause("I", "thank", np("my", "brother", plural=True), "past"),
     "I thanked my brothers.", "Ich habe meinen Brüdern gedankt."),
    (clause("she", "give", np("a", "apple", "big"), time="every day", recipient=np("the", "horse", "small")),
     "She gives the small horse a big apple every day.", "Sie gibt jeden Tag dem kleinen Pferd einen großen Apfel."),
    (clause(np("our", "sister", plural=True), "give", np("", "letter", "long", plural=True, count=31), "will",
            recipient=np("the", "uncle")),
     "Our sisters will give the uncle thirty-one long letters.",
     "Unsere Schwestern werden dem Onkel einunddreißig lange Briefe geben."),
    (clause(np("a", "woman", "tired"), "carry", np("the", "chair", plural=True, count=2), "past", "yesterday",
            place=Place(np("the", "house"), direction=True)),
     "A tired woman carried the two chairs into the house yesterday.",
     "Eine müde Frau hat gestern die zwei Stühle ins Haus getragen."),
    (clause(np("the", "girl"), "find", np("the", "key", possessor=np("the", "boy")), "past"),
     "The girl found the boy's key.", "Das Mädchen hat den Schlüssel des Jungen gefunden."),
    (clause("we", "turn on", np("the", "radio", "cheap", possessor=np("his", "daughter", plural=True)),
            "can"),
     "We can turn on his daughters' cheap radio.", "Wir können das billige Radio seiner Töchter einschalten."),
    (clause("I", "put on", np("my", "coat"), "will"), "I will put on my coat.", "Ich werde meinen Mantel anziehen."),
    (being(np("this", "cake"), "expensive"), "This cake is expensive.", "Dieser Kuchen ist teuer."),
    (being("they", "tired", "past", "yesterday"), "They were tired yesterday.", "Sie waren gestern müde."),
    (being("I", "hungry", negated=True), "I am not hungry.", "Ich bin nicht hungrig."),
    (being(np("the", "shirt", plural=True), "green"), "The shirts are green.", "Die Hemden sind grün."),
]  # fmt: skip

FRONTED_TIMES = [
    (clause(np("the", "man"), "get up", time="today"), "Today the man gets up.", "Heute steht der Mann auf."),
    (clause("I", "buy", np("a", "coat"), "past", "last week"),
     "Last week I bought a coat.", "Letzte Woche habe ich einen Mantel gekauft."),
    (clause("she", "open", np("the", "box"), "will", "tomorrow"),
     "Tomorrow she will open the box.", "Morgen wird sie die Kiste aufmachen."),
    (clause(np("the", "child", plural=True), "drink", np("", "milk", "warm"), time="in the morning"),
     "In the morning the children drink warm milk.", "Am Morgen trinken die Kinder warme Milch."),
    (Clause(PRONOUN["we"], VERB["visit"], "past", np("our", "aunt"), time=numbered_time(247, NOUN["day"], past=True)),
     "Two hundred and forty-seven days ago we visited our aunt.",
     "Vor zweihundertsiebenundvierzig Tagen haben wir unsere Tante besucht."),
    (Clause(PRONOUN["he"], VERB["work"], "have to", time=numbered_time(3, NOUN["week"], past=False)),
     "In three weeks he has to work.", "In drei Wochen muss er arbeiten."),
    (being("we", "happy", "past", "in winter"), "In winter we were happy.", "Im Winter waren wir glücklich."),
]  # fmt: skip

QUESTIONS = [
    (clause(np("the", "woman"), "read", np("a", "newspaper")),
     "Does the woman read a newspaper?", "Liest die Frau eine Zeitung?"),
    (clause("they", "turn off", np("the", "machine"), time="every week"),
     "Do they turn off the machine every week?", "Schalten sie jede Woche die Maschine aus?"),
    (clause(np("the", "boy"), "throw away", np("the", "egg", plural=True), "past"),
     "Did the boy throw away the eggs?", "Hat der Junge die Eier weggeworfen?"),
    (clause("she", "go", tense="past", place=Place(np("the", "office"), direction=True)),
     "Did she go into the office?", "Ist sie ins Büro gegangen?"),
    (clause("I", "call", np("the", "doctor"), "have to"),
     "Do I have to call the doctor?", "Muss ich den Arzt anrufen?"),
    (clause("he", "work", tense="have to", time="in the evening"),
     "Does he have to work in the evening?", "Muss er am Abend arbeiten?"),
    (clause(np("my", "guest", plural=True), "wait", tense="can"),
     "Can my guests wait?", "Können meine Gäste warten?"),
    (clause("we", "call", np("the", "child", plural=True), "will", "on Monday"),
     "Will we call the children on Monday?", "Werden wir am Montag die Kinder anrufen?"),
    (being(np("the", "soup"), "cold"), "Is the soup cold?", "Ist die Suppe kalt?"),
    (being("I", "sad", "past"), "Was I sad?", "War ich traurig?"),
]  # fmt: skip


@pytest.mark.parametrize(("parts", "english", "german"), STATEMENTS)
def test_statements(parts, english, german):
    phrase = simple_sentence(parts)
    assert (phrase.source, phrase.target) == (english, german)


@pytest.mark.parametrize(("parts", "english", "german"), FRONTED_TIMES)
def test_fronted_time_leaves_the_verb_second(parts, english, german):
    phrase = simple_sentence(parts, "time first")
    assert (phrase.source, phrase.target) == (english, german)


@pytest.mark.parametrize(("parts", "english", "german"), QUESTIONS)
def test_questions(parts, english, german):
    phrase = simple_sentence(parts, "verb first")
    assert (phrase.source, phrase.target) == (english, german)


SHE_TURNS_IT_ON = clause("she", "turn on", np("the", "computer"))
SUBORDINATE = [
    (clause(np("the", "man"), "know"), "that", SHE_TURNS_IT_ON, {},
     "The man knows that she turns on the computer.", "Der Mann weiß, dass sie den Computer einschaltet."),
    (clause("I", "hope"), "that", clause(np("the", "guest", plural=True), "arrive", tense="will", time="tomorrow"), {},
     "I hope that the guests will arrive tomorrow.", "Ich hoffe, dass die Gäste morgen ankommen werden."),
    (clause(np("the", "girl"), "think"), "that", clause("he", "throw away", np("the", "book"), "past"),
     {"question": True},
     "Does the girl think that he threw away the book?",
     "Glaubt das Mädchen, dass er das Buch weggeworfen hat?"),
    (clause("they", "say"), "that", clause("they", "write", np("", "letter", plural=True), "have to"), {},
     "They say that they have to write letters.", "Sie sagen, dass sie Briefe schreiben müssen."),
    (clause(np("the", "woman"), "drink", np("", "water")), "because", being("she", "tired"), {},
     "The woman drinks water because she is tired.", "Die Frau trinkt Wasser, weil sie müde ist."),
    (clause("we", "sleep", tense="past"), "because", being("we", "tired", "past"), {"main_first": False},
     "Because we were tired, we slept.", "Weil wir müde waren, haben wir geschlafen."),
    (clause("I", "turn off", np("the", "lamp")), "when", clause(np("the", "child", plural=True), "sleep"), {},
     "I turn off the lamp when the children sleep.", "Ich schalte die Lampe aus, wenn die Kinder schlafen."),
    (clause(np("the", "dog"), "eat", np("the", "cake"), "past"), "when",
     clause(np("the", "boy"), "open", np("the", "door"), "past"), {"main_first": False},
     "When the boy opened the door, the dog ate the cake.",
     "Als der Junge die Tür aufgemacht hat, hat der Hund den Kuchen gegessen."),
    (clause("he", "buy", np("the", "picture"), "have to"), "although", being(np("the", "picture"), "expensive"), {},
     "He has to buy the picture although the picture is expensive.",
     "Er muss das Bild kaufen, obwohl das Bild teuer ist."),
    (clause(np("my", "sister"), "work"), "although", clause("she", "get up", time="in the evening"),
     {"main_first": False},
     "Although she gets up in the evening, my sister works.",
     "Obwohl sie am Abend aufsteht, arbeitet meine Schwester."),
    (clause("they", "tidy up", np("the", "house"), "past"), "before",
     clause(np("the", "uncle"), "arrive", tense="past"), {},
     "They tidied up the house before the uncle arrived.",
     "Sie haben das Haus aufgeräumt, bevor der Onkel angekommen ist."),
    (clause("she", "put on", np("the", "jacket")), "before", clause("she", "feed", np("the", "cat")),
     {"main_first": False},
     "Before she feeds the cat, she puts on the jacket.", "Bevor sie die Katze füttert, zieht sie die Jacke an."),
]  # fmt: skip


@pytest.mark.parametrize(("first", "conjunction", "second", "options", "english", "german"), SUBORDINATE)
def test_subordinate_clauses_have_the_verb_last(first, conjunction, second, options, english, german):
    phrase = complex_sentence(first, conjunction, second, **options)
    assert (phrase.source, phrase.target) == (english, german)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: np("a", "man", plural=True), "no plural"),
        (lambda: np("the", "milk", plural=True), "mass noun"),
        (lambda: np("the", "man", count=3), "count=3"),
        (lambda: np("the", "man", plural=True, count=1), "count=1"),
        (lambda: np("my", "coat", possessor=np("the", "man")), "possessor"),
        (lambda: Clause(PRONOUN["he"]), "either a verb or a predicative adjective"),
        (lambda: Clause(PRONOUN["he"], VERB["wait"], quality=ADJECTIVE["old"]), "not both"),
        (lambda: Clause(PRONOUN["he"], VERB["wait"], negated=True), "negated"),
        (lambda: being("he", "old", "can"), "tense='can'"),
        (lambda: PRONOUN["he"].german("dative"), "case='dative'"),
        (lambda: complex_sentence(clause("I", "say"), "that", SHE_TURNS_IT_ON, main_first=False), "main clause first"),
    ],
)
def test_what_neither_language_has_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
