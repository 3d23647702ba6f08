"""Positions, masks, attention implementations and key-value caches."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
import reference
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import StaticCache
from transformers.cache_utils import DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import Seq2SeqLMOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.fsmt.modeling_fsmt import SinusoidalPositionalEmbedding

from vanilla_transformer import attention_vanilla_transformer as attention
from vanilla_transformer.attention_vanilla_transformer import add_positions, eager_attention_forward, sinusoids

CLOSE = {"rtol": 1e-5, "atol": 1e-5}
HEADS = {"usual heads": {}, "d_k < d_v": {"d_k": 3, "d_v": 7}, "d_k > d_v": {"d_k": 6, "d_v": 2}}
NEWEST_CACHE_NAME = "cache" if "cache" in Seq2SeqLMOutput.__dataclass_fields__ else "past_key_values"


def random_ids(rows: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(3, 50, (rows, length), generator=torch.Generator().manual_seed(seed))


def right_padding(*lengths: int) -> Tensor:
    return (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()


# ---------------------------------------------------------------------------------------- positions


@pytest.mark.parametrize("d_model", [4, 16, 512])
def test_sinusoids_are_the_papers(make_config, d_model):
    positions = [0, 1, 2, 3, 4, 5, 19_999]
    config = make_config(d_model=d_model)
    table = torch.tensor([reference.position_encoding(p, d_model) for p in positions], dtype=torch.float64)
    assert_close(sinusoids(torch.tensor(positions), config), table, rtol=0, atol=1e-10)
    halves = torch.cat([table[:, 0::2], table[:, 1::2]], dim=1)
    config = make_config(d_model=d_model, sinusoid_layout="halves")
    assert_close(sinusoids(torch.tensor(positions), config), halves, rtol=0, atol=1e-10)

    config = make_config(d_model=d_model, position_embedding_type="sinusoidal_tensor2tensor")
    halves = torch.tensor([reference.position_encoding_tensor2tensor(p, d_model) for p in positions]).double()
    assert_close(sinusoids(torch.tensor(positions), config), halves, rtol=0, atol=1e-6)
    table = torch.stack(halves.chunk(2, dim=1), dim=-1).flatten(1)
    config.sinusoid_layout = "interleaved"
    assert_close(sinusoids(torch.tensor(positions), config), table, rtol=0, atol=1e-6)


def test_tensor2tensors_sinusoids_are_those_of_fsmt(make_config):
    ids = random_ids(2, 30)
    for padding_idx in (0, 1):
        config = make_config(position_embedding_type="sinusoidal_tensor2tensor", position_offset=padding_idx + 1)
        theirs = SinusoidalPositionalEmbedding(40, 16, padding_idx)
        theirs.make_weight(40, 16, padding_idx)
        expected = theirs(ids)
        positions = torch.arange(30) + config.position_offset
        assert_close(sinusoids(positions, config).float().expand(2, -1, -1), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_positions_stay_apart_in_half_precision(make_config, dtype):
    # 10,000 and 10,001 are one number in bfloat16: positions computed in it would be equal.
    config = make_config()
    positions = attention.make_positions(config).to(dtype)
    torch.manual_seed(0)
    embeddings = torch.randn(1, 4, 16).to(dtype)
    states = add_positions(embeddings, positions, config, None, past_length=10_000)
    encoding = [reference.position_encoding(p, 16) for p in range(10_000, 10_004)]
    expected = embeddings.double() * 4.0 + torch.tensor(encoding, dtype=torch.float64)
    rounding = torch.finfo(dtype).eps / 2  # one, of the sum
    assert_close(states.double(), expected, rtol=1.001 * rounding, atol=1e-6)
    assert states.dtype == dtype


def test_learned_positions_beyond_the_table_are_a_clear_error(make_model):
    fields = {"position_embedding_type": "learned", "max_position_embeddings": 8}
    for offset in (0, 2):
        model = make_model(**fields, position_offset=offset)
        fits, long, far = random_ids(1, 8), random_ids(1, 9), random_ids(1, 80)
        assert model(input_ids=fits, decoder_input_ids=fits).logits.isfinite().all()
        for ids in (long, far):
            for arguments in (
                {"input_ids": ids, "decoder_input_ids": fits},
                {"input_ids": fits, "decoder_input_ids": ids},
                {"input_ids": ids, "attention_mask": torch.ones_like(ids), "decoder_input_ids": fits},
                {"inputs_embeds": model.model.shared(ids), "decoder_input_ids": fits},
                {"input_ids": fits, "labels": ids},
            ):
                with pytest.raises(ValueError, match=rf"{ids.shape[1]} tokens .* 8 learned positions.*truncate"):
                    model(**arguments)
            with pytest.raises(ValueError, match=r"8 learned positions"):
                model.generate(ids)
    cache = model(input_ids=fits, decoder_input_ids=fits, use_cache=True)[NEWEST_CACHE_NAME]
    with pytest.raises(ValueError, match=r"An input of 9 tokens"):
        model(input_ids=fits, decoder_input_ids=fits[:, :1], **{NEWEST_CACHE_NAME: cache})


# ---------------------------------------------------------------------------------------- padding


@pytest.mark.parametrize("position", ["sinusoidal", "learned"])
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_padding_on_either_side_changes_nothing(make_model, implementation, position):
    model = make_model(implementation, position_embedding_type=position, max_position_embeddings=20)
    sources = [random_ids(1, length, seed=length) for length in (3, 9, 6)]
    prompts = [random_ids(1, length, seed=20 + length) for length in (5, 2, 7)]
    alone = [model(input_ids=s, decoder_input_ids=t).logits[0] for s, t in zip(sources, prompts, strict=True)]

    def batch(rows: list[Tensor], side: str) -> tuple[Tensor, Tensor]:
        width = max(row.shape[1] for row in rows)
        gaps = [(width - row.shape[1], 0) if side == "left" else (0, width - row.shape[1]) for row in rows]
        ids = torch.cat([nn.functional.pad(row, gap, value=0) for row, gap in zip(rows, gaps, strict=True)])
        masks = [nn.functional.pad(torch.ones_like(row), gap) for row, gap in zip(rows, gaps, strict=True)]
        return ids, torch.cat(masks)

    for source_side in ("left", "right"):
        for prompt_side in ("left", "right"):
            source, source_mask = batch(sources, source_side)
            prompt, prompt_mask = batch(prompts, prompt_side)
            arguments = {"input_ids": source, "attention_mask": source_mask, "decoder_input_ids": prompt}
            logits = model(**arguments, decoder_attention_mask=prompt_mask).logits
            for row, mask, expected in zip(logits, prompt_mask, alone, strict=True):
                assert_close(row[mask == 1], expected, **CLOSE)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_what_stands_in_a_hole_of_a_mask_is_not_seen(make_model, implementation):
    model = make_model(implementation)
    source, target = random_ids(2, 8), random_ids(2, 6, seed=1)
    source_mask = torch.tensor([[1, 1, 0, 1, 0, 0, 1, 1], [0, 1, 1, 0, 1, 1, 1, 0]])
    target_mask = torch.tensor([[1, 0, 1, 1, 0, 1], [0, 1, 1, 0, 1, 1]])
    masks = {"attention_mask": source_mask, "decoder_attention_mask": target_mask}
    logits = model(input_ids=source, decoder_input_ids=target, **masks).logits
    others = {
        "input_ids": source.where(source_mask == 1, 49 - source),
        "decoder_input_ids": target.where(target_mask == 1, 49 - target),
    }
    assert_close(model(**others, **masks).logits[target_mask == 1], logits[target_mask == 1], **CLOSE)
    seen = model(**others, attention_mask=source_mask).logits
    assert (seen - logits)[target_mask == 1].abs().max() > 0.01  # without a mask it would be


def test_no_position_sees_a_later_one(make_model):
    for implementation in ("eager", "sdpa"):
        model = make_model(implementation)
        source, target = random_ids(2, 5), random_ids(2, 9)
        logits = model(input_ids=source, decoder_input_ids=target).logits
        other = target.clone()
        other[:, 6:] = 49 - other[:, 6:]
        changed = model(input_ids=source, decoder_input_ids=other).logits
        assert_close(changed[:, :6], logits[:, :6], **CLOSE)
        assert (changed - logits)[:, 6:].abs().amin(dim=(0, 2)).max() > 1e-4


# ---------------------------------------------------------------------------------------- implementations


@pytest.mark.parametrize("heads", HEADS)
def test_eager_and_sdpa_are_equal_forward_and_backward(make_model, heads):
    inputs = {
        "input_ids": random_ids(3, 7),
        "attention_mask": right_padding(7, 2, 5),
        "decoder_attention_mask": right_padding(4, 6, 1),
        "labels": random_ids(3, 6).where(right_padding(4, 6, 1) == 1, -100),
    }
    results = []
    for implementation in ("eager", "sdpa"):
        model = make_model(implementation, **HEADS[heads])
        outputs = model(**inputs)
        outputs.loss.backward()
        results.append((outputs, {name: p.grad for name, p in model.named_parameters()}))
    (eager, eager_gradients), (sdpa, sdpa_gradients) = results
    assert_close(eager.logits[inputs["labels"] >= 0], sdpa.logits[inputs["labels"] >= 0], **CLOSE)
    for name, gradient in eager_gradients.items():
        assert_close(gradient, sdpa_gradients[name], **CLOSE)


@pytest.mark.parametrize("heads", ["usual heads", "d_k < d_v"])
def test_flex_attention_is_equal_forward(make_model, heads):
    pytest.importorskip("torch.nn.attention.flex_attention")
    inputs = {
        "input_ids": random_ids(2, 7),
        "attention_mask": right_padding(7, 3),
        "decoder_input_ids": random_ids(2, 6),
        "decoder_attention_mask": right_padding(4, 6),
    }
    fields = {"encoder_layers": 1, "decoder_layers": 1, **HEADS[heads]}
    # Uncompiled: compiling the kernel takes two minutes on a CPU.
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        flex = make_model("flex_attention", **fields)(**inputs).logits
        eager = make_model("eager", **fields)(**inputs).logits
    real = inputs["decoder_attention_mask"] == 1
    assert_close(flex[real], eager[real], **CLOSE)
    with pytest.raises(ValueError, match=r"output_attentions=True.*flex_attention.*set_attn_implementation"):
        make_model("flex_attention")(**inputs, output_attentions=True)


@pytest.fixture
def calls(monkeypatch) -> list[tuple[str, tuple[int, ...] | None]]:
    """Return a list that gets the name and the mask's shape at each call of an attention function."""
    log = []

    def spy(name, function):
        def call(module, query, key, value, attention_mask, **kwargs):
            log.append((name, None if attention_mask is None else tuple(attention_mask.shape)))
            return function(module, query, key, value, attention_mask, **kwargs)

        return call

    monkeypatch.setattr(attention, "eager_attention_forward", spy("eager", eager_attention_forward))
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", spy("sdpa", ALL_ATTENTION_FUNCTIONS["sdpa"]))
    return log


def test_set_attn_implementation_switches_the_function(make_model, calls):
    inputs = {"input_ids": random_ids(2, 5), "decoder_input_ids": random_ids(2, 4)}
    model = make_model("eager")
    logits = {}
    for implementation in ("sdpa", "eager", "sdpa"):
        model.set_attn_implementation(implementation)
        calls.clear()
        logits[implementation] = model(**inputs).logits
        assert [name for name, _ in calls] == [implementation] * (2 + 2 * 3)
    assert_close(logits["eager"], logits["sdpa"], **CLOSE)


def test_sdpa_masks_grow_with_the_source_and_not_with_its_square(make_model, calls):
    model = make_model("sdpa")
    masks = {"attention_mask": right_padding(7, 3), "decoder_attention_mask": right_padding(4, 6)}
    model(input_ids=random_ids(2, 7), decoder_input_ids=random_ids(2, 6), **masks)
    encoder, decoder = [shape for _, shape in calls[:2]], [shape for _, shape in calls[2:]]
    assert encoder == [(2, 1, 1, 7)] * 2
    assert decoder == [None, (2, 1, 1, 7)] * 3  # causality is the kernel's flag, padding behind is not seen anyway
    calls.clear()
    masks = {name: torch.ones_like(mask) for name, mask in masks.items()}
    model(input_ids=random_ids(2, 7), decoder_input_ids=random_ids(2, 6), **masks)
    assert {shape for _, shape in calls} == {None}


@pytest.mark.parametrize("heads", HEADS)
def test_attentions_under_sdpa_are_eagers(make_model, heads):
    inputs = {
        "input_ids": random_ids(3, 7),
        "attention_mask": right_padding(7, 2, 5),
        "decoder_input_ids": random_ids(3, 6),
    }
    eager = make_model("eager", **HEADS[heads])(**inputs, output_attentions=True)
    model = make_model("sdpa", **HEADS[heads])
    sdpa = model(**inputs, output_attentions=True)
    assert_close(sdpa.logits, model(**inputs).logits, **CLOSE)
    shapes = {"encoder_attentions": (2, 4, 7, 7), "decoder_attentions": (3, 2, 6, 6), "cross_attentions": (3, 2, 6, 7)}
    for name, (layers, *shape) in shapes.items():
        assert len(sdpa[name]) == layers
        for ours, expected in zip(sdpa[name], eager[name], strict=True):
            assert ours.shape == (3, *shape)
            assert_close(ours, expected, **CLOSE)
            assert_close(ours.sum(-1), torch.ones(3, *shape[:2]), **CLOSE)
    for weights in (*sdpa.encoder_attentions, *sdpa.cross_attentions):
        assert not weights[1, :, :, 2:].any()  # padding
    assert not torch.stack(sdpa.decoder_attentions).triu(1).any()  # the future
    assert make_model("sdpa")(**inputs).cross_attentions is None
    generated = model.generate(
        inputs["input_ids"], output_attentions=True, return_dict_in_generate=True, num_beams=2, max_new_tokens=3
    )
    assert len(generated.cross_attentions) == 3
    assert generated.cross_attentions[0][0].shape == (6, 2, 1, 7)


def test_hidden_states_end_with_the_last(make_model):
    for norm in ("post", "pre"):
        model = make_model(norm_position=norm).model
        inputs = {"input_ids": random_ids(2, 7), "decoder_input_ids": random_ids(2, 6)}
        outputs = model(**inputs, output_hidden_states=True)
        assert len(outputs.encoder_hidden_states) == 2 + 1
        assert len(outputs.decoder_hidden_states) == 3 + 1
        assert torch.equal(outputs.encoder_hidden_states[-1], outputs.encoder_last_hidden_state)
        assert torch.equal(outputs.decoder_hidden_states[-1], outputs.last_hidden_state)
        assert model(**inputs).decoder_hidden_states is None


def test_eager_scores_of_float16_do_not_overflow():
    torch.manual_seed(0)
    value = torch.randn(1, 2, 5, 64).half()
    query = torch.randn(1, 2, 5, 64).half() * 60
    scores = query.float() @ query.float().transpose(2, 3)
    assert scores.max() > 65_504 > scores.max() / 8  # q·k does not fit into float16, q·k / sqrt(d_k) does
    output, weights = eager_attention_forward(nn.Module(), query, query, value, None, scaling=0.125)
    assert output.isfinite().all()
    assert_close(weights.float(), (scores / 8).softmax(-1), rtol=0, atol=1e-3)


class _SoftmaxTypes(TorchDispatchMode):
    """Collects the types that softmax runs in."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if "softmax" in str(function):
            self.dtypes.add(args[0].dtype)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [(torch.float16, torch.float32), (torch.bfloat16, torch.float32), (torch.float64, torch.float64)],
)
def test_eager_softmax_runs_in_float32_or_wider(make_model, dtype, expected):
    model = make_model("eager", dtype=dtype)
    with _SoftmaxTypes() as seen:
        outputs = model(input_ids=random_ids(2, 5), decoder_input_ids=random_ids(2, 4), output_attentions=True)
    assert seen.dtypes == {expected}
    assert outputs.cross_attentions[0].dtype == outputs.logits.dtype == dtype


# ---------------------------------------------------------------------------------------- rows without any key


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_empty_rows_make_no_nan_and_leave_the_others_alone(make_model, implementation, dtype):
    model = make_model(implementation, dtype=dtype)
    close = CLOSE if dtype == torch.float32 else {"rtol": 0.05, "atol": 0.05}
    source, labels = random_ids(3, 6), random_ids(3, 5, seed=1)
    source_mask = torch.tensor([[1] * 6, [0] * 6, [1, 1, 1, 0, 0, 0]])
    target_mask = torch.tensor([[1] * 5, [1] * 5, [0] * 5])  # the second has no source, the third no target
    labels = labels.masked_fill(target_mask == 0, -100)
    arguments = {"attention_mask": source_mask, "decoder_attention_mask": target_mask, "labels": labels}
    for training in (True, False):
        model.train(training).zero_grad()
        outputs = model(input_ids=source, **arguments, return_logits=True)
        outputs.loss.backward()
        assert outputs.loss.isfinite()
        assert outputs.logits.isfinite().all()
        assert all(p.grad.isfinite().all() for p in model.parameters())
    alone = model.eval()(input_ids=source[:1], labels=labels[:1]).logits
    assert_close(outputs.logits[:1], alone, **close)

    # The more padding, the same result: an empty row attends to nothing.
    wider = {"input_ids": nn.functional.pad(source, (0, 4)), "attention_mask": nn.functional.pad(source_mask, (0, 4))}
    assert_close(model(**wider, labels=labels).logits[:2], outputs.logits[:2], **close)

    generated = model.generate(source, attention_mask=source_mask, num_beams=2, max_length_offset=3, min_new_tokens=3)
    assert generated.shape[1] == 1 + 6 + 3
    if dtype == torch.float32:
        expected = model.generate(source[:1], num_beams=2, max_length_offset=3, min_new_tokens=3)
        assert torch.equal(generated[:1], expected)


# ---------------------------------------------------------------------------------------- long inputs


def test_memory_grows_linearly_to_20000_tokens():
    # In a process of its own: the peak of resident memory is a process's. Source and target, padded, d_k != d_v.
    script = textwrap.dedent("""
        import resource, sys, torch
        from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
        torch.set_num_threads(1)
        torch.manual_seed(0)
        model = VanillaTransformerForConditionalGeneration(VanillaTransformerConfig(
            vocab_size=8, d_model=8, encoder_layers=1, decoder_layers=1, encoder_attention_heads=1,
            decoder_attention_heads=1, encoder_ffn_dim=8, decoder_ffn_dim=8, d_k=4, d_v=6)).eval()
        assert model.config._attn_implementation == "sdpa"
        def peak(length):
            ids = torch.randint(3, 8, (1, length))
            mask = (torch.arange(length) < length - 50).long()[None]
            with torch.no_grad():
                model(input_ids=ids, attention_mask=mask, decoder_input_ids=ids, decoder_attention_mask=mask)
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(*[peak(length) for length in (500, 10_000, 20_000)])
    """)
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    start, ten, twenty = map(float, result.stdout.split())
    # One [20,000, 20,000] mask of booleans would be 381 MB, one matrix of float32 1,526 MB.
    assert twenty - start < 60, (start, ten, twenty)
    assert twenty - ten < 2 * max(ten - start, 5), (start, ten, twenty)  # quadratic growth would be threefold


# ---------------------------------------------------------------------------------------- caches


def step_by_step(model, source: Tensor, source_mask: Tensor, target: Tensor, cache, size: int, name: str) -> Tensor:
    """Return the logits of the target fed in chunks of `size`."""
    states = model.model.encoder(source, source_mask)
    logits = []
    for chunk in target.split(size, dim=1):
        outputs = model(
            encoder_outputs=states,
            attention_mask=source_mask,
            decoder_input_ids=chunk,
            use_cache=True,
            **{name: cache},
        )
        cache = outputs[NEWEST_CACHE_NAME]
        logits.append(outputs.logits)
    assert cache.get_seq_length() == target.shape[1]
    return torch.cat(logits, dim=1)


def make_cache(kind: str, model, source_length: int):
    if kind == "none":
        return None
    if kind == "dynamic":
        return EncoderDecoderCache(DynamicCache(), DynamicCache())
    if kind == "only for self-attention":
        return DynamicCache()
    sizes = (32, source_length)
    return EncoderDecoderCache(*(StaticCache(config=model.config, max_cache_len=size) for size in sizes))


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated")
@pytest.mark.parametrize("name", ["past_key_values", "cache"])
@pytest.mark.parametrize("kind", ["none", "dynamic", "only for self-attention", "static"])
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_cached_steps_equal_the_full_pass(make_model, implementation, kind, name):
    model = make_model(implementation, d_k=3, d_v=5)
    source, source_mask, target = random_ids(3, 8), right_padding(8, 3, 5), random_ids(3, 30)
    with torch.no_grad():
        full = model(input_ids=source, attention_mask=source_mask, decoder_input_ids=target, use_cache=False)
        assert full.get(NEWEST_CACHE_NAME) is None
        for size in (1, 3):
            cache = make_cache(kind, model, 8)
            logits = step_by_step(model, source, source_mask, target, cache, size, name)
            assert_close(logits, full.logits, **CLOSE)


@pytest.mark.parametrize("position", ["learned", "sinusoidal_tensor2tensor"])
def test_positions_continue_from_the_cache(make_model, position):
    model = make_model(position_embedding_type=position, max_position_embeddings=30, position_offset=2)
    source, source_mask, target = random_ids(3, 8), right_padding(8, 3, 5), random_ids(3, 30)
    with torch.no_grad():
        full = model(input_ids=source, attention_mask=source_mask, decoder_input_ids=target).logits
        for kind in ("dynamic", "static"):
            cache = make_cache(kind, model, 8)
            steps = step_by_step(model, source, source_mask, target, cache, 3, NEWEST_CACHE_NAME)
            assert_close(steps, full, **CLOSE)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_cached_steps_in_bfloat16(make_model, implementation):
    model = make_model(implementation, dtype=torch.bfloat16)
    source, source_mask, target = random_ids(3, 8), right_padding(8, 3, 5), random_ids(3, 30)
    with torch.no_grad():
        full = model(input_ids=source, attention_mask=source_mask, decoder_input_ids=target).logits
        steps = step_by_step(model, source, source_mask, target, None, 1, NEWEST_CACHE_NAME)
    assert_close(steps, full, rtol=0.05, atol=0.1)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_cached_steps_with_padded_prompts(make_model, implementation):
    model = make_model(implementation)
    source, target = random_ids(2, 6), random_ids(2, 12)
    target_mask = torch.ones(2, 12, dtype=torch.long)
    target_mask[1, :4] = 0
    with torch.no_grad():
        full = model(input_ids=source, decoder_input_ids=target, decoder_attention_mask=target_mask).logits
        alone = model(input_ids=source[1:], decoder_input_ids=target[1:, 4:]).logits
        states = model.model.encoder(source)
        cache, steps = None, []
        for end in (7, 8, 11, 12):
            start = cache.get_seq_length() if cache is not None else 0
            outputs = model(
                encoder_outputs=states,
                decoder_input_ids=target[:, start:end],
                decoder_attention_mask=target_mask[:, :end],
                use_cache=True,
                **{NEWEST_CACHE_NAME: cache},
            )
            cache = outputs[NEWEST_CACHE_NAME]
            steps.append(outputs.logits)
    steps = torch.cat(steps, dim=1)
    assert_close(steps[0], full[0], **CLOSE)
    assert_close(steps[1, 4:], full[1, 4:], **CLOSE)
    assert_close(steps[1, 4:], alone[0], **CLOSE)


def test_both_cache_names_come_and_the_old_one_warns_where_the_library_does(make_model):
    model = make_model()
    arguments = {"input_ids": random_ids(1, 4), "decoder_input_ids": random_ids(1, 2)}
    cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
    if NEWEST_CACHE_NAME == "cache":
        with pytest.warns(FutureWarning, match=r"`past_key_values` is deprecated"):
            outputs = model(**arguments, past_key_values=cache)
    else:
        outputs = model(**arguments, past_key_values=cache)
    assert outputs[NEWEST_CACHE_NAME] is cache
    assert cache.get_seq_length() == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("padded", [False, True])
def test_short_rows_train_by_plain_products_with_the_gradients_of_the_kernel(make_model, monkeypatch, dtype, padded):
    model = make_model("sdpa", dropout=0.0).train()
    source, labels = torch.randint(3, 50, (4, 9)), torch.randint(3, 50, (4, 7))
    mask = torch.ones_like(source)
    if padded:
        mask[1:, 6:] = 0
        labels[2, 4:] = -100
    calls = []
    kernel = nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        nn.functional, "scaled_dot_product_attention", lambda *a, **k: calls.append(1) or kernel(*a, **k)
    )
    gradients = {}
    for name, limit, half in (("exact", 0, False), ("kernel", 0, True), ("plain", 1000, dtype == torch.bfloat16)):
        monkeypatch.setattr(attention, "_SHORT", limit)
        monkeypatch.setattr(attention, "_SHORT_HALF", limit)
        calls.clear()
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            loss = model(source, attention_mask=mask, labels=labels).loss
        gradients[name] = torch.cat([x.flatten() for x in torch.autograd.grad(loss, list(model.parameters()))])
        assert bool(calls) == (limit == 0)
    exact = gradients["exact"]
    error = {name: (value - exact).norm() / exact.norm() for name, value in gradients.items()}
    # In bfloat16 the kernel keeps the scores in float32 and the plain products round them once more.
    assert error["plain"] < (1e-6 if dtype == torch.float32 else 2.5 * error["kernel"])
    calls.clear()
    model.eval()(source, attention_mask=mask, labels=labels)
    assert calls  # without a backward pass the kernel is as fast
