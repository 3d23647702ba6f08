"""Two processes share one model, by FSDP2 and by tensor parallelism: the losses and weights of one process."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tiny_models import SHARING, TINY, batch, randomise
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.testing import assert_close

from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from vanilla_transformer import loss_vanilla_transformer as loss
from vanilla_transformer.loss_vanilla_transformer import is_plain_linear

try:
    from transformers.distributed.configuration_utils import DistributedConfig

    # The library's own sharding by plans, as it is in 5.24.
    HAS_PLANS = {"tp_size", "fsdp_size"} <= set(inspect.signature(DistributedConfig).parameters)
except ImportError:
    HAS_PLANS = False
OPTIONS = {
    "tie_word_embeddings": False,
    "attention_bias": True,
    "output_bias": True,
    "position_embedding_type": "learned",
    "max_position_embeddings": 12,
    "norm_position": "pre",
    "d_k": 3,
    "d_v": 5,
}
MODES = {"tied": {}, "separate": SHARING["separate"], "untied, all options": OPTIONS}
# The library ties after it has sharded (5.24): where matrices are tied and their rows don't come out even, here 37
# among two, it keeps two copies of which one grows stale. BART with 51 tokens trains as wrongly.
FSDP_CASES = [
    *(("by hand", mode) for mode in MODES),
    ("by hand, output apart", "untied, all options"),
    *(("by plan", mode) for mode in ("tied", "untied, all options")),
]


# ---------------------------------------------------------------------------------------- the plan


@pytest.mark.skipif(not HAS_PLANS, reason="older releases read no plan of a class")
@pytest.mark.parametrize("mode", MODES)
def test_the_plan_names_every_matrix_there_is_and_no_other(make_model, mode):
    model = make_model(**MODES[mode])
    plan = model.tp_plan
    modules = {name.replace("layers.0", "layers.*") for name, _ in model.named_modules() if "layers.1" not in name}
    assert set(plan) <= modules
    matrices = {
        name.replace("layers.0", "layers.*")
        for name, module in model.named_modules()
        if isinstance(module, (nn.Linear, nn.Embedding)) and "positions" not in name
    }
    assert set(plan) == {name for name in matrices if "layers.1" not in name and "layers.2" not in name}
    assert model.supports_tp_plan


@pytest.mark.parametrize("d", [(None, None), (3, 5)])
def test_a_process_with_half_of_the_heads_computes_half_of_the_sum(make_model, d):
    """Cut by hand as "colwise" and "rowwise" say: the halves' outputs add up to the whole attention's."""
    attention = make_model(d_k=d[0], d_v=d[1]).model.decoder.layers[0].encoder_attn
    torch.manual_seed(4)
    target, source = torch.randn(2, 5, 16), torch.randn(2, 7, 16)
    whole, _ = attention(target, None, source)
    total = torch.zeros_like(whole)
    weights = {name: parameter.detach().clone() for name, parameter in attention.named_parameters()}
    for half in (0, 1):
        for name, weight in weights.items():
            dim = 1 if name.startswith("out_proj") else 0
            attention.get_submodule(name.removesuffix(".weight")).weight = nn.Parameter(weight.chunk(2, dim)[half])
        total += attention(target, None, source)[0]
    assert_close(total, whole, rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------------------------------- two processes


def training_batch() -> dict[str, Tensor]:
    inputs = batch()
    labels = inputs["decoder_input_ids"].masked_fill(inputs["decoder_attention_mask"] == 0, -100)
    return {"input_ids": inputs["input_ids"], "attention_mask": inputs["attention_mask"], "labels": labels}


def train(model: nn.Module, rows: slice, share: float = 1.0) -> list[float]:
    """Take two steps on some rows of the batch and return the losses, each process's part of the whole batch's.

    Args:
        model: The model, perhaps sharded.
        rows: What this process sees of the batch.
        share: Factor on the gradients; FSDP averages over processes what is meant to be a sum.
    """
    inputs = training_batch()
    items = int((inputs["labels"] != -100).sum())
    part = {name: value[rows] for name, value in inputs.items()}
    # Not Adam: it makes whole steps of gradients that are rounding alone, such as those of the keys' biases.
    optimizer = torch.optim.SGD(model.train().parameters(), lr=0.02, momentum=0.9)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(**part, num_items_in_batch=items).loss
        (loss * share).backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def full_weights(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for name, p in model.named_parameters()
    }


def shard_by_hand(folder: str, output_apart: bool = False) -> nn.Module:
    model = VanillaTransformerForConditionalGeneration.from_pretrained(folder)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in model.modules():
        if type(module).__name__ in model._no_split_modules:
            fully_shard(module, mesh=mesh)
    if output_apart:
        fully_shard(model.lm_head, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def run_fsdp(model: nn.Module) -> dict[str, Any]:
    is_sharded = isinstance(model.lm_head.weight, DTensor)
    rank = dist.get_rank()
    fused: list[bool] = []  # of each forward pass, while the weights are as it finds them

    def noting(lm_head: nn.Module) -> bool:
        fused.append(is_plain_linear(lm_head))
        return fused[-1]

    loss.is_plain_linear = noting
    losses = train(model, slice(0, 2) if rank == 0 else slice(2, 3), share=dist.get_world_size())
    loss.is_plain_linear = is_plain_linear
    total = torch.tensor(losses)
    dist.all_reduce(total)
    return {"losses": total.tolist(), "weights": full_weights(model), "is_sharded": is_sharded, "fused": fused}


def run_tensor_parallel(folder: str, output: Path) -> dict[str, Any]:
    model = VanillaTransformerForConditionalGeneration.from_pretrained(
        folder, distributed_config=DistributedConfig(tp_size=2)
    )
    result: dict[str, Any] = {
        "plan": model.tp_plan,
        "shapes": {name: tuple(p.to_local().shape) for name, p in model.named_parameters() if isinstance(p, DTensor)},
    }
    inputs = batch()
    with torch.no_grad():
        result["logits"] = model(**inputs).logits
    source = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    result["tokens"] = [model.generate(**source, num_beams=beams, max_new_tokens=8) for beams in (1, 3)]
    result["losses"] = train(model, slice(0, 3))
    result["weights"] = full_weights(model)
    model.save_pretrained(output)
    return result


def main(folder: Path) -> None:
    """What each of the two processes of the test below does."""
    dist.init_process_group("gloo")
    results: dict[str, Any] = {}
    for mode in MODES:
        name = str(folder / mode)
        for way in ("by hand", "by hand, output apart"):
            if (way, mode) in FSDP_CASES:
                results[f"fsdp {way}, {mode}"] = run_fsdp(shard_by_hand(name, output_apart="apart" in way))
        if HAS_PLANS and ("by plan", mode) in FSDP_CASES:
            plan = DistributedConfig(fsdp_size=2)
            loaded = VanillaTransformerForConditionalGeneration.from_pretrained(name, distributed_config=plan)
            results[f"fsdp by plan, {mode}"] = run_fsdp(loaded)
        if HAS_PLANS:
            results[f"tensor parallel, {mode}"] = run_tensor_parallel(name, folder / f"saved {mode}")
    torch.save(results, folder / f"rank{dist.get_rank()}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("sharding")
    for mode, fields in MODES.items():
        torch.manual_seed(0)
        config = VanillaTransformerConfig(**{**TINY, "encoder_layers": 1, "decoder_layers": 1, **fields})
        randomise(VanillaTransformerForConditionalGeneration(config)).save_pretrained(folder / mode)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", __file__, str(folder)]
    done = subprocess.run(
        [sys.executable, *launch], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return folder, [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in (0, 1)]


def close(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, weight in theirs.items():
        assert_close(ours[name], weight, rtol=1e-4, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize(("way", "mode"), FSDP_CASES)
def test_fsdp2_trains_as_one_process(results, way, mode):
    if way == "by plan" and not HAS_PLANS:
        pytest.skip("the library shards by a plan in newer releases")
    folder, ranks = results
    model = VanillaTransformerForConditionalGeneration.from_pretrained(folder / mode)
    losses = train(model, slice(0, 3))
    for rank in ranks:
        result = rank[f"fsdp {way}, {mode}"]
        assert result["is_sharded"]
        # In its forward pass the outermost module's weights are whole, and the fused loss takes them. Those of a
        # module apart are whole only while that one runs: the fused loss steps aside.
        assert set(result["fused"]) == {"apart" not in way}
        assert result["losses"] == pytest.approx(losses, rel=1e-5)
        close(result["weights"], full_weights(model))


def part_of(name: str, shape: tuple[int, ...], number: int) -> tuple[int, ...]:
    """Return the shape of one of two processes' part: rows, and columns where the rows before were cut."""
    module, kind = name.split(".")[-2:]
    if module in ("out_proj", "fc2") and kind == "bias":
        return shape  # added once, to the sum
    dim = 1 if module in ("out_proj", "fc2") else 0
    return tuple(torch.empty(shape, device="meta").chunk(2, dim)[number].shape)


@pytest.mark.skipif(not HAS_PLANS, reason="older releases read no plan of a class")
@pytest.mark.parametrize("mode", MODES)
def test_tensor_parallel_processes_compute_as_one(results, mode):
    folder, ranks = results
    model = VanillaTransformerForConditionalGeneration.from_pretrained(folder / mode)
    whole = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    inputs = batch()
    logits = model(**inputs).logits
    source = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    tokens = [model.generate(**source, num_beams=beams, max_new_tokens=8) for beams in (1, 3)]
    saved = VanillaTransformerForConditionalGeneration.from_pretrained(folder / f"saved {mode}")
    losses = train(model, slice(0, 3))
    for number, rank in enumerate(ranks):
        result = rank[f"tensor parallel, {mode}"]
        for name, shape in result["shapes"].items():
            assert shape == part_of(name, whole[name], number), name
        assert {name for name in whole if name.endswith(("_proj.weight", "fc1.weight", "fc2.weight"))} <= set(
            result["shapes"]
        )
        assert_close(result["logits"], logits, rtol=1e-4, atol=1e-4)
        for ours, theirs in zip(result["tokens"], tokens, strict=True):
            assert torch.equal(ours, theirs)
        assert result["losses"] == pytest.approx(losses, rel=1e-5)
        close(result["weights"], full_weights(model))
        close(full_weights(saved), result["weights"])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
