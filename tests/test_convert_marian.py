"""MarianMT ↔ ours, against `MarianMTModel`, `MarianTokenizer` and the library's decoding."""

import copy
import json
import pickle
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import pad
from torch import nn
from transformers import AutoTokenizer, MarianConfig, MarianMTModel, MarianTokenizer, pipeline
from transformers.models.marian.modeling_marian import MarianSinusoidalPositionalEmbedding

import vanilla_transformer as vt
from vanilla_transformer.attention_vanilla_transformer import sinusoids
from vanilla_transformer.convert.marian import STREAM_AXIS, TABLE, from_marian, read, to_marian, write
from vanilla_transformer.convert.renaming import ConversionError

PAD, EOS, SIZE = 60, 0, 61
MARIAN = {
    "vocab_size": SIZE,
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 40,
    "max_position_embeddings": 64,
    "activation_function": "swish",
    "scale_embedding": True,
    "pad_token_id": PAD,
    "eos_token_id": EOS,
    "forced_eos_token_id": EOS,
    "decoder_start_token_id": PAD,
}
SEPARATE = {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 67}
KINDS = {
    "one matrix": {},
    "separate vocabularies": SEPARATE,
    "separate, untied": {**SEPARATE, "tie_word_embeddings": False},
    "three matrices of one size": {"tie_word_embeddings": False},  # "shared" is there, and nobody reads it
    "gelu, unscaled, other depths": {
        **{"activation_function": "gelu", "scale_embedding": False, "encoder_layers": 3, "decoder_layers": 1},
        **{"encoder_ffn_dim": 40, "decoder_ffn_dim": 24, "d_model": 24},
    },
}
OPUS = {  # what the generation_config.json of Helsinki-NLP/opus-mt-en-de says, with shorter outputs
    **{"bad_words_ids": [[PAD]], "forced_eos_token_id": EOS, "max_length": 14, "num_beams": 4},
    **{"renormalize_logits": True, "bos_token_id": 0},
}
OURS = {**{k: v for k, v in MARIAN.items() if k != "forced_eos_token_id"}, "dropout": 0.0, "layer_norm_eps": 1e-5}


def randomise(model):
    """Give every weight, bias and LayerNorm a value of its own; outputs then depend on inputs."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if "embed_positions" not in name:
                offset = 1.0 if "norm.weight" in name else 0.0
                std = 0.1 if "norm" in name or name.endswith("bias") else 0.3 if "layers" in name else 1.0
                tensor.copy_(offset + std * torch.randn(tensor.shape, generator=generator, dtype=torch.float64))
    return model.eval()


def make_marian(dtype=torch.float32, generation=None, **fields):
    config = MarianConfig(**{**MARIAN, **fields})
    config.tie_word_embeddings = fields.get("tie_word_embeddings", True)  # 5.0 takes another field for it
    model = randomise(MarianMTModel(config)).to(dtype)
    for name, value in (OPUS if generation is None else generation).items():
        setattr(model.generation_config, name, value)
    return model


def make_ours(dtype=torch.float32, **fields):
    model = vt.VanillaTransformerForConditionalGeneration(vt.VanillaTransformerConfig(**{**OURS, **fields}))
    return randomise(model).to(dtype)


def batch():
    source, source_mask = pad([[11, 12, 13, 14, 15, 16, EOS], [21, 22, EOS], [31, 32, 33, 34, EOS]])
    target, target_mask = pad([[PAD, 17, 18, 19, 20, 17], [PAD, 23, 24, 25, 26, 27, 28, 29], [PAD, 35]])
    return {
        **{"input_ids": source, "attention_mask": source_mask},
        **{"decoder_input_ids": target, "decoder_attention_mask": target_mask},
    }


def sources():
    rows = [[11, 12, 13, 14, 15, 16], [21, 22], [31, 32, 33, 34], [41, 42, 43], [7], [9, 50, 51, 52, 9, 8]]
    ids, mask = pad([[*row, EOS] for row in rows])
    return {"input_ids": ids, "attention_mask": mask}


@torch.no_grad()
def assert_same_logits(one, other, tolerance):
    inputs = batch()
    real = inputs["decoder_attention_mask"].bool()
    first, second = (model(**inputs).logits[real] for model in (one, other))
    assert first.std() > 0.5  # they say something
    torch.testing.assert_close(first, second, rtol=0.0, atol=tolerance)


def mend(model):
    """Make Marian's beam search work with separate vocabularies: up to 5.8 the library takes the source's size."""
    if isinstance(model, MarianMTModel):
        model.config.vocab_size = model.config.decoder_vocab_size
    return model


def assert_same_tokens(one, other, **options):
    models = [copy.deepcopy(one), copy.deepcopy(other)]
    first, second = (mend(model).generate(**sources(), **options).tolist() for model in models)
    assert first == second
    # Random models like to repeat one token: once more without, so that each step counts.
    options = {**options, "no_repeat_ngram_size": 1}
    first, second = (model.generate(**sources(), **options).tolist() for model in models)
    assert first == second
    assert len({tuple(row) for row in first}) == len(first)
    assert sum(len(set(row)) for row in first) > 5 * len(first)


# ---------------------------------------------------------------------------------------- from Marian


@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_loss_equal_marians(kind):
    marian = make_marian(torch.float64, **KINDS[kind])
    model = from_marian(marian)
    assert not model.training
    # Marian's positions are rounded to float32, ours are not; all else is float64.
    assert_same_logits(marian, model, 1e-6)
    single = make_marian(**KINDS[kind])
    assert_same_logits(single, from_marian(single), 1e-5)
    labels = batch()["decoder_input_ids"].masked_fill(batch()["decoder_attention_mask"] == 0, -100)
    inputs = {name: batch()[name] for name in ("input_ids", "attention_mask")}
    losses = [x(**inputs, labels=labels).loss for x in (marian, model)]
    torch.testing.assert_close(*losses, rtol=0.0, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_beams", [1, 4])
def test_greedy_and_beam_search_give_marians_tokens_with_its_own_settings(kind, num_beams, tmp_path):
    marian = make_marian(generation={**OPUS, "num_beams": num_beams}, **KINDS[kind])
    model = from_marian(marian)
    assert_same_tokens(marian, model)
    model.save_pretrained(tmp_path)
    loaded = vt.VanillaTransformerForConditionalGeneration.from_pretrained(tmp_path)
    assert_same_tokens(marian, loaded)
    assert_same_logits(marian, loaded, 1e-5)


@pytest.mark.parametrize(
    "settings",
    [
        {"num_beams": 4, "length_penalty": 0.3, "early_stopping": True, "max_length": 12},
        {"num_beams": 3, "length_penalty": 2.0, "early_stopping": "never", "max_new_tokens": 9},
        {"num_beams": 4, "no_repeat_ngram_size": 2, "repetition_penalty": 1.3, "min_length": 5, "max_length": 12},
        {},  # the library's own defaults: greedy, 20 new tokens
    ],
    ids=str,
)
def test_the_checkpoints_own_ranking_and_lengths_apply(settings, tmp_path):
    marian = make_marian(generation=settings)
    model = from_marian(marian)
    assert_same_tokens(marian, model)
    model.save_pretrained(tmp_path)
    loaded = vt.VanillaTransformerForConditionalGeneration.from_pretrained(tmp_path)
    assert_same_tokens(marian, loaded)
    assert (loaded.generation_config.gnmt_alpha, loaded.generation_config.max_length_offset) == (None, None)
    scores = [
        x.generate(**sources(), num_beams=4, return_dict_in_generate=True, output_scores=True).sequences_scores
        for x in (marian, loaded)
    ]
    torch.testing.assert_close(*scores, rtol=1e-5, atol=1e-5)


def test_positions_equal_marians_table():
    table = MarianSinusoidalPositionalEmbedding(600, 48).create_weight()
    config = vt.VanillaTransformerConfig(d_model=48, sinusoid_layout="halves")
    torch.testing.assert_close(table.double(), sinusoids(torch.arange(600), config), rtol=0.0, atol=1e-7)


def test_an_odd_width_is_refused():  # Marian then has one sine more than cosines
    marian = make_marian(d_model=15, encoder_attention_heads=3, decoder_attention_heads=5)
    with pytest.raises(ConversionError, match="d_model=15 is odd"):
        from_marian(marian)


def test_training_rates_pipelines_fields_and_precision_are_carried():
    marian = make_marian(
        torch.bfloat16,
        **{"dropout": 0.3, "attention_dropout": 0.2, "activation_dropout": 0.1, "prefix": "x: ", "bos_token_id": 5},
        task_specific_params={"translation": {"num_beams": 2}},
        use_cache=False,
    )
    model = from_marian(marian)
    assert model.dtype == torch.bfloat16
    for name in ("dropout", "attention_dropout", "activation_dropout", "prefix", "task_specific_params", "use_cache"):
        assert getattr(model.config, name) == getattr(marian.config, name), name
    assert (model.config.label_smoothing, model.config.max_position_embeddings) == (0.0, 64)
    assert (model.config.bos_token_id, model.config.eos_token_id) == (5, EOS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"encoder_layerdrop": 0.1}, "encoder_layerdrop=0.1: layers are never dropped here"),
        ({"normalize_before": True}, "normalize_before=True is not what MarianMTModel computes"),
        ({"static_position_embeddings": False}, "static_position_embeddings=False is not what MarianMTModel"),
        ({"decoder_vocab_size": 67}, "decoder_vocab_size=67 differs from vocab_size=61"),
    ],
)
def test_what_we_do_not_express_is_refused(change, message):
    marian = make_marian()
    for name, value in change.items():
        setattr(marian.config, name, value)
    with pytest.raises(ConversionError, match=message):
        from_marian(marian)


def test_a_padding_id_is_needed():
    marian = make_marian()
    marian.config.pad_token_id = None
    with pytest.raises(ConversionError, match="pad_token_id=None is not valid"):
        from_marian(marian)


def test_trained_positions_mixed_norms_and_other_classes_are_refused():
    marian = make_marian()
    with torch.no_grad():
        marian.model.decoder.embed_positions.weight[3, 5] += 0.001
    with pytest.raises(ConversionError, match="are not Marian's sinusoids"):
        from_marian(marian)
    marian = make_marian()
    marian.model.encoder.layers[1].final_layer_norm.eps = 1e-6
    with pytest.raises(ConversionError, match=r"LayerNorms have different ε, \[1e-06, 1e-05\]"):
        from_marian(marian)
    with pytest.raises(ConversionError, match="this is a MarianModel"):
        from_marian(marian.model)


def test_one_other_epsilon_in_memory_is_carried():
    marian = make_marian(torch.float64)
    for module in marian.modules():
        if isinstance(module, nn.LayerNorm):
            module.eps = 0.01
    model = from_marian(marian)
    assert model.config.layer_norm_eps == 0.01
    assert_same_logits(marian, model, 1e-6)


def test_unknown_tensors_in_memory_are_all_named():
    marian = make_marian()
    marian.model.encoder.register_buffer("scale", torch.ones(3))
    marian.model.encoder.layers[0].fc3 = nn.Linear(2, 2)
    with pytest.raises(ConversionError, match=r"unknown: model.encoder.layers.0.fc3.bias\n.*fc3.weight\n.*scale"):
        from_marian(marian)


# ---------------------------------------------------------------------------------------- to Marian

PAPER = {
    "one matrix": {},
    "untied": {"tie_word_embeddings": False},
    "separate vocabularies": SEPARATE,
    "separate, untied": {**SEPARATE, "tie_word_embeddings": False},
    "biases": {"attention_bias": True, "output_bias": True},
    "halves": {"sinusoid_layout": "halves", "scale_embedding": False, "activation_function": "relu"},
}


@pytest.mark.filterwarnings("ignore:MarianMT has no place")
@pytest.mark.parametrize("kind", PAPER)
def test_a_paper_model_goes_to_marian_exactly(kind):
    model = make_ours(torch.float64, **PAPER[kind])
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    marian = to_marian(model)
    assert type(marian) is MarianMTModel
    assert not marian.training
    assert_same_logits(model, marian, 1e-6)
    assert_same_tokens(model, marian, num_beams=1, max_new_tokens=12)
    assert_same_tokens(model, marian, num_beams=4, max_new_tokens=12, length_penalty=0.8, early_stopping=True)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.filterwarnings("ignore:MarianMT has no place")
def test_interleaved_becomes_halves_by_one_permutation_of_the_residual_stream():
    model = make_ours(torch.float64)
    marian = to_marian(model)
    order = [*range(0, 16, 2), *range(1, 16, 2)]
    inputs = {**batch(), "output_hidden_states": True}
    ours, theirs = model(**inputs), marian(**inputs)
    for side, mask in (("encoder", "attention_mask"), ("decoder", "decoder_attention_mask")):
        states = (getattr(x, f"{side}_hidden_states") for x in (ours, theirs))
        for mine, other in zip(*states, strict=True):
            real = inputs[mask].bool()
            torch.testing.assert_close(mine[real][:, order], other[real], rtol=0.0, atol=1e-6)
    same = {
        name
        for name, tensor in marian.state_dict().items()
        if torch.equal(tensor, model.state_dict().get(name, tensor))
    }
    # What meets the stream by no axis is as it was; all the rest has moved.
    assert {name.rpartition(".")[2] for name in same} <= {"bias", "final_logits_bias", "weight"}
    moved = {".".join(name.split(".")[-2:]) for name in set(marian.state_dict()) - same}
    assert moved == set(STREAM_AXIS) - {"out_proj.bias"}  # ours has no such bias here, Marian's is zero


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "three matrices of one size"])
def test_there_and_back_nothing_has_changed(kind):
    marian = make_marian(**KINDS[kind])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = to_marian(from_marian(marian))
    theirs, ours = again.state_dict(), marian.state_dict()
    assert list(theirs) == list(ours)
    assert all(torch.equal(theirs[name], ours[name]) for name in ours)
    left_out = {"dtype", "label_smoothing"}
    if not MarianConfig(
        share_encoder_decoder_embeddings=False
    ).tie_word_embeddings:  # 5.0 cannot say so, and has a copy
        left_out.add("tie_word_embeddings")
    first, second = (x.config.to_dict() for x in (again, marian))
    assert {k: v for k, v in first.items() if k not in left_out} == {
        k: v for k, v in second.items() if k not in left_out
    }
    settings = [x.generation_config.to_dict() for x in (again, marian)]
    assert {k: v for k, v in settings[0].items() if k[0] != "_"} == {
        k: v for k, v in settings[1].items() if k[0] != "_"
    }


def test_our_settings_come_back_from_marian():
    model = make_ours(
        sinusoid_layout="halves", attention_bias=True, output_bias=True, label_smoothing=0.2, dropout=0.25
    )
    model.generation_config.gnmt_alpha = model.generation_config.max_length_offset = None
    again = from_marian(to_marian(model))
    assert again.config.to_dict() == {**model.config.to_dict(), "dtype": again.config.to_dict()["dtype"]}
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in again.state_dict().items())


def test_another_epsilon_is_refused_with_the_size_of_the_difference():
    model = make_ours(layer_norm_eps=0.001)
    model.generation_config.gnmt_alpha = model.generation_config.max_length_offset = None
    with pytest.raises(
        ConversionError, match=r"layer_norm_eps=0.001: MarianMT has 1e-05.*allow_layer_norm_eps"
    ) as error:
        to_marian(model.train())
    assert model.training
    marian = to_marian(model.eval(), allow_layer_norm_eps=True)
    generator = torch.Generator().manual_seed(9)
    source, target = (torch.randint(SIZE, (8, 32), generator=generator) for _ in range(2))
    with torch.no_grad():
        logits = [x(input_ids=source, decoder_input_ids=target).logits for x in (model, marian)]
    measured = float((logits[0] - logits[1]).abs().max())
    told = float(str(error.value).split("by up to ")[1].split(" ")[0])
    assert measured / 3 < told < measured * 3  # other random tokens
    assert told > 1e-3


def test_what_is_lost_of_the_papers_decoding_is_told():
    model = make_ours()
    with pytest.warns(UserWarning, match=r"gnmt_alpha=0.6 \(set instead: length_penalty=0.6.*max_length_offset=50"):
        settings = to_marian(model).generation_config
    assert (settings.num_beams, settings.length_penalty, settings.early_stopping) == (4, 0.6, "never")
    assert settings.max_length == 64  # Marian's positions end there
    assert not {"gnmt_alpha", "max_length_offset"} & set(vars(settings))
    model.generation_config.num_beams = 1
    model.generation_config.max_length = 30
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # greedy, with a length: nothing is lost
        settings = to_marian(model).generation_config
    assert (settings.length_penalty, settings.early_stopping, settings.max_length) == (None, None, 30)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"norm_position": "pre"}, "norm_position='pre': MarianMT has 'post'"),
        ({"final_norm": True}, "final_norm=True: MarianMT has no LayerNorm behind its stacks"),
        ({"position_embedding_type": "learned"}, "position_embedding_type='learned': MarianMT has 'sinusoidal'"),
        ({"position_embedding_type": "sinusoidal_tensor2tensor"}, "MarianMT has 'sinusoidal'"),
        ({"position_offset": 2}, "position_offset=2: MarianMT has 0"),
        ({"d_k": 6}, "encoder's heads have d_k and d_v 6 and 4: MarianMT has d_model / h = 16 / 4"),
        ({"encoder_attention_heads": 2, "d_v": 3}, "d_k and d_v 8 and 3"),
        ({"d_k": 4, "d_v": 4}, "decoder's heads have d_k and d_v 4 and 4: MarianMT has d_model / h = 16 / 2"),
    ],
)
def test_what_marian_does_not_express_is_refused_and_nothing_written(fields, message, tmp_path):
    with pytest.raises(ConversionError, match=message):
        write(make_ours(**fields), None, tmp_path / "marian")
    assert list(tmp_path.iterdir()) == []


def test_only_our_model_goes_to_marian():
    with pytest.raises(ConversionError, match="this is a VanillaTransformerModel"):
        to_marian(make_ours().model)


def test_the_table_names_every_tensor_of_marian():
    marian = make_marian(**SEPARATE, tie_word_embeddings=False)
    names = {".".join("{i}" if part.isdigit() else part for part in name.split(".")) for name in marian.state_dict()}
    names = {name for name in names if "embed_positions" not in name}
    assert names | {"model.shared.weight"} == set(TABLE)


# ---------------------------------------------------------------------------------------- folders

ENGLISH = ["the cat sat on the mat", "a dog ran through the park", "we saw the small red house", "it's late, isn't it"]
GERMAN = [
    "die Katze saß auf der Matte",
    "ein Hund lief durch den Park",
    "wir sahen das kleine rote Haus",
    "es ist spät",
]


def sentencepiece_vocabulary(texts, path):
    """Train a SentencePiece model; return its pieces behind `</s>` and `<unk>`, `<pad>` last, as Marian has them."""
    sentencepiece = pytest.importorskip("sentencepiece")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts * 5),
        model_prefix=str(path),
        vocab_size=58,
        hard_vocab_limit=False,
        bos_id=-1,
        minloglevel=2,
    )
    pieces = [row.split("\t")[0] for row in path.with_suffix(".vocab").read_text(encoding="utf-8").splitlines()]
    vocabulary = {"</s>": 0, "<unk>": 1}
    for piece in [*pieces, "<pad>"]:
        vocabulary.setdefault(piece, len(vocabulary))
    return vocabulary


def make_marian_folder(folder, separate):
    """Write a MarianMT checkpoint with its SentencePiece tokenizer; return the size of the vocabularies."""
    work = folder.with_suffix(".work")
    work.mkdir()
    texts = (
        {"source": ENGLISH, "target": GERMAN} if separate else dict.fromkeys(("source", "target"), ENGLISH + GERMAN)
    )
    vocabularies = {side: sentencepiece_vocabulary(texts[side], work / side) for side in texts}
    for side, vocabulary in vocabularies.items():
        if separate:  # both have the special tokens at the same places, so that one id pads both
            vocabulary.pop("<pad>")
            vocabulary = {"</s>": 0, "<unk>": 1, "<pad>": 2, **{k: v + 1 for k, v in vocabulary.items() if v > 1}}
            vocabularies[side] = vocabulary
        (work / f"{side}.json").write_text(json.dumps(vocabulary), encoding="utf-8")
    tokenizer = MarianTokenizer(
        source_spm=str(work / "source.model"),
        target_spm=str(work / "target.model"),
        vocab=str(work / "source.json"),
        target_vocab_file=str(work / "target.json") if separate else None,
        separate_vocabs=separate,
        source_lang="en",
        target_lang="de",
    )
    sizes = {"vocab_size": len(vocabularies["source"]), "decoder_vocab_size": len(vocabularies["target"])}
    padding = tokenizer.pad_token_id
    ids = {"pad_token_id": padding, "decoder_start_token_id": padding}
    sharing = {"share_encoder_decoder_embeddings": not separate, "tie_word_embeddings": not separate}
    generation = {**OPUS, "bad_words_ids": [[padding]], "no_repeat_ngram_size": 1}
    marian = make_marian(**sizes, **ids, **sharing, generation=generation)
    marian.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.fixture(scope="module", params=[False, True], ids=["one vocabulary", "separate vocabularies"])
def marian_folder(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("marian") / "checkpoint"
    make_marian_folder(folder, request.param)
    return folder


def translations(folder, **options):
    translate = pipeline("translation", model=str(folder), device="cpu")
    mend(translate.model)
    return [record["translation_text"] for record in translate([*ENGLISH, "a cat ran late"], batch_size=2, **options)]


def test_the_pipeline_gives_the_same_text_on_the_converted_folder_and_back(marian_folder, tmp_path):
    expected = translations(marian_folder)
    assert len(set(expected)) > 3
    model, tokenizer = read(marian_folder)
    ours = tmp_path / "ours"
    model.save_pretrained(ours)
    tokenizer.save_pretrained(ours)
    assert translations(ours) == expected
    assert translations(ours, num_beams=1) == translations(marian_folder, num_beams=1)
    loaded, kept = AutoTokenizer.from_pretrained(ours), AutoTokenizer.from_pretrained(marian_folder)
    assert type(loaded) is type(kept) is MarianTokenizer
    both = [x(ENGLISH, text_target=GERMAN)["labels"] for x in (loaded, kept)]
    assert both[0] == both[1]

    write(model, tokenizer, tmp_path / "back")
    assert translations(tmp_path / "back") == expected
    old, new = (load_file(folder / "model.safetensors") for folder in (marian_folder, tmp_path / "back"))
    assert sorted(old) == sorted(new)
    assert all(torch.equal(old[name], new[name]) for name in old)


def test_folders_as_they_were_written_before_version_5(marian_folder, tmp_path):
    """Settings of the decoding in config.json, no class of the tokenizer, the tables of positions in the file."""
    old = copy_folder(marian_folder, tmp_path / "old")
    settings = json.loads((old / "generation_config.json").read_text())
    (old / "generation_config.json").unlink()
    moved = {name: settings[name] for name in ("bad_words_ids", "max_length", "num_beams", "no_repeat_ngram_size")}
    edit(old / "config.json", lambda c: c.update(moved, normalize_before=False, static_position_embeddings=True))
    edit(old / "tokenizer_config.json", lambda c: c.pop("tokenizer_class"))
    tensors = load_file(old / "model.safetensors")
    table = MarianSinusoidalPositionalEmbedding(64, 16).create_weight()
    tensors |= {f"model.{side}.embed_positions.weight": table.clone() for side in ("encoder", "decoder")}
    save_file(tensors, old / "model.safetensors", metadata={"format": "pt"})
    expected = translations(old)
    model, tokenizer = read(old)
    assert (model.generation_config.num_beams, model.generation_config.max_length) == (4, 14)
    model.save_pretrained(tmp_path / "ours")
    tokenizer.save_pretrained(tmp_path / "ours")
    assert translations(tmp_path / "ours") == expected


@pytest.mark.filterwarnings("ignore:MarianMT has no place")
def test_our_stock_tokenizer_serves_a_marian_folder(tmp_path):
    tokenizer = vt.train_tokenizer((ENGLISH + GERMAN) * 3, vocab_size=280)
    ids = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2, "decoder_start_token_id": 2}
    model = make_ours(vocab_size=len(tokenizer), **ids)
    model.generation_config.update(gnmt_alpha=None, length_penalty=0.9, num_beams=3)
    model.save_pretrained(tmp_path / "ours")
    vt.save_tokenizer(tokenizer, tmp_path / "ours")
    write(model, tokenizer, tmp_path / "marian")
    loaded = AutoTokenizer.from_pretrained(tmp_path / "marian")
    assert loaded(ENGLISH)["input_ids"] == tokenizer(ENGLISH)["input_ids"]
    options = {"max_length": 20, "bad_words_ids": [[0]], "no_repeat_ngram_size": 1}
    expected = translations(tmp_path / "ours", **options)
    assert translations(tmp_path / "marian", **options) == expected
    assert len(set(expected)) > 3
    again, kept = read(tmp_path / "marian")
    assert kept(GERMAN)["input_ids"] == tokenizer(GERMAN)["input_ids"]
    again.config.check()
    assert_same_logits(model, again, 1e-4)  # float32, logits of up to 40, and sums in another order


def copy_folder(folder, target):
    target.mkdir()
    for path in folder.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    return target


def edit(path, change):
    content = json.loads(path.read_text(encoding="utf-8"))
    change(content)
    path.write_text(json.dumps(content), encoding="utf-8")


@pytest.fixture
def plain_folder(tmp_path):
    folder = tmp_path / "plain"
    make_marian().save_pretrained(folder)
    return folder


def test_a_file_without_the_tied_projection_is_read_on_every_release(tmp_path):
    marian = make_marian(**SEPARATE)
    marian.save_pretrained(tmp_path / "marian")
    assert "lm_head.weight" not in load_file(tmp_path / "marian" / "model.safetensors")
    assert_same_logits(marian, read(tmp_path / "marian")[0], 1e-5)  # MarianMTModel of 5.0 itself invents a projection


def test_without_a_tokenizer_there_is_none(plain_folder, tmp_path):
    model, tokenizer = read(plain_folder)
    assert tokenizer is None
    write(model, None, tmp_path / "again")
    assert_same_logits(MarianMTModel.from_pretrained(tmp_path / "again"), make_marian(), 1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.encoder.layers.1.fc1.bias"), "missing: model.encoder.layers.1.fc1.bias"),
        (lambda t: t.update({"model.encoder.gate": torch.ones(2)}), "unknown: model.encoder.gate"),
        (
            lambda t: t.update({"model.decoder.layers.0.fc2.bias": torch.ones(3)}),
            r"wrong shape: .*fc2.bias is \[3\], \[16\] is needed",
        ),
    ],
    ids=["missing", "unknown", "misshapen"],
)
def test_a_weights_file_that_does_not_fit_is_refused_and_nothing_written(change, message, plain_folder, tmp_path):
    tensors = load_file(plain_folder / "model.safetensors")
    change(tensors)
    save_file(tensors, plain_folder / "model.safetensors", metadata={"format": "pt"})
    before = sorted(path.name for path in tmp_path.rglob("*"))
    with pytest.raises(ConversionError, match=message):
        read(plain_folder)
    assert sorted(path.name for path in tmp_path.rglob("*")) == before


class _Hostile:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))  # opening it for writing makes the file


def test_pickled_code_is_not_run(plain_folder, tmp_path):
    (plain_folder / "model.safetensors").unlink()
    with (plain_folder / "pytorch_model.bin").open("wb") as file:
        torch.save({"lm_head.weight": _Hostile(tmp_path / "was here")}, file)
    with pytest.raises(ConversionError, match="cannot be read as a checkpoint of MarianMT"):
        read(plain_folder)
    (plain_folder / "pytorch_model.bin").write_bytes(pickle.dumps(_Hostile(tmp_path / "was here")))
    with pytest.raises(ConversionError, match="cannot be read as a checkpoint of MarianMT"):
        read(plain_folder)
    assert not (tmp_path / "was here").exists()


def test_weights_of_a_harmless_pickle_are_read(plain_folder):
    state = load_file(plain_folder / "model.safetensors")
    (plain_folder / "model.safetensors").unlink()
    torch.save(state, plain_folder / "pytorch_model.bin")
    assert_same_logits(read(plain_folder)[0], make_marian(), 1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: (f / "config.json").unlink(), "has no config.json. A model of the Hub has to be downloaded first"),
        (lambda f: (f / "config.json").write_text("{"), "cannot be read as a checkpoint of MarianMT"),
        (lambda f: (f / "config.json").write_text("[]"), "not of the model type 'marian'"),
        (lambda f: edit(f / "config.json", lambda c: c.update(model_type="bart")), "not of the model type 'marian'"),
        (lambda f: edit(f / "config.json", lambda c: c.update(d_model="many")), "cannot be read as a checkpoint"),
        (lambda f: (f / "model.safetensors").unlink(), "cannot be read as a checkpoint of MarianMT"),
        (lambda f: (f / "model.safetensors").write_bytes(b"\x00" * 40), "cannot be read as a checkpoint of MarianMT"),
    ],
)
def test_a_folder_that_is_no_marian_checkpoint_is_refused(change, message, plain_folder):
    change(plain_folder)
    with pytest.raises(ConversionError, match=message):
        read(plain_folder)


def test_a_tokenizer_of_another_model_is_refused(plain_folder, tmp_path):
    tokenizer = vt.train_tokenizer(ENGLISH * 3, vocab_size=270)
    vt.save_tokenizer(tokenizer, plain_folder)
    with pytest.raises(ConversionError, match=r"has ids up to \d+, and the model's vocab_size is 61"):
        read(plain_folder)
    with pytest.raises(ConversionError, match="the model's vocab_size is 61"):
        write(make_ours(), tokenizer, tmp_path / "marian")
    assert not (tmp_path / "marian").exists()


def test_what_is_there_is_not_overwritten(tmp_path):
    (tmp_path / "marian").mkdir()
    (tmp_path / "marian" / "notes.txt").write_text("mine")
    with pytest.raises(ConversionError, match="is not an empty folder"):
        write(make_ours(), None, tmp_path / "marian")
    assert [path.name for path in tmp_path.rglob("*")] == ["marian", "notes.txt"]


def test_a_missing_sentencepiece_is_named(plain_folder, monkeypatch):
    (plain_folder / "source.spm").write_bytes(b"")
    monkeypatch.setattr("vanilla_transformer.convert.marian_settings.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install 'vanilla-transformer\[marian\]'"):
        read(plain_folder)
