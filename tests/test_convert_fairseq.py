"""fairseq `.pt` → ours: files in fairseq's published layout, against FSMT (post-norm) and the written-out equations.

fairseq itself does not install beside current torch; FSMT is the library's port of its post-norm Transformer.
"""

import argparse
import collections
import math
import os
import pickle
import sys
import types
from pathlib import Path

import pytest
import torch
from fsmt_models import (
    EOS,
    PAD,
    SOURCES,
    SPECIAL,
    TARGETS,
    UNK,
    fairseq_spelling,
    fsmt_generate,
    learn_codes,
    logits,
    make_fsmt,
    make_fsmt_tokenizer,
    make_words,
    pad_rows,
    segment,
)
from reference import Transformer, position_encoding_tensor2tensor
from transformers import AutoTokenizer, pipeline
from transformers.activations import ACT2FN

from vanilla_transformer.convert.fairseq import from_fairseq, load_checkpoint, read
from vanilla_transformer.convert.fairseq_dictionaries import fast_tokenizer, read_bpe_codes, read_dictionary
from vanilla_transformer.convert.fairseq_options import ACTIVATIONS, REFUSED
from vanilla_transformer.convert.renaming import ConversionError, whole_folder
from vanilla_transformer.tokenizer_training import save_tokenizer

ONE_SIZE = {"src_vocab_size": 53}
# Matrices of the FSMT model that are equal → fairseq's options.
SHARING = {
    "separate": ({}, {}),
    "output tied": ({"equal": ["output"]}, {"share_decoder_input_output_embed": True}),
    "all one": ({**ONE_SIZE, "equal": ["source", "output"]}, {"share_all_embeddings": True}),
}


def options_for(model, **changes):
    """Return the options of fairseq's command line for an FSMT model, as `args` holds them."""
    config = model.config
    options = {
        f"{side}_{theirs}": getattr(config, f"{side}_{ours}")
        for side in ("encoder", "decoder")
        for theirs, ours in (
            ("layers", "layers"),
            ("attention_heads", "attention_heads"),
            ("ffn_embed_dim", "ffn_dim"),
        )
    }
    return {
        **options,
        **dict.fromkeys(("encoder_embed_dim", "decoder_embed_dim", "decoder_output_dim"), config.d_model),
        **dict.fromkeys(REFUSED, None),
        **{"arch": "transformer_wmt_en_de_big", "task": "translation", "source_lang": "en", "target_lang": "de"},
        **{"criterion": "label_smoothed_cross_entropy", "label_smoothing": 0.1, "activation_fn": "relu"},
        **{"dropout": 0.2, "attention_dropout": 0.05, "activation_dropout": 0.0, "relu_dropout": 0.15},
        **{"max_source_positions": 1024, "max_target_positions": 1024, "left_pad_source": "True"},
        **changes,
    }


def tensors_of(model, options):
    """Return the tensors of an FSMT model under the names of current fairseq."""
    state = {name.removeprefix("model."): tensor.clone() for name, tensor in model.state_dict().items()}
    for side in ("encoder", "decoder"):
        del state[f"{side}.embed_positions.weight"]
        state[f"{side}.embed_positions._float_tensor"] = torch.zeros(1)
        state[f"{side}.version"] = torch.tensor([3.0])
    return state


def with_old_names(state, is_tied):
    """Return the tensors as the first releases named them."""
    old = {}
    norms = {
        "encoder": ("self_attn_layer_norm", "final_layer_norm"),
        "decoder": ("self_attn_layer_norm", "encoder_attn_layer_norm", "final_layer_norm"),
    }
    for name, tensor in state.items():
        head, _, kind = name.rpartition(".")
        side, module = name.partition(".")[0], head.rpartition(".")[2]
        if module in ("k_proj", "v_proj"):
            continue
        if module == "q_proj":
            packed = [state[f"{head[: -len('q_proj')]}{letter}_proj.{kind}"] for letter in "qkv"]
            old[f"{head[: -len('q_proj')]}in_proj_{kind}"] = torch.cat(packed)
        elif module in norms[side] and ".layers." in name:
            old[f"{head.removesuffix(module)}layer_norms.{norms[side].index(module)}.{kind}"] = tensor
        elif name == "decoder.output_projection.weight":
            old |= {} if is_tied else {"decoder.embed_out": tensor}
        elif name.endswith("_float_tensor"):
            old[f"{side}.embed_positions.weights"] = torch.zeros(1026, 16)
        else:
            old[name] = tensor
    return {name: tensor for name, tensor in old.items() if not name.endswith("version")}


def checkpoint_of(model, layout="args", **changes):
    options = options_for(model, **changes)
    state = tensors_of(model, options)
    if layout == "old":
        is_tied = options.get("share_all_embeddings") or options.get("share_decoder_input_output_embed")
        state = with_old_names(state, is_tied)
    rest = {"optimizer_history": [{"num_updates": 7}], "extra_state": {"epoch": 2}, "last_optimizer_state": {}}
    if layout in ("args", "old"):
        return {"args": argparse.Namespace(**options), "model": state, **rest}
    smoothing, criterion = options.pop("label_smoothing"), options.pop("criterion")
    parts = {
        "criterion": {"_name": criterion, "label_smoothing": smoothing},
        "task": {"_name": "translation", "source_lang": "en", "target_lang": "de"},
    }
    if layout == "cfg with a namespace":
        model_options = argparse.Namespace(**options)
    else:
        stacks = {
            side: {
                name.removeprefix(f"{side}_"): value for name, value in options.items() if name.startswith(f"{side}_")
            }
            for side in ("encoder", "decoder")
        }
        flat = {name: value for name, value in options.items() if not name.startswith(("encoder_", "decoder_"))}
        model_options = {**flat, **stacks, "quant_noise": {"pq": 0.0, "pq_block_size": 8, "scalar": 0.0}}
    return {"args": None, "cfg": {**parts, "model": model_options}, "model": state, **rest}


def save(checkpoint, path):
    torch.save(checkpoint, path)
    return path


# ---------------------------------------------------------------------------------------- weights


@pytest.mark.parametrize("layout", ["args", "old", "cfg", "cfg with a namespace"])
@pytest.mark.parametrize("sharing", SHARING)
def test_logits_are_those_of_fsmt(sharing, layout, tmp_path):
    fields, flags = SHARING[sharing]
    foreign = make_fsmt(**fields)
    ours, tokenizer = read(save(checkpoint_of(foreign, layout, **flags), tmp_path / "model.pt"))
    assert tokenizer is None
    for side in ("right", "left"):
        torch.testing.assert_close(logits(ours, side=side), logits(foreign, side=side), rtol=0, atol=1e-5)
    assert ours.config.share_encoder_decoder_embeddings == (sharing == "all one")
    assert ours.config.tie_word_embeddings == (sharing != "separate")
    assert not ours.training


def test_other_sizes_unscaled_embeddings_and_another_activation():
    fields = {"encoder_layers": 3, "decoder_layers": 1, "d_model": 24, "decoder_attention_heads": 8}
    foreign = make_fsmt(**fields, activation_function="gelu", scale_embedding=False)
    ours = from_fairseq(checkpoint_of(foreign, activation_fn="gelu", no_scale_embedding=True))
    torch.testing.assert_close(logits(ours), logits(foreign), rtol=0, atol=1e-5)


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("pre_norm", [False, True])
def test_logits_are_those_of_the_equations(pre_norm, learned):
    """Pre-norm and learned positions, which FSMT has not."""
    foreign = make_fsmt().double()
    flags = {f"{side}_normalize_before": pre_norm for side in ("encoder", "decoder")}
    flags |= {f"{side}_learned_pos": learned for side in ("encoder", "decoder")}
    checkpoint = checkpoint_of(foreign, **flags, max_source_positions=12, max_target_positions=12)
    state, draw = checkpoint["model"], torch.Generator().manual_seed(5)
    for side in ("encoder", "decoder"):
        if pre_norm:
            for kind in ("weight", "bias"):
                state[f"{side}.layer_norm.{kind}"] = torch.randn(16, generator=draw, dtype=torch.float64)
        if learned:
            del state[f"{side}.embed_positions._float_tensor"]
            table = torch.randn(12 + 2, 16, generator=draw, dtype=torch.float64)
            state[f"{side}.embed_positions.weight"] = table
    ours = from_fairseq(checkpoint)
    assert ours.dtype == torch.float64
    weights = {f"model.{name}": tensor for name, tensor in state.items()}
    weights["lm_head.weight"] = state["decoder.output_projection.weight"]
    reference = Transformer(
        weights,
        d_model=16,
        layers=(2, 3),
        heads=(4, 2),
        pre_norm=pre_norm,
        positions=None if learned else position_encoding_tensor2tensor,
        eps=1e-5,
        position_offset=2,
    )
    expected = torch.cat([reference.logits(*pair) for pair in zip(SOURCES, TARGETS, strict=True)])
    torch.testing.assert_close(logits(ours), expected, rtol=0, atol=1e-10)


def test_configuration_is_carried():
    ours = from_fairseq(checkpoint_of(make_fsmt())).config
    assert (ours.dropout, ours.attention_dropout, ours.activation_dropout, ours.label_smoothing) == (
        0.2,
        0.05,
        0.15,
        0.1,
    )
    assert (ours.bos_token_id, ours.pad_token_id, ours.eos_token_id, ours.decoder_start_token_id) == (0, 1, 2, 2)
    assert (ours.position_embedding_type, ours.position_offset, ours.layer_norm_eps) == (
        "sinusoidal_tensor2tensor",
        2,
        1e-5,
    )
    plain = from_fairseq(checkpoint_of(make_fsmt(), criterion="cross_entropy"))
    assert plain.config.label_smoothing == 0.0


def test_accurate_gelu_is_fairseqs_formula():
    x = torch.linspace(-4, 4, 101, dtype=torch.float64)
    formula = [v * 0.5 * (1 + math.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v**3))) for v in x.tolist()]
    for name in ("gelu_accurate", "gelu_fast"):
        torch.testing.assert_close(ACT2FN[ACTIVATIONS[name]](x), torch.tensor(formula, dtype=torch.float64))


def test_generation_is_that_of_fairseq_generate(tmp_path):
    foreign = make_fsmt(**ONE_SIZE, std=0.3, ends=2.0)
    from_fairseq(checkpoint_of(foreign, max_target_positions=12)).save_pretrained(tmp_path)
    ours = type(from_fairseq(checkpoint_of(foreign))).from_pretrained(tmp_path)
    ids, mask = pad_rows([[draw % 50 + 3 for draw in range(n, n * 7, n)] + [EOS] for n in range(2, 26)])
    expected = fsmt_generate(
        foreign,
        **{"input_ids": ids, "attention_mask": mask, "num_beams": 5, "length_penalty": 1.0, "early_stopping": True},
        **{"max_new_tokens": 12, "min_new_tokens": 1, "suppress_tokens": [PAD], "max_length": None},
        forced_eos_token_id=EOS,
    )
    assert ours.generate(input_ids=ids, attention_mask=mask).tolist() == expected.tolist()
    for other in ({"early_stopping": False}, {"num_beams": 4}, {"min_new_tokens": 0}, {"gnmt_alpha": 0.6}):
        assert ours.generate(input_ids=ids, attention_mask=mask, **other).tolist() != expected.tolist()
    assert from_fairseq(checkpoint_of(foreign)).generation_config.max_new_tokens == 201


# ---------------------------------------------------------------------------------------- refused


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_counterpart_is_refused_by_name(name):
    with pytest.raises(ConversionError, match=f"{name}=True: .+ has no counterpart"):
        from_fairseq(checkpoint_of(make_fsmt(), **{name: True}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"encoder_normalize_before": True}, "encoder_normalize_before=True and decoder_normalize_before=False"),
        ({"decoder_learned_pos": True}, "encoder_learned_pos=False and decoder_learned_pos=True"),
        ({"decoder_embed_dim": 32}, "encoder_embed_dim=16 and decoder_embed_dim=32"),
        ({"decoder_output_dim": 32}, "encoder_embed_dim=16 and decoder_output_dim=32"),
        (
            {"encoder_learned_pos": True, "decoder_learned_pos": True, "max_source_positions": 9},
            "max_source_positions=9 and max_target_positions=1024",
        ),
        ({"activation_fn": "relu_squared"}, "activation_fn='relu_squared'"),
        ({"encoder_attention_heads": None}, "lack encoder_attention_heads"),
        ({"decoder_attention_heads": 3}, "d_model=16 is not divisible by decoder_attention_heads=3"),
        ({"share_decoder_input_output_embed": True}, "decoder.output_projection.weight is .*, and the two differ"),
        ({"share_all_embeddings": True}, "encoder.embed_tokens.weight is .*, and the two differ"),
    ],
)
def test_options_that_do_not_fit_are_refused_by_name(changes, message):
    with pytest.raises(ConversionError, match=message):
        from_fairseq(checkpoint_of(make_fsmt(), **changes))


@pytest.mark.parametrize(("side", "version"), [("encoder", 1), ("decoder", 2)])
def test_pre_norm_without_a_last_layer_norm_is_refused(side, version):
    checkpoint = checkpoint_of(make_fsmt(), encoder_normalize_before=True, decoder_normalize_before=True)
    checkpoint["model"][f"{side}.version"] = torch.tensor([float(version)])
    with pytest.raises(ConversionError, match=rf"{side}\.version={version}"):
        from_fairseq(checkpoint)


def test_a_checkpoint_without_options_is_refused():
    checkpoint = checkpoint_of(make_fsmt())
    with pytest.raises(ConversionError, match="neither 'args' nor 'cfg'"):
        from_fairseq({"model": checkpoint["model"]})
    with pytest.raises(ConversionError, match="class list"):
        from_fairseq({"model": checkpoint["model"], "args": [1]})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("decoder.layers.1.fc1.bias"), r"missing: decoder\.layers\.1\.fc1\.bias"),
        (lambda state: state.pop("decoder.output_projection.weight"), r"no decoder\.output_projection\.weight"),
        (lambda state: state.pop("encoder.embed_tokens.weight"), r"no encoder\.embed_tokens\.weight"),
        (lambda state: state.update({"encoder.quant_noise.weight": torch.ones(2)}), r"unknown: encoder\.quant_noise"),
        (
            lambda state: state.update({"encoder.layers.0.fc2.bias": torch.ones(17)}),
            r"wrong shape: encoder\.layers\.0\.fc2\.bias is \[17\], \[16\]",
        ),
        (
            lambda state: state.update({"encoder.layers.0.layer_norms.0.bias": torch.ones(16)}),
            r"encoder\.layers\.0\.self_attn_layer_norm\.bias under its name and under an older one",
        ),
        (lambda state: state.update({"encoder.embed_positions.weight": torch.ones(9, 16)}), "unknown: .*positions"),
        (
            lambda state: state.update({"decoder.layer_norm.bias": torch.ones(16)}),
            r"no place for: decoder\.layer_norm",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_refused_and_nothing_is_written(change, message, tmp_path):
    checkpoint = checkpoint_of(make_fsmt())
    change(checkpoint["model"])
    path = save(checkpoint, tmp_path / "model.pt")
    with pytest.raises(ConversionError, match=message), whole_folder(tmp_path / "ours") as output:
        read(path)[0].save_pretrained(output)
    assert [entry.name for entry in tmp_path.iterdir()] == ["model.pt"]


class Hostile:
    """Unpickled without care it makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("place", ["args", "extra_state", "an option"])
def test_a_hostile_pickle_is_refused_unexecuted(place, tmp_path):
    trace = tmp_path / "executed"
    checkpoint = checkpoint_of(make_fsmt())
    if place == "an option":
        checkpoint["args"].data = Hostile(trace)
    else:
        checkpoint[place] = Hostile(trace)
    path = save(checkpoint, tmp_path / "model.pt")
    with pytest.raises(ConversionError, match=r"posix\.mkdir|nt\.mkdir"):
        read(path)
    assert not trace.exists()
    torch.load(path, weights_only=False)  # the file does what it is accused of
    assert trace.is_dir()


def test_a_hostile_namespace_attribute_cannot_replace_a_method(tmp_path):
    checkpoint = checkpoint_of(make_fsmt())
    checkpoint["args"].__dict__.update({"__setstate__": 1, "__class__": 2, "__reduce__": 3})
    read(save(checkpoint, tmp_path / "model.pt"))


def fake_module(monkeypatch, name, *classes):
    module = types.ModuleType(name)
    for class_name in classes:
        made = type(class_name, (), {"__module__": name, "__qualname__": class_name})
        setattr(module, class_name, made)
    monkeypatch.setitem(sys.modules, name, module)
    return module


@pytest.mark.parametrize("name", ["fairseq.meters", "fairseq.logging.meters"])
def test_the_meters_of_a_training_are_read_as_nothing(name, tmp_path, monkeypatch):
    meters = fake_module(monkeypatch, name, "AverageMeter", "StopwatchMeter")
    monkeypatch.setitem(sys.modules, "fairseq", types.ModuleType("fairseq"))
    foreign = make_fsmt()
    checkpoint = checkpoint_of(foreign)
    speed = meters.AverageMeter()
    speed.value = 3.5
    train = collections.OrderedDict(speed=speed, wall=meters.StopwatchMeter())
    checkpoint["extra_state"]["train_meters"] = train
    path = save(checkpoint, tmp_path / "model.pt")
    monkeypatch.undo()
    ours, _ = read(path)
    torch.testing.assert_close(logits(ours), logits(foreign), rtol=0, atol=1e-5)
    assert not hasattr(load_checkpoint(path)["extra_state"]["train_meters"]["speed"], "value")


def test_omegaconf_containers_are_refused(tmp_path, monkeypatch):
    fake_module(monkeypatch, "omegaconf")
    module = fake_module(monkeypatch, "omegaconf.dictconfig", "DictConfig")
    path = save({**checkpoint_of(make_fsmt()), "args": None, "cfg": module.DictConfig()}, tmp_path / "model.pt")
    with pytest.raises(ConversionError, match=r"omegaconf\.dictconfig\.DictConfig"):
        read(path)


def test_other_files_are_refused(tmp_path):
    with pytest.raises(ConversionError, match="no dict of tensors under 'model'"):
        read(save({"encoder.weight": torch.ones(2)}, tmp_path / "state.pt"))
    (tmp_path / "text.pt").write_text("nothing of the kind")
    with pytest.raises(ConversionError, match="was not read"):
        read(tmp_path / "text.pt")
    (tmp_path / "plain.pt").write_bytes(pickle.dumps({"model": 1}))
    with pytest.raises(ConversionError, match="was not read"):
        read(tmp_path / "plain.pt")


# ---------------------------------------------------------------------------------------- dictionaries and codes


def test_dictionaries_are_read_as_fairseq_does(tmp_path):
    path = tmp_path / "dict.en.txt"
    path.write_text(
        "the 9\nth@@ 7\nthe 5 #fairseq:overwrite\n<s> 3 #fairseq:overwrite\nß 2\nmadeupword0000 0\n", "utf-8"
    )
    symbols = read_dictionary(path)
    assert symbols[:4] == ["<s>", "<pad>", "</s>", "<unk>"]
    assert [symbols.index(word) for word in ("th@@", "the", "ß", "madeupword0000")] == [5, 6, 8, 9]
    assert len(symbols) == len(set(symbols)) == 10


@pytest.mark.parametrize(
    ("text", "message"),
    [("the\n", r"line 1: 'the' is no"), ("a 2\nb two\n", "line 2"), ("a 2\n\na 1\n", "line 3: 'a' is there twice")],
)
def test_damaged_dictionaries_are_refused(text, message, tmp_path):
    (tmp_path / "dict.txt").write_text(text)
    with pytest.raises(ConversionError, match=message):
        read_dictionary(tmp_path / "dict.txt")
    (tmp_path / "dict.txt").write_bytes(b"\xff 2\n")
    with pytest.raises(ConversionError, match="cannot be read"):
        read_dictionary(tmp_path / "dict.txt")


def test_codes_of_both_tools_are_read(tmp_path):
    path = tmp_path / "bpecodes"
    expected = [("t", "h"), ("th", "e</w>"), ("\u00a0", "a")]
    path.write_text("#version: 0.2\nt h\nth e</w>\n\u00a0 a\nt h\n", "utf-8")
    assert read_bpe_codes(path) == expected
    path.write_text("t h 120\nth e</w> 99\n\u00a0 a 3\n", "utf-8")
    assert read_bpe_codes(path) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("t h\ne </w>\n", "line 1: 't h' is neither"),
        ("#version: 0.1\nt h\n", "version: 0.1"),
        ("#version: 0.2\nt\n", "line 2"),
    ],
)
def test_other_codes_are_refused(text, message, tmp_path):
    (tmp_path / "codes").write_text(text)
    with pytest.raises(ConversionError, match=message):
        read_bpe_codes(tmp_path / "codes")


class Pair:
    """Two dictionaries and codes as files, and FSMTTokenizer made of the same."""

    def __init__(self, folder, joined=False, complete=False):
        self.words = make_words(seed=1)
        merges = learn_codes(self.words)
        counts = collections.Counter(segment(self.words, merges, folder / "codes"))
        frequent = [piece for piece, count in counts.most_common() if complete or count > 2]
        symbols = [symbol for pair in merges for symbol in (*pair, "".join(pair))]
        if complete:  # each symbol on the way of a merge has an entry
            frequent = list(dict.fromkeys([*frequent, *symbols]))
        pieces = (frequent, frequent) if joined else (frequent[::2] + frequent[1::3], frequent[::-1])
        self.vocabularies = [
            {**SPECIAL, **{piece: number for number, piece in enumerate(dict.fromkeys(side), start=4)}}
            for side in pieces
        ]
        self.oracle = make_fsmt_tokenizer(folder / "fsmt", *self.vocabularies, merges)
        self.files = {"bpe_codes": folder / "bpecodes"}
        self.files["bpe_codes"].write_text("#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in merges), "utf-8")
        for side, vocabulary in zip(("source", "target"), self.vocabularies, strict=True):
            self.files[f"{side}_dictionary"] = folder / f"dict.{side}.txt"
            lines = [f"{fairseq_spelling(piece)} 5\n" for piece in list(vocabulary)[4:]]
            self.files[f"{side}_dictionary"].write_text("".join(lines), "utf-8")
        self.sizes = {"src_vocab_size": len(self.vocabularies[0]), "tgt_vocab_size": len(self.vocabularies[1])}

    def tokenizer(self):
        """Return the fast tokenizer and the row of the source's dictionary for each of its ids."""
        dictionaries = [read_dictionary(self.files[f"{side}_dictionary"]) for side in ("source", "target")]
        return fast_tokenizer(*dictionaries, read_bpe_codes(self.files["bpe_codes"]))

    def source_ids(self, text):
        """Return FSMTTokenizer's ids for text whose words are split already."""
        pieces = [piece for word in text.split() for piece in self.oracle.bpe(word).split(" ")]
        return [*self.oracle.convert_tokens_to_ids(pieces), EOS]

    def texts(self):
        others = make_words(seed=9, alphabet="abdegilmnorstuwäßxyé漢")  # letters and pieces that no dictionary has
        return [" ".join(words[start : start + 7]) for words in (self.words, others) for start in range(0, 399, 7)]


@pytest.fixture(scope="module")
def separate(tmp_path_factory):
    return Pair(tmp_path_factory.mktemp("separate"))


def test_the_fast_tokenizer_gives_the_pieces_of_fsmt_tokenizer(separate):
    tokenizer, rows = separate.tokenizer()
    unknown = 0
    for text in (*separate.texts(), "", "  a  \t b\u00a0c\x1cd ", "</s> <pad> a</s>"):
        expected = separate.source_ids(text)
        assert [rows[number] for number in tokenizer(text)["input_ids"]] == expected
        unknown += expected.count(UNK)
    assert unknown > 50
    assert len(rows) == len(tokenizer)


def test_targets_get_the_ids_of_the_targets_dictionary_and_decode_to_their_words(separate):
    tokenizer, _ = separate.tokenizer()
    target = separate.vocabularies[1]
    whole = 0
    for text in separate.texts():
        pieces = [piece for word in text.split() for piece in separate.oracle.bpe(word).split(" ")]
        ids = tokenizer(text_target=text)["input_ids"]
        known = [
            (given, target[piece]) for given, piece in zip(ids, [*pieces, "</s>"], strict=True) if piece in target
        ]
        assert [given for given, _ in known] == [expected for _, expected in known]
        unknown = [given for given, piece in zip(ids, pieces, strict=False) if piece not in target]
        assert all(given == UNK or given >= len(target) for given in unknown)
        if not unknown:
            whole += 1
            assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert whole > 20
    assert tokenizer.convert_ids_to_tokens(range(len(target))) == list(target)


def test_with_its_tokenizer_the_model_sees_what_fairseqs_saw(separate, tmp_path):
    foreign = make_fsmt(**separate.sizes)
    path = save(checkpoint_of(foreign), tmp_path / "model.pt")
    ours, tokenizer = read(path, **separate.files)
    assert (
        ours.config.vocab_size == len(tokenizer) > ours.config.decoder_vocab_size == separate.sizes["tgt_vocab_size"]
    )
    texts = separate.texts()[::19]
    theirs = logits(foreign, [separate.source_ids(text) for text in texts], TARGETS * 2)
    same = logits(ours, [tokenizer(text)["input_ids"] for text in texts], TARGETS * 2)
    torch.testing.assert_close(same, theirs, rtol=0, atol=1e-5)


def test_the_pipeline_translates_from_the_converted_folder(separate, tmp_path):
    foreign = make_fsmt(**separate.sizes, ends=1.0)
    ours, tokenizer = read(
        save(checkpoint_of(foreign, max_target_positions=9), tmp_path / "model.pt"), **separate.files
    )
    ours.save_pretrained(tmp_path / "ours")
    save_tokenizer(tokenizer, tmp_path / "ours")
    assert AutoTokenizer.from_pretrained(tmp_path / "ours").is_fast
    entries = [fairseq_spelling(piece) for piece in separate.vocabularies[1]]
    expected = []
    texts = separate.texts()[::7]
    for text in texts:
        row = fsmt_generate(
            foreign,
            input_ids=torch.tensor([separate.source_ids(text)]),
            **{"num_beams": 5, "length_penalty": 1.0, "early_stopping": True, "suppress_tokens": [PAD]},
            **{"max_new_tokens": 9, "min_new_tokens": 1, "max_length": None, "forced_eos_token_id": EOS},
        )[0]
        pieces = " ".join(entries[number] for number in row.tolist() if number >= len(SPECIAL))
        expected.append({"translation_text": f"{pieces} ".replace("@@ ", "").rstrip()})  # fairseq's --remove-bpe
    assert len({result["translation_text"] for result in expected}) > 3
    assert pipeline("translation", model=str(tmp_path / "ours"))(texts) == expected


@pytest.mark.parametrize("complete", [True, False])
def test_a_joined_dictionary_keeps_one_matrix_if_it_lacks_no_symbol(complete, tmp_path):
    pair = Pair(tmp_path, joined=True, complete=complete)
    foreign = make_fsmt(**pair.sizes, equal=["source", "output"])
    path = save(checkpoint_of(foreign, share_all_embeddings=True), tmp_path / "model.pt")
    ours, tokenizer = read(path, **pair.files)
    assert ours.config.share_encoder_decoder_embeddings == complete
    assert ours.config.tie_word_embeddings
    texts = pair.texts()[::19]
    theirs = logits(foreign, [pair.source_ids(text) for text in texts], TARGETS * 2)
    same = logits(ours, [tokenizer(text)["input_ids"] for text in texts], TARGETS * 2)
    torch.testing.assert_close(same, theirs, rtol=0, atol=1e-5)


def test_with_moses_the_tokenizer_is_fsmts(separate, tmp_path):
    foreign = make_fsmt(**separate.sizes)
    path = save(checkpoint_of(foreign), tmp_path / "model.pt")
    ours, tokenizer = read(path, **separate.files, moses=True)
    assert ours.config.vocab_size == separate.sizes["src_vocab_size"]
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    loaded = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    text = f"{separate.words[0]}, {separate.words[1]} - {separate.words[2]}."
    assert loaded(text)["input_ids"] == tokenizer(text)["input_ids"] == separate.oracle(text)["input_ids"]
    ids = list(range(4, 30))
    assert loaded.decode(ids) == separate.oracle.decode(ids)


def test_dictionaries_of_another_model_and_missing_files_are_refused(separate, tmp_path):
    path = save(checkpoint_of(make_fsmt()), tmp_path / "model.pt")
    with pytest.raises(ConversionError, match=r"encoder\.embed_tokens\.weight has 41 rows, and its dictionary"):
        read(path, **separate.files)
    for given in ({"bpe_codes": separate.files["bpe_codes"]}, {"moses": True}):
        with pytest.raises(ConversionError, match="give all three, or none"):
            read(path, **given)
    path = save(checkpoint_of(make_fsmt(**separate.sizes), target_lang=None), tmp_path / "model.pt")
    with pytest.raises(ConversionError, match=r"of two the checkpoint names \['en'\]"):
        read(path, **separate.files, moses=True)
    with pytest.raises(ConversionError, match="is not a file"):
        read(Path(tmp_path, "nothing.pt"))
