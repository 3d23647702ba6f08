"""FSMT → ours, against `FSMTForConditionalGeneration`, `FSMTTokenizer` and the library's decoding."""

import pytest
import torch
from fsmt_models import (
    EOS,
    PAD,
    SOURCES,
    SPECIAL,
    TARGETS,
    fsmt_generate,
    learn_codes,
    logits,
    make_fsmt,
    make_fsmt_tokenizer,
    make_words,
    pad_rows,
    segment,
)
from reference import position_encoding_tensor2tensor
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, GenerationConfig, pipeline
from transformers.models.fsmt import modeling_fsmt

from vanilla_transformer.convert import fsmt as converter
from vanilla_transformer.convert.fsmt import from_fsmt, read
from vanilla_transformer.convert.renaming import ConversionError, whole_folder

ONE_SIZE = {"src_vocab_size": 53}
KINDS = {
    "two dictionaries": {},
    "two dictionaries, output tied": {"equal": ["output"]},
    "one dictionary, three matrices": ONE_SIZE,
    "one matrix by equal numbers": {**ONE_SIZE, "equal": ["source", "output"]},
    "one matrix by the config": {**ONE_SIZE, "tie_word_embeddings": True},
    "source and target one, output its own": {**ONE_SIZE, "equal": ["source"]},
    "gelu, unscaled, other sizes": {
        **{"activation_function": "gelu", "scale_embedding": False, "encoder_layers": 3, "decoder_layers": 1},
        **{"encoder_ffn_dim": 40, "decoder_ffn_dim": 24, "d_model": 24, "decoder_attention_heads": 8},
    },
    "short table of positions": {"max_position_embeddings": 4},
}
SHARING = {  # source and target, target and output
    "two dictionaries, output tied": (False, True),
    "one matrix by equal numbers": (True, True),
    "one matrix by the config": (True, True),
    "source and target one, output its own": (True, False),
}


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_fsmt(kind, side):
    foreign = make_fsmt(**KINDS[kind])
    ours = from_fsmt(foreign)
    torch.testing.assert_close(logits(ours, side=side), logits(foreign, side=side), rtol=0, atol=1e-5)
    sharing = (ours.config.share_encoder_decoder_embeddings, ours.config.tie_word_embeddings)
    assert sharing == SHARING.get(kind, (False, False))
    assert not ours.training


def test_in_float64_the_float32_angles_of_fsmt_are_the_whole_difference(monkeypatch):
    # FSMT fills its mask by way of float32, where the least float64 overflows.
    monkeypatch.setattr(modeling_fsmt, "fill_with_neg_inf", lambda t: t.fill_(torch.finfo(t.dtype).min))
    foreign = make_fsmt().double()
    ours = from_fsmt(foreign)
    assert ours.dtype == torch.float64
    torch.testing.assert_close(logits(ours), logits(foreign), rtol=0, atol=1e-5)
    for stack in (foreign.model.encoder, foreign.model.decoder):
        with torch.no_grad():
            for place, row in enumerate(stack.embed_positions.weight):
                row.copy_(torch.tensor(position_encoding_tensor2tensor(place, 16), dtype=torch.float64))
    torch.testing.assert_close(logits(ours), logits(foreign), rtol=0, atol=1e-12)


def test_other_ids_move_the_positions_and_the_start():
    foreign = make_fsmt(
        pad_token_id=5, bos_token_id=3, eos_token_id=4, decoder_start_token_id=3, forced_eos_token_id=4
    )
    ours = from_fsmt(foreign)
    assert ours.config.position_offset == 6
    ids = ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id")
    assert [getattr(ours.config, name) for name in ids] == [5, 3, 4, 3]
    torch.testing.assert_close(logits(ours, fill=5), logits(foreign, fill=5), rtol=0, atol=1e-5)


def test_configuration_is_carried():
    fields = {"dropout": 0.25, "attention_dropout": 0.15, "activation_dropout": 0.35, "use_cache": False}
    ours = from_fsmt(make_fsmt(**fields)).config
    assert {name: getattr(ours, name) for name in fields} == fields
    assert (ours.vocab_size, ours.decoder_vocab_size, ours.max_position_embeddings) == (41, 53, 64)
    assert (ours.label_smoothing, ours.layer_norm_eps, ours.attention_bias) == (0.0, 1e-5, True)
    assert (ours.position_embedding_type, ours.sinusoid_layout) == ("sinusoidal_tensor2tensor", "halves")


SETTINGS = {
    "its own": {},
    "greedy": {"num_beams": 1},
    "short hypotheses": {"num_beams": 4, "length_penalty": 0.2, "early_stopping": "never"},
    "long hypotheses": {"num_beams": 4, "length_penalty": 2.5, "max_length": 10},
}


@pytest.mark.parametrize("settings", SETTINGS)
def test_generate_gives_the_tokens_of_fsmt_also_after_saving(settings, tmp_path):
    foreign = make_fsmt(**ONE_SIZE, equal=["source"], std=0.3, ends=2.0)
    # A trained model does not write padding; FSMT counts it as no token.
    foreign.generation_config.update(**SETTINGS[settings], suppress_tokens=[PAD])
    from_fsmt(foreign).save_pretrained(tmp_path / "ours")
    ours = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "ours")
    sources = [[draw % 50 + 3 for draw in range(seed, seed * 7, seed)] + [EOS] for seed in range(2, 14)]
    ids, mask = pad_rows(sources)
    expected = fsmt_generate(foreign, input_ids=ids, attention_mask=mask)
    assert ours.generate(input_ids=ids, attention_mask=mask).tolist() == expected.tolist()
    if settings == "long hypotheses":
        paper = ours.generate(input_ids=ids, attention_mask=mask, gnmt_alpha=0.6)
        assert paper.tolist() != expected.tolist()  # the ranking matters for these sentences


def test_settings_that_fsmt_leaves_open_stay_the_librarys(tmp_path):
    foreign = make_fsmt(std=0.3)
    ids = {"pad_token_id": PAD, "eos_token_id": EOS, "decoder_start_token_id": EOS, "suppress_tokens": [PAD]}
    foreign.generation_config = GenerationConfig(**ids)
    from_fsmt(foreign).save_pretrained(tmp_path / "ours")
    ours = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "ours")
    source, mask = pad_rows(SOURCES)
    for options in ({}, {"num_beams": 3}):
        expected = fsmt_generate(foreign, input_ids=source, attention_mask=mask, **options)
        assert ours.generate(input_ids=source, attention_mask=mask, **options).tolist() == expected.tolist()


def test_trained_positions_are_carried_as_learned_ones():
    foreign = make_fsmt(max_position_embeddings=9)
    with torch.no_grad():
        foreign.model.decoder.embed_positions.weight.add_(torch.randn(11, 16) * 0.01)
    ours = from_fsmt(foreign)
    assert (ours.config.position_embedding_type, ours.config.max_position_embeddings) == ("learned", 9)
    torch.testing.assert_close(logits(ours), logits(foreign), rtol=0, atol=1e-5)


def test_half_precision_is_carried_with_its_sinusoids():
    ours = from_fsmt(make_fsmt().bfloat16())
    assert ours.dtype == torch.bfloat16
    assert ours.config.position_embedding_type == "sinusoidal_tensor2tensor"


# ---------------------------------------------------------------------------------------- refused


@pytest.mark.parametrize("name", ["encoder_layerdrop", "decoder_layerdrop"])
def test_layer_dropout_is_refused_by_name(name):
    with pytest.raises(ConversionError, match=rf"{name}=0\.2.*set config\.{name} = 0\.0"):
        from_fsmt(make_fsmt(**{name: 0.2}))


def test_layer_norms_that_differ_are_refused():
    foreign = make_fsmt()
    foreign.model.decoder.layers[1].final_layer_norm.eps = 1e-3
    with pytest.raises(ConversionError, match=r"different ε, \[1e-05, 0\.001\]"):
        from_fsmt(foreign)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"d_model": 15, "encoder_attention_heads": 3, "decoder_attention_heads": 5}, "d_model=15 is odd"),
        ({"decoder_start_token_id": None}, "decoder_start_token_id have to be set"),
        ({"dropout": 1.0}, r"dropout=1\.0 is not valid"),
    ],
)
def test_what_our_configuration_cannot_say_is_refused(fields, message):
    with pytest.raises(ConversionError, match=message):
        from_fsmt(make_fsmt(**fields))


def test_another_class_is_refused():
    with pytest.raises(ConversionError, match="not a FSMTModel"):
        from_fsmt(make_fsmt().model)


def test_another_kind_of_checkpoint_and_no_checkpoint_are_refused(tmp_path, make_model):
    make_model().save_pretrained(tmp_path / "other")
    with pytest.raises(ConversionError, match="'vanilla_transformer', not 'fsmt'"):
        read(tmp_path / "other")
    with pytest.raises(ConversionError, match="not a folder with a config"):
        read(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda tensors: tensors.pop("model.decoder.layers.1.fc1.bias"),
            r"missing: model\.decoder\.layers\.1\.fc1\.bias",
        ),
        (lambda tensors: tensors.update({"model.extra": torch.ones(2)}), r"unknown: model\.extra"),
        (
            lambda tensors: tensors.update({"model.encoder.layers.0.fc2.bias": torch.ones(17)}),
            r"wrong shape: model\.encoder\.layers\.0\.fc2\.bias is \[17\], \[16\] is needed",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_refused_and_nothing_is_written(change, message, tmp_path):
    folder = tmp_path / "fsmt"
    make_fsmt().save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConversionError, match=message), whole_folder(tmp_path / "ours") as output:
        read(folder)[0].save_pretrained(output)
    assert [path.name for path in tmp_path.iterdir()] == ["fsmt"]


def test_in_memory_an_unknown_tensor_is_refused():
    foreign = make_fsmt()
    foreign.model.adapter = torch.nn.Linear(2, 2)
    with pytest.raises(ConversionError, match=r"unknown: model\.adapter\.bias"):
        from_fsmt(foreign)


# ---------------------------------------------------------------------------------------- folders and text


def published(folder, foreign):
    """Save as the published checkpoints are: without tables of positions."""
    foreign.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if "embed_positions" not in name}
    assert len(kept) == len(tensors) - 2
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


def test_a_published_folder_is_read_with_its_tokenizer_and_translates_alike(tmp_path):
    words = make_words(seed=1)
    merges = learn_codes(words)
    pieces = sorted(set(segment(words, merges, tmp_path / "codes")))
    source = {**SPECIAL, **{piece: number for number, piece in enumerate(pieces[::2], start=4)}}
    target = {**SPECIAL, **{piece: number for number, piece in enumerate(reversed(pieces), start=4)}}
    foreign = make_fsmt(src_vocab_size=len(source), tgt_vocab_size=len(target), ends=1.0)
    foreign.generation_config.update(suppress_tokens=[PAD], num_beams=3, max_length=14)
    folder = tmp_path / "fsmt"
    published(folder, foreign)
    make_fsmt_tokenizer(tmp_path / "vocabularies", source, target, merges).save_pretrained(folder)

    ours, tokenizer = read(folder)
    torch.testing.assert_close(logits(ours), logits(foreign), rtol=0, atol=1e-5)
    ours.save_pretrained(tmp_path / "ours")
    tokenizer.save_pretrained(tmp_path / "ours")
    assert type(AutoTokenizer.from_pretrained(tmp_path / "ours")).__name__ == "FSMTTokenizer"
    texts = [" ".join(words[start : start + 5]) + "." for start in range(0, 40, 5)]
    original = AutoTokenizer.from_pretrained(folder)
    expected = []
    for text in texts:
        row = fsmt_generate(foreign, **original(text, return_tensors="pt"))[0]
        expected.append({"translation_text": original.decode(row, skip_special_tokens=True)})
    assert len({result["translation_text"] for result in expected}) > 3
    assert pipeline("translation", model=str(tmp_path / "ours"))(texts) == expected


def test_a_folder_without_dictionaries_has_no_tokenizer(tmp_path):
    foreign = make_fsmt()
    foreign.save_pretrained(tmp_path)
    ours, tokenizer = read(tmp_path)
    assert tokenizer is None
    torch.testing.assert_close(logits(ours), logits(foreign), rtol=0, atol=1e-5)


def test_without_sacremoses_the_error_says_what_to_install(tmp_path, monkeypatch):
    make_fsmt().save_pretrained(tmp_path)
    (tmp_path / "vocab-src.json").write_text("{}")
    monkeypatch.setattr(converter, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="sacremoses"):
        read(tmp_path)


def test_sentences_beyond_the_table_of_positions_go_on():
    foreign = make_fsmt(max_position_embeddings=4)
    assert max(map(len, TARGETS)) > 4
    source = [[5 + n % 30 for n in range(40)] + [EOS]]
    expected = logits(foreign, sources=source, targets=TARGETS[:1])
    torch.testing.assert_close(
        logits(from_fsmt(foreign), sources=source, targets=TARGETS[:1]), expected, rtol=0, atol=1e-5
    )
