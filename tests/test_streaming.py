"""The promises of batches from a stream, over random streams."""

import itertools
import logging
import random
from types import SimpleNamespace

import datasets
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import vanilla_transformer as vt
from vanilla_transformer.batching import TokenBudgetBatchSampler
from vanilla_transformer.dataloading import token_budget_dataloader
from vanilla_transformer.streaming import BpeDropoutPairs, TokenBudgetStream
from vanilla_transformer.training_arguments import VanillaTransformerTrainingArguments

LENGTHS = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), min_size=40, max_size=300)


def pairs_of(lengths):
    """Pairs of those lengths; each token of a pair is its number, so that pairs can be told apart."""
    return [{"input_ids": [n] * source, "labels": [n] * target} for n, (source, target) in enumerate(lengths)]


def numbers(batches):
    return [[pair["labels"][0] for pair in batch] for batch in batches]


@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.integers(30, 200), st.integers(32, 400), st.integers(1, 4), st.integers(0, 3), st.integers(0, 9))
def test_once_each_within_the_budget_and_as_many_for_each_process(lengths, budget, buffer_size, replicas, epoch, seed):
    pairs = pairs_of(lengths)
    parts = []
    for rank in range(replicas):
        stream = TokenBudgetStream(pairs, budget, buffer_size=buffer_size, rank=rank, num_replicas=replicas, seed=seed)
        stream.set_epoch(epoch)
        parts.append(list(stream))
        assert numbers(stream) == numbers(parts[-1])  # again the same: a resumed run can read up to where it was
    assert len(set(map(len, parts))) == 1
    batches = [batch for part in parts for batch in part]
    assert sorted(n for batch in numbers(batches) for n in batch) == list(range(len(pairs)))
    for batch in batches:
        for side in ("input_ids", "labels"):
            assert len(batch) * max(len(pair[side]) for pair in batch) <= budget


def test_a_stream_within_one_buffer_is_batched_as_a_data_set_in_memory():
    generator = random.Random(3)
    lengths = [(generator.randint(3, 40), generator.randint(3, 40)) for _ in range(500)]
    sampler = TokenBudgetBatchSampler(*zip(*lengths, strict=True), 400, seed=5)
    assert numbers(TokenBudgetStream(pairs_of(lengths), 400, seed=5)) == list(sampler)


def test_other_epochs_and_buffers_have_other_orders():
    stream = TokenBudgetStream(pairs_of([(4, 4)] * 256), 32, buffer_size=64, seed=1)
    first = numbers(stream)
    stream.set_epoch(1)
    assert numbers(stream) != first
    within = [[[n % 64 for n in batch] for batch in first[k : k + 8]] for k in (0, 8)]
    assert within[0] != within[1]


def test_repeated_it_goes_through_its_epochs_one_after_the_other():
    pairs = pairs_of([(n % 9 + 1, n % 4 + 1) for n in range(100)])
    once = TokenBudgetStream(pairs, 50, seed=3)
    want = []
    for epoch in range(3):
        once.set_epoch(epoch)
        want += numbers(once)
    endless = iter(TokenBudgetStream(pairs, 50, seed=3, repeat=True))
    assert numbers(itertools.islice(endless, len(want))) == want
    assert numbers(TokenBudgetStream(iter(pairs), 50, repeat=True))  # ends where the stream cannot begin anew
    assert not list(TokenBudgetStream([], 50, repeat=True))


class Epochs(list):
    """A stream with an epoch of its own."""

    def set_epoch(self, epoch):
        self.epoch = epoch


def test_the_epoch_reaches_the_stream_behind():
    pairs = Epochs(pairs_of([(3, 3)] * 20))
    TokenBudgetStream(pairs, 30).set_epoch(4)
    assert pairs.epoch == 4


def test_a_worker_reads_the_same_and_several_are_refused():
    pairs = pairs_of([(n % 7 + 1, n % 5 + 1) for n in range(100)])
    stream = TokenBudgetStream(pairs, 40, buffer_size=50)
    want = numbers(stream)
    assert numbers(DataLoader(stream, batch_size=None, num_workers=1, collate_fn=list)) == want
    with pytest.raises(ValueError, match="read by one worker"):
        list(DataLoader(stream, batch_size=None, num_workers=2, collate_fn=list))


def test_longer_pairs_are_an_error_or_a_counted_drop(caplog):
    caplog.set_level(logging.INFO, logger="vanilla_transformer")
    pairs = pairs_of([(3, 3), (50, 3), (3, 3), (3, 60)])
    with pytest.raises(ValueError, match="Pair 1 of the stream has 50 source and 3 target tokens"):
        list(TokenBudgetStream(pairs, 40))
    stream = TokenBudgetStream(pairs, 40, too_long="drop")
    for _ in range(2):
        assert sorted(n for batch in numbers(stream) for n in batch) == [0, 2]
        assert stream.dropped == 2
        assert "Dropped: pair 1 of the stream" in caplog.text
        assert "in pass 0 over the stream: 2 longer pairs" in caplog.text
        caplog.clear()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 2, "num_replicas": 2}, "rank must be from 0 to num_replicas - 1 = 1, got 2"),
        ({"buffer_size": 7}, "buffer_size must be at least 8 pairs a process, 8, got 7"),
        ({"seed": -1}, "seed"),
        ({"max_tokens_per_batch": 0}, "max_tokens_per_batch"),
        ({"too_long": "cut"}, "too_long"),
    ],
)
def test_options_out_of_range_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        TokenBudgetStream(pairs_of([(1, 1)]), **{"max_tokens_per_batch": 10, **options})


@pytest.mark.parametrize(
    "pair", [{"input_ids": [1]}, {"input_ids": [1], "labels": []}, {"input_ids": [1], "labels": None}]
)
def test_a_pair_without_tokens_is_named(pair):
    with pytest.raises(ValueError, match="Pair 1 of the stream has no tokens in 'labels'"):
        list(TokenBudgetStream([{"input_ids": [1], "labels": [1]}, pair], 10))


def test_too_short_a_stream_for_all_processes_is_an_error():
    with pytest.raises(ValueError, match="equal numbers of batches"):
        list(TokenBudgetStream(pairs_of([(3, 3)]), 10, num_replicas=2))


@pytest.fixture(scope="module")
def texts():
    rows = [(f"the {a} bird sees {n} houses", f"der {a} Vogel sieht {n} Haeuser") for n in range(40) for a in "abc"]
    return datasets.Dataset.from_dict({"source": [s for s, _ in rows], "target": [t for _, t in rows]})


@pytest.fixture(scope="module")
def tokenizer(texts):
    return vt.train_tokenizer(texts["source"][:] + texts["target"][:], vocab_size=330)


def test_bpe_dropout_gives_the_same_text_in_other_pieces_each_time(texts, tokenizer):
    pairs = BpeDropoutPairs(texts, tokenizer, 0.3, seed=2)
    first, second = list(pairs), list(pairs)
    decoded = [
        tuple(tokenizer.decode(pair[side], skip_special_tokens=True) for side in ("input_ids", "labels"))
        for pair in first
    ]
    assert sorted(decoded) == sorted(zip(texts["source"], texts["target"], strict=True))
    assert first != second
    assert all(pair["labels"][-1] == tokenizer.eos_token_id for pair in first)
    clean = tokenizer(texts["source"][:])["input_ids"]
    assert sum(len(pair["input_ids"]) for pair in first) > sum(map(len, clean))
    assert tokenizer(texts["source"][:])["input_ids"] == clean  # the tokenizer itself is as it was


def test_bpe_dropout_pairs_come_in_another_order_each_epoch(texts, tokenizer):
    pairs = BpeDropoutPairs(texts, tokenizer, 1.0, seed=2)  # single bytes: nothing is drawn
    first = list(pairs)
    assert list(pairs) == first
    pairs.set_epoch(1)
    assert list(pairs) != first
    assert sorted(map(str, pairs)) == sorted(map(str, first))


def test_bpe_dropout_in_batches_keeps_the_budget(texts, tokenizer):
    stream = TokenBudgetStream(BpeDropoutPairs(texts, tokenizer, 0.2), 200)
    batches = list(stream)
    assert sum(map(len, batches)) == len(texts)
    for batch in batches:
        for side in ("input_ids", "labels"):
            assert len(batch) * max(len(pair[side]) for pair in batch) <= 200


def test_processes_draw_pieces_of_their_own_and_share_the_pairs(texts, tokenizer):
    """The pieces differ between processes, and so would the batches that one stream is cut into."""
    seen = []
    for rank in range(3):
        trainer = SimpleNamespace(
            args=VanillaTransformerTrainingArguments("unused", use_cpu=True, seed=5),
            train_dataset=BpeDropoutPairs(texts, tokenizer, 0.3, seed=2),
            model=None,
            data_collator=None,
            accelerator=SimpleNamespace(process_index=rank, num_processes=3, device=None),
            _get_collator_with_removed_columns=lambda collator, description: list,
        )
        loader = token_budget_dataloader(trainer, 120)
        pairs = itertools.islice(itertools.chain.from_iterable(loader), len(texts) // 3)  # a pass
        seen.append([tokenizer.decode(pair["input_ids"], skip_special_tokens=True) for pair in pairs])
    assert sorted(itertools.chain.from_iterable(seen)) == sorted(texts["source"])


@pytest.mark.parametrize("dropout", [0.0, -0.1, 1.5])
def test_bpe_dropout_out_of_range_is_named(texts, tokenizer, dropout):
    with pytest.raises(ValueError, match=f"got {dropout}"):
        BpeDropoutPairs(texts, tokenizer, dropout)
