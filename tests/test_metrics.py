"""BLEU and chrF against sacreBLEU itself, by its functional interface."""

from __future__ import annotations

import logging
import socket
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import sacrebleu
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import EvalPrediction, PreTrainedTokenizerFast

from vanilla_transformer.metrics import TranslationScore, build_compute_metrics

HYPOTHESES = ["The old dog sleeps under the table.", "Two children are playing in the Snow.", "A man, alone."]
REFERENCES = ["The old dog sleeps below the table.", "Two children are playing in the snow.", "A man, alone."]
OTHERS = ["An old dog is asleep under the table.", "Two kids play in the snow.", "A lonely man."]


@pytest.fixture
def no_network(monkeypatch) -> None:
    def refuse(*args, **kwargs):
        raise OSError("the network was touched")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)


@pytest.fixture
def score(tmp_path, no_network) -> TranslationScore:
    return TranslationScore(cache_dir=str(tmp_path))


def test_equals_sacrebleu(score) -> None:
    result = score.compute(predictions=HYPOTHESES, references=REFERENCES)
    bleu = sacrebleu.corpus_bleu(HYPOTHESES, [REFERENCES])
    assert result["bleu"] == pytest.approx(bleu.score, abs=1e-9)
    assert result["chrf"] == pytest.approx(sacrebleu.corpus_chrf(HYPOTHESES, [REFERENCES]).score, abs=1e-9)
    assert (result["hypothesis_length"], result["reference_length"]) == (bleu.sys_len, bleu.ref_len)
    assert result["brevity_penalty"] == bleu.bp
    assert result["exact_match"] == pytest.approx(100 / 3)
    assert result["num_sentences"] == 3
    version = sacrebleu.__version__
    assert result["bleu_signature"] == f"nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:{version}"
    assert result["chrf_signature"] == f"nrefs:1|case:mixed|eff:yes|nc:6|nw:0|space:no|version:{version}"


def test_options_reach_sacrebleu_and_the_signature(score) -> None:
    result = score.compute(
        predictions=HYPOTHESES, references=REFERENCES, tokenize="none", lowercase=True, chrf_word_order=2
    )
    bleu = sacrebleu.corpus_bleu(HYPOTHESES, [REFERENCES], tokenize="none", lowercase=True)
    assert result["bleu"] == pytest.approx(bleu.score, abs=1e-9)
    assert "case:lc" in result["bleu_signature"]
    assert "tok:none" in result["bleu_signature"]
    lowered = [[text.lower() for text in texts] for texts in (HYPOTHESES, REFERENCES)]
    chrf = sacrebleu.corpus_chrf(lowered[0], [lowered[1]], word_order=2)
    assert result["chrf"] == pytest.approx(chrf.score, abs=1e-9)
    assert result["exact_match"] == pytest.approx(200 / 3)  # "Snow" is "snow" now
    chinese = score.compute(predictions=["我是学生"], references=["我是学生"], tokenize="zh")
    assert chinese["hypothesis_length"] == 4  # one token a character


def test_several_references_also_in_unequal_numbers(score) -> None:
    both = [list(pair) for pair in zip(REFERENCES, OTHERS, strict=True)]
    result = score.compute(predictions=HYPOTHESES, references=both)
    assert result["bleu"] == pytest.approx(sacrebleu.corpus_bleu(HYPOTHESES, [REFERENCES, OTHERS]).score, abs=1e-9)
    assert "nrefs:2" in result["bleu_signature"]
    uneven = [both[0], both[1][:1], both[2][:1]]
    result = score.compute(predictions=HYPOTHESES, references=uneven)
    expected = sacrebleu.corpus_bleu(HYPOTHESES, [REFERENCES, [OTHERS[0], None, None]])
    assert result["bleu"] == pytest.approx(expected.score, abs=1e-9)
    assert "nrefs:var" in result["bleu_signature"]
    mixed = score.compute(predictions=HYPOTHESES, references=[both[0], *REFERENCES[1:]])
    assert mixed == result


def test_accumulates_batches_and_single_sentences(score) -> None:
    score.add_batch(predictions=HYPOTHESES[:2], references=REFERENCES[:2])
    score.add(prediction=HYPOTHESES[2], reference=REFERENCES[2])
    whole = TranslationScore(keep_in_memory=True).compute(predictions=HYPOTHESES, references=REFERENCES)
    assert score.compute() == whole
    assert score.compute(predictions=REFERENCES, references=REFERENCES)["bleu"] == pytest.approx(100)  # a new start


def test_processes_add_up(tmp_path) -> None:
    def process(rank: int):
        part = TranslationScore(num_process=2, process_id=rank, experiment_id="two", cache_dir=str(tmp_path))
        part.add_batch(predictions=HYPOTHESES[rank::2], references=REFERENCES[rank::2])
        return part.compute()

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(process, range(2))
    assert second is None
    assert first["num_sentences"] == 3
    assert first["bleu"] == pytest.approx(sacrebleu.corpus_bleu(HYPOTHESES, [REFERENCES]).score, abs=1e-9)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"references": REFERENCES[:2]}, "3 predictions and 2 references"),
        ({"references": None}, "must both be given"),
        ({"predictions": [], "references": []}, "nothing to score"),
        ({"references": [["a"], [], ["b"]]}, "Sentence 1 has no reference"),
        ({"tokenize": "moses"}, "does not know tokenize='moses'; its tokenizers are 13a"),
        ({"chrf_word_order": -1}, "chrf_word_order"),
    ],
)
def test_wrong_input_is_named(score, arguments, words) -> None:
    with pytest.raises(ValueError, match=words):
        score.compute(**{"predictions": HYPOTHESES, "references": REFERENCES, **arguments})


WORDS = ["<pad>", "</s>", "<s>", "a", "dog", "barks", "loud", "."]
PAD, END, START, A, DOG, BARKS, LOUD, DOT = range(8)


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="</s>", bos_token="<s>")


def test_compute_metrics_decodes_padded_ids(tokenizer, no_network, caplog) -> None:
    predictions = np.array(
        [
            [START, A, DOG, BARKS, DOT, END, -100, -100],
            [START, A, DOG, BARKS, END, PAD, PAD, -100],
            [START, A, DOG, END, END, END, END, END],  # generate() may fill up with the end token
        ]
    )
    labels = np.array([[A, DOG, BARKS, DOT, END], [A, DOG, BARKS, LOUD, END], [A, DOG, END, -100, -100]])
    caplog.set_level(logging.INFO, "vanilla_transformer")
    compute = build_compute_metrics(tokenizer)
    result = compute(EvalPrediction(predictions=(predictions, None), label_ids=labels))
    texts = ["a dog barks .", "a dog barks", "a dog"], ["a dog barks .", "a dog barks loud", "a dog"]
    assert result["bleu"] == pytest.approx(sacrebleu.corpus_bleu(texts[0], [texts[1]]).score, abs=1e-9)
    assert result["chrf"] == pytest.approx(sacrebleu.corpus_chrf(texts[0], [texts[1]]).score, abs=1e-9)
    assert result["exact_match"] == pytest.approx(200 / 3)
    assert result["gen_len"] == pytest.approx((5 + 4 + 3) / 3)
    assert all(isinstance(value, float) for value in result.values())
    # Padding by another -100 column changes nothing; the signatures are logged once.
    wider = np.pad(predictions, ((0, 0), (0, 1)), constant_values=-100)
    again = compute(EvalPrediction(predictions=wider, label_ids=np.pad(labels, ((0, 0), (0, 3)), constant_values=PAD)))
    assert again == result
    assert [record.getMessage().count("signature") for record in caplog.records] == [1, 1]
    assert "tok:13a" in caplog.text
    assert "nc:6" in caplog.text


def test_compute_metrics_passes_options_on(tokenizer, caplog) -> None:
    caplog.set_level(logging.INFO, "vanilla_transformer")
    row = np.array([[START, A, DOG, END]])
    build_compute_metrics(tokenizer, tokenize="char", lowercase=True, chrf_word_order=2)(
        EvalPrediction(row, row[:, 1:])
    )
    assert "case:lc|eff:no|tok:char" in caplog.text
    assert "nw:2" in caplog.text


def test_compute_metrics_names_what_is_wrong(tokenizer) -> None:
    compute = build_compute_metrics(tokenizer)
    ids = np.array([[START, A, END]])
    with pytest.raises(ValueError, match="predict_with_generate=True"):
        compute(EvalPrediction(predictions=np.zeros((1, 3, 8), dtype=np.float32), label_ids=ids))
    with pytest.raises(ValueError, match="no label_ids"):
        compute(EvalPrediction(predictions=ids, label_ids=None))
    with pytest.raises(ValueError, match="3 predictions for 1 references"):
        compute(EvalPrediction(predictions=ids.repeat(3, 0), label_ids=ids))
    with pytest.raises(ValueError, match="moses"):
        build_compute_metrics(tokenizer, tokenize="moses")
    tokenizer.pad_token = None
    with pytest.raises(ValueError, match="no padding token"):
        build_compute_metrics(tokenizer)
