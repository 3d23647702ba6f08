"""Smaller models against the large one: its layers called by hand, its heads zeroed by hooks, its logits by index.

In float64: with these large random weights sums in another order differ by 1e-5 in float32.
"""

import json
import random
import re
import sys
import warnings

import pytest
import torch
import transformers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from script_modules import SCRIPTS, load
from tiny_models import SHARING, batch, randomise
from tokenizers import Tokenizer, pre_tokenizers
from torch.testing import assert_close
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, PreTrainedTokenizerFast

from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from vanilla_transformer.model_card import RunFacts, write_model_card
from vanilla_transformer.modeling_vanilla_transformer import shift_tokens_right
from vanilla_transformer.phrase_grammar import generate_splits
from vanilla_transformer.shrinking import head_importance, keep_layers, prune_heads, trim_vocabulary
from vanilla_transformer.tokenizer_training import save_tokenizer, train_tokenizer

ONE_WIDTH = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "d_k": 6, "d_v": 5}
FORMS = {
    "paper": {},
    "pre-norm, biases": {"norm_position": "pre", "attention_bias": True, "output_bias": True},
    "learned": {"position_embedding_type": "learned", "max_position_embeddings": 16},
}


def parameters(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def logits(model, inputs):
    with torch.no_grad():
        return model(**inputs).logits


def with_labels():
    inputs = batch()
    mask = inputs.pop("decoder_attention_mask")
    labels = inputs.pop("decoder_input_ids").roll(-1, 1)  # any tokens do
    return {**inputs, "labels": labels.masked_fill(mask == 0, -100)}


def reloaded(model, folder):
    """The model as a folder gives it back, nothing missing and nothing left over."""
    model.save_pretrained(folder)
    again, report = AutoModelForSeq2SeqLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values())
    assert again.num_parameters() == again.config.num_trainable_parameters()
    return again.eval()


# ---------------------------------------------------------------------------------------- layers


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("sharing", SHARING)
def test_kept_layers_compute_what_they_did(make_model, tmp_path, form, sharing):
    model = randomise(make_model(encoder_layers=3, **SHARING[sharing], **FORMS[form], dtype=torch.float64))
    before, inputs = parameters(model), batch()
    smaller = reloaded(keep_layers(model, encoder=[0, 2], decoder=[1]), tmp_path)
    assert (smaller.config.encoder_layers, smaller.config.decoder_layers) == (2, 1)
    # The same layers of the large model itself, the others taken out of its lists.
    model.model.encoder.layers = torch.nn.ModuleList([model.model.encoder.layers[i] for i in (0, 2)])
    model.model.decoder.layers = torch.nn.ModuleList([model.model.decoder.layers[1]])
    expected = model(**inputs, use_cache=False).logits
    assert_close(logits(smaller, inputs), expected, rtol=0, atol=1e-10)
    assert all(
        torch.equal(before[name], tensor) for name, tensor in model.state_dict().items() if "layers" not in name
    )


def test_one_stack_alone_and_step_by_step_decoding(make_model):
    model = randomise(make_model())
    smaller = keep_layers(model, decoder=[0, 2])
    assert smaller.config.encoder_layers == model.config.encoder_layers
    ids = batch()["input_ids"]
    cached = smaller.generate(ids, num_beams=1, max_new_tokens=6)
    assert torch.equal(cached, smaller.generate(ids, num_beams=1, max_new_tokens=6, use_cache=False))


def test_a_student_shares_no_memory_with_its_teacher(make_model):
    model = make_model(dtype=torch.bfloat16).train()
    model.generation_config.num_beams = 7
    before = parameters(model)
    student = keep_layers(model, decoder=[0])
    assert student.training
    assert student.dtype == torch.bfloat16
    assert student.generation_config.num_beams == 7
    assert student.lm_head.weight is student.model.shared.weight is student.model.encoder.embed_tokens.weight
    assert all(parameter.requires_grad for parameter in student.parameters())
    with torch.no_grad():
        for parameter in student.parameters():
            parameter.zero_()
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert model.config.decoder_layers == 3


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"encoder": []}, "encoder=\\[\\].*0 to 1"),
        ({"decoder": [3]}, "decoder=\\[3\\].*0 to 2"),
        ({"decoder": [-1]}, "0 to 2"),
        ({"decoder": [0, 0]}, "each once"),
        ({"decoder": [2, 0]}, "ascending"),
        ({}, "All layers"),
        ({"encoder": [0, 1]}, "All layers"),
    ],
)
def test_layers_that_cannot_be_kept(make_model, chosen, message):
    with pytest.raises(ValueError, match=message):
        keep_layers(make_model(), **chosen)


def test_other_models_are_refused(make_model):
    with pytest.raises(ValueError, match=r"torch\.nn.*Linear cannot be shrunk"):
        keep_layers(torch.nn.Linear(2, 2), decoder=[0])


@pytest.mark.parametrize("backend", ["torch", "torchao"])
def test_quantised_models_are_refused(make_model, backend):
    from vanilla_transformer.quantization import quantize_int8

    if backend == "torchao":
        pytest.importorskip("torchao")
    with pytest.raises(ValueError, match="quantised"):
        keep_layers(quantize_int8(make_model(d_model=32), backend), decoder=[0])


# ---------------------------------------------------------------------------------------- heads


def zero_heads(model, removed):
    """Set the output of heads to zero before W^O, by hooks."""
    for name, heads in removed.items():
        attention = model.get_submodule(name)

        def zero(module, inputs, heads=heads, count=attention.num_heads):
            states = inputs[0].unflatten(-1, (count, -1)).clone()
            states[:, :, heads] = 0
            return (states.flatten(-2),)

        attention.out_proj.register_forward_pre_hook(zero)


def attention_names(model):
    return [name for name, _ in model.named_modules() if name.endswith("_attn")]


@pytest.mark.parametrize("form", FORMS)
def test_a_pruned_model_is_the_full_one_with_those_heads_zeroed(make_model, tmp_path, form):
    model = randomise(make_model(**ONE_WIDTH, **FORMS[form], dtype=torch.float64))
    generator, importance, removed = random.Random(1), {}, {}
    for name in attention_names(model):
        order = generator.sample(range(4), 4)
        importance[name] = torch.tensor([float(order.index(head)) for head in range(4)])
        removed[name] = order[: 1 if ".encoder." in name else 2]
    smaller = reloaded(prune_heads(model, importance, encoder=1, decoder=2), tmp_path)
    config = smaller.config
    assert (config.encoder_attention_heads, config.decoder_attention_heads) == (3, 2)
    assert (config.d_model, config.d_k, config.d_v) == (16, 6, 5)
    full = logits(model, batch())
    zero_heads(model, removed)
    expected = logits(model, batch())
    assert (full - expected).abs().max() > 0.01
    assert_close(logits(smaller, batch()), expected, rtol=0, atol=1e-10)


def test_widths_that_followed_from_the_number_of_heads_stay(make_model):
    model = randomise(make_model(decoder_attention_heads=4, dtype=torch.float64))
    assert model.config.d_k is None
    importance = {name: torch.arange(4.0) for name in attention_names(model)}
    smaller = prune_heads(model, importance, encoder=2)
    assert (smaller.config.d_k, smaller.config.d_v) == (4, 4)
    assert (smaller.config.encoder_attention_heads, smaller.config.decoder_attention_heads) == (2, 4)
    zero_heads(model, {name: [0, 1] for name in importance if ".encoder." in name})
    assert_close(logits(smaller, batch()), logits(model, batch()), rtol=0, atol=1e-10)


def test_importance_is_the_slope_of_each_sentence_s_loss(make_model):
    # By central differences, a sentence at a time: the factor on a head's output moved to both sides of one.
    model = randomise(make_model(**ONE_WIDTH, dropout=0.3, attention_dropout=0.3, dtype=torch.float64), std=0.3)
    inputs, step, expected = with_labels(), 1e-5, {}

    def loss(row, name, head, factor):
        def scale(module, states):
            states = states[0].unflatten(-1, (4, -1)).clone()
            states[:, :, head] *= factor
            return (states.flatten(-2),)

        handle = model.get_submodule(name).out_proj.register_forward_pre_hook(scale)
        with torch.no_grad():
            found = logits(model, {key: tensor[row : row + 1] for key, tensor in inputs.items()})
        handle.remove()
        labels = inputs["labels"][row]
        return -sum(found[0, t].log_softmax(-1)[label] for t, label in enumerate(labels) if label != -100).item()

    for name in attention_names(model):
        slopes = [
            [abs(loss(row, name, h, 1 + step) - loss(row, name, h, 1 - step)) / (2 * step) for h in range(4)]
            for row in range(3)
        ]
        expected[name] = torch.tensor(slopes, dtype=torch.float64).mean(0)
    whole = head_importance(model.train(), [inputs])  # measures without dropout all the same
    assert whole.keys() == expected.keys()
    for name, value in expected.items():
        assert_close(whole[name], value, rtol=1e-5, atol=1e-8)
    parts = [{key: tensor[rows] for key, tensor in inputs.items()} for rows in (slice(0, 1), slice(1, 3))]
    for name, value in head_importance(model, parts).items():
        assert_close(value, expected[name], rtol=1e-5, atol=1e-8)


def test_measuring_leaves_the_model_as_it_was(make_model):
    model = make_model(**ONE_WIDTH).train()
    model.lm_head.weight.grad = torch.ones_like(model.lm_head.weight)
    model.model.decoder.layers[0].requires_grad_(False)
    with torch.no_grad():
        head_importance(model, [with_labels()])
    assert model.training
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert [name for name, p in model.named_parameters() if p.grad is not None] == ["model.shared.weight"]
    with pytest.raises(ValueError, match="no labels"):
        head_importance(model, [batch()])
    with pytest.raises(ValueError, match="no batch"):
        head_importance(model, [])
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize(
    ("removed", "message"),
    [
        ({}, "no head would go"),
        ({"encoder": 4}, "encoder=4: of 4 heads"),
        ({"decoder": -1}, "decoder=-1"),
    ],
)
def test_numbers_of_heads_that_cannot_go(make_model, removed, message):
    model = make_model(**ONE_WIDTH)
    with pytest.raises(ValueError, match=message):
        prune_heads(model, {name: torch.ones(4) for name in attention_names(model)}, **removed)


def test_importance_that_does_not_fit_is_refused(make_model):
    model = make_model(**ONE_WIDTH)
    good = {name: torch.ones(4) for name in attention_names(model)}
    name = "model.decoder.layers.1.encoder_attn"
    for bad in (None, torch.ones(3), torch.tensor([1.0, float("nan"), 1.0, 1.0])):
        importance = {key: value for key, value in {**good, name: bad}.items() if value is not None}
        with pytest.raises(ValueError, match=re.escape(name)):
            prune_heads(model, importance, encoder=1)
    two_widths = make_model()  # 4 heads of 4 above, 2 of 8 below
    heads = {n: torch.ones(4 if ".encoder." in n else 2) for n in attention_names(two_widths)}
    with pytest.raises(ValueError, match=r"different widths.*\(4, 4\), \(8, 8\)"):
        prune_heads(two_widths, heads, encoder=1)


# ---------------------------------------------------------------------------------------- vocabulary

SPLITS = generate_splits(train_size=1200, valid_size=20, test_size=20)
TRAINING = [text for pair in SPLITS.train[:600] for text in pair]
TRAINING += ["Ünïcödé naïve café 日本語の文 日本語の", "it's 1234567890 </s> <pad>"] * 5
CORPUS = [text for pair in SPLITS.train[:25] for text in pair] + ["Ünïcödé 日本語"]
# Words that open a line of the corpus, and words behind a space: a tokenizer sees them apart.
OPENING = sorted({line.split()[0] for line in CORPUS})
FOLLOWING = sorted({word for line in CORPUS for word in line.split()[1:]})


def tokenizer_of(texts=TRAINING, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return train_tokenizer(texts, **{"vocab_size": 700, **options})


def model_for(tokenizer, **fields):
    fields = {"vocab_size": len(tokenizer), "d_model": 8, "encoder_layers": 1, "decoder_layers": 1, **fields}
    return VanillaTransformerForConditionalGeneration(VanillaTransformerConfig.tiny(**fields))


def trim(tokenizer, texts, **fields):
    return trim_vocabulary(model_for(tokenizer, **fields), tokenizer, texts)


FULL = tokenizer_of(languages=["de"], model_max_length=50)
TRIMMED = trim(FULL, CORPUS)[1]


@pytest.mark.parametrize("form", ["paper", "pre-norm, biases"])
@pytest.mark.parametrize("sharing", SHARING)
def test_logits_of_the_tokens_that_are_left_are_what_they_were(make_model, tmp_path, form, sharing):
    fields = {**SHARING[sharing], **FORMS[form], "vocab_size": len(FULL), "decoder_vocab_size": len(FULL)}
    model = randomise(make_model(**fields, dtype=torch.float64))
    before = parameters(model)
    smaller, tokenizer = trim_vocabulary(model, FULL, iter(CORPUS))
    smaller = reloaded(smaller, tmp_path)
    assert 260 < len(tokenizer) == smaller.config.vocab_size == smaller.config.decoder_vocab_size < len(FULL)
    kept = torch.tensor(FULL.convert_tokens_to_ids(tokenizer.convert_ids_to_tokens(range(len(tokenizer)))))
    for source, target in zip(CORPUS[:-1:2], CORPUS[1::2], strict=True):
        rows = [{"input_ids": t(source).input_ids, "labels": t(target).input_ids} for t in (FULL, tokenizer)]
        old, new = ({name: torch.tensor([ids]) for name, ids in row.items()} for row in rows)
        assert torch.equal(kept[new["input_ids"]], old["input_ids"])
        expected = logits(model, old).index_select(-1, kept)
        assert_close(logits(smaller, new), expected, rtol=0, atol=1e-10)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(OPENING), st.lists(st.sampled_from(FOLLOWING), max_size=12))
@example(OPENING[0], FOLLOWING)
def test_words_of_the_corpus_are_cut_as_before(opening, following):
    text = " ".join([opening, *following])
    assert TRIMMED.tokenize(text) == FULL.tokenize(text)
    assert TRIMMED.decode(TRIMMED(text).input_ids[:-1]) == text


@settings(max_examples=200, deadline=None)
@given(st.text() | st.sampled_from(TRAINING))
@example("👩‍👩‍👧‍👦 \x00 </s><pad>>>de<< \u2028 Ġ")
def test_any_text_can_be_written_and_read_back(text):
    ids = TRIMMED(text).input_ids
    assert ids[-1] == TRIMMED.eos_token_id
    assert TRIMMED.decode(ids[:-1]) == text
    # What comes out in tokens of the corpus comes out in the same ones.
    tokens = FULL.tokenize(text)
    if set(tokens) <= USED:
        assert TRIMMED.tokenize(text) == tokens


USED = {token for line in CORPUS for token in FULL.tokenize(line)}


def test_what_is_left_is_what_the_corpus_needs():
    kept, full = TRIMMED.get_vocab(), FULL.get_vocab()
    assert USED | {"<pad>", "</s>", "<s>", ">>de<<"} | set(pre_tokenizers.ByteLevel.alphabet()) <= set(kept)
    assert sorted(kept.values()) == list(range(len(kept)))
    assert sorted(kept, key=kept.get) == sorted(kept, key=full.get)  # the old order
    # Without any one of its merges the corpus is cut otherwise: none is there for nothing.
    spec = json.loads(TRIMMED.backend_tokenizer.to_str())
    merges = spec["model"]["merges"]
    lines = [TRIMMED.backend_tokenizer.encode(line).tokens for line in CORPUS]
    for left_out in range(0, len(merges), 7):
        fewer = {**spec["model"], "merges": merges[:left_out] + merges[left_out + 1 :]}
        other = Tokenizer.from_str(json.dumps({**spec, "model": fewer}))
        assert [other.encode(line).tokens for line in CORPUS] != lines, merges[left_out]


def test_the_tokenizer_is_a_stock_one_with_its_settings(tmp_path):
    save_tokenizer(TRIMMED, tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert type(again) is PreTrainedTokenizerFast
    assert again.get_vocab() == TRIMMED.get_vocab()
    assert (again.model_max_length, again.split_special_tokens, again.padding_side) == (50, True, "right")
    assert again.all_special_tokens == FULL.all_special_tokens
    for text in (*CORPUS, "other words </s> >>de<<"):
        assert again(text).input_ids == TRIMMED(text).input_ids
    pair = again("We see", "the house").input_ids
    assert again.convert_ids_to_tokens(pair)[-1] == "</s>"
    assert pair.count(again.eos_token_id) == 1


def test_trimming_again_takes_nothing_more():
    model, tokenizer = trim(TRIMMED, CORPUS)
    assert tokenizer.get_vocab() == TRIMMED.get_vocab()
    assert model.config.vocab_size == len(TRIMMED)


def test_special_tokens_that_stand_last_and_ids_in_the_settings_get_their_new_ids():
    spec = json.loads(FULL.backend_tokenizer.to_str())
    special = [entry["content"] for entry in spec["added_tokens"]]
    words = [token for token in spec["model"]["vocab"] if token not in special]
    ids = {token: number for number, token in enumerate([*words, *special])}
    spec["model"]["vocab"] = ids
    for entry in spec["added_tokens"]:
        entry["id"] = ids[entry["content"]]
    spec["post_processor"]["special_tokens"]["</s>"]["ids"] = [ids["</s>"]]
    backend = Tokenizer.from_str(json.dumps(spec))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="</s>", bos_token="<s>")
    pad_id, eos, start = (ids[name] for name in ("<pad>", "</s>", "<s>"))
    model = model_for(
        tokenizer,
        vocab_size=len(ids) + 5,  # rows that no token has
        pad_token_id=pad_id,
        eos_token_id=[eos, ids["a"]],
        bos_token_id=None,
        decoder_start_token_id=len(ids) + 2,  # one of them
    )
    model.generation_config.forced_bos_token_id = start
    model.generation_config.suppress_tokens = [pad_id, start]
    smaller, trimmed = trim_vocabulary(model, tokenizer, CORPUS)
    names = trimmed.get_vocab()
    new = (names["<pad>"], names["</s>"], names["<s>"])
    assert new != (pad_id, eos, start)
    for settings_ in (smaller.config, smaller.generation_config):
        assert settings_.pad_token_id == new[0]
        assert settings_.eos_token_id == [new[1], names["a"]]
        assert settings_.bos_token_id is None
        assert settings_.decoder_start_token_id == len(names)
    assert smaller.config.vocab_size == len(names) + 1
    assert smaller.generation_config.forced_bos_token_id == new[2]
    assert smaller.generation_config.suppress_tokens == [new[0], new[2]]
    assert model.generation_config.forced_bos_token_id == start
    row = model.model.shared.weight[[pad_id, eos, start, len(ids) + 2]]
    assert torch.equal(smaller.model.shared.weight[[*new, len(names)]], row)
    assert trimmed(CORPUS[0]).input_ids[-1] == new[1]


def changed(**fields):
    """FULL with other entries in tokenizer.json; those of "model" with other ones there."""
    spec = json.loads(FULL.backend_tokenizer.to_str())
    spec["model"] |= fields.pop("model", {})
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps({**spec, **fields})))


ROBERTA = {"type": "RobertaProcessing", "sep": ["</s>", 1], "cls": ["<s>", 2]}
WORD_LEVEL = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}


@pytest.mark.parametrize(
    ("tokenizer", "message"),
    [
        (lambda: object(), "fast tokenizer is needed"),
        (lambda: changed(model=WORD_LEVEL), "type WordLevel"),
        (lambda: changed(pre_tokenizer={"type": "Whitespace"}), "Whitespace"),
        (lambda: changed(pre_tokenizer=None), "byte-level"),
        (lambda: changed(model={"dropout": 0.1}), "dropout=0.1"),
        (lambda: changed(model={"ignore_merges": True}), "ignore_merges=True"),
        (lambda: changed(post_processor={**ROBERTA, "trim_offsets": True, "add_prefix_space": False}), "Roberta"),
        (lambda: tokenizer_of(vocab_size=800), "another one's"),
    ],
)
def test_tokenizers_that_cannot_be_trimmed(tokenizer, message):
    with pytest.raises(ValueError, match=message):
        trim_vocabulary(model_for(FULL), tokenizer(), CORPUS)


def test_corpora_and_models_that_cannot_be_trimmed(make_model):
    for empty in ([], ["", ""]):
        with pytest.raises(ValueError, match="empty"):
            trim(FULL, empty)
    with pytest.raises(ValueError, match="iterable of strings"):
        trim(FULL, "a text")
    two = {"vocab_size": len(FULL), "decoder_vocab_size": len(FULL) + 1, "share_encoder_decoder_embeddings": False}
    with pytest.raises(ValueError, match="two vocabularies"):
        trim_vocabulary(make_model(**two), FULL, CORPUS)
    model = model_for(FULL)
    model.generation_config.bad_words_ids = [[5]]
    with pytest.raises(ValueError, match="bad_words_ids"):
        trim_vocabulary(model, FULL, CORPUS)


# ---------------------------------------------------------------------------------------- the script


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint with its tokenizer, and text beside it."""
    place = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    fields = {"encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
    model_for(FULL, d_model=16, **fields).save_pretrained(place / "large")
    save_tokenizer(FULL, place / "large")
    for side, language in enumerate(("en", "de")):
        text = "".join(f"{pair[side]}\n" for pair in SPLITS.train[:25])
        (place / f"text.{language}").write_text(text, encoding="utf-8")
    return place


def call(words, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["shrink.py", *map(str, words)])
    monkeypatch.setattr(sys, "path", [*sys.path, str(SCRIPTS)])
    load("shrink").main()


def test_the_script_does_all_three_and_writes_a_whole_folder(folder, tmp_path, monkeypatch, capsys):
    facts = RunFacts(1, "a", "b", {"data": "some text"}, scores={"test": {"bleu": 99.0}}, languages=["en", "de"])
    write_model_card(folder / "large", facts)
    text = [folder / "text.en", folder / "text.de"]
    words = ["--model", folder / "large", "--output_dir", tmp_path / "small", "--keep_decoder_layers", 0, 2]
    words += ["--prune_heads", 1, 2, "--importance_data", *text, "--trim_vocabulary", *text]
    call(words, monkeypatch)
    output = capsys.readouterr().out
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "small")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "small")
    config = model.config
    assert (config.encoder_layers, config.decoder_layers) == (2, 2)
    assert (config.encoder_attention_heads, config.decoder_attention_heads, config.d_k) == (3, 2, 4)
    assert len(tokenizer) == config.vocab_size < len(FULL)
    assert f"to {model.num_parameters():,} parameters" in output
    assert f"{len(tokenizer)} of {len(FULL)} tokens" in output
    assert (tmp_path / "small" / "modeling_vanilla_transformer.py").is_file()
    assert list(tmp_path.iterdir()) == [tmp_path / "small"]
    card = (tmp_path / "small" / "README.md").read_text(encoding="utf-8")
    assert "some text" in card
    assert "2 of 3 decoder layers" in card
    assert "99.0" not in card  # the score of another model
    large = load_file(folder / "large" / "model.safetensors")
    small = load_file(tmp_path / "small" / "model.safetensors")
    same = "model.decoder.layers.{}.fc1.weight"
    assert torch.equal(small[same.format(1)], large[same.format(2)])
    translate = transformers.pipeline("translation", model=str(tmp_path / "small"))
    assert isinstance(translate("We see the house.", max_new_tokens=4)[0]["translation_text"], str)


def test_the_script_prunes_the_heads_that_a_loss_by_hand_finds_unimportant(folder, tmp_path, monkeypatch):
    text = [folder / "text.en", folder / "text.de"]
    words = ["--model", folder / "large", "--output_dir", tmp_path / "small", "--prune_heads", 0, 3]
    call([*words, "--importance_data", *text, "--importance_pairs", 10], monkeypatch)
    model = AutoModelForSeq2SeqLM.from_pretrained(folder / "large")
    pairs = [(FULL(source).input_ids, FULL(target).input_ids) for source, target in SPLITS.train[:10]]
    name = "model.decoder.layers.0.encoder_attn"
    states, slopes = [], torch.zeros(4)
    model.get_submodule(name).out_proj.register_forward_pre_hook(lambda module, inputs: states.append(inputs[0]))
    for source, target in pairs:
        labels = torch.tensor([target])
        found = model(torch.tensor([source]), decoder_input_ids=shift_tokens_right(labels, 0, 2)).logits
        loss = torch.nn.functional.cross_entropy(found[0], labels[0], reduction="sum")
        state = states.pop()
        (gradient,) = torch.autograd.grad(loss, state)
        slopes += (gradient * state).unflatten(-1, (4, -1)).sum((0, 1, 3)).detach().abs()
    best = int(slopes.argmax())
    rows = model.get_submodule(name).v_proj.weight[4 * best : 4 * best + 4]
    assert torch.equal(load_file(tmp_path / "small" / "model.safetensors")[f"{name}.v_proj.weight"], rows)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "nothing to shrink"),
        ("--keep_decoder_layers 3", "decoder=[3]"),
        ("--prune_heads 1", "--importance_data go together"),
        ("--importance_data {text}.en {text}.de --keep_decoder_layers 0", "go together"),
        ("--prune_heads 1 1 1 --importance_data {text}.en {text}.de", "3 numbers"),
        ("--prune_heads 4 --importance_data {text}.en {text}.de", "encoder=4"),
        ("--prune_heads 1 --importance_data {text}.en {text}.fr", "text.fr: no such file"),
        ("--prune_heads 1 --importance_data {text}.en {text}.de --importance_pairs 0", "--importance_pairs 0"),
        ("--trim_vocabulary {text}.fr", "text.fr: no such file"),
        ("--keep_decoder_layers 0 --model {text}.en", "no config.json"),
    ],
)
def test_the_script_refuses(folder, words, message, tmp_path, monkeypatch, capsys):
    words = words.format(text=folder / "text").split()
    with pytest.raises(SystemExit) as stopped:
        call(["--model", folder / "large", "--output_dir", tmp_path / "small", *words], monkeypatch)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_the_script_overwrites_nothing_and_leaves_no_half_folder(folder, tmp_path, monkeypatch, capsys):
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "file").write_text("kept")
    words = ["--model", folder / "large", "--keep_decoder_layers", 0, "--output_dir"]
    with pytest.raises(SystemExit):
        call([*words, tmp_path / "old"], monkeypatch)
    assert "not an empty folder" in capsys.readouterr().err
    assert [path.read_text() for path in (tmp_path / "old").iterdir()] == ["kept"]

    def full_disk(*arguments, **options):
        raise OSError("No space left on device")

    monkeypatch.setattr("vanilla_transformer.tokenizer_training.save_tokenizer", full_disk)
    with pytest.raises(SystemExit):
        call([*words, tmp_path / "new"], monkeypatch)
    assert "No space left" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [tmp_path / "old"]
