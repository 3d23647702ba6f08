"""torch.compile and torch.export: no graph break, few compilations over many lengths, the results of eager mode."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from script_modules import load
from tiny_models import SEPARATE, SMALL, batch, pad, randomise
from torch import Tensor, nn
from torch.export import Dim, export
from torch.testing import assert_close
from transformers import CompileConfig, MarianConfig, MarianMTModel

from vanilla_transformer import loss_vanilla_transformer


class CountingBackend:
    """Runs what dynamo captured as it is, and counts the graphs."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph_module: torch.fx.GraphModule, example_inputs: list[Tensor]) -> Any:
        self.graphs += 1
        return graph_module.forward


@pytest.fixture(autouse=True)
def _forget_what_was_compiled():
    torch._dynamo.reset()  # the compiler's own way for tests, also in the library's suite
    yield
    torch._dynamo.reset()


MODES = {
    "sdpa": ("sdpa", {}),
    "eager, learned positions": ("eager", {"position_embedding_type": "learned", "max_position_embeddings": 16}),
    "pre-norm, d_k and d_v, separate": ("sdpa", {**SEPARATE, "norm_position": "pre", "d_k": 3, "d_v": 5}),
}


@pytest.mark.parametrize("mode", MODES)
def test_forward_is_one_graph(make_model, mode):
    implementation, fields = MODES[mode]
    model = make_model(implementation, encoder_layers=1, decoder_layers=1, **fields)
    backend = CountingBackend()
    compiled = torch.compile(model, fullgraph=True, backend=backend)  # fullgraph: a graph break is an error
    inputs = batch()
    with torch.no_grad():
        logits = compiled(**inputs).logits
        real = inputs["decoder_attention_mask"] == 1
        assert_close(logits[real], model(**inputs).logits[real], rtol=1e-5, atol=1e-6)
    assert backend.graphs == 1


def random_pair(source_length: int, target_length: int, vocab_size: int = 50) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(source_length * 100 + target_length)
    source = torch.randint(3, vocab_size, (2, source_length), generator=generator)
    labels = torch.randint(3, vocab_size, (2, target_length), generator=generator)
    mask = torch.ones_like(source)
    mask[0, -1] = 0
    labels[1, -2:] = -100
    return {"input_ids": source, "attention_mask": mask, "labels": labels}


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def test_training_is_one_graph_and_is_compiled_anew_once_for_all_lengths(make_model, monkeypatch):
    # A few rows a chunk, as with a real vocabulary: the number of chunks must not be a part of what was compiled.
    monkeypatch.setattr(loss_vanilla_transformer, "_chunk_rows", lambda *_: 8)
    model = make_model(encoder_layers=1, decoder_layers=1, output_bias=True).train()
    backend = CountingBackend()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    for number, lengths in enumerate(((5, 7), (9, 8), (12, 15), (7, 31), (13, 60))):
        pair = random_pair(*lengths)
        loss, expected = compiled(**pair).loss, model(**pair).loss
        assert_close(loss, expected, rtol=1e-5, atol=1e-6)
        ours, theirs = gradients(model, loss), gradients(model, expected)
        for name, gradient in theirs.items():
            assert_close(ours[name], gradient, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
        assert backend.graphs <= min(number + 1, 2)  # the second time torch lets lengths vary


def _has_compiler() -> bool:
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return False
    return True


@pytest.mark.parametrize(
    "backend",
    [
        "aot_eager",  # traces the backward pass too
        pytest.param(
            "inductor",  # generates code
            marks=[pytest.mark.slow, pytest.mark.skipif(not _has_compiler(), reason="there is no C++ compiler")],
        ),
    ],
)
def test_a_training_step_equals_eagers(make_model, backend):
    model = make_model(encoder_layers=1, decoder_layers=1).train()
    pair = random_pair(6, 5)
    expected = model(**pair).loss
    theirs = gradients(model, expected)
    loss = torch.compile(model, fullgraph=True, backend=backend)(**pair).loss
    assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    for name, gradient in gradients(model, loss).items():
        assert_close(gradient, theirs[name], rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


# ---------------------------------------------------------------------------------------- decoding


def graphs_of_generation(model: nn.Module, dynamic: bool | None) -> list[int]:
    """Return how many graphs there were after decoding sources of several lengths with a static cache."""
    torch._dynamo.reset()
    backend = CountingBackend()
    # A function, since the library copies what the config holds.
    config = CompileConfig(backend=lambda *args: backend(*args), fullgraph=True, mode=None, dynamic=dynamic)
    config._compile_all_devices = True  # the library compiles on accelerators only; its tests set this (5.0 to 5.24)
    graphs = []
    for length in (5, 9, 12, 7):
        source = torch.randint(3, 50, (2, length), generator=torch.Generator().manual_seed(length))
        mask = torch.ones_like(source)
        mask[0, -2:] = 0
        options = {"attention_mask": mask, "num_beams": 1, "max_new_tokens": 8, "min_new_tokens": 8}
        output = model.generate(source, cache_implementation="static", compile_config=config, **options)
        assert torch.equal(output, model.generate(source, **options))
        graphs.append(backend.graphs)
    return graphs


@pytest.fixture
def marian() -> MarianMTModel:
    torch.manual_seed(0)
    tokens = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 2}
    return randomise(MarianMTModel(MarianConfig(**SMALL, **tokens, vocab_size=50, max_position_embeddings=64)))


def test_static_cache_decoding_compiles_once_for_all_lengths(make_model, marian):
    model = randomise(make_model(encoder_layers=1, decoder_layers=1))
    # One step is one graph, whatever the length of source and output; with torch's default the first other length
    # costs a second graph, as it does with the library's own models.
    assert graphs_of_generation(model, dynamic=True) == [1, 1, 1, 1]
    assert graphs_of_generation(model, dynamic=None) == graphs_of_generation(marian, dynamic=None) == [1, 2, 2, 2]


def translate_lengths(model: nn.Module, num_beams: int) -> list[list[list[int]]]:
    """Return what batches of two sentences of several lengths become."""
    results = []
    for length in (5, 9, 12, 7):
        source = random_pair(length, 3)
        output = model.generate(
            source["input_ids"], attention_mask=source["attention_mask"], num_beams=num_beams, max_new_tokens=length
        )
        results.append(output.tolist())
    return results


@pytest.mark.parametrize("num_beams", [1, 3])
def test_the_scripts_switch_compiles_each_stack_that_is_called_for_all_lengths(make_model, num_beams, monkeypatch):
    compile_function, backends = torch.compile, []

    def compile_with_counter(function: Any, **options: Any) -> Any:  # nn.Module.compile goes through it too
        backends.append(CountingBackend())
        return compile_function(function, backend=backends[-1], **options)

    monkeypatch.setattr(torch, "compile", compile_with_counter)
    model = randomise(make_model(encoder_layers=1, decoder_layers=1))
    expected = translate_lengths(model, num_beams)
    load("loading").compile_stacks(model)
    assert translate_lengths(model, num_beams) == expected
    # The trial, the encoder, the decoder. Our beam search does not call the decoder; the greedy one of the library
    # does: with an empty cache, with one token in it, and with more.
    assert [backend.graphs for backend in backends] == [1, 1, 3 if num_beams == 1 else 0]


@pytest.mark.slow
@pytest.mark.skipif(not _has_compiler(), reason="there is no C++ compiler")
@pytest.mark.parametrize("num_beams", [1, 3])
def test_the_scripts_switch_translates_as_eager_does(make_model, num_beams):
    model = randomise(make_model(encoder_layers=1, decoder_layers=1))
    expected = translate_lengths(model, num_beams)
    load("loading").compile_stacks(model)
    assert translate_lengths(model, num_beams) == expected


# ---------------------------------------------------------------------------------------- torch.export

B, S, T = Dim("B", max=64), Dim("S", min=2, max=512), Dim("T", min=2, max=512)
SHAPES = {
    "input_ids": {0: B, 1: S},
    "attention_mask": {0: B, 1: S},
    "decoder_input_ids": {0: B, 1: T},
    "decoder_attention_mask": {0: B, 1: T},
}


def another_batch() -> dict[str, Tensor]:
    """Return four pairs of other lengths than `batch()`."""
    source, source_mask = pad([[5, 6, 7, 8, 9, 10, 11, 12, 13, 1], [3, 4, 1], [9, 8, 1], [7, 1]])
    target, target_mask = pad([[2, 5, 6], [2, 9, 9], [2, 3], [2, 7]])
    return {
        "input_ids": source,
        "attention_mask": source_mask,
        "decoder_input_ids": target,
        "decoder_attention_mask": target_mask,
    }


@pytest.mark.parametrize("strict", [False, True])
def test_the_encoder_exports_with_dynamic_shapes(make_model, strict):
    encoder = make_model(encoder_layers=1).get_encoder()
    names = ("input_ids", "attention_mask")
    example, other = ({name: inputs[name] for name in names} for inputs in (batch(), another_batch()))
    with torch.no_grad():
        program = export(encoder, (), example, dynamic_shapes={name: SHAPES[name] for name in names}, strict=strict)
        for inputs in (example, other):
            states = program.module()(**inputs).last_hidden_state
            assert_close(states, encoder(**inputs).last_hidden_state, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_the_whole_forward_exports_with_dynamic_shapes(make_model, implementation):
    model = make_model(implementation, encoder_layers=1, decoder_layers=1, output_bias=True)
    with torch.no_grad():
        shapes = {**SHAPES, "use_cache": None}  # torch.export has no type for a cache
        program = export(model, (), {**batch(), "use_cache": False}, dynamic_shapes=shapes)
        for inputs in (batch(), another_batch()):
            real = inputs["decoder_attention_mask"] == 1
            logits = program.module()(**inputs, use_cache=False).logits
            assert_close(logits[real], model(**inputs).logits[real], rtol=1e-5, atol=1e-6)
