"""JoeyNMT 2.3: its Transformer, its loss, its data pipeline and its optimizer, on the pairs that all train on.

Importing this module imports joeynmt, an optional peer. Everything but the loop is JoeyNMT's own: `build_model` with
post-norm layers and one matrix for both embeddings and the output, `XentLoss` with smoothing, the optimizer of its
builder, and batches of `batch_type: token`, which its `TokenBatchSampler` cuts from a shuffled row of pairs and its
vocabulary encodes token by token. It has no bucketing by length, so its batches are padded to their longest pair. Its
dropout falls on attention weights and inside the feed-forward layers too.
"""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import datasets
import torch
from joeynmt.builders import build_optimizer
from joeynmt.datasets import BaseDataset
from joeynmt.model import build_model
from joeynmt.vocabulary import Vocabulary

from .workload import DROPOUT, LABEL_SMOOTHING, SIZES, Workload

SOURCE, TARGET = "input_ids", "labels"  # its two "languages" are the columns of the pairs

for _module in ("builders", "model"):  # each logs at DEBUG by a handler of its own
    logging.getLogger(f"joeynmt.{_module}").setLevel(logging.WARNING)


class Pairs(BaseDataset):
    """The pairs as JoeyNMT has them: rows of tokens, their end left to the vocabulary.

    Args:
        dataset: Columns "input_ids" and "labels", each row with its end.
        tokenizer: What the ids are ids of.
        vocab_size: V; a tokenizer that has fewer tokens is filled up.
    """

    def __init__(self, dataset: datasets.Dataset, tokenizer: Any, vocab_size: int) -> None:
        tokens = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
        tokens += [f"<unused {index}>" for index in range(len(tokens), vocab_size)]
        self.vocabulary = _Vocabulary(tokens, _symbols(tokenizer))
        super().__init__(
            path="",
            src_lang=SOURCE,
            trg_lang=TARGET,
            has_trg=True,
            has_prompt={SOURCE: False, TARGET: False},
            sequence_encoder=dict.fromkeys((SOURCE, TARGET), self.vocabulary.sentences_to_ids),
        )
        columns = dataset.to_dict()
        self.rows = {
            side: [[tokens[index] for index in row[:-1]] for row in columns[side]] for side in (SOURCE, TARGET)
        }
        self.target_tokens = sum(len(row) + 1 for row in self.rows[TARGET])
        self.reset_indices()

    def get_item(self, idx: int, lang: str, is_train: bool | None = None) -> list[str]:
        """Return the tokens of one side of a pair."""
        return self.rows[lang][idx]

    def __len__(self) -> int:
        return len(self.rows[SOURCE])

    def batches(self, budget: int, device: str) -> tuple[Any, float]:
        """Return the loader of batches by tokens, padding counted, and the mean of real target tokens in a batch.

        A batch ends with the pair that makes it reach the budget.
        """
        vocabulary = self.vocabulary
        loader = self.make_iter(
            batch_size=budget,
            batch_type="token",
            shuffle=True,
            pad_index=vocabulary.pad_index,
            eos_index=vocabulary.eos_index,
            device=torch.device(device),
        )
        return loader, self.target_tokens / sum(1 for _ in loader.batch_sampler)


class _Vocabulary(Vocabulary):
    """JoeyNMT's vocabulary, made in linear time: its own looks for every token in the list of those before."""

    def add_tokens(self, tokens: list[str]) -> None:
        """Number the tokens, the first of equal ones; the constructor calls this once."""
        self._itos = list(dict.fromkeys(tokens))  # private names of 2.3
        self._stoi = {token: index for index, token in enumerate(self._itos)}


def _symbols(tokenizer: Any) -> SimpleNamespace:
    """Return the special tokens, which JoeyNMT puts first; its unknown one, which never occurs, is the start token."""
    return SimpleNamespace(
        unk_token=tokenizer.bos_token,
        bos_token=tokenizer.bos_token,
        pad_token=tokenizer.pad_token,
        eos_token=tokenizer.eos_token,
        sep_token=None,
        unk_id=0,
        bos_id=0,
        pad_id=1,
        eos_id=2,
        sep_id=None,
        lang_tags=[],
    )


def model(workload: Workload, vocabulary: Any) -> Any:
    """Return the model with fresh weights; called with `return_type="loss"`, it gives the sum of a batch first."""
    sizes = SIZES[workload.size]
    stack = {
        "type": "transformer",
        "num_layers": sizes["layers"],
        "num_heads": sizes["heads"],
        "hidden_size": sizes["d_model"],
        "ff_size": sizes["d_ff"],
        "dropout": DROPOUT,
        "layer_norm": "post",
        "activation": "relu",
        "embeddings": {"embedding_dim": sizes["d_model"], "scale": True, "dropout": DROPOUT},
    }
    torch.manual_seed(1)
    found = build_model(
        {"encoder": stack, "decoder": stack, "tied_embeddings": True, "tied_softmax": True}, vocabulary, vocabulary
    )
    found.loss_function = ("crossentropy", LABEL_SMOOTHING)  # a setter that takes what to build
    return found


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    """Return JoeyNMT's Adam with the paper's betas."""
    return build_optimizer({"optimizer": "adam", "learning_rate": 1e-4, "adam_betas": (0.9, 0.98)}, parameters)
