"""What is trained on and translated: models of some sizes, generated or real text, and the arithmetic of a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import datasets
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import MarianConfig, MarianMTModel, PreTrainedTokenizerFast

from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration

PAD, EOS, START = 0, 1, 2
SIZES: dict[str, dict[str, int]] = {
    "tiny": {"layers": 4, "d_model": 128, "d_ff": 256, "heads": 4},
    "small": {"layers": 3, "d_model": 256, "d_ff": 1024, "heads": 4},
    "base": {"layers": 6, "d_model": 512, "d_ff": 2048, "heads": 8},
    "big": {"layers": 6, "d_model": 1024, "d_ff": 4096, "heads": 16},
}
DROPOUT = LABEL_SMOOTHING = 0.1


@dataclass(frozen=True)
class Workload:
    """A model size with a vocabulary.

    Args:
        size: One of `SIZES`.
        vocab_size: V, one vocabulary for both sides and one matrix for all.
    """

    size: str
    vocab_size: int

    def __str__(self) -> str:
        return f"{self.size}, V {self.vocab_size:,}"

    def config(self, **overrides: Any) -> VanillaTransformerConfig:
        """Return our configuration."""
        sizes = SIZES[self.size]
        fields: dict[str, Any] = {
            "vocab_size": self.vocab_size,
            "d_model": sizes["d_model"],
            "encoder_layers": sizes["layers"],
            "decoder_layers": sizes["layers"],
            "encoder_attention_heads": sizes["heads"],
            "decoder_attention_heads": sizes["heads"],
            "encoder_ffn_dim": sizes["d_ff"],
            "decoder_ffn_dim": sizes["d_ff"],
            "dropout": DROPOUT,
            "label_smoothing": LABEL_SMOOTHING,
            "pad_token_id": PAD,
            "eos_token_id": EOS,
            "decoder_start_token_id": START,
        }
        return VanillaTransformerConfig(**{**fields, **overrides})

    def ours(self, **overrides: Any) -> VanillaTransformerForConditionalGeneration:
        """Return our model with fresh weights; `overrides` are fields of the configuration."""
        torch.manual_seed(1)
        return VanillaTransformerForConditionalGeneration(self.config(**overrides))

    def marian(self) -> MarianMTModel:
        """Return MarianMT of the same size with fresh weights."""
        sizes = SIZES[self.size]
        torch.manual_seed(1)
        return MarianMTModel(
            MarianConfig(
                vocab_size=self.vocab_size,
                d_model=sizes["d_model"],
                encoder_layers=sizes["layers"],
                decoder_layers=sizes["layers"],
                encoder_attention_heads=sizes["heads"],
                decoder_attention_heads=sizes["heads"],
                encoder_ffn_dim=sizes["d_ff"],
                decoder_ffn_dim=sizes["d_ff"],
                dropout=DROPOUT,
                attention_dropout=0.0,
                activation_dropout=0.0,
                activation_function="relu",
                scale_embedding=True,
                max_position_embeddings=1024,
                pad_token_id=PAD,
                eos_token_id=EOS,
                decoder_start_token_id=PAD,
                forced_eos_token_id=None,
            )
        )


def word_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer for generated text, whose word "w17" is token 17."""
    vocabulary = {"<pad>": PAD, "</s>": EOS, "<s>": START, **{f"w{i}": i for i in range(3, vocab_size)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", bos_token="<s>")


def generated_pairs(vocab_size: int, count: int, seed: int = 1) -> datasets.Dataset:
    """Return pairs of token ids with the lengths of image captions: about 15 tokens a side, from 4 to 50.

    Lengths are log-normal, a target's near its source's; words follow Zipf's law. Nothing can be learned from them,
    which the time of a step does not depend on.
    """
    generator = torch.Generator().manual_seed(seed)
    source = torch.exp(torch.randn(count, generator=generator) * 0.33 + 2.62).round().clamp(4, 50).long()
    ratio = torch.exp(torch.randn(count, generator=generator) * 0.18 + 0.06)
    target = (source * ratio).round().clamp(4, 50).long()
    frequencies = 1.0 / torch.arange(3, vocab_size).double().sub(1)
    drawn = torch.multinomial(
        frequencies, int(source.sum() + target.sum()), replacement=True, generator=generator
    ).add(3)
    rows = drawn.split([*source.tolist(), *target.tolist()])
    ids = [[*row.tolist()[:-1], EOS] for row in rows]
    return datasets.Dataset.from_dict({"input_ids": ids[:count], "labels": ids[count:]})


def corpus_pairs(files: list[str], vocab_size: int, count: int | None) -> tuple[datasets.Dataset, Any]:
    """Return the first `count` pairs of a corpus, encoded by a tokenizer trained on it, and the tokenizer."""
    from vanilla_transformer.corpus import encode_pairs, load_parallel_files
    from vanilla_transformer.tokenizer_training import iterate_texts, train_tokenizer

    pairs, _ = load_parallel_files(files)
    if count is not None:
        pairs = pairs.select(range(min(count, len(pairs))))
    tokenizer = train_tokenizer(iterate_texts(pairs), vocab_size=vocab_size)
    encoded, _ = encode_pairs(pairs, tokenizer)
    return encoded, tokenizer


def training_flops(config: VanillaTransformerConfig, sources: list[int], targets: list[int]) -> float:
    """Return the floating-point operations of forward and backward over pairs of these lengths, without padding.

    6 a parameter of a matrix product and token: the encoder's on source tokens, the decoder's and the output
    projection's on target tokens, but keys and values of the attention to the source on source tokens; and
    12 · d_model a pair of tokens that attend to each other (half of them under the causal mask) a layer.
    """
    width, layers = config.d_model, config.decoder_layers
    attention = 4 * width**2
    encoder = config.encoder_layers * (attention + 2 * width * config.encoder_ffn_dim)
    on_target = layers * (attention + 2 * width**2 + 2 * width * config.decoder_ffn_dim)
    on_target += width * config.decoder_vocab_size
    on_source = encoder + layers * 2 * width**2
    linear = 6.0 * (on_source * sum(sources) + on_target * sum(targets))
    pairs = sum(
        config.encoder_layers * s * s + layers * (t * (t + 1) / 2 + s * t)
        for s, t in zip(sources, targets, strict=True)
    )
    return linear + 12.0 * width * pairs
