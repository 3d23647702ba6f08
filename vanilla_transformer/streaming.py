"""Token-budget batches of a stream: a corpus that is read once, in order, and never held whole.

A stream tells its lengths only as it goes by, so pairs are sorted within a buffer of it, not over the whole epoch.
What `TokenBudgetBatchSampler` promises for a data set in memory holds here, too, unless said otherwise.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from .batching import TokenBudgetBatchSampler
from .tokenizer_training import bpe_dropout

if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

Pair = Mapping[str, Any]


class TokenBudgetStream(IterableDataset[list[Pair]]):
    """Yields lists of pairs whose padded source and padded target tokens each stay within a budget.

    Every pair comes exactly once in a pass over the stream, the budget is never exceeded, and all processes make the
    same number of steps with batches of their own. The order depends on the stream, `seed` and the epoch alone, so
    that a resumed run can read up to where it was. Use it with `DataLoader(stream, batch_size=None, collate_fn=...)`.

    What a stream does not allow: `len()` is unknown; a pair changes places only within its buffer, so let the data
    set shuffle, too; a resumed run reads again what it had read before; and each process reads the whole stream and
    keeps its share of the batches, since only so do all have the same number of them.

    Args:
        pairs: The encoded pairs, an iterable that can be iterated over once an epoch, such as a
            `datasets.IterableDataset`; where it has a `set_epoch`, that is called as well.
        max_tokens_per_batch: The budget, in tokens, for each of the two sides.
        buffer_size: How many pairs to read before batches are made of them. More pairs, less padding.
        shuffle: Whether to draw the batches of a buffer in a new order each epoch; otherwise short to long.
        seed: Seed of the order, >= 0.
        rank: This process, from 0.
        num_replicas: Number of processes that share the batches.
        too_long: What to do with a pair of which one side is longer than the budget: "error", or "drop", which counts
            it in `dropped` and, at the end of a pass, in the log.
        repeat: Whether to go on with the next epoch after the last pair, again and again, as a Trainer needs it that
            counts updates: it can only skip batches within what it takes for one pass.
        source_column: The column that holds the source's tokens.
        target_column: The column that holds the target's tokens.

    Attributes:
        epoch: The epoch whose batches the next iteration yields.
        dropped: Number of pairs left out in the current pass.

    Raises:
        ValueError: If an option is out of its range; while iterating, if a pair lacks a column or is longer than the
            budget and `too_long` is "error", or if the stream is too short to give every process a batch.
    """

    def __init__(
        self,
        pairs: Iterable[Pair],
        max_tokens_per_batch: int,
        *,
        buffer_size: int = 50_000,
        shuffle: bool = True,
        seed: int = 0,
        rank: int = 0,
        num_replicas: int = 1,
        too_long: Literal["error", "drop"] = "error",
        repeat: bool = False,
        source_column: str = "input_ids",
        target_column: str = "labels",
    ) -> None:
        super().__init__()
        if not 0 <= rank < num_replicas:
            raise ValueError(f"rank must be from 0 to num_replicas - 1 = {num_replicas - 1}, got {rank}.")
        if buffer_size < 8 * num_replicas:
            raise ValueError(f"buffer_size must be at least 8 pairs a process, {8 * num_replicas}, got {buffer_size}.")
        self.pairs = pairs
        self.buffer_size = buffer_size
        self.rank = rank
        self.num_replicas = num_replicas
        self.columns = source_column, target_column
        self.too_long = too_long
        self.repeat = repeat
        self.max_tokens_per_batch = max_tokens_per_batch
        self.epoch = 0
        self.dropped = 0
        self._options: dict[str, Any] = {"shuffle": shuffle, "seed": seed, "num_replicas": num_replicas}
        shortest = [1] * num_replicas  # a batch each: the sampler checks the options
        TokenBudgetBatchSampler(shortest, shortest, max_tokens_per_batch, too_long=too_long, **self._options)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch, from 0, whose batches the next iteration yields."""
        self.epoch = epoch
        if hasattr(self.pairs, "set_epoch"):
            self.pairs.set_epoch(epoch)

    def __iter__(self) -> Iterator[list[Pair]]:
        """The batches of this process in the current epoch and, with `repeat`, in all that follow."""
        worker = get_worker_info()
        if worker is not None and worker.num_workers > 1:
            raise ValueError(
                f"A stream is read by one worker, as several would each read all of it, and {worker.num_workers} were "
                "asked for: set num_workers (dataloader_num_workers) to 1, or to 0."
            )
        found = True
        while found:
            found = False
            for batch in self._one_pass():
                found = True
                yield batch
            if not self.repeat:
                return
            self.set_epoch(self.epoch + 1)

    def _one_pass(self) -> Iterator[list[Pair]]:
        """The batches of this process in the current epoch."""
        self.dropped = 0
        for number, buffer in enumerate(self._buffers()):
            source, target = ([len(pair[column]) for pair in buffer] for column in self.columns)
            sampler = TokenBudgetBatchSampler(source, target, self.max_tokens_per_batch, **self._options)
            # Another order for each buffer of each epoch: the two numbers are paired off to one (Cantor).
            sampler.set_epoch((self.epoch + number) * (self.epoch + number + 1) // 2 + number)
            for indices in itertools.islice(sampler, self.rank, None, self.num_replicas):
                yield [buffer[index] for index in indices]
        if self.dropped and self.rank == 0:
            logger.info("Dropped in pass %d over the stream: %s longer pairs.", self.epoch, f"{self.dropped:,}")

    def _buffers(self) -> Iterator[list[Pair]]:
        """The stream in parts of `buffer_size`; the last is never so short that a process would go without a batch."""
        spare = 8 * self.num_replicas
        buffer: list[Pair] = []
        for pair in self._fitting_pairs():
            buffer.append(pair)
            if len(buffer) == self.buffer_size + spare:
                yield buffer[: self.buffer_size]
                buffer = buffer[self.buffer_size :]
        if buffer:
            yield buffer

    def _fitting_pairs(self) -> Iterator[Pair]:
        """The pairs of the stream within the budget."""
        for number, pair in enumerate(self.pairs):
            missing = [column for column in self.columns if not len(pair.get(column) or ())]
            if missing:
                raise ValueError(f"Pair {number:,} of the stream has no tokens in {' and '.join(map(repr, missing))}.")
            sides = [len(pair[column]) for column in self.columns]
            if max(sides) <= self.max_tokens_per_batch:
                yield pair
            elif self.too_long == "drop":
                self.dropped += 1
                if self.dropped == 1 and self.rank == 0:  # a pass may take days
                    logger.info("Dropped: pair %s of the stream and those as long that follow.", f"{number:,}")
            else:
                raise ValueError(
                    f"Pair {number:,} of the stream has {sides[0]:,} source and {sides[1]:,} target tokens, more than "
                    f"max_tokens_per_batch={self.max_tokens_per_batch:,}. Raise it, shorten the pairs, or pass "
                    'too_long="drop" to leave them out.'
                )


class BpeDropoutPairs(IterableDataset[Pair]):
    """Pairs of text, encoded anew with BPE-dropout each time they come by, in a new order each epoch.

    BPE-dropout (Provilkov et al. 2020, arXiv 1910.13267) shows the model each sentence in ever other pieces, which
    helps where there is little text. Since lengths change with the pieces, the pairs are a stream; give it to
    `VanillaTransformerTrainer`, or to a `TokenBudgetStream`. Evaluate and translate with the tokenizer as it is. The
    order depends on the seed and the epoch; the pieces are drawn by the `tokenizers` library, which takes no seed, so
    that two runs, and a run and its resumption, differ. So do several processes, which therefore cannot find their
    shares in one stream: each reads the pairs of its own `share`.

    Args:
        texts: The columns "source" and "target".
        tokenizer: A fast tokenizer with a BPE model.
        dropout: Probability of leaving a merge out, in (0, 1]; the paper's is 0.1.
        seed: Seed of the order, >= 0.

    Attributes:
        share: (rank, number of processes): of the epoch's order every so many pairs, from the rank-th on, come.

    Raises:
        ValueError: If the tokenizer has no BPE model or the probability is out of its range.
    """

    ROWS = 1000  # encoded at a time

    def __init__(
        self, texts: datasets.Dataset, tokenizer: PreTrainedTokenizerBase, dropout: float = 0.1, *, seed: int = 0
    ) -> None:
        super().__init__()
        if dropout <= 0:
            raise ValueError(f"dropout must lie in (0, 1], got {dropout}: without it the pairs need no new encoding.")
        with bpe_dropout(tokenizer, dropout):
            pass  # checks both
        self.texts = texts
        self.tokenizer = tokenizer
        self.dropout = dropout
        self.seed = seed
        self.epoch = 0
        self.share = 0, 1

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch, from 0, whose order the next iteration has."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[Pair]:
        """The pairs as "input_ids" and "labels"."""
        rank, processes = self.share
        order = np.random.default_rng([self.seed, self.epoch]).permutation(len(self.texts))[rank::processes]
        for start in range(0, len(order), self.ROWS):
            rows = self.texts[order[start : start + self.ROWS]]
            with bpe_dropout(self.tokenizer, self.dropout):
                sources = self.tokenizer(rows["source"])["input_ids"]
                targets = self.tokenizer(text_target=rows["target"])["input_ids"]
            for source, target in zip(sources, targets, strict=True):
                yield {"input_ids": source, "labels": target}


def stream_loader(stream: TokenBudgetStream, *, device: torch.device | None, **options: Any) -> Any:
    """A data loader over a `TokenBudgetStream` that puts batches on the device and resumes where a Trainer says.

    It is accelerate's own `DataLoaderShard`: `accelerator.prepare` would share the stream out once more.

    Args:
        stream: The batches.
        device: Where they go; None leaves them where they are.
        **options: Options of `torch.utils.data.DataLoader`, such as `collate_fn`.
    """
    from accelerate.data_loader import DataLoaderShard

    return DataLoaderShard(stream, device=device, batch_size=None, **options)
