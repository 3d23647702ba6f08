"""Decoding: the cap of each sentence, padding and batching, prefixes, scores.

A small model that has half learnt to copy gives outputs that differ, end at various lengths, and sometimes do not end.
"""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import Tensor
from torch.nn.functional import pad
from torch.testing import assert_close
from transformers import GenerationConfig

from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from vanilla_transformer.length_limits_vanilla_transformer import SentenceLengthCriteria, pad_behind_end

PAD, EOS, START = 0, 1, 2
MODES = {
    "greedy": {"num_beams": 1},
    "beam 4": {"num_beams": 4},
    "beam 5, early stopping": {"num_beams": 5, "early_stopping": True},
}


def copy_batch(generator: torch.Generator, rows: int, width: int) -> Tensor:
    """Return random sources, each with its end token, padded on the right."""
    ids = torch.randint(3, 24, (rows, width), generator=generator)
    last = torch.randint(1, width, (rows, 1), generator=generator)
    return ids.masked_fill(torch.arange(width) > last, PAD).scatter(1, last, EOS)


@pytest.fixture(scope="module")
def trained() -> VanillaTransformerForConditionalGeneration:
    torch.manual_seed(0)
    config = VanillaTransformerConfig(
        vocab_size=24,
        d_model=32,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        dropout=0.0,
    )
    model = VanillaTransformerForConditionalGeneration(config).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, betas=(0.9, 0.98))
    generator = torch.Generator().manual_seed(1)
    for _ in range(120):
        source = copy_batch(generator, 32, 10)
        labels = source.masked_fill(source == PAD, -100)
        model(input_ids=source, attention_mask=source.ne(PAD).long(), labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


@pytest.fixture(scope="module")
def sources() -> list[Tensor]:
    """Return 60 sentences of 2 to 13 tokens, longer than any in training at the upper end."""
    return [row[row != PAD] for row in copy_batch(torch.Generator().manual_seed(5), 60, 13)]


def collate(rows: list[Tensor], side: str = "right") -> dict[str, Tensor]:
    width = max(map(len, rows))
    gaps = [(width - len(row), 0) if side == "left" else (0, width - len(row)) for row in rows]
    ids = torch.stack([pad(row, gap, value=PAD) for row, gap in zip(rows, gaps, strict=True)])
    mask = torch.stack([pad(torch.ones_like(row), gap) for row, gap in zip(rows, gaps, strict=True)])
    return {"input_ids": ids, "attention_mask": mask}


def strip(sequences: Tensor) -> list[list[int]]:
    """Return the rows without the padding at their end; padding anywhere else stays."""
    return [row[: int(row.ne(PAD).nonzero().max()) + 1].tolist() for row in sequences]


# ---------------------------------------------------------------------------------------- batches


@pytest.mark.parametrize("mode", MODES)
def test_batch_size_order_and_padding_change_nothing(trained, sources, mode):
    arguments = {**MODES[mode], "max_length_offset": 3}
    alone = [strip(trained.generate(source[None], **arguments))[0] for source in sources]
    # The set is worth its name: many outputs, many lengths, some right, some wrong, some cut.
    assert len({tuple(output) for output in alone}) > 40
    assert len({len(output) for output in alone}) > 8
    copied = sum(output[1:] == source.tolist() for output, source in zip(alone, sources, strict=True))
    cut = sum(output[-1] != EOS for output in alone)
    assert 5 < copied < 55
    assert cut >= 2

    shuffled = torch.randperm(60, generator=torch.Generator().manual_seed(3)).tolist()
    orders = {
        "sorted": sorted(range(60), key=lambda index: len(sources[index])),
        "shuffled": shuffled,
    }
    for order in orders.values():
        for size in (7, 60):
            for side in ("right", "left"):
                for start in range(0, 60, size):
                    indices = order[start : start + size]
                    outputs = trained.generate(**collate([sources[index] for index in indices], side), **arguments)
                    assert strip(outputs) == [alone[index] for index in indices], (size, side)


def test_rows_are_padded_behind_their_end(trained, sources):
    for mode, arguments in MODES.items():
        outputs = trained.generate(**collate(sources), **arguments, max_length_offset=3)
        assert (outputs[:, 0] == START).all()
        for row, source in zip(outputs.tolist(), sources, strict=True):
            length = len(row) if EOS not in row else row.index(EOS) + 1
            length = min(length, 1 + len(source) + 3)
            assert set(row[length:]) <= {PAD}, mode
            assert PAD not in row[:length], mode


def test_pad_behind_end_by_hand():
    rows = torch.tensor([[2, 1, 5, 1, 6, 1], [2, 5, 6, 7, 8, 9], [2, 5, 6, 3, 1, 4]])
    expected = [[2, 1, 5, 1, 0, 0], [2, 5, 6, 7, 8, 9], [2, 5, 6, 3, 1, 0]]
    assert pad_behind_end(rows.clone(), 2, None, 1, 0).tolist() == expected
    expected = [[2, 1, 5, 1, 0, 0], [2, 5, 6, 7, 8, 9], [2, 5, 6, 3, 0, 0]]
    assert pad_behind_end(rows.clone(), 2, None, [1, 3], 0).tolist() == expected
    expected = [[2, 1, 5, 1, 0, 0], [2, 5, 6, 7, 0, 0], [2, 5, 6, 3, 0, 0]]
    assert pad_behind_end(rows.clone(), 2, torch.tensor([2]), 1, 0).tolist() == expected
    assert pad_behind_end(rows.clone(), 2, None, None, 0).tolist() == rows.tolist()
    with_scores = transformers.generation.GenerateBeamEncoderDecoderOutput(sequences=rows.clone())
    assert pad_behind_end(with_scores, 2, torch.tensor([2]), 1, 0).sequences.tolist() == expected
    assert pad_behind_end("text", 2, None, 1, 0) == "text"


# ---------------------------------------------------------------------------------------- caps


class _NoEnd(transformers.LogitsProcessor):
    """Forbids the end token, so that only caps end a sentence, and padding, so that lengths can be counted."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores.index_fill(-1, torch.tensor([PAD, EOS]), float("-inf"))


LENGTHS = (2, 9, 5)


def endless(model, **arguments) -> list[int]:
    """Return the number of tokens that each row of three sources got, start token not counted."""
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(3, 24, (length - 1,), generator=generator) for length in LENGTHS]
    inputs = collate([torch.cat([row, torch.tensor([EOS])]) for row in rows])
    outputs = model.generate(**{**inputs, **arguments}, logits_processor=[_NoEnd()])
    return [len(row) - 1 for row in strip(outputs)]


@pytest.mark.parametrize(
    "arguments",
    [
        {"num_beams": 1},
        {"num_beams": 4},
        {},  # the model's own: beam 4
        {"num_beams": 1, "do_sample": True},
        {"num_beams": 3, "do_sample": True},
        {"num_beams": 1, "do_sample": True, "num_return_sequences": 3},
        {"num_beams": 4, "num_return_sequences": 4},
        {"num_beams": 1, "cache_implementation": "static"},
        {"num_beams": 4, "use_cache": False},
        {"num_beams": 1, "attention_mask": None},  # padding is then what equals pad_token_id
    ],
)
def test_each_sentence_has_its_own_cap_in_every_mode(trained, arguments):
    torch.manual_seed(0)
    returned = arguments.get("num_return_sequences", 1)
    expected = [length + 3 for length in LENGTHS for _ in range(returned)]
    assert endless(trained, max_length_offset=3, **arguments) == expected


def test_the_cap_is_fifty_more_than_the_source(trained):
    assert endless(trained, num_beams=1) == [length + 50 for length in LENGTHS]
    assert trained.generation_config.max_length_offset == 50
    assert endless(trained, num_beams=1, max_length_offset=0) == list(LENGTHS)
    assert endless(trained, num_beams=2, max_length_offset=0) == list(LENGTHS)


def test_the_cap_does_not_count_a_prefix(trained):
    for start in ([START], []):  # generate() adds a start token that is missing
        prefix = torch.tensor([[*start, 7, 8, 9]]).expand(3, -1)
        for beams in (1, 4):
            lengths = endless(trained, num_beams=beams, max_length_offset=3, decoder_input_ids=prefix)
            assert lengths == [3 + length + 3 for length in LENGTHS]


def test_the_cap_of_sources_that_are_not_ids(trained):
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(3, 24, (length,), generator=generator) for length in LENGTHS]
    inputs = collate(rows)
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    embeddings = trained.model.shared(ids)
    states = trained.model.encoder(ids, mask)
    arguments = {"max_length_offset": 2, "num_beams": 1, "logits_processor": [_NoEnd()]}
    expected = strip(trained.generate(ids, attention_mask=mask, **arguments))
    assert [len(row) - 1 for row in expected] == [length + 2 for length in LENGTHS]
    assert strip(trained.generate(inputs_embeds=embeddings, attention_mask=mask, **arguments)) == expected
    assert strip(trained.generate(encoder_outputs=states, attention_mask=mask, **arguments)) == expected
    outputs = trained.generate(encoder_outputs=states, **arguments)  # no mask: all of it is source
    assert outputs.shape == (3, 1 + 9 + 2)
    with pytest.raises(ValueError, match=r"generate\(\) needs a source"):
        trained.generate()


def test_explicit_limits_take_the_caps_place(trained):
    for arguments in ({"max_new_tokens": 4}, {"max_length": 5}):
        assert endless(trained, num_beams=1, **arguments) == [4, 4, 4]
        assert endless(trained, num_beams=2, **arguments, max_length_offset=1) == [4, 4, 4]
        config = GenerationConfig(**arguments, num_beams=1)
        assert endless(trained, generation_config=config) == [4, 4, 4]
    config = GenerationConfig(num_beams=1)  # says nothing of lengths: the model's offset stays in force
    assert endless(trained, generation_config=config) == [length + 50 for length in LENGTHS]
    config.max_length_offset = 2
    assert endless(trained, generation_config=config) == [length + 2 for length in LENGTHS]
    assert endless(trained, generation_config=config, max_length_offset=1) == [length + 1 for length in LENGTHS]
    saved = trained.generation_config
    try:
        trained.generation_config = GenerationConfig.from_dict({**saved.to_dict(), "max_new_tokens": 4})
        assert endless(trained, num_beams=1) == [4, 4, 4]
        trained.generation_config = GenerationConfig.from_dict({**saved.to_dict(), "max_length_offset": 6})
        assert endless(trained, num_beams=1) == [length + 6 for length in LENGTHS]
        trained.generation_config = GenerationConfig(eos_token_id=EOS, pad_token_id=PAD, decoder_start_token_id=START)
        assert endless(trained) == [length + 50 for length in LENGTHS]  # as of a folder without the file
    finally:
        trained.generation_config = saved


def test_no_offset_leaves_the_length_to_the_library(trained):
    assert endless(trained, num_beams=1, max_length_offset=None) == [20, 20, 20]  # its own default


@pytest.mark.parametrize("value", [-1, 1.5, "50", True, [50]])
def test_an_offset_that_is_no_count_is_refused(trained, value):
    with pytest.raises(ValueError, match=r"max_length_offset=.* is not valid: .*at least 0"):
        endless(trained, max_length_offset=value)


def test_saved_offset_is_used_after_loading(trained, tmp_path):
    trained.save_pretrained(tmp_path)
    loaded = VanillaTransformerForConditionalGeneration.from_pretrained(tmp_path)
    assert endless(loaded, num_beams=1) == [length + 50 for length in LENGTHS]
    loaded.generation_config.max_length_offset = 4
    loaded.save_pretrained(tmp_path)
    loaded = VanillaTransformerForConditionalGeneration.from_pretrained(tmp_path)
    assert endless(loaded, num_beams=1) == [length + 4 for length in LENGTHS]
    (tmp_path / "generation_config.json").unlink()
    loaded = VanillaTransformerForConditionalGeneration.from_pretrained(tmp_path)
    assert endless(loaded, num_beams=1) == [length + 50 for length in LENGTHS]


def test_own_stopping_criteria_come_on_top(trained):
    stop = SentenceLengthCriteria(torch.tensor([3]), 1)
    assert endless(trained, num_beams=1, stopping_criteria=[stop]) == [3, 3, 3]


def test_learned_positions_bound_the_cap(make_model):
    model = make_model(position_embedding_type="learned", max_position_embeddings=12)
    arguments = {"logits_processor": [_NoEnd()], "num_beams": 2}
    ids = torch.tensor([[5, 6, 7, 1]])
    assert model.generate(ids, **arguments).shape == (1, 1 + 12)  # the last token is not fed back: 12 inputs
    prefix = torch.tensor([[2, 5, 6]])
    assert model.generate(ids, decoder_input_ids=prefix, **arguments).shape == (1, 1 + 12)
    with pytest.raises(ValueError, match=r"12 learned positions"):
        model.generate(ids, **{**arguments, "max_new_tokens": 13})


# ---------------------------------------------------------------------------------------- prefixes and starts


def test_prefixes_of_different_lengths_in_one_batch(trained, sources):
    prefixes = [torch.tensor([START, *source[: 1 + n % 3]]) for n, source in enumerate(sources[:9])]
    for arguments in MODES.values():
        arguments = {**arguments, "max_length_offset": 3}
        alone = [
            trained.generate(source[None], decoder_input_ids=prefix[None], **arguments)[0]
            for source, prefix in zip(sources, prefixes, strict=False)
        ]
        for output, prefix in zip(alone, prefixes, strict=True):
            assert output[: len(prefix)].tolist() == prefix.tolist()
        batch = collate(prefixes, "left")
        outputs = trained.generate(
            **collate(sources[:9]),
            decoder_input_ids=batch["input_ids"],
            decoder_attention_mask=batch["attention_mask"],
            **arguments,
        )
        for row, mask, expected in zip(outputs, batch["attention_mask"], alone, strict=True):
            assert strip(row[None, int((mask == 0).sum()) :]) == strip(expected[None])


def test_the_decoder_starts_with_its_start_token(make_model):
    model = make_model(decoder_start_token_id=9)
    ids = torch.tensor([[5, 6, 7, 1]])
    assert model.generate(ids)[0, 0] == 9
    assert model.generate(ids, decoder_start_token_id=8)[0, 0] == 8
    prefix = torch.tensor([[8, 5]])
    arguments = {"decoder_start_token_id": 8, "num_beams": 1, "max_length_offset": 0, "logits_processor": [_NoEnd()]}
    assert model.generate(ids, decoder_input_ids=prefix, **arguments).shape == (1, 2 + 4)


# ---------------------------------------------------------------------------------------- same tokens, same scores


@pytest.mark.parametrize(
    "arguments",
    [
        {"use_cache": False},
        pytest.param({"cache_implementation": "static"}, id="static"),
        {"attn_implementation": "eager"},
    ],
)
def test_cache_and_implementation_change_no_token(trained, sources, arguments):
    inputs = collate(sources[:20])
    implementation = arguments.pop("attn_implementation", "sdpa")
    for mode in MODES.values():
        expected = trained.generate(**inputs, **mode, max_length_offset=3)
        try:
            trained.set_attn_implementation(implementation)
            outputs = trained.generate(**inputs, **mode, max_length_offset=3, **arguments)
        finally:
            trained.set_attn_implementation("sdpa")
        assert torch.equal(outputs, expected)


@pytest.mark.parametrize("length_penalty", [0.0, 0.6, 1.0])
def test_scores_are_those_of_forced_decoding(trained, sources, length_penalty):
    sources = sources[:12]
    inputs = collate(sources)
    outputs = trained.generate(
        **inputs,
        num_beams=4,
        num_return_sequences=4,
        length_penalty=length_penalty,
        max_length_offset=1,
        return_dict_in_generate=True,
        output_scores=True,
    )
    sequences = outputs.sequences
    labels = sequences[:, 1:]
    with torch.no_grad():
        logits = trained(
            input_ids=inputs["input_ids"].repeat_interleave(4, dim=0),
            attention_mask=inputs["attention_mask"].repeat_interleave(4, dim=0),
            decoder_input_ids=sequences[:, :-1],
        ).logits
    log_probs = logits.log_softmax(-1).gather(2, labels[..., None])[..., 0]
    totals = log_probs.masked_fill(labels == PAD, 0.0).sum(dim=1)
    lengths = labels.ne(PAD).sum(dim=1)
    assert_close(outputs.sequences_scores * lengths**length_penalty, totals, rtol=0, atol=1e-4)
    scores = outputs.sequences_scores.view(12, 4)
    assert (scores[:, :-1] >= scores[:, 1:]).all()
    caps = torch.tensor([len(source) + 1 for source in sources]).repeat_interleave(4)
    cut = (lengths == caps) & (labels.gather(1, lengths[:, None] - 1)[:, 0] != EOS)
    assert 0 < cut.sum() < 48  # both kinds of hypotheses are among them


def test_greedy_takes_the_best_token_at_each_step(trained, sources):
    inputs = collate(sources[:12])
    outputs = trained.generate(**inputs, num_beams=1, max_length_offset=3)
    logits = trained(**inputs, decoder_input_ids=outputs[:, :-1]).logits
    labels = outputs[:, 1:]
    assert torch.equal(logits.argmax(-1)[labels != PAD], labels[labels != PAD])


def test_a_beam_finds_what_greedy_search_misses(trained, sources):
    inputs = collate(sources)
    scores = []
    for beams in (1, 5):
        sequences = trained.generate(**inputs, num_beams=beams, length_penalty=0.0, max_length_offset=3)
        labels = sequences[:, 1:]
        logits = trained(**inputs, decoder_input_ids=sequences[:, :-1]).logits
        log_probs = logits.log_softmax(-1).gather(2, labels[..., None])[..., 0]
        scores.append(log_probs.masked_fill(labels == PAD, 0.0).sum(dim=1))
    greedy, beam = scores
    assert (beam > greedy + 1e-3).sum() >= 5
    assert beam.mean() > greedy.mean()


def test_several_end_tokens(trained, sources):
    inputs = collate(sources[:12])
    for beams in (1, 3):
        outputs = trained.generate(**inputs, num_beams=beams, eos_token_id=[1, 5, 6, 7], max_length_offset=2)
        for row in outputs.tolist():
            ends = [place for place, token in enumerate(row) if token in {1, 5, 6, 7}]
            assert len(ends) <= 1
            if ends:
                assert set(row[ends[0] + 1 :]) <= {PAD}


def test_sampling_draws_and_n_best_differs(trained, sources):
    torch.manual_seed(0)
    outputs = trained.generate(sources[0][None], do_sample=True, num_beams=1, num_return_sequences=20)
    assert len({tuple(row) for row in strip(outputs)}) > 3
    outputs = trained.generate(sources[1][None], num_beams=4, num_return_sequences=4)
    assert len({tuple(row) for row in strip(outputs)}) == 4


@pytest.mark.parametrize("target", [37, 61])
def test_beam_search_over_a_separate_target_vocabulary(make_model, target):
    # compute_transition_scores, and the beam search of 5.0 to 5.8, take the vocabulary's size from the config.
    model = make_model(share_encoder_decoder_embeddings=False, decoder_vocab_size=target)
    ids = torch.tensor([[5, 6, 7, 49, 1], [8, 9, 1, 0, 0]])
    arguments = {"output_scores": True, "return_dict_in_generate": True, "length_penalty": 0.0}
    outputs = model.generate(ids, num_beams=4, num_return_sequences=2, max_length_offset=2, **arguments)
    assert outputs.sequences.shape[0] == 4
    assert outputs.sequences.max() < target
    steps = model.compute_transition_scores(
        outputs.sequences, outputs.scores, outputs.beam_indices, normalize_logits=False
    )
    assert_close(steps.sum(dim=1), outputs.sequences_scores, rtol=1e-5, atol=1e-5)
    assert model.config.vocab_size == 50
