"""The graphs are run by onnxruntime and compared with the model in PyTorch; names are those of Optimum's export."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from tiny_models import SEPARATE, SOURCES, TARGETS, TINY, pad, randomise
from tokenizers import Tokenizer, models
from torch import nn
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from vanilla_transformer.convert import onnx as converter
from vanilla_transformer.convert.onnx import ENCODER, FIRST_STEP, NEXT_STEP, greedy_search, to_onnx, write
from vanilla_transformer.convert.renaming import ConversionError

np = pytest.importorskip("numpy")
onnx, onnxruntime, _ = (
    pytest.importorskip(name, reason="runs ONNX files: pip install -e '.[onnx]'")
    for name in ("onnx", "onnxruntime", "onnxscript")
)

SMALL = {**TINY, "encoder_layers": 1, "decoder_layers": 2, "dropout": 0.3}
VARIANTS = {
    "paper": {},
    "everything": {
        "norm_position": "pre",
        "attention_bias": True,
        "output_bias": True,
        "activation_function": "gelu",
        "position_embedding_type": "learned",
        "position_offset": 2,
        "max_position_embeddings": 30,
        "d_k": 6,
        "d_v": 10,
        "layer_norm_eps": 1e-2,
        "scale_embedding": False,
        "decoder_start_token_id": 4,
        **SEPARATE,
        "tie_word_embeddings": False,
    },
    "tensor2tensor": {"position_embedding_type": "sinusoidal_tensor2tensor", "position_offset": 1, **SEPARATE},
}
DTYPES = {"paper": torch.float32, "everything": torch.float32, "tensor2tensor": torch.float64}


def make(variant: str) -> VanillaTransformerForConditionalGeneration:
    """Return a model in which biases and norms count, and which ends one of `SOURCES` before its length cap."""
    torch.manual_seed(5)
    config = VanillaTransformerConfig(**SMALL, **VARIANTS[variant])
    model = randomise(VanillaTransformerForConditionalGeneration(config), std=0.3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1 or parameter.shape[0] == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    ids, mask = pad(SOURCES)
    third = int(model.generate(ids, attention_mask=mask, num_beams=1, max_new_tokens=5)[0, 3])
    for settings in (model.config, model.generation_config):
        settings.eos_token_id = [1, third]
    return model.to(DTYPES[variant])


def word_tokenizer() -> PreTrainedTokenizerFast:
    words = ["<pad>", "</s>", "<s>", "a", "b", "c"]
    model = models.WordLevel({word: number for number, word in enumerate(words)}, "<pad>")
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model), pad_token="<pad>", eos_token="</s>")


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """Return a factory of a model and its folder, each written once; it is written in training mode."""
    made = {}

    def get(variant: str):
        if variant not in made:
            model, folder = make(variant), tmp_path_factory.mktemp("onnx") / "model"
            to_onnx(model.train(), word_tokenizer(), folder)
            assert model.training
            assert model.dtype == DTYPES[variant]
            assert model.config._attn_implementation == "sdpa"
            made[variant] = model.eval(), folder
        return made[variant]

    return get


def open_graph(folder: Path, name: str):
    session = onnxruntime.InferenceSession(str(folder / name))
    names = [output.name for output in session.get_outputs()]

    def run(**inputs):
        inputs = {key: value.numpy() if torch.is_tensor(value) else value for key, value in inputs.items()}
        return dict(zip(names, session.run(names, inputs), strict=True))

    return run, [value.name for value in session.get_inputs()], names


def left_padded_and_empty():
    """Return sources with padding on the left, and one that is nothing but padding."""
    ids = torch.tensor([[0, 0, 0, 5, 6, 7, 1], [0, 8, 9, 10, 11, 12, 1], [0] * 7])
    return ids, ids.ne(0).long()


BATCHES = {
    "padded on the right": (*pad(SOURCES), pad(TARGETS)[0]),
    "padded on the left": (*left_padded_and_empty(), pad(TARGETS)[0]),
    "one token": (torch.tensor([[7]]), torch.tensor([[1]]), torch.tensor([[2]])),
    "long": (
        *(torch.arange(25).expand(4, -1) % 9 + 3, torch.ones(4, 25).long()),
        torch.arange(88).view(4, 22) % 31 + 2,
    ),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_each_graph_gives_the_states_and_logits_of_the_model_at_lengths_that_were_not_traced(variant, converted):
    model, folder = converted(variant)
    (encode, _, _), (first, _, _), (following, _, _) = (
        open_graph(folder, n) for n in (ENCODER, FIRST_STEP, NEXT_STEP)
    )

    def assert_close(actual, expected, what):
        torch.testing.assert_close(
            torch.from_numpy(actual), expected.float(), atol=1e-5, rtol=1e-4, msg=lambda text: f"{what}: {text}"
        )

    for batch, (ids, mask, targets) in BATCHES.items():
        with torch.no_grad():
            expected = model(ids, mask, targets, use_cache=False)
        states = encode(input_ids=ids, attention_mask=mask)["last_hidden_state"]
        assert_close(states, expected.encoder_last_hidden_state, f"{batch}, encoder")
        source = {"encoder_attention_mask": mask}
        whole = first(input_ids=targets, encoder_hidden_states=states, **source)
        assert_close(whole["logits"], expected.logits, f"{batch}, all at once")

        past, begun = {}, 0  # one token, one more, and the rest
        for end in (1, 2, targets.shape[1]):
            if end <= begun:
                continue
            new = targets[:, begun:end]
            if begun:
                outputs = following(input_ids=new, **source, **past)
            else:
                outputs = first(input_ids=new, encoder_hidden_states=states, **source)
            assert_close(outputs.pop("logits"), expected.logits[:, begun:end], f"{batch}, tokens {begun} to {end}")
            past |= {name.replace("present", "past_key_values"): value for name, value in outputs.items()}
            begun = end
        for name in past:
            assert_close(past[name], torch.from_numpy(whole[name.replace("past_key_values", "present")]), name)


def test_inputs_and_outputs_are_named_as_optimum_names_them(converted):
    # Those that ORTModelForSeq2SeqLM of optimum-onnx 0.1.0 (transformers 4.57) feeds and reads: it ran such a folder.
    def cache(prefix, sides):
        return {f"{prefix}.{n}.{side}.{kind}" for n in (0, 1) for side in sides for kind in ("key", "value")}

    _, folder = converted("paper")
    _, inputs, outputs = open_graph(folder, ENCODER)
    assert (set(inputs), set(outputs)) == ({"input_ids", "attention_mask"}, {"last_hidden_state"})
    _, inputs, outputs = open_graph(folder, FIRST_STEP)
    assert set(inputs) == {"input_ids", "encoder_attention_mask", "encoder_hidden_states"}
    assert set(outputs) == {"logits", *cache("present", ("decoder", "encoder"))}
    _, inputs, outputs = open_graph(folder, NEXT_STEP)
    both = cache("past_key_values", ("decoder", "encoder"))
    assert set(inputs) == {"input_ids", "encoder_attention_mask", *both}
    assert set(outputs) == {"logits", *cache("present", ("decoder",))}


@pytest.mark.parametrize("variant", VARIANTS)
def test_greedy_search_gives_the_tokens_of_generate(variant, converted):
    model, folder = converted(variant)
    ids, mask = pad(SOURCES)
    expected = model.generate(ids, attention_mask=mask, num_beams=1, max_length_offset=4)
    assert len({int(row.ne(0).sum()) for row in expected}) > 1, "all rows are equally long: nothing is compared"
    tokens = greedy_search(folder, ids.numpy(), mask.numpy(), max_length_offset=4)
    assert tokens.tolist() == expected.tolist()


def test_greedy_search_can_be_copied_to_where_there_is_neither_torch_nor_transformers(converted, tmp_path):
    model, folder = converted("paper")
    ids, mask = pad(SOURCES)
    script = tmp_path / "copied.py"
    body = textwrap.dedent(inspect.getsource(greedy_search))
    script.write_text(
        "from __future__ import annotations\nimport sys\nsys.modules.update(torch=None, transformers=None)\n"
        f"{body}\nimport numpy as np\n"
        f"ids, mask = (np.array(x, dtype=np.int64) for x in {[ids.tolist(), mask.tolist()]})\n"
        f"print(greedy_search({str(folder)!r}, ids, mask).tolist())\n",
        encoding="utf-8",
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == model.generate(ids, attention_mask=mask, num_beams=1).tolist()


def test_the_folder_has_settings_and_tokenizer_and_no_torch_weights(converted):
    model, folder = converted("tensor2tensor")
    config = VanillaTransformerConfig.from_pretrained(folder)
    expected = model.config.to_dict()
    changed = {key for key, value in config.to_dict().items() if value != expected[key]}
    assert changed <= {"dtype", "_name_or_path", "architectures"}
    assert config.dtype == torch.float32
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == model.config.eos_token_id
    assert AutoTokenizer.from_pretrained(folder).get_vocab() == word_tokenizer().get_vocab()
    assert not [*folder.glob("*.safetensors"), *folder.glob("*.bin")]


def test_int8_quantises_every_weight_of_a_product_and_stays_near_the_logits(converted, tmp_path):
    model, plain = converted("paper")
    folder = tmp_path / "int8"
    write(model, None, folder, quantization="int8")
    products = {"encoder": 6, "decoder": 8}  # projections and feed-forward, a layer
    counted = {}
    for name in (ENCODER, FIRST_STEP, NEXT_STEP):
        nodes = [node.op_type for node in onnx.load(folder / name).graph.node]
        counted[name] = nodes.count("MatMulInteger"), nodes.count("MatMul")
    # What is left in float multiplies states with states: two for each attention. + 1: the output projection.
    first = 2 * (products["decoder"] + 2) + 1
    assert counted == {ENCODER: (6, 2), FIRST_STEP: (first, 8), NEXT_STEP: (first - 2 * 2, 8)}
    assert model.lm_head.weight is model.model.shared.weight

    ids, mask, targets = BATCHES["padded on the right"]
    logits = {}
    for key, where in (("float", plain), ("int8", folder)):
        states = open_graph(where, ENCODER)[0](input_ids=ids, attention_mask=mask)["last_hidden_state"]
        run = open_graph(where, FIRST_STEP)[0]
        logits[key] = run(input_ids=targets, encoder_attention_mask=mask, encoder_hidden_states=states)["logits"]
    error = np.abs(logits["int8"] - logits["float"]).mean() / logits["float"].std()
    assert 0 < error < 0.1


@pytest.mark.parametrize("package", ["onnx", "onnxscript", "onnxruntime"])
def test_a_missing_package_names_the_extra_and_nothing_is_written(package, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=rf"needs {package}: pip install 'vanilla-transformer\[onnx\]'"):
        to_onnx(make("paper"), None, tmp_path / "out", quantization="int8")
    assert not any(tmp_path.iterdir())


def test_greedy_search_without_onnxruntime_names_the_extra(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(ImportError, match=r"vanilla-transformer\[onnx\]"):
        greedy_search(tmp_path, None, None)


def test_what_cannot_be_written_is_refused_and_nothing_is_written(tmp_path):
    model = make("paper")
    with pytest.raises(ConversionError, match=r"quantization='int4' is not valid: choose None or 'int8'"):
        to_onnx(model, None, tmp_path / "out", quantization="int4")
    model.lm_head = nn.Sequential(model.lm_head)  # as an int8 layer or an adapter is: no nn.Linear
    with pytest.raises(ConversionError, match=r"projection is a Sequential.*only a float model can be written"):
        to_onnx(model, None, tmp_path / "out")
    assert not any(tmp_path.iterdir())


def test_a_folder_with_files_is_refused_and_kept(tmp_path):
    (tmp_path / "mine.txt").write_text("kept")
    with pytest.raises(ConversionError, match="not an empty folder"):
        to_onnx(make("paper"), None, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_an_interrupted_conversion_leaves_no_folder(monkeypatch, tmp_path):
    def export(module, arguments, path):
        if path.name == NEXT_STEP:
            raise KeyboardInterrupt
        path.write_text("half")

    monkeypatch.setattr(converter, "_export", export)
    with pytest.raises(KeyboardInterrupt):
        to_onnx(make("paper"), None, tmp_path / "out")
    assert not any(tmp_path.iterdir())
