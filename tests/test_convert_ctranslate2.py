"""Against CTranslate2 itself: its scores and translations of what we write, and what its converters write."""

from __future__ import annotations

import json
import random
import re
import struct
import sys
from pathlib import Path

import pytest
import torch
from tiny_models import SEPARATE, SHARING, randomise
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    AutoModelForSeq2SeqLM,
    M2M100Config,
    M2M100ForConditionalGeneration,
    MarianConfig,
    MarianMTModel,
    PreTrainedTokenizerFast,
)

from vanilla_transformer import VanillaTransformerConfig
from vanilla_transformer.convert.ctranslate2 import TABLE, from_ctranslate2, read, to_ctranslate2, to_spec, write
from vanilla_transformer.convert.ctranslate2_file import ACTIVATIONS, read_model_file
from vanilla_transformer.convert.renaming import ConversionError
from vanilla_transformer.metrics import TranslationScore
from vanilla_transformer.phrase_grammar import generate_splits
from vanilla_transformer.tokenizer_training import train_tokenizer

ctranslate2 = pytest.importorskip("ctranslate2", reason="compares with CTranslate2: pip install -e '.[ctranslate2]'")
QUANTIZED = ("int8", "int8_float32", "int16", "float16", "bfloat16")

# Each leaves the paper's model in what it names.
VARIANTS = {
    "paper": {},
    "pre-norm": {"norm_position": "pre"},
    "biases": {"attention_bias": True, "output_bias": True},
    "everything": {
        "norm_position": "pre",
        "attention_bias": True,
        "output_bias": True,
        "activation_function": "gelu",
        "position_embedding_type": "learned",
        "position_offset": 2,
        "max_position_embeddings": 30,
        "sinusoid_layout": None,
        "scale_embedding": False,
        "layer_norm_eps": 1e-2,
        "share_encoder_decoder_embeddings": False,
        "tie_word_embeddings": False,
        "decoder_start_token_id": 1,
        "pad_token_id": 3,
    },
    "no scale": {"scale_embedding": False},
    "eps": {"layer_norm_eps": 0.1},
    "learned": {"position_embedding_type": "learned", "max_position_embeddings": 20},
    "halves": {"sinusoid_layout": "halves"},
    "offset": {"position_offset": 5},
    "tensor2tensor": {"position_embedding_type": "sinusoidal_tensor2tensor"},
    "tensor2tensor by turns": {
        "position_embedding_type": "sinusoidal_tensor2tensor",
        "sinusoid_layout": "interleaved",
        "position_offset": 2,
    },
    "positions of CTranslate2's own": {"position_embedding_type": "sinusoidal_tensor2tensor", "position_offset": 1},
    "wide heads": {"d_k": 12, "d_v": 12, "attention_bias": True},
    "no beginning": {"bos_token_id": None, "decoder_start_token_id": 0},
    **{f"sharing: {name}": fields for name, fields in SHARING.items()},
    **{f"activation {name}": {"activation_function": name} for names in ACTIVATIONS for name in names},
}


def word_tokenizer(size: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer of words "w3", "w4", ... whose ids are their numbers."""
    words = ["<pad>", "</s>", "<s>", *(f"w{number}" for number in range(3, size))]
    backend = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="</s>", bos_token="<s>")


def tokenizers_of(config: VanillaTransformerConfig) -> dict[str, PreTrainedTokenizerFast]:
    """Return the tokenizers of a model as `to_ctranslate2` takes them."""
    both = {"tokenizer": word_tokenizer(config.vocab_size)}
    if config.decoder_vocab_size != config.vocab_size:
        both["target_tokenizer"] = word_tokenizer(config.decoder_vocab_size)
    return both


def sentences(count: int, size: int, longest: int, seed: int = 0) -> list[list[int]]:
    """Return rows of random ids, each with its end."""
    draw = random.Random(seed)
    return [[*draw.choices(range(4, size), k=draw.randint(1, longest)), 1] for _ in range(count)]


def translator(folder: Path, compute_type: str = "float32"):
    return ctranslate2.Translator(str(folder), compute_type=compute_type, inter_threads=1, intra_threads=1)


def tokens(tokenizer, rows: list[list[int]]) -> list[list[str]]:
    return [tokenizer.convert_ids_to_tokens(row) for row in rows]


def their_scores(model, tokenizers, sources, targets) -> list[list[float]]:
    """The log-probabilities that CTranslate2 gives to each token of the targets; their ends come last."""
    target_tokenizer = tokenizers.get("target_tokenizer", tokenizers["tokenizer"])
    results = model.score_batch(
        tokens(tokenizers["tokenizer"], sources), [row[:-1] for row in tokens(target_tokenizer, targets)]
    )
    return [result.log_probs for result in results]


@torch.no_grad()
def our_scores(model, sources, targets) -> list[list[float]]:
    """The same of ours, each sentence alone, so that no padding takes part."""
    rows = []
    for source, target in zip(sources, targets, strict=True):
        start = [model.config.decoder_start_token_id, *target[:-1]]
        logits = model(input_ids=torch.tensor([source]), decoder_input_ids=torch.tensor([start])).logits[0]
        rows.append(logits.float().log_softmax(-1).gather(-1, torch.tensor(target)[:, None])[:, 0].tolist())
    return rows


def worst_difference(ours: list[list[float]], theirs: list[list[float]]) -> float:
    assert [len(row) for row in ours] == [len(row) for row in theirs]
    pairs = [pair for one, other in zip(ours, theirs, strict=True) for pair in zip(one, other, strict=True)]
    return float(torch.tensor(pairs, dtype=torch.float64).diff(dim=1).abs().max())  # NaN if there is one


def sources_and_targets(config: VanillaTransformerConfig):
    return sentences(8, config.vocab_size, 12), sentences(8, config.decoder_vocab_size, 14, seed=1)


@pytest.fixture
def small(make_model):
    """A factory of tiny models whose every part counts, with their tokenizers."""

    def make(**fields):
        model = make_model(**fields)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "embed" in name or name.startswith("lm_head"):
                    parameter.mul_(2.0)
                if name == "final_logits_bias":
                    parameter.normal_()
        return model, tokenizers_of(model.config)

    return make


# ---------------------------------------------------------------------------------------- ours → CTranslate2


@pytest.mark.parametrize("variant", VARIANTS)
def test_ctranslate2_gives_every_token_our_score_and_what_it_got_is_read_back_unchanged(small, variant, tmp_path):
    model, tokenizers = small(**VARIANTS[variant])
    to_ctranslate2(model, output_dir=tmp_path / "ct2", **tokenizers)
    sources, targets = sources_and_targets(model.config)
    ours = our_scores(model, sources, targets)
    theirs = their_scores(translator(tmp_path / "ct2"), tokenizers, sources, targets)
    assert worst_difference(ours, theirs) < 2e-5
    assert min(map(min, ours)) < -5  # no flat distribution, in which nothing would show

    again, tokenizer = from_ctranslate2(tmp_path / "ct2")
    assert worst_difference(ours, our_scores(again, sources, targets)) < 1e-5
    assert tokenizer.get_vocab() == tokenizers["tokenizer"].get_vocab()
    assert tokenizer("w5 w7").input_ids == [5, 7, 1]
    state = again.state_dict()
    offset = model.config.position_offset if model.config.position_embedding_type == "learned" else 0
    assert state.keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(state[name], tensor[offset:] if "embed_positions" in name else tensor), name
    expected = model.config.to_dict()
    if offset:
        expected["position_offset"] = 0  # their tables begin at the first position
    if model.config.bos_token_id is None:
        expected["bos_token_id"] = model.config.decoder_start_token_id
    names = next(names for names in ACTIVATIONS if model.config.activation_function in names)
    expected["activation_function"] = names[0]
    ignored = ("architectures", "dtype", "transformers_version", "dropout")
    assert {k: v for k, v in again.config.to_dict().items() if k not in ignored} == {
        k: v for k, v in expected.items() if k not in ignored
    }


@pytest.mark.parametrize(
    ("fields", "ending"),
    [
        ({}, 4.0),
        ({"norm_position": "pre", "tie_word_embeddings": False, "attention_bias": True}, 1.0),
        ({**SEPARATE, "norm_position": "pre"}, 4.0),
    ],
)
def test_beam_search_finds_the_same_translations_with_the_same_scores(make_model, fields, ending, tmp_path):
    model = with_endings(randomise(make_model(output_bias=True, **fields), 0.5), ending)
    tokenizers = tokenizers_of(model.config)
    to_ctranslate2(model, output_dir=tmp_path / "ct2", **tokenizers)
    sources = sentences(80, model.config.vocab_size, 12)
    for penalty in (0.5, 1.0, 2.0):
        equal, rows = check_beam_search(model, tmp_path / "ct2", tokenizers, sources, penalty, 14)
        assert equal >= 79  # what differs is a tie, which is checked
        assert len({tuple(row) for row in rows}) > 5
        assert {row[-1] == 1 for row in rows} == {True, False}  # some end themselves, some are cut


def with_endings(model, logit: float):
    """Make the end token more probable, so that translations end sooner and later."""
    with torch.no_grad():
        model.final_logits_bias.zero_()
        model.final_logits_bias[0, 1] = logit
    return model


def check_beam_search(model, folder, tokenizers, sources, length_penalty, longest) -> tuple[int, list[list[int]]]:
    """Compare tokens and scores of a beam search; return the number of equal translations, and ours."""
    pad, source_tokenizer = model.config.pad_token_id, tokenizers["tokenizer"]
    target_tokenizer = tokenizers.get("target_tokenizer", source_tokenizer)
    theirs = translator(folder).translate_batch(
        tokens(source_tokenizer, sources),
        beam_size=4,
        length_penalty=length_penalty,
        patience=1,
        max_decoding_length=longest,
        min_decoding_length=0,  # 1 by default: no translation may be empty
        return_scores=True,
        return_end_token=True,
    )
    equal, rows = 0, []
    for first in range(0, len(sources), 100):
        batch = sources[first : first + 100]
        width = max(map(len, batch))
        ours = model.generate(
            torch.tensor([row + [pad] * (width - len(row)) for row in batch]),
            attention_mask=torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in batch]),
            num_beams=4,
            length_penalty=length_penalty,
            early_stopping=True,
            max_new_tokens=longest,
            return_dict_in_generate=True,
            output_scores=True,
        )
        found = zip(ours.sequences[:, 1:].tolist(), ours.sequences_scores.tolist(), theirs[first:], strict=False)
        for row, score, result in found:
            row = row[: row.index(1) + 1] if 1 in row else row
            rows.append(row)
            equal += row == target_tokenizer.convert_tokens_to_ids(result.hypotheses[0])
            assert score == pytest.approx(result.scores[0], abs=1e-4)  # also where the tokens differ: a tie
    assert len(rows) == len(theirs)
    return equal, rows


def test_byte_level_text_translates_alike_with_many_sentences(make_config, make_model, tmp_path):
    pairs = generate_splits().test[:200]
    tokenizer = train_tokenizer([text for pair in pairs for text in pair], vocab_size=400)
    # Rounded up: four rows have no token.
    model = make_model(vocab_size=len(tokenizer) + 4, d_model=32, output_bias=True)
    model = with_endings(randomise(model, 0.3), 6.0)
    to_ctranslate2(model, tokenizer, tmp_path / "ct2")
    vocabulary = json.loads((tmp_path / "ct2/shared_vocabulary.json").read_text())
    assert vocabulary[:3] == ["<pad>", "</s>", "<s>"]
    assert vocabulary[-5:] == [
        tokenizer.convert_ids_to_tokens(len(tokenizer) - 1),
        *(f"<unused{len(tokenizer) + number}>" for number in range(4)),
    ]
    assert any(token.startswith("Ġ") for token in vocabulary)
    sources = [tokenizer(source).input_ids for source, _ in pairs]
    equal, rows = check_beam_search(model, tmp_path / "ct2", {"tokenizer": tokenizer}, sources, 1.0, 12)
    assert equal >= 198
    assert len({tuple(row) for row in rows}) > 20  # translations that depend on their source
    assert {row[-1] == 1 for row in rows} == {True, False}


@pytest.mark.parametrize("positions", ["sinusoidal", "learned"])
@pytest.mark.parametrize("quantization", QUANTIZED)
def test_a_quantised_model_is_read_as_ctranslate2_computes_it_in_float32(small, quantization, positions, tmp_path):
    model, tokenizers = small(attention_bias=True, output_bias=True, position_embedding_type=positions)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    write(model, output_dir=tmp_path / "ct2", quantization=quantization, **tokenizers)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())

    again, _ = read(tmp_path / "ct2")
    sources, targets = sources_and_targets(model.config)
    theirs = their_scores(translator(tmp_path / "ct2", "float32"), tokenizers, sources, targets)
    # Sinusoids are read as such: the 16-bit types round their table too, and ours is exact.
    rounding = {"float16": 3e-4, "bfloat16": 5e-3}.get(quantization, 0.0) if positions == "sinusoidal" else 0.0
    assert worst_difference(our_scores(again, sources, targets), theirs) < 2e-5 + rounding
    loss = worst_difference(our_scores(again, sources, targets), our_scores(model, sources, targets))
    assert 1e-4 < loss < 0.5  # something was rounded, and not much
    assert again.config.position_embedding_type == positions
    assert again.config.tie_word_embeddings
    assert again.dtype == torch.float32


def test_each_type_makes_a_smaller_file_than_the_one_before(small, tmp_path):
    sizes = []
    for quantization in ("float32", "bfloat16", "int8"):
        model, tokenizers = small(vocab_size=300, d_model=64)
        folder = tmp_path / quantization
        to_ctranslate2(model, output_dir=folder, quantization=quantization, num_positions=16, **tokenizers)
        sizes.append((folder / "model.bin").stat().st_size)
    assert sizes[0] > 1.8 * sizes[1] > 1.8 * 1.6 * sizes[2]


def test_a_model_in_bfloat16_is_written_in_float32(small, tmp_path):
    model, tokenizers = small()
    to_ctranslate2(model.bfloat16(), output_dir=tmp_path / "ct2", **tokenizers)
    variables = read_model_file(tmp_path / "ct2/model.bin").variables
    assert torch.equal(variables["decoder/embeddings/weight"], model.model.shared.weight.float())


def test_positions_of_ctranslate2_s_own_have_no_table_and_no_end(small, tmp_path):
    model, tokenizers = small(**VARIANTS["positions of CTranslate2's own"])
    to_ctranslate2(model, output_dir=tmp_path / "ct2", num_positions=10, **tokenizers)
    assert not any("encodings" in name for name in read_model_file(tmp_path / "ct2/model.bin").variables)
    target_row = [*([5, 6, 7] * 800), 1]
    result = translator(tmp_path / "ct2").score_batch(
        tokens(tokenizers["tokenizer"], [[4, 5, 1]]),
        tokens(tokenizers["tokenizer"], [target_row[:-1]]),
        max_input_length=0,
    )
    # Its angles are float32, ours float64: at position 2,400 they are some 1e-4 apart.
    assert worst_difference(our_scores(model, [[4, 5, 1]], [target_row]), [result[0].log_probs]) < 2e-3


def test_as_many_positions_are_written_as_asked_for(small, tmp_path):
    model, tokenizers = small()
    to_ctranslate2(model, output_dir=tmp_path / "ct2", num_positions=6, **tokenizers)
    variables = read_model_file(tmp_path / "ct2/model.bin").variables
    assert variables["encoder/position_encodings/encodings"].shape == (6, 16)
    assert variables["decoder/position_encodings/encodings"].shape == (6, 16)
    again, _ = from_ctranslate2(tmp_path / "ct2")
    assert again.config.position_embedding_type == "sinusoidal"


# ---------------------------------------------------------------------------------------- CTranslate2 → ours


def their_folder(spec, folder: Path, size: int, quantization: str | None = None, **settings) -> Path:
    """Save what a converter of CTranslate2 made, with a vocabulary of such size."""
    vocabulary = ["</s>", "<unk>", *(f"w{number}" for number in range(2, size))]
    spec.register_source_vocabulary(vocabulary)
    spec.register_target_vocabulary(vocabulary)
    for name, value in {"eos_token": "</s>", "unk_token": "<unk>", **settings}.items():
        setattr(spec.config, name, value)
    spec.validate()
    spec.optimize(quantization)
    folder.mkdir()
    spec.save(str(folder))
    return folder


def with_random_weights(model):
    torch.manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "embed_positions" not in name:
                parameter.normal_(std=0.3)
        if hasattr(model, "final_logits_bias"):
            model.final_logits_bias.normal_()
    return model.eval()


MARIAN = {
    "vocab_size": 40,
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "max_position_embeddings": 64,
    "pad_token_id": 39,
    "eos_token_id": 0,
    "forced_eos_token_id": 0,
    "decoder_start_token_id": 39,
    "scale_embedding": True,
}


@pytest.mark.parametrize("quantization", [None, "int8", "int16"])
def test_a_published_marian_model_that_starts_from_a_zero_embedding_is_read(quantization, tmp_path):
    from ctranslate2.converters import transformers as converters

    marian = with_random_weights(MarianMTModel(MarianConfig(**MARIAN)))
    spec = converters.MarianMTLoader().get_model_spec(marian)  # leaves the padding token out: 39 tokens
    folder = their_folder(spec, tmp_path / "ct2", 39, quantization, decoder_start_token="</s>")
    model, tokenizer = from_ctranslate2(folder)
    config = model.config
    assert tokenizer is None
    assert (config.vocab_size, config.pad_token_id, config.decoder_start_token_id) == (40, 39, 39)
    assert (config.eos_token_id, config.bos_token_id) == (0, None)
    assert (config.sinusoid_layout, config.activation_function, config.layer_norm_eps) == ("halves", "gelu", 1e-5)

    vocabulary = json.loads((folder / "shared_vocabulary.json").read_text())
    draw = random.Random(0)
    sources = [[*draw.choices(range(2, 39), k=length), 0] for length in (3, 9, 5)]
    targets = [[*draw.choices(range(2, 39), k=length), 0] for length in (6, 4, 8)]
    results = translator(folder).score_batch(
        *([[vocabulary[number] for number in row] for row in rows] for rows in (sources, [t[:-1] for t in targets]))
    )
    theirs = [result.log_probs for result in results]
    assert worst_difference(our_scores(model, sources, targets), theirs) < 2e-5
    tuned = model.train()(input_ids=torch.tensor([sources[0]]), labels=torch.tensor([targets[0]]))
    assert tuned.loss.isfinite()  # label smoothing asks for the log-probability of the added token too
    assert tuned.loss < 20


def test_a_pre_norm_model_with_fairseq_positions_is_read(tmp_path):
    from ctranslate2.converters import transformers as converters

    fields = {
        **MARIAN,
        "pad_token_id": 1,
        "bos_token_id": 2,
        "decoder_start_token_id": 0,
        "activation_function": "relu",
    }
    m2m = with_random_weights(M2M100ForConditionalGeneration(M2M100Config(**fields)))
    folder = their_folder(
        converters.M2M100Loader().get_model_spec(m2m), tmp_path / "ct2", 40, decoder_start_token="</s>"
    )
    model, _ = from_ctranslate2(folder)
    assert model.config.norm_position == "pre"
    assert model.config.position_embedding_type == "sinusoidal_tensor2tensor"
    assert (model.config.sinusoid_layout, model.config.position_offset) == ("halves", 2)
    assert model.config.attention_bias
    source, target = torch.tensor([[5, 6, 7, 8, 0]]), torch.tensor([[0, 9, 10, 11]])
    ours = model(input_ids=source, decoder_input_ids=target).logits[0, :, :40]
    theirs = m2m(input_ids=source, attention_mask=torch.ones_like(source), decoder_input_ids=target).logits[0]
    assert torch.allclose(ours, theirs, atol=2e-5)


def test_the_table_has_no_row_that_no_model_needs(small):
    model, tokenizers = small(**VARIANTS["everything"])
    spec = to_spec(model, **tokenizers)
    names = {name for name, value in spec.variables().items() if not isinstance(value, str) and value.shape}
    rows = {re.sub(r"layer_\d+", "layer_{i}", name) for name in names}
    assert {re.sub(r"\[.*\]", "", row) for row in TABLE} == rows


# ---------------------------------------------------------------------------------------- what is refused

KINDS = (torch.float32, torch.int8, torch.int16, torch.int32, torch.float16, torch.bfloat16)


def model_bytes(variables, specification="TransformerSpec", revision=7, version=6, aliases=()) -> bytes:
    """Return a model.bin as CTranslate2's `ModelSpec` documents it; written anew here, to make damaged ones."""

    def text(value: str) -> bytes:
        return struct.pack("<H", len(value.encode()) + 1) + value.encode() + b"\0"

    parts = [struct.pack("<I", version), text(specification), struct.pack("<II", revision, len(variables))]
    for name, tensor in variables.items():
        data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        parts += [text(name), struct.pack(f"<B{tensor.dim()}I", tensor.dim(), *tensor.shape)]
        parts += [struct.pack("<BI", KINDS.index(tensor.dtype), len(data)), data]
    parts.append(struct.pack("<I", len(aliases)))
    return b"".join(parts + [text(alias) + text(name) for alias, name in aliases])


@pytest.fixture
def folder(small, tmp_path):
    """A folder that can be read."""
    model, tokenizers = small(attention_bias=True, d_k=4, d_v=4)
    to_ctranslate2(model, output_dir=tmp_path / "ct2", num_positions=6, **tokenizers)
    return tmp_path / "ct2"


def layer(part: str) -> str:
    return f"decoder/layer_1/{part}"


def number(value, dtype=torch.int32):
    return torch.tensor(value, dtype=dtype)


CHANGED_VARIABLES = {
    "relative positions": (
        {layer("self_attention/relative_position_keys"): torch.rand(3, 4)},
        "unknown: decoder",
    ),
    "a norm after the embeddings": (
        {"encoder/layernorm_embedding/gamma": torch.rand(16)},
        "unknown: encoder",
    ),
    "a gated layer": ({layer("ffn/linear_0_noact/weight"): torch.rand(40, 16)}, "unknown: .*noact"),
    "RMSNorm": ({layer("ffn/layer_norm/beta"): None}, "missing: decoder/layer_1/ffn/layer_norm/beta"),
    "a part of the biases": (
        {layer("attention/linear_2/bias"): None},
        "missing: .*/linear_2/bias",
    ),
    "a gap in the layers": ({"encoder/layer_7/ffn/linear_0/bias": torch.rand(24)}, "missing: encoder/layer_2/"),
    "countless layers": ({"encoder/layer_7000000/ffn/linear_0/bias": torch.rand(24)}, "encoder_layers=7000001"),
    "another shape": (
        {layer("ffn/linear_1/weight"): torch.rand(16, 39)},
        "wrong shape: .*/linear_1/weight",
    ),
    "parts that are not equal": ({layer("self_attention/linear_0/weight"): torch.rand(47, 16)}, "47 rows"),
    "a norm too many": ({"encoder/layer_norm/gamma": torch.rand(16)}, "no place for: encoder/layer_norm/gamma"),
    "several source features": ({"encoder/embeddings_1/weight": torch.rand(5, 16)}, "unknown: encoder/embeddings_1"),
    "no embeddings": ({"encoder/embeddings_0/weight": None}, "no matrix encoder/embeddings_0/weight"),
    "one head's width": ({layer("attention/head_dim"): number(5)}, "head_dim differ"),
    "another scale of queries": ({layer("attention/queries_scale"): number(1.0, torch.float32)}, "queries_scale=1.0"),
    "no scale at all": ({layer("attention/queries_scale"): number(float("nan"), torch.float32)}, "queries_scale=nan"),
    "shared keys": ({layer("attention/num_heads_kv"): number(1)}, "num_heads_kv=1"),
    "rotary positions": ({layer("self_attention/rotary_dim"): number(0)}, "rotary_dim=0"),
    "ALiBi": ({"decoder/alibi": number(1, torch.int8)}, "decoder/alibi=1"),
    "multi-query": ({"encoder/multi_query_attention": number(1, torch.int8)}, "encoder/multi_query_attention=1"),
    "a scale of the outputs": ({"decoder/scale_outputs": number(0.5, torch.float32)}, "decoder/scale_outputs=0.5"),
    "a scale of embeddings": (
        {"encoder/scale_embeddings": number(3.0, torch.float32)},
        "scale_embeddings=3.0",
    ),
    "one scale of embeddings": ({"encoder/scale_embeddings": number(0, torch.int8)}, "differ in scale_embedding"),
    "one pre-norm": ({"encoder/pre_norm": number(1, torch.int8)}, "differ in norm_position"),
    "two activations": ({"encoder/activation": number(2, torch.int8)}, "differ in activation_function"),
    "an unknown activation": ({"encoder/activation": number(9, torch.int8)}, "encoder/activation=9 is unknown"),
    "heads that are no integer": ({"encoder/num_heads": number(float("nan"), torch.float32)}, "encoder/num_heads=nan"),
    "no heads": ({"encoder/num_heads": number(0)}, "encoder_attention_heads=0"),
    "two kinds of positions": ({"decoder/position_encodings/encodings": torch.rand(6, 16)}, "other positions"),
    "positions of one stack": ({"decoder/position_encodings/encodings": None}, "other positions"),
    "another vocabulary's matrix": (
        {"encoder/embeddings_0/weight": torch.rand(49, 16)},
        "matrix 49 rows",
    ),
    "int8 without a scale": ({layer("ffn/linear_1/weight"): torch.ones(16, 40, dtype=torch.int8)}, "without its"),
    "a scale of zero": (
        {
            layer("ffn/linear_1/weight"): torch.ones(16, 40, dtype=torch.int8),
            layer("ffn/linear_1/weight_scale"): torch.zeros(16),
        },
        "not positive",
    ),
    "a scale of another size": (
        {
            layer("ffn/linear_1/weight"): torch.ones(16, 40, dtype=torch.int8),
            layer("ffn/linear_1/weight_scale"): torch.ones(40),
        },
        "scale of shape",
    ),
}


@pytest.mark.parametrize("case", CHANGED_VARIABLES)
def test_what_our_class_cannot_express_is_refused_by_name(folder, case):
    changes, message = CHANGED_VARIABLES[case]
    variables = read_model_file(folder / "model.bin").variables
    (folder / "model.bin").write_bytes(model_bytes(variables))
    from_ctranslate2(folder)  # as it was
    variables.update(changes)
    variables = {name: tensor for name, tensor in variables.items() if tensor is not None}
    (folder / "model.bin").write_bytes(model_bytes(variables))
    with pytest.raises(ConversionError, match=message):
        from_ctranslate2(folder)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"multi_query_attention": True}, "multi_query_attention"),
        ({"quantization_type": 1}, "quantization_type"),
        ({"layer_norm_epsilon": "small"}, "small"),
        ({"layer_norm_epsilon": -1.0}, "layer_norm_eps=-1.0"),
        ({"eos_token": "<end>"}, "eos_token='<end>'"),
        ({"decoder_start_token": None}, "decoder_start_token=None"),
        ({"unk_token": 3}, "unk_token"),
    ],
)
def test_what_config_json_asks_for_is_not_ignored(folder, fields, message):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **fields}))
    with pytest.raises(ConversionError, match=message):
        from_ctranslate2(folder)


def test_tokens_that_ctranslate2_adds_are_told_of(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "add_source_eos": True}))
    with pytest.warns(UserWarning, match="puts nothing before and '</s>' behind every source"):
        from_ctranslate2(folder)


def test_vocabularies_of_older_releases_are_read(folder):
    model, _ = from_ctranslate2(folder)
    vocabulary = json.loads((folder / "shared_vocabulary.json").read_text())
    (folder / "shared_vocabulary.json").unlink()
    for side in ("source", "target"):
        (folder / f"{side}_vocabulary.txt").write_bytes("".join(f"{token}\r\n" for token in vocabulary).encode())
    again, _ = from_ctranslate2(folder)
    assert again.config.to_dict() == model.config.to_dict()
    (folder / "source_vocabulary.txt").unlink()
    with pytest.raises(ConversionError, match="no vocabulary"):
        from_ctranslate2(folder)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", b"[]", "holds a list"),
        ("config.json", b"{", "not valid JSON"),
        ("config.json", b"\xff", "not valid JSON"),
        ("config.json", None, "config.json does not exist"),
        ("shared_vocabulary.json", b"[1]", "no strings"),
        ("shared_vocabulary.json", b"[" * 100_000, "not valid JSON"),
        ("model.bin", None, "model.bin does not exist"),
        ("model.bin", b"", "binary version needs 4 bytes and 0 are left"),
        ("tokenizer.json", None, "tokenizer"),
    ],
)
def test_a_missing_or_damaged_file_is_named(folder, name, content, message):
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(content)
    with pytest.raises((ConversionError, OSError, ValueError), match=message):
        from_ctranslate2(folder)


def test_a_tokenizer_of_another_model_is_refused(folder):
    word_tokenizer(51).save_pretrained(folder)
    with pytest.raises(ConversionError, match="'w50' as 50"):
        from_ctranslate2(folder)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"version": 5}, "binary version 5"),
        ({"version": 1 << 31}, "binary version"),
        ({"specification": "TransformerDecoderSpec"}, "TransformerDecoderSpec"),
        ({"revision": 4}, "revision 4"),
        ({"revision": 8}, "revision 8"),
    ],
)
def test_other_kinds_of_models_are_refused(folder, fields, message):
    variables = read_model_file(folder / "model.bin").variables
    (folder / "model.bin").write_bytes(model_bytes(variables, **fields))
    with pytest.raises(ConversionError, match=message):
        from_ctranslate2(folder)


HEADER = model_bytes({})[: -4 - 4]  # up to the number of variables
ONE = HEADER + struct.pack("<I", 1)
A_NAME = struct.pack("<H", 2) + b"a\0"
HOSTILE = {
    "countless variables": (HEADER + b"\xff" * 4 + A_NAME, "4294967295 variables can't be in"),
    "countless aliases": (HEADER + bytes(4) + b"\xff" * 4, "4294967295 aliases can't be in"),
    "a name beyond the end": (ONE + b"\xff\xffabcdefghijkl", "needs 65535 bytes"),
    "a name without end": (ONE + struct.pack("<H", 2) + b"ab" * 9, "no closing zero"),
    "a name of no bytes": (ONE + bytes(12), "empty"),
    "a name in no encoding": (
        ONE + struct.pack("<H", 2) + b"\xff\0" + bytes(9),
        "not UTF-8",
    ),
    "many axes": (ONE + A_NAME + b"\xff" * 12, "255 axes"),
    "a huge shape": (
        ONE + A_NAME + b"\x08" + b"\xff" * 32 + struct.pack("<BI", 0, 4) + bytes(4),
        "and 4 are given",
    ),
    "a huge variable": (
        ONE + A_NAME + struct.pack("<BIBI", 1, 1 << 29, 0, 1 << 31) + bytes(4),
        "needs 2147483648 bytes",
    ),
    "an empty variable": (
        ONE + A_NAME + struct.pack("<BIBI", 1, 0, 0, 0) + bytes(4),
        "has 0 bytes",
    ),
    "an unknown type": (
        ONE + A_NAME + struct.pack("<BBI", 0, 6, 4) + bytes(4),
        "unknown type 6",
    ),
    "a variable twice": (
        HEADER + struct.pack("<I", 2) + (A_NAME + struct.pack("<BBI", 0, 0, 4) + bytes(4)) * 2 + bytes(4),
        "a is there twice",
    ),
    "an alias of nothing": (model_bytes({}, aliases=[("a", "b")]), "b, which is not there"),
    "an alias of an alias": (
        model_bytes({"a": torch.ones(1)}, aliases=[("b", "a"), ("c", "b")]),
        "b, which is not there",
    ),
    "an alias twice": (model_bytes({"a": torch.ones(1)}, aliases=[("b", "a"), ("b", "a")]), "b is there twice"),
    "something behind the end": (model_bytes({"a": torch.ones(1)}) + b"x", "1 bytes follow"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_model_file_gives_one_clear_error(case, tmp_path):
    content, message = HOSTILE[case]
    (tmp_path / "model.bin").write_bytes(content)
    with pytest.raises(ConversionError, match=message):
        read_model_file(tmp_path / "model.bin")


def test_a_file_that_is_cut_anywhere_is_refused(folder, tmp_path):
    content = (folder / "model.bin").read_bytes()
    cut = tmp_path / "cut.bin"
    for length in [*range(300), *range(300, len(content), 499)]:
        cut.write_bytes(content[:length])
        with pytest.raises(ConversionError, match="damaged or cut off"):
            read_model_file(cut)


def test_a_flipped_byte_gives_a_model_or_one_clear_error(folder):
    content = (folder / "model.bin").read_bytes()
    draw = random.Random(0)
    refused = 0
    for place in [*draw.sample(range(600), 40), *draw.sample(range(len(content)), 10)]:
        changed = bytearray(content)
        changed[place] ^= 1 << draw.randrange(8)
        (folder / "model.bin").write_bytes(changed)
        try:
            from_ctranslate2(folder)
        except ConversionError:
            refused += 1
    assert 5 < refused < 50


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"d_k": 4, "d_v": 8}, "d_k=4 and d_v=8"),
        ({"d_v": 8}, "d_k=4 and d_v=8"),
        ({"final_norm": True}, "final_norm=True with norm_position='post'"),
        ({"norm_position": "pre", "final_norm": False}, "final_norm=False with norm_position='pre'"),
        ({"eos_token_id": [1, 3]}, r"eos_token_id=\[1, 3\]"),
        ({"eos_token_id": None}, "eos_token_id=None"),
        ({"eos_token_id": 50}, "eos_token_id=50"),
        ({"activation_function": "relu6"}, "activation_function='relu6'"),
        ({"vocab_size": 20}, "ids up to 49, and vocab_size=20"),
        ({**SEPARATE, "decoder_vocab_size": 60}, "those of unequal sizes need one"),
    ],
)
def test_what_ctranslate2_cannot_express_is_refused_and_nothing_is_written(small, fields, message, tmp_path):
    model, _ = small(**fields)
    with pytest.raises(ConversionError, match=message):
        to_ctranslate2(model, word_tokenizer(50), tmp_path / "ct2")
    assert not list(tmp_path.iterdir())


def test_wrong_arguments_are_refused_and_nothing_is_written(small, tmp_path):
    model, tokenizers = small()
    with pytest.raises(ConversionError, match="quantization='int4' is not one of float32"):
        to_ctranslate2(model, output_dir=tmp_path / "ct2", quantization="int4", **tokenizers)
    with pytest.raises(ConversionError, match="a target_tokenizer is for separate vocabularies"):
        to_ctranslate2(model, output_dir=tmp_path / "ct2", target_tokenizer=word_tokenizer(50), **tokenizers)
    with pytest.raises(ConversionError, match="num_positions=0"):
        to_ctranslate2(model, output_dir=tmp_path / "ct2", num_positions=0, **tokenizers)
    with pytest.raises(ConversionError, match="give the tokenizer too"):
        to_ctranslate2(model, None, tmp_path / "ct2")
    model.register_parameter("adapter", torch.nn.Parameter(torch.ones(1)))
    with pytest.raises(ConversionError, match="unknown: adapter"):
        to_ctranslate2(model, output_dir=tmp_path / "ct2", **tokenizers)
    assert not list(tmp_path.iterdir())
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(ConversionError, match="not an empty folder"):
        to_ctranslate2(model, output_dir=tmp_path, **tokenizers)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_without_ctranslate2_writing_names_the_extra_and_reading_works(small, folder, tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "ctranslate2"]:
        monkeypatch.setitem(sys.modules, name, None)
    model, tokenizers = small()
    with pytest.raises(ImportError, match=r"vanilla-transformer\[ctranslate2\]"):
        to_ctranslate2(model, output_dir=tmp_path / "new", **tokenizers)
    assert not (tmp_path / "new").exists()
    assert from_ctranslate2(folder)[0].config.d_model == 16


# ---------------------------------------------------------------------------------------- a trained model


@pytest.mark.slow
def test_a_trained_model_translates_a_thousand_sentences_alike_and_int8_as_well(trained_folder, tmp_path):
    model = AutoModelForSeq2SeqLM.from_pretrained(trained_folder).eval()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(trained_folder)
    pairs = generate_splits().test
    assert len(pairs) == 1000
    sources = [tokenizer(source).input_ids for source, _ in pairs]
    for quantization in ("float32", "int8"):
        to_ctranslate2(model, tokenizer, tmp_path / quantization, quantization=quantization)
    equal, rows = check_beam_search(model, tmp_path / "float32", {"tokenizer": tokenizer}, sources, 0.6, 80)
    assert equal >= 998
    assert sum(row[-1] == tokenizer.eos_token_id for row in rows) > 980

    scores = {}
    for compute_type in ("float32", "int8"):
        results = translator(tmp_path / compute_type, compute_type).translate_batch(
            tokens(tokenizer, sources), beam_size=4, length_penalty=0.6, max_decoding_length=80
        )
        texts = [tokenizer.convert_tokens_to_string(result.hypotheses[0]) for result in results]
        references = [target for _, target in pairs]
        scores[compute_type] = TranslationScore().compute(predictions=texts, references=references)["bleu"]
    assert scores["float32"] > 80
    assert abs(scores["int8"] - scores["float32"]) < 0.3
