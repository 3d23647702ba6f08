"""The vocabularies of an OpenNMT-py checkpoint, from lists (version 3) or the objects of torchtext (1 and 2)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedTokenizerFast

from .renaming import ConversionError

UNKNOWN, PAD, START, END = "<unk>", "<blank>", "<s>", "</s>"


class _StandIn:
    """In the place of a class or function that a pickle names: keeps the state that it is given, and does nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.state: dict[str, Any] = {}

    def __setstate__(self, state: Any) -> None:
        self.state = state if isinstance(state, dict) else {}


def _stand_in(name: str) -> type[_StandIn]:
    module, _, class_name = name.rpartition(".")
    return type(class_name, (_StandIn,), {"__module__": module})


# What the pickled vocabularies of versions 1 and 2 consist of, by the names that the files use.
STAND_INS = tuple(
    map(
        _stand_in,
        (
            "torchtext.data.field.Field",
            "torchtext.data.field.LabelField",
            "torchtext.data.field.RawField",
            "torchtext.data.utils._split_tokenizer",
            "torchtext.vocab.Vocab",
            "onmt.inputters.text_dataset.TextMultiField",
            "onmt.inputters.text_dataset._feature_tokenize",
            "onmt.inputters.inputter.AlignField",
            "onmt.inputters.inputter.make_src",
            "onmt.inputters.inputter.make_tgt",
            "functools.partial",
        ),
    )
)


def vocabularies(vocab: Any) -> tuple[list[str], list[str]]:
    """Return the tokens of source and target in the order of their ids.

    Args:
        vocab: "vocab" of a checkpoint that `opennmt.read` or a trusting `torch.load` gave.

    Raises:
        ConversionError: It is of another kind, or has source features.
    """
    if not isinstance(vocab, Mapping):
        raise ConversionError(f"'vocab' of the checkpoint is a {type(vocab).__name__}, which is not known here.")
    if vocab.get("src_feats") or vocab.get("tgt_feats"):
        raise ConversionError("src_feats: features beside the source tokens cannot be expressed.")
    return _tokens(vocab.get("src"), "src"), _tokens(vocab.get("tgt"), "tgt")


def _tokens(field: Any, side: str) -> list[str]:
    tokens = field
    if not isinstance(field, list):
        fields = _state(field).get("fields") or []
        if len(fields) > 1:
            raise ConversionError(f"{side}_feats: features beside the tokens cannot be expressed.")
        tokens = _state(_state(fields[0][1]).get("vocab")).get("itos") if fields else None
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
        raise ConversionError(f"{side!r} in 'vocab' of the checkpoint is a {type(field).__name__} without tokens.")
    return tokens


def _state(item: Any) -> dict[str, Any]:
    return item.state if isinstance(item, _StandIn) else getattr(item, "__dict__", {})


def special_ids(vocab: Any, source_size: int, target_size: int) -> dict[str, int]:
    """Return the config's token ids, and check the vocabularies against the embeddings' sizes.

    Raises:
        ConversionError: A size differs, a special token is missing, or padding has two ids.
    """
    source, target = vocabularies(vocab)
    for side, tokens, size in (("src", source, source_size), ("tgt", target, target_size)):
        if len(tokens) != size:
            raise ConversionError(f"The {side} vocabulary has {len(tokens)} tokens, and its embeddings {size} rows.")
    start = vocab.get("decoder_start_token", START)
    missing = [token for token in (PAD, END, start) if token not in target] + [PAD] * (PAD not in source)
    if missing:
        raise ConversionError(f"The vocabulary has no {', '.join(missing)}.")
    if source.index(PAD) != target.index(PAD):
        raise ConversionError(
            f"pad_token_id: {PAD} has id {source.index(PAD)} in the source and {target.index(PAD)} in the target "
            "vocabulary; this class has one id."
        )
    return {
        "pad_token_id": target.index(PAD),
        "eos_token_id": target.index(END),
        "bos_token_id": target.index(START if START in target else start),
        "decoder_start_token_id": target.index(start),
    }


def make_tokenizer(tokens: list[str], start: str = START) -> PreTrainedTokenizerFast:
    """Return a tokenizer of text already cut into these tokens, with spaces between them; rows have no end token."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    backend = Tokenizer(models.WordLevel({token: number for number, token in enumerate(tokens)}, unk_token=UNKNOWN))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        bos_token=start,
        eos_token=END,
        unk_token=UNKNOWN if UNKNOWN in tokens else None,
        split_special_tokens=True,
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
        padding_side="right",
    )
