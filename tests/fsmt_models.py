"""Tiny FSMT models of the library with random weights, and a dictionary and byte-pair codes as fairseq writes them."""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter

import torch
from transformers import FSMTConfig, FSMTForConditionalGeneration, FSMTTokenizer

BOS, PAD, EOS, UNK = 0, 1, 2, 3
SMALL = {
    "src_vocab_size": 41,
    "tgt_vocab_size": 53,
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 40,
    "max_position_embeddings": 64,
    "max_length": 14,
}
SOURCES = [[11, 12, 13, 14, 15, 16, EOS], [21, 22, EOS], [31, 32, 33, 34, EOS]]
TARGETS = [[EOS, 17, 18, 19, 20, 17], [EOS, 23, 24, 25, 26, 27, 28, 29], [EOS, 35]]


def make_fsmt(*, equal=(), seed=0, std=0.4, ends=0.0, **fields):
    """Return an FSMT model in which every weight, bias and LayerNorm has a value of its own.

    `equal` names the matrices ("source", "output") that are copies of the target's embeddings, as in the published
    checkpoints; `ends` is added to the logit of the end token, so that sentences end by themselves.
    """
    model = FSMTForConditionalGeneration(FSMTConfig(**{**SMALL, **fields})).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "embed_positions" not in name:
                centre = 1.0 if name.endswith("norm.weight") else 0.0
                parameter.copy_(centre + std * torch.randn(parameter.shape, generator=generator))
        decoder = model.model.decoder
        if "source" in equal:
            model.model.encoder.embed_tokens.weight.copy_(decoder.embed_tokens.weight)
        if "output" in equal:
            decoder.output_projection.weight.copy_(decoder.embed_tokens.weight)
        mean = decoder.layers[-1].final_layer_norm.bias  # of the decoder's output
        decoder.output_projection.weight[EOS].add_(ends * mean / mean.square().sum())
    return model


def pad_rows(rows, side="right", fill=PAD):
    width = max(map(len, rows))
    filling = [[fill] * (width - len(row)) for row in rows]
    padded = [row + more if side == "right" else more + row for row, more in zip(rows, filling, strict=True)]
    mask = [[1] * len(row) + [0] * len(more) for row, more in zip(rows, filling, strict=True)]
    return torch.tensor(padded), torch.tensor([row if side == "right" else row[::-1] for row in mask])


def logits(model, sources=SOURCES, targets=TARGETS, side="right", fill=PAD):
    """Return the logits of the real target tokens [N, V], FSMT's or ours, from a batch with padding."""
    source, source_mask = pad_rows(sources, side, fill)
    target, target_mask = pad_rows(targets, side, fill)
    with torch.no_grad():
        output = model(
            input_ids=source,
            attention_mask=source_mask,
            decoder_input_ids=target,
            decoder_attention_mask=target_mask,
            use_cache=False,  # with a cache FSMT takes whole targets for single steps, and masks nothing
        ).logits
    return output[target_mask.bool()]


def fsmt_generate(model, **arguments):
    """Return the tokens of the library's decoding with FSMT, each step through its whole forward pass.

    Its own steps are not to be trusted on all releases: in 5.0 its cache gives each token the first position, and
    without a cache `generate()` leaves the causal mask out (to 5.24).
    """

    def whole_target(ids, encoder_outputs=None, attention_mask=None, **others):
        # FSMT makes its masks where it sees `input_ids`; the encoder's output is there already.
        inputs = {"input_ids": ids, "decoder_input_ids": ids, "use_cache": False}
        return {**inputs, "encoder_outputs": encoder_outputs, "attention_mask": attention_mask}

    model.prepare_inputs_for_generation = whole_target
    try:
        return model.generate(**arguments, use_cache=False)
    finally:
        del model.prepare_inputs_for_generation


# ---------------------------------------------------------------------------------------- words


def make_words(seed, number=400, alphabet="abdegilmnorstuwäß"):
    """Return words of a made-up language, some of them often."""
    draw = random.Random(seed)
    stems = ["".join(draw.choices(alphabet, k=draw.randint(1, 4))) for _ in range(30)]
    words = ["".join(draw.choices(stems, k=draw.randint(1, 3))) for _ in range(number // 4)]
    return draw.choices([*words, ",", ".", "-"], k=number)


def learn_codes(words, merges=120):
    """Return byte-pair codes as subword-nmt learns them: the most frequent pair again and again."""
    counts = Counter(words)
    pieces = {word: [*word[:-1], f"{word[-1]}</w>"] for word in counts}
    codes = []
    while len(codes) < merges:
        pairs = Counter()
        for word, parts in pieces.items():
            for pair in itertools.pairwise(parts):
                pairs[pair] += counts[word]
        first, second = min(pairs, key=lambda pair: (-pairs[pair], pair))
        codes.append((first, second))
        for parts in pieces.values():
            place = 0
            while place < len(parts) - 1:
                if parts[place : place + 2] == [first, second]:
                    parts[place : place + 2] = [first + second]
                place += 1
    return codes


def make_fsmt_tokenizer(folder, source, target, merges):
    """Return the library's FSMTTokenizer for two vocabularies, dicts of symbol to id."""
    folder.mkdir()
    (folder / "source.json").write_text(json.dumps(source))
    (folder / "target.json").write_text(json.dumps(target))
    (folder / "merges").write_text("".join(f"{a} {b}\n" for a, b in merges))
    files = {"src_vocab_file": "source.json", "tgt_vocab_file": "target.json", "merges_file": "merges"}
    return FSMTTokenizer(langs=["en", "de"], **{key: str(folder / name) for key, name in files.items()})


def segment(words, merges, folder):
    """Return the words in pieces, by FSMTTokenizer's own byte-pair encoding, as "ab", "c</w>"."""
    tokenizer = make_fsmt_tokenizer(folder, SPECIAL, SPECIAL, merges)
    return [piece for word in words for piece in tokenizer.bpe(word).split(" ")]


SPECIAL = {"<s>": BOS, "<pad>": PAD, "</s>": EOS, "<unk>": UNK}


def fairseq_spelling(piece):
    """Return a piece as fairseq's dictionaries have it: "ab@@", "c"."""
    return piece.removesuffix("</w>") if piece.endswith("</w>") else piece + "@@"
