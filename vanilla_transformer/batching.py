"""Batches of about the same number of tokens, as the paper trains (section 5.1): sentences of like length together.

A batch of `n` pairs costs `n · longest source` tokens in the encoder and `n · longest target` tokens in the decoder,
padding included. `TokenBudgetBatchSampler` keeps both within a budget, always, and wastes little of it on padding.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Sampler

if TYPE_CHECKING:
    import datasets

IntArray = npt.NDArray[np.int64]
Lengths = Sequence[int] | npt.NDArray[np.integer[Any]] | torch.Tensor

# Pairs whose (source - target) differs by less than this many tokens change places between epochs. One token mixes
# the batches well (at 1,200 tokens a batch, 12% of a sentence's neighbours come back the next epoch) and costs about
# one percent of padding.
_NOISE_TOKENS = 1.0

# When batches are large beside the corpus, each spans many lengths, at the long tail above all. Then the batches with
# the most padding are cut in two until padding makes up no more than this share of an epoch ...
_PADDING_SHARE = 0.072
# ... or until there are so many batches more, as a share of the fewest: small batches are no good either.
_MOST_CUTS = 0.5


@dataclass(frozen=True)
class _Plan:
    """The batches of one epoch: batch `b` holds the pairs `order[starts[b]:ends[b]]`."""

    order: IntArray  # [P] positions among the kept pairs, sorted by length
    starts: IntArray  # [N]
    ends: IntArray  # [N]


class TokenBudgetBatchSampler(Sampler[list[int]]):
    """Yields lists of indices whose padded source and padded target tokens each stay within a budget.

    Every pair comes exactly once an epoch. `len()` is exact, the same in every epoch, and a multiple of
    `num_replicas`, so that processes which take turns (as `accelerate` deals batches out) all make the same number of
    steps and none sees a batch twice. The order depends on `seed` and the epoch alone: call `set_epoch` before each.

    How: the larger side of a pair, `max(source, target)`, decides how many fit, so pairs are sorted by it and, among
    equals, by `source - target`, in alternating direction, so that neighbours are alike on both sides. Greedy
    cutting of such a row is optimal in the number of batches. Each epoch moves the first cut by chance and blurs the
    second key by one token, which gives other batches but, as the first key is untouched, never more than one batch
    beyond the optimum; the batches with the most padding are then cut in two until the number is the fixed one.

    The class has no attribute `batch_size` on purpose: with one, `accelerate.data_loader.BatchSamplerShard` takes
    batches of another size for incomplete ones and, on several processes, drops them.

    Args:
        source_lengths: Tokens of each source, special tokens included: list, numpy array or tensor of P integers >= 1.
        target_lengths: Tokens of each target, likewise.
        max_tokens_per_batch: The budget, in tokens, for each of the two sides.
        shuffle: Whether to draw new batches in a new order each epoch; otherwise the same batches, short to long.
        seed: Seed of the order, >= 0.
        num_replicas: Number of processes that share the batches.
        too_long: What to do with a pair of which one side is longer than the budget: "error" raises, "drop" leaves
            it out and counts it in `dropped`.
        max_sentences_per_batch: Optional limit on the pairs of a batch.

    Attributes:
        dropped: Number of pairs left out because they are longer than the budget.
        num_pairs: Number of pairs of an epoch, P less the dropped ones.
        epoch: The epoch whose batches the next iteration yields.

    Raises:
        ValueError: If lengths are missing, unequal in number, not whole or below 1; if an option is out of its range;
            if a pair is longer than the budget and `too_long` is "error", or all are and it is "drop"; if there are
            too few pairs to give every process its own batches.
    """

    def __init__(
        self,
        source_lengths: Lengths,
        target_lengths: Lengths,
        max_tokens_per_batch: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        num_replicas: int = 1,
        too_long: Literal["error", "drop"] = "error",
        max_sentences_per_batch: int | None = None,
    ) -> None:
        super().__init__()
        _check_count("max_tokens_per_batch", max_tokens_per_batch, 1)
        _check_count("seed", seed, 0)
        _check_count("num_replicas", num_replicas, 1)
        if max_sentences_per_batch is not None:
            _check_count("max_sentences_per_batch", max_sentences_per_batch, 1)
        if too_long not in ("error", "drop"):
            raise ValueError(f'too_long must be "error" or "drop", got {too_long!r}.')
        source = _as_lengths("source_lengths", source_lengths)
        target = _as_lengths("target_lengths", target_lengths)
        if len(source) != len(target):
            raise ValueError(
                f"source_lengths and target_lengths must describe the same pairs, got {len(source):,} and "
                f"{len(target):,} lengths."
            )
        self.max_tokens_per_batch = max_tokens_per_batch
        self.max_sentences_per_batch = max_sentences_per_batch
        self.shuffle = shuffle
        self.seed = seed
        self.num_replicas = num_replicas
        self.epoch = 0
        self._kept = _pairs_within(source, target, max_tokens_per_batch, too_long)
        self.num_pairs = len(self._kept)
        self.dropped = len(source) - self.num_pairs
        self._source = source[self._kept]
        self._target = target[self._kept]
        self._longer = np.maximum(self._source, self._target)
        self._shifts_first_cut = False  # decided with the number of batches, next
        self._num_batches = self._fix_num_batches()
        self._planned: tuple[int, _Plan] | None = None  # the last epoch's plan

    @property
    def sampler(self) -> TokenBudgetBatchSampler:
        """Itself: where `accelerate`'s data loaders look for the `set_epoch` of a wrapped batch sampler."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch, from 0, whose batches the next iteration yields."""
        _check_count("epoch", epoch, 0)
        self.epoch = epoch

    def __len__(self) -> int:
        """Number of batches of an epoch, over all processes; the same for every epoch."""
        return self._num_batches

    def __iter__(self) -> Iterator[list[int]]:
        """The batches of the current epoch, each a list of indices into the lengths given."""
        plan = self._plan(self.epoch)
        turn = np.arange(self._num_batches)
        if self.shuffle:
            turn = np.random.default_rng([self.seed, self.epoch, 1]).permutation(self._num_batches)
        for b in turn.tolist():
            yield self._kept[plan.order[plan.starts[b] : plan.ends[b]]].tolist()

    def padding_share(self) -> float:
        """Share of padding among all tokens of the current epoch's batches, both sides together, in [0, 1)."""
        tokens = int(self._source.sum() + self._target.sum())
        return 1.0 - tokens / int(self._padded_tokens(self._plan(self.epoch)).sum())

    def describe(self) -> str:
        """One line about an epoch for the log: pairs, batches, mean sizes, padding, dropped pairs."""
        batches = self._num_batches
        text = (
            f"{self.num_pairs:,} pairs in {batches:,} batches an epoch: on average {self.num_pairs / batches:,.1f} "
            f"pairs, {self._source.sum() / batches:,.0f} source and {self._target.sum() / batches:,.0f} target "
            f"tokens; {self.padding_share():.1%} padding"
        )
        return text + (f"; {self.dropped:,} longer pairs dropped" if self.dropped else "")

    def _plan(self, epoch: int) -> _Plan:
        """The batches of an epoch, by ascending length."""
        if self._planned is None or self._planned[0] != epoch:
            first_budget = self.max_tokens_per_batch
            noise = None
            if self.shuffle:
                rng = np.random.default_rng([self.seed, epoch, 0])
                noise = rng.uniform(-_NOISE_TOKENS, _NOISE_TOKENS, self.num_pairs)
                if self._shifts_first_cut:
                    first_budget = int(rng.integers(1, self.max_tokens_per_batch, endpoint=True))
            order = self._sort(noise)
            ends = self._cut(self._longer[order], first_budget)
            self._planned = (epoch, self._split(order, ends, self._num_batches))
        return self._planned[1]

    def _sort(self, noise: npt.NDArray[np.float64] | None) -> IntArray:
        """Order of the pairs by the longer side, then, back and forth, by source - target (+ noise)."""
        difference = (self._source - self._target).astype(np.float64)
        if noise is not None:
            difference += noise
        np.negative(difference, out=difference, where=self._longer % 2 == 0)
        return np.lexsort((difference, self._longer))

    def _cut(self, longer: IntArray, first_budget: int) -> IntArray:
        """Ends of the greedy batches of a row sorted by its longer sides; the first batch may get a smaller budget.

        As the row ascends, n pairs from i cost n · longer[i + n - 1] on the longer side: a bisection finds the
        largest n. A batch of one pair always fits, too-long pairs being gone.
        """
        row = longer.tolist()
        cap = self.max_sentences_per_batch or len(row)
        ends: list[int] = []
        start, budget = 0, first_budget
        while start < len(row):
            low, high = 1, max(1, min(cap, len(row) - start, budget // row[start]))
            while low < high:
                middle = (low + high + 1) // 2
                if middle * row[start + middle - 1] <= budget:
                    low = middle
                else:
                    high = middle - 1
            start += low
            ends.append(start)
            budget = self.max_tokens_per_batch
        return np.asarray(ends, dtype=np.int64)

    def _split(self, order: IntArray, ends: IntArray, num_batches: int | None) -> _Plan:
        """Cut the batches with the most padding in two until there are `num_batches`.

        With None: until there is little padding, see the constants above.
        """
        source, target = self._source[order], self._target[order]
        starts = np.concatenate(([0], ends[:-1]))
        padding = self._padded_tokens(_Plan(order, starts, ends)) - np.add.reduceat(source + target, starts)
        heap = list(zip((-padding).tolist(), (starts - ends).tolist(), starts.tolist(), ends.tolist(), strict=True))
        heapq.heapify(heap)
        total = int(padding.sum())
        tolerated = int((source.sum() + target.sum()) * _PADDING_SHARE / (1 - _PADDING_SHARE))
        most = num_batches or len(ends) + int(len(ends) * _MOST_CUTS)
        while len(heap) < most and (num_batches or total > tolerated):
            waste, _, start, end = heapq.heappop(heap)
            total += waste
            middle = start + _best_cut(source[start:end], target[start:end])
            for a, b in ((start, middle), (middle, end)):
                s, t = source[a:b], target[a:b]
                waste = int(s.sum() + t.sum()) - (b - a) * int(s.max() + t.max())
                total -= waste
                heapq.heappush(heap, (waste, a - b, a, b))
        bounds = np.asarray(sorted(item[2:] for item in heap), dtype=np.int64)
        return _Plan(order, bounds[:, 0], bounds[:, 1])

    def _padded_tokens(self, plan: _Plan) -> IntArray:
        """Source plus target tokens of each batch, padding included. [N]."""
        longest_source = np.maximum.reduceat(self._source[plan.order], plan.starts)
        longest_target = np.maximum.reduceat(self._target[plan.order], plan.starts)
        return np.asarray((plan.ends - plan.starts) * (longest_source + longest_target), dtype=np.int64)

    def _fix_num_batches(self) -> int:
        """The number of batches of every epoch: the optimum, one for the moved first cut, few against padding."""
        order = self._sort(None)
        ends = self._cut(self._longer[order], self.max_tokens_per_batch)
        fewest = len(ends)
        wanted = len(self._split(order, ends, None).ends) + (fewest > 1)
        most = self.num_pairs // self.num_replicas * self.num_replicas
        if fewest > most:
            raise ValueError(
                f"{self.num_pairs:,} pairs do not make equal numbers of batches within max_tokens_per_batch="
                f"{self.max_tokens_per_batch:,} for {self.num_replicas} processes: at least {fewest:,} batches are "
                f"needed and the largest multiple of {self.num_replicas} that {self.num_pairs:,} pairs can fill is "
                f"{most:,}. Use more data, fewer processes or a larger budget."
            )
        wanted = min(most, -(-wanted // self.num_replicas) * self.num_replicas)
        # An epoch whose first cut is moved may need one batch beyond the fewest.
        self._shifts_first_cut = 1 < fewest < wanted
        return wanted


class LongestFirstSampler(Sampler[int]):
    """Yields every index once, the longest row first: batches without a shuffle hold little padding.

    The most memory is needed at once, and a progress bar errs on the safe side.

    Args:
        lengths: Tokens of each row: list, numpy array or tensor of P integers >= 1.

    Attributes:
        order: The indices in the order they are yielded; equal lengths keep their order. [P].
    """

    def __init__(self, lengths: Lengths) -> None:
        super().__init__()
        self.order: IntArray = np.argsort(-_as_lengths("lengths", lengths), kind="stable")

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self) -> Iterator[int]:
        return iter(self.order.tolist())


def sequence_lengths(dataset: datasets.Dataset | torch.utils.data.Dataset[Any], column: str) -> IntArray:
    """Number of elements of each row of a list column: the lengths a `TokenBudgetBatchSampler` needs.

    A `datasets.Dataset` is read as Arrow, by offsets, without decoding a token (a million rows in a tenth of a
    second, in some seconds after a shuffle); any other map-style dataset is read item by item.

    Args:
        dataset: A map-style dataset whose rows are mappings.
        column: Name of a column of lists, such as "input_ids" or "labels".

    Returns:
        The lengths. [P].

    Raises:
        ValueError: If the column is missing, is not a column of lists, or has an empty cell (None).
    """
    import datasets

    if not isinstance(dataset, datasets.Dataset):
        try:
            return np.asarray([len(dataset[i][column]) for i in range(len(dataset))], dtype=np.int64)  # type: ignore[arg-type]
        except (KeyError, TypeError) as error:
            raise ValueError(f"Every item of the dataset must map {column!r} to a sequence of tokens.") from error

    import pyarrow as pa
    import pyarrow.compute as pc

    if column not in dataset.column_names:
        raise ValueError(f"The dataset has no column {column!r}; its columns are {', '.join(dataset.column_names)}.")
    parts: list[IntArray] = []
    # The Arrow format keeps the rows chosen by select(), shuffle() or filter(), in their order.
    for table in dataset.select_columns([column]).with_format("arrow").iter(batch_size=10_000):
        cells = table[column]
        if not (pa.types.is_list(cells.type) or pa.types.is_large_list(cells.type)):
            raise ValueError(f"Column {column!r} must hold lists of token ids, got {cells.type}.")
        if cells.null_count:
            raise ValueError(f"Column {column!r} has {cells.null_count:,} rows without a list (None).")
        parts.append(pc.list_value_length(cells).to_numpy().astype(np.int64))
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)


def _check_count(name: str, value: int, least: int) -> None:
    """Raise unless value is a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        raise ValueError(f"{name} must be a whole number >= {least}, got {value!r}.")


def _as_lengths(name: str, lengths: Lengths) -> IntArray:
    """The lengths as int64, checked."""
    if isinstance(lengths, torch.Tensor):
        lengths = lengths.detach().cpu().numpy()
    try:
        array = np.asarray(lengths)
    except ValueError as error:  # rows of unequal length
        raise ValueError(f"{name} must be a flat list of whole numbers.") from error
    if array.ndim != 1 or len(array) == 0:
        raise ValueError(f"{name} must be a flat, non-empty list of whole numbers, got shape {array.shape}.")
    if not np.issubdtype(array.dtype, np.integer):
        raise ValueError(f"{name} must hold whole numbers of tokens, got {array.dtype} (first value {array[0]!r}).")
    if array.min() < 1:
        index = int(array.argmin())
        raise ValueError(
            f"{name} must be at least 1 (every row ends in an end token), got {int(array[index])} at index {index:,}."
        )
    return array.astype(np.int64)


def _pairs_within(source: IntArray, target: IntArray, budget: int, too_long: str) -> IntArray:
    """Indices of the pairs that fit the budget, after the checks on those that do not."""
    fits = np.maximum(source, target) <= budget
    kept = np.flatnonzero(fits)
    if len(kept) == len(source):
        return kept
    beyond = np.flatnonzero(~fits)
    index = int(beyond[0])
    longest = int(max(source.max(), target.max()))
    if too_long == "error":
        more = f" ({len(beyond):,} such pairs; the longest side has {longest:,} tokens)" if len(beyond) > 1 else ""
        raise ValueError(
            f"Pair {index:,} has {int(source[index]):,} source and {int(target[index]):,} target tokens, more than "
            f"max_tokens_per_batch={budget:,}{more}. Raise max_tokens_per_batch to at least {longest:,}, shorten the "
            'pairs, or pass too_long="drop" to leave them out.'
        )
    if len(kept) == 0:
        raise ValueError(
            f"All {len(source):,} pairs are longer than max_tokens_per_batch={budget:,}: nothing is left to train on. "
            f"Raise it; the longest side has {longest:,} tokens."
        )
    return kept


def _best_cut(source: IntArray, target: IntArray) -> int:
    """Where to cut a batch of n >= 2 pairs in two so that both together hold the fewest padded tokens."""
    n = len(source)
    before = np.maximum.accumulate(source)[:-1] + np.maximum.accumulate(target)[:-1]
    after = np.maximum.accumulate(source[::-1])[::-1][1:] + np.maximum.accumulate(target[::-1])[::-1][1:]
    left = np.arange(1, n)
    cost = before * left + after * (n - left)
    cheapest = np.flatnonzero(cost == cost.min())
    return int(left[cheapest[np.abs(left[cheapest] - n / 2).argmin()]])  # the most even of equally cheap cuts
