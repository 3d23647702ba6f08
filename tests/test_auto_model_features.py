"""Code that takes `AutoModel` for features or a classifier gets from ours what it gets from BART."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny_models import SEPARATE, SHARING, SMALL, randomise
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForSeq2SeqLM, BartConfig, BartModel, PreTrainedTokenizerFast, pipeline
from transformers.models.bart.modeling_bart import shift_tokens_right

from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration

PAD, EOS, BOS = 0, 1, 2
VOCABULARY = 40
SENTENCES = ["w5 w6 w7 w8", "w9", "w11 w12"]
TOKENS = {"pad_token_id": PAD, "eos_token_id": EOS, "bos_token_id": BOS, "decoder_start_token_id": BOS}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    words = ["<pad>", "</s>", "<s>", *(f"w{i}" for i in range(3, VOCABULARY))]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", EOS)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="</s>", bos_token="<s>")


def make_seq2seq(**fields: Any) -> VanillaTransformerForConditionalGeneration:
    config = VanillaTransformerConfig(**{**SMALL, "vocab_size": VOCABULARY, "dropout": 0.0, **fields})
    return randomise(VanillaTransformerForConditionalGeneration(config))


@pytest.fixture(scope="module")
def folder(tokenizer, tmp_path_factory) -> Path:
    """A checkpoint of the whole model, as training leaves it."""
    folder = tmp_path_factory.mktemp("checkpoint") / "model"
    make_seq2seq().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(params=["ours", "bart"])
def model(request, folder) -> nn.Module:
    """Our base model from its folder, or the library's BART of the same sizes."""
    if request.param == "ours":
        return AutoModel.from_pretrained(folder).eval()
    torch.manual_seed(0)
    return AutoModel.from_config(make_bart_config()).eval()


def make_bart_config() -> BartConfig:
    return BartConfig(**SMALL, **TOKENS, vocab_size=VOCABULARY, max_position_embeddings=64, dropout=0.0)


def layout(value: Any) -> Any:
    """The shapes in an output, nested as they are."""
    if isinstance(value, Tensor):
        return tuple(value.shape)
    return [layout(part) for part in value] if isinstance(value, tuple) else type(value).__name__


# ---------------------------------------------------------------------------------------------- what comes out


@pytest.mark.parametrize("target", [None, 3])
@pytest.mark.parametrize(
    "options",
    [{}, {"use_cache": False}, {"output_hidden_states": True}, {"output_attentions": True}, {"return_dict": False}],
    ids=str,
)
def test_outputs_have_barts_fields_and_shapes(folder, tokenizer, options, target) -> None:
    ours = AutoModel.from_pretrained(folder, attn_implementation="eager").eval()
    bart = BartModel._from_config(make_bart_config(), attn_implementation="eager").eval()
    inputs = tokenizer(SENTENCES, return_tensors="pt", padding=True)
    if target:
        inputs["decoder_input_ids"] = torch.full((len(SENTENCES), target), BOS)
    mine, theirs = ours(**inputs, **options), bart(**inputs, **options)
    assert type(mine) is type(theirs)
    if options.get("return_dict", True):
        assert list(mine) == list(theirs)
        mine, theirs = mine.to_tuple(), theirs.to_tuple()
    assert layout(mine) == layout(theirs)


def test_without_a_target_the_source_shifted_right_is_decoded(folder, tokenizer) -> None:
    """By BART's own function."""
    model = AutoModel.from_pretrained(folder).eval()
    inputs = tokenizer(SENTENCES, return_tensors="pt", padding=True)
    expected = model(**inputs, decoder_input_ids=shift_tokens_right(inputs["input_ids"], PAD, BOS))
    assert torch.equal(model(**inputs).last_hidden_state, expected.last_hidden_state)


@pytest.mark.parametrize("sharing", SHARING)
def test_the_base_model_of_a_checkpoint_has_all_its_weights(tmp_path, sharing) -> None:
    whole = make_seq2seq(**SHARING[sharing])
    whole.save_pretrained(tmp_path)
    base, info = AutoModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["mismatched_keys"]
    state = base.state_dict()
    assert state.keys() == whole.model.state_dict().keys()
    assert all(torch.equal(value, state[name]) for name, value in whole.model.state_dict().items())


def test_the_encoder_alone_gives_features(folder, tokenizer) -> None:
    base, whole = AutoModel.from_pretrained(folder).eval(), AutoModelForSeq2SeqLM.from_pretrained(folder).eval()
    inputs = tokenizer(SENTENCES, return_tensors="pt", padding=True)
    features = base.get_encoder()(**inputs).last_hidden_state
    assert torch.equal(features, base(**inputs).encoder_last_hidden_state)
    assert torch.equal(features, whole.get_encoder()(**inputs).last_hidden_state)


def test_separate_vocabularies_have_an_encoder_and_say_what_the_decoder_needs() -> None:
    base = make_seq2seq(**SEPARATE).model
    input_ids = torch.tensor([[39, 38, EOS]])  # beyond the target's vocabulary
    assert base.get_encoder()(input_ids).last_hidden_state.shape == (1, 3, 16)
    with pytest.raises(ValueError, match="decoder_input_ids"):
        base(input_ids)


# ---------------------------------------------------------------------------------------------- what is made of it


def pool_first(model: nn.Module, inputs: Any) -> Tensor:
    return model(**inputs).last_hidden_state[:, 0]


def pool_end_token(model: nn.Module, inputs: Any) -> Tensor:
    """As BartForSequenceClassification does: the decoder's state at the last end token."""
    states = model(**inputs).last_hidden_state
    return states[inputs["input_ids"].eq(EOS)].view(len(states), -1, states.shape[-1])[:, -1]


def pool_mean(model: nn.Module, inputs: Any) -> Tensor:
    """As sentence embeddings are made: the mean of the encoder's states over real tokens."""
    states, mask = model(**inputs).encoder_last_hidden_state, inputs["attention_mask"][..., None]
    return (states * mask).sum(1) / mask.sum(1)


POOLINGS = [pool_first, pool_end_token, pool_mean]


@pytest.mark.parametrize("pool", POOLINGS)
def test_features_do_not_depend_on_the_batch(model, tokenizer, pool) -> None:
    together = pool(model, tokenizer(SENTENCES, return_tensors="pt", padding=True))
    assert together.shape == (len(SENTENCES), 16)
    for sentence, features in zip(SENTENCES, together, strict=True):
        alone = pool(model, tokenizer([sentence], return_tensors="pt"))[0]
        torch.testing.assert_close(features, alone, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(together[0], together[1], atol=1e-3)


@pytest.mark.parametrize("pool", POOLINGS)
def test_a_classifier_on_top_learns(model, tokenizer, pool) -> None:
    """Whether a sentence holds w5 or w6, somewhere among other words; the whole model is trained."""
    generator = torch.Generator().manual_seed(1)
    texts, classes = [], torch.arange(16) % 2
    for label in classes.tolist():
        words = [f"w{i}" for i in torch.randint(10, VOCABULARY, (3,), generator=generator).tolist()]
        words[int(torch.randint(3, (1,), generator=generator))] = f"w{5 + label}"
        texts.append(" ".join(words))
    inputs = tokenizer(texts, return_tensors="pt", padding=True)
    torch.manual_seed(0)
    head = nn.Linear(16, 2)
    optimizer = torch.optim.Adam([*model.parameters(), *head.parameters()], lr=1e-2)
    model.train()
    for _ in range(60):
        loss = F.cross_entropy(head(pool(model, inputs)), classes)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    assert loss < 0.1
    model.eval()
    assert torch.equal(head(pool(model, inputs)).argmax(-1), classes)


def test_the_feature_extraction_pipeline_gives_the_models_states(model, tokenizer) -> None:
    pipe = pipeline("feature-extraction", model=model, tokenizer=tokenizer)
    for sentence in SENTENCES:
        expected = model(**tokenizer(sentence, return_tensors="pt")).last_hidden_state
        assert torch.equal(pipe(sentence, return_tensors=True), expected)


# ---------------------------------------------------------------------------------------------- without the package

FROM_THE_FOLDER = """
import sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "vanilla_transformer":
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Hidden())
import json
from transformers import AutoModel, AutoTokenizer, pipeline
folder, sentence = sys.argv[1:]
model = AutoModel.from_pretrained(folder, trust_remote_code=True).eval()
inputs = AutoTokenizer.from_pretrained(folder)(sentence, return_tensors="pt")
states = model(**inputs).last_hidden_state
pipe = pipeline("feature-extraction", model=folder, trust_remote_code=True)
assert type(pipe.model).__module__.startswith("transformers_modules."), type(pipe.model)
print("RESULT", json.dumps([states.tolist(), pipe(sentence)]))
"""


def test_features_come_from_the_folder_alone(folder, tmp_path) -> None:
    environment = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    environment.pop("HF_MODULES_CACHE", None)
    done = subprocess.run(
        [sys.executable, "-c", FROM_THE_FOLDER, str(folder), SENTENCES[0]],
        env=environment, cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    states, piped = json.loads(done.stdout.partition("RESULT ")[2])
    expected = pipeline("feature-extraction", model=str(folder))(SENTENCES[0])
    assert states == piped == expected
