"""Configuration of the Transformer of "Attention Is All You Need" (Vaswani et al. 2017, arXiv 1706.03762).

Every default is the paper's base model. Fields that other systems need (biases in the attention, learned positions,
pre-norm, ...) are there too; they are off by default, and each says where it leaves the paper.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
import transformers
from transformers.activations import ACT2FN
from transformers.utils import TRANSFORMERS_DYNAMIC_MODULE_NAME

if int(transformers.__version__.partition(".")[0]) < 5:  # before anything that older releases lack
    raise ImportError(
        f"vanilla-transformer needs transformers 5.0 or newer, and {transformers.__version__} is installed: "
        'pip install "transformers>=5.0,<6"'
    )

NORM_POSITIONS = ("post", "pre")
POSITION_EMBEDDING_TYPES = ("sinusoidal", "sinusoidal_tensor2tensor", "learned")
SINUSOID_LAYOUTS = ("interleaved", "halves")

# What config.json says to people who load a checkpoint with `trust_remote_code=True` and without this package.
AUTO_MAP = {
    "AutoConfig": "configuration_vanilla_transformer.VanillaTransformerConfig",
    "AutoModel": "modeling_vanilla_transformer.VanillaTransformerModel",
    "AutoModelForSeq2SeqLM": "modeling_vanilla_transformer.VanillaTransformerForConditionalGeneration",
}
CUSTOM_PIPELINES = {
    task: {"impl": f"pipeline_vanilla_transformer.{name}", "pt": ["AutoModelForSeq2SeqLM"], "type": "text"}
    for task, name in (
        ("translation", "TranslationPipeline"),
        ("summarization", "SummarizationPipeline"),
        ("text2text-generation", "Text2TextGenerationPipeline"),
    )
}
# No size, offset or id of a real model comes near it; beyond it the library and torch fail in unclear ways.
_LARGEST_INTEGER = 2**31 - 1
# The library makes a name for each of `num_labels` labels.
_MOST_LABELS = 1_000_000
# A weights file may lack this many parameters, or four times what it holds; see `check_missing_weights`.
_FEW_PARAMETERS = 10**8
# What only the class itself may set: of a file, the first two would choose code on the Hub (transformers 5.0).
_PRIVATE = (
    "_attn_implementation",
    "_attn_implementation_internal",
    "_experts_implementation",
    "_experts_implementation_internal",
    "_foreign_pipelines",
)
# True in the copy of this file that a checkpoint ships: the library imports it as `transformers_modules.<folder>`.
_IS_SHIPPED_COPY = __name__.partition(".")[0] == TRANSFORMERS_DYNAMIC_MODULE_NAME


class _PipelineTable(dict[str, dict[str, Any]]):
    """`custom_pipelines` in which `translation_xx_to_yy` finds "translation"; the library looks for equal keys."""

    @staticmethod
    def _plain(task: object) -> Any:
        return "translation" if isinstance(task, str) and re.fullmatch(r"translation_.+_to_.+", task) else task

    def __contains__(self, task: object) -> bool:
        return super().__contains__(self._plain(task))

    def __getitem__(self, task: str) -> dict[str, Any]:
        return super().__getitem__(self._plain(task))


class VanillaTransformerConfig(transformers.PreTrainedConfig):
    r"""Configuration of an encoder-decoder Transformer; without arguments the paper's base model.

    The paper's symbols stand in brackets. Sizes are counts, probabilities lie in [0, 1).

    Args:
        vocab_size: Size of the source vocabulary, of the target's too unless `decoder_vocab_size` is given (section
            5.1: 37,000 byte-pair tokens shared by source and target).
        decoder_vocab_size: Size of a target vocabulary of its own; needs `share_encoder_decoder_embeddings=False`.
        d_model: Width of every layer's input and output [d_model].
        encoder_layers: Number of encoder layers [N].
        decoder_layers: Number of decoder layers [N].
        encoder_attention_heads: Heads in the encoder's attentions [h].
        decoder_attention_heads: Heads in the decoder's attentions [h].
        d_k: Width of a head's queries and keys [d_k]; `None` is d_model / h.
        d_v: Width of a head's values [d_v]; `None` is d_model / h.
        encoder_ffn_dim: Inner width of the encoder's feed-forward layers [d_ff].
        decoder_ffn_dim: Inner width of the decoder's feed-forward layers [d_ff].
        dropout: Dropout on each sublayer's output and on the sum of embedding and position [P_drop] (section 5.4).
        attention_dropout: Dropout on the attention weights. 0 in the paper's text; tensor2tensor used 0.1.
        activation_dropout: Dropout after the feed-forward activation. 0 in the paper.
        activation_function: Feed-forward activation, a name of `transformers.activations.ACT2FN`; "relu" in the paper.
        label_smoothing: Label smoothing of the training loss [ε_ls]: (1 - ε) · one-hot + ε / V.
        norm_position: "post" is the paper, LayerNorm(x + Sublayer(x)). "pre" leaves it: x + Sublayer(LayerNorm(x))
            with a last LayerNorm after each stack.
        final_norm: A last LayerNorm after each stack. `None`: with "pre" only, as in the paper and in tensor2tensor.
            True with "post" is what `torch.nn.Transformer` has by default.
        position_embedding_type: "sinusoidal" is the paper's section 3.5. "sinusoidal_tensor2tensor" divides the
            exponents by d_model/2 - 1, as tensor2tensor, fairseq and FSMT do. "learned" is Table 3 row E.
        position_offset: Number added to every position; fairseq and BART count from 2. 0 in the paper.
        sinusoid_layout: "interleaved" is the paper, sin and cos by turns; "halves" puts all sines first, as Marian and
            tensor2tensor do. `None` is "interleaved" for "sinusoidal", "halves" for "sinusoidal_tensor2tensor".
        max_position_embeddings: Longest input of "learned" positions, in tokens. Sinusoids have no limit.
        scale_embedding: Multiply embeddings by sqrt(d_model) (section 3.4).
        attention_bias: Add biases to the four attention projections. The paper's formulas have none.
        output_bias: Add a bias to the output logits (`final_logits_bias` in Marian). The paper has none.
        layer_norm_eps: ε in LayerNorm; 1e-6 as in tensor2tensor.
        init_std: Standard deviation of fresh matrices and embeddings, normal, as in MarianMT (0.02). `None`: as in
            tensor2tensor, of which the paper says nothing: Xavier-uniform matrices, embeddings with d_model^-0.5.
            A small one learns faster on small corpora.
        share_encoder_decoder_embeddings: One embedding matrix for source and target (section 3.4).
        tie_word_embeddings: The output projection is the target embedding matrix (section 3.4).
        pad_token_id: Id of the padding token.
        eos_token_id: Id of the token that ends a sentence, or several.
        bos_token_id: Id of the token that starts a sentence.
        decoder_start_token_id: Id that the decoder's input starts with.
        use_cache: Return keys and values for step-by-step decoding.
        **kwargs: The library's common arguments, see `transformers.PreTrainedConfig`.

    Attributes:
        max_layers: The most layers a stack may have: 1,000, as many as the deepest Transformer published (Wang et al.
            2022) has in all. A limit of the class, which no config.json can change.
        max_parameters: The most parameters a model may have: 100 billion. Likewise. The two stop a damaged or hostile
            config.json before a long loop or a large allocation; who means it raises them first:
            `VanillaTransformerConfig.max_parameters = 10**12`.

    Raises:
        ValueError: A value does not fit; the message names the field, the value and the rule. Fields that neither this
            class nor the library knows are kept, as the library does.

    Example:
        >>> from vanilla_transformer import VanillaTransformerConfig
        >>> VanillaTransformerConfig().d_model
        512
        >>> VanillaTransformerConfig.big(dropout=0.1).encoder_attention_heads
        16
    """

    model_type = "vanilla_transformer"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values", "cache"]
    attribute_map: ClassVar[dict[str, str]] = {
        "hidden_size": "d_model",
        "num_attention_heads": "encoder_attention_heads",
        "num_hidden_layers": "encoder_layers",
    }
    max_layers: ClassVar[int] = 1_000
    max_parameters: ClassVar[int] = 10**11

    def __init__(
        self,
        vocab_size: int = 37_000,
        decoder_vocab_size: int | None = None,
        d_model: int = 512,
        encoder_layers: int = 6,
        decoder_layers: int = 6,
        encoder_attention_heads: int = 8,
        decoder_attention_heads: int = 8,
        d_k: int | None = None,
        d_v: int | None = None,
        encoder_ffn_dim: int = 2048,
        decoder_ffn_dim: int = 2048,
        dropout: float = 0.1,
        attention_dropout: float = 0.0,
        activation_dropout: float = 0.0,
        activation_function: str = "relu",
        label_smoothing: float = 0.1,
        norm_position: str = "post",
        final_norm: bool | None = None,
        position_embedding_type: str = "sinusoidal",
        position_offset: int = 0,
        sinusoid_layout: str | None = None,
        max_position_embeddings: int = 1024,
        scale_embedding: bool = True,
        attention_bias: bool = False,
        output_bias: bool = False,
        layer_norm_eps: float = 1e-6,
        init_std: float | None = None,
        share_encoder_decoder_embeddings: bool = True,
        tie_word_embeddings: bool = True,
        pad_token_id: int = 0,
        eos_token_id: int | list[int] | None = 1,
        bos_token_id: int | None = 2,
        decoder_start_token_id: int = 2,
        use_cache: bool = True,
        **kwargs: Any,
    ) -> None:
        self.vocab_size = vocab_size
        self.decoder_vocab_size = vocab_size if decoder_vocab_size is None else decoder_vocab_size
        self.d_model = d_model
        self.encoder_layers = encoder_layers
        self.decoder_layers = decoder_layers
        self.encoder_attention_heads = encoder_attention_heads
        self.decoder_attention_heads = decoder_attention_heads
        self.d_k = d_k
        self.d_v = d_v
        self.encoder_ffn_dim = encoder_ffn_dim
        self.decoder_ffn_dim = decoder_ffn_dim
        self.dropout = dropout
        self.attention_dropout = attention_dropout
        self.activation_dropout = activation_dropout
        self.activation_function = activation_function
        self.label_smoothing = label_smoothing
        self.norm_position = norm_position
        self.final_norm = final_norm
        self.position_embedding_type = position_embedding_type
        self.position_offset = position_offset
        self.sinusoid_layout = sinusoid_layout
        self.max_position_embeddings = max_position_embeddings
        self.scale_embedding = scale_embedding
        self.attention_bias = attention_bias
        self.output_bias = output_bias
        self.layer_norm_eps = layer_norm_eps
        self.init_std = init_std
        self.share_encoder_decoder_embeddings = share_encoder_decoder_embeddings
        self.use_cache = use_cache
        kwargs.setdefault("is_encoder_decoder", True)
        _check_library_fields(type(self), kwargs)
        try:
            super().__init__(**kwargs)
        except ValueError:
            raise
        except Exception as error:  # an AttributeError, a TypeError or an error class of its own, by release
            raise ValueError(
                f"The library does not take one of the fields {', '.join(sorted(kwargs))}: "
                f"{type(error).__name__}: {error}"
            ) from error
        # After super().__init__, which resets them on some releases of the library.
        self.tie_word_embeddings = tie_word_embeddings
        self.pad_token_id = pad_token_id
        self.eos_token_id = eos_token_id
        self.bos_token_id = bos_token_id
        self.decoder_start_token_id = decoder_start_token_id
        if sinusoid_layout is None and position_embedding_type in POSITION_EMBEDDING_TYPES[:2]:
            self.sinusoid_layout = "interleaved" if position_embedding_type == "sinusoidal" else "halves"
        aliased = [getattr(self, field) for alias, field in self.attribute_map.items() if alias in kwargs]
        if 0 not in aliased:  # the library's config test (5.0) asks for hidden_size=0; making a model checks again
            self.check()

    def __setattr__(self, key: str, value: Any) -> None:
        super().__setattr__(key, value)
        if key == "vocab_size" and self.__dict__.get("share_encoder_decoder_embeddings"):
            self.decoder_vocab_size = value  # one vocabulary: resizing it, or overriding its size, changes both

    def check(self) -> None:
        """Raise one ValueError that names the first field that does not fit, its value and the rule.

        Called when a config or a model is made: fields may change in between.
        """
        _check_fields(self)
        _check_combinations(self)
        _check_limits(self)
        self.check_token_ids()

    def check_token_ids(self, vocab_size: int | None = None, decoder_vocab_size: int | None = None) -> None:
        """Raise a ValueError if the padding or start token is outside vocabularies of these sizes, or the config's."""
        target = decoder_vocab_size or self.decoder_vocab_size
        both = min(vocab_size or self.vocab_size, target)
        for name, size in (("pad_token_id", both), ("decoder_start_token_id", target)):
            if getattr(self, name) >= size:
                raise ValueError(
                    f"{name}={getattr(self, name)} is outside a vocabulary of {size} tokens: choose an id below it, "
                    "or a larger vocabulary."
                )

    @property
    def has_final_norm(self) -> bool:
        """Whether each stack ends with a LayerNorm of its own."""
        return self.norm_position == "pre" if self.final_norm is None else self.final_norm

    @property
    def custom_pipelines(self) -> dict[str, dict[str, Any]]:
        """The pipelines that ship with a checkpoint, as `transformers.pipeline` looks for them.

        Empty in the installed package: there the tasks are registered, and an entry here would make `pipeline()` ask
        for trust. A checkpoint's config.json always has the entries, see `to_dict`.
        """
        shipped = CUSTOM_PIPELINES if _IS_SHIPPED_COPY else {}
        # A fresh copy each time: `pipeline()` writes into the entry that it uses.
        return _PipelineTable(copy.deepcopy({**shipped, **self.__dict__.get("_foreign_pipelines", {})}))

    @custom_pipelines.setter
    def custom_pipelines(self, value: dict[str, dict[str, Any]] | None) -> None:
        value = {} if value is None else value
        if not isinstance(value, dict) or not all(isinstance(entry, dict) for entry in value.values()):
            raise ValueError(
                f"custom_pipelines={value!r:.80} is not valid: custom_pipelines must be a dict of one dict a task."
            )
        ours = {entry["impl"] for entry in CUSTOM_PIPELINES.values()}
        foreign = {task: entry for task, entry in value.items() if entry.get("impl") not in ours}
        if foreign:
            self._foreign_pipelines = foreign

    def get_text_config(self, decoder: bool | None = None, encoder: bool | None = None) -> Any:
        """Return the config of one side, or, without arguments, the one that the library's `generate()` reads.

        There `vocab_size` is the target's: `compute_transition_scores` reads it so, so does beam search up to 5.8.
        """
        config = super().get_text_config(decoder, encoder)
        if config is self and self.decoder_vocab_size != self.vocab_size:
            config = copy.copy(self)
            config.vocab_size = self.decoder_vocab_size
        return config

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as config.json holds them, with what loading without this package needs."""
        output: dict[str, Any] = super().to_dict()
        output["custom_pipelines"] = {**copy.deepcopy(CUSTOM_PIPELINES), **output.pop("_foreign_pipelines", {})}
        # `register_for_auto_class` remembers one Auto class a class; a checkpoint is for all three. An entry of
        # another repository ("owner/name--module.Class") ends with a save, which writes the files themselves.
        own = {
            auto: reference
            for auto, reference in (output.get("auto_map") or {}).items()
            if not (auto in AUTO_MAP and isinstance(reference, str) and "--" in reference)
        }
        output["auto_map"] = {**AUTO_MAP, **own}
        return output

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Return the config of a config.json's fields; `kwargs` replace some, as in the library.

        Raises:
            ValueError: A value does not fit, or the fields ask for an attention of the Hub. Such code is for the
                caller to choose: `from_pretrained(folder, attn_implementation="owner/name")`.
        """
        for name in ("attn_implementation", "experts_implementation"):
            value = config_dict.get(name)
            if isinstance(value, dict) or (isinstance(value, str) and "/" in value):
                raise ValueError(
                    f"{name}={value!r:.80} is not valid in a config.json: it names code on the Hub. If you trust it, "
                    "take it out of the file and pass it to from_pretrained."
                )
        return super().from_dict(config_dict, **kwargs)

    @classmethod
    def base(cls, **overrides: Any) -> VanillaTransformerConfig:
        """Return the base model of the paper's Table 3; `overrides` are fields to change."""
        return cls(**overrides)

    @classmethod
    def big(cls, **overrides: Any) -> VanillaTransformerConfig:
        """Return the big model of Table 3: d_model 1024, d_ff 4096, 16 heads, P_drop 0.3.

        The paper trains big with P_drop 0.1 for English-French (section 6.1): `big(dropout=0.1)`.
        """
        big = {
            "d_model": 1024,
            "encoder_ffn_dim": 4096,
            "decoder_ffn_dim": 4096,
            "encoder_attention_heads": 16,
            "decoder_attention_heads": 16,
            "dropout": 0.3,
        }
        return cls(**{**big, **overrides})

    @classmethod
    def tiny(cls, **overrides: Any) -> VanillaTransformerConfig:
        """Return the small model published for Multi30k (Wu et al. 2021): 4+4 layers, d_model 128, 2.6M parameters.

        Smaller than any model of the paper: for corpora of some 10,000 pairs, and for tests.
        """
        tiny = {
            "vocab_size": 10_000,
            "d_model": 128,
            "encoder_layers": 4,
            "decoder_layers": 4,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 256,
            "decoder_ffn_dim": 256,
            "dropout": 0.3,
        }
        return cls(**{**tiny, **overrides})

    def head_dims(self, num_heads: int) -> tuple[int, int]:
        """Return (d_k, d_v) of an attention with `num_heads` heads (section 3.2.2)."""
        return self.d_k or self.d_model // num_heads, self.d_v or self.d_model // num_heads

    def num_trainable_parameters(self) -> int:
        """Return the number of parameters in closed form; tied matrices count once.

        Per attention: 2·d_model·h·d_k + 2·d_model·h·d_v; per feed-forward layer: 2·d_model·d_ff + d_ff + d_model; per
        LayerNorm: 2·d_model.
        """
        d = self.d_model

        def attention(num_heads: int) -> int:
            d_k, d_v = self.head_dims(num_heads)
            biases = num_heads * (2 * d_k + d_v) + d if self.attention_bias else 0
            return 2 * d * num_heads * (d_k + d_v) + biases

        def ffn(d_ff: int) -> int:
            return 2 * d * d_ff + d_ff + d

        encoder = attention(self.encoder_attention_heads) + ffn(self.encoder_ffn_dim) + 2 * 2 * d
        decoder = 2 * attention(self.decoder_attention_heads) + ffn(self.decoder_ffn_dim) + 3 * 2 * d
        total = self.encoder_layers * encoder + self.decoder_layers * decoder
        total += self.vocab_size * d
        total += 0 if self.share_encoder_decoder_embeddings else self.decoder_vocab_size * d
        total += 0 if self.tie_word_embeddings else self.decoder_vocab_size * d
        total += self.decoder_vocab_size if self.output_bias else 0
        total += 2 * 2 * d if self.has_final_norm else 0
        if self.position_embedding_type == "learned":
            total += 2 * (self.max_position_embeddings + self.position_offset) * d
        return total


def check_missing_weights(missing: int, held: int) -> None:
    """Raise a ValueError if a checkpoint's config asks for far more than its weights file holds.

    The library makes what a file lacks, in memory and at random, before it complains. A few missing matrices are a
    fine-tuner's wish (a larger vocabulary, more layers); a hundred times the file is a damaged or hostile config.

    Args:
        missing: Number of parameters that the model has and the file lacks, or has in another shape.
        held: Number of parameters that the file fills.
    """
    if missing > max(4 * held, _FEW_PARAMETERS):
        raise ValueError(
            f"config.json asks for a model of {held + missing:,} parameters, and the weights file holds {held:,} of "
            "them: the two do not belong together. To enlarge a model that far, make it with from_config and copy the "
            "weights yourself."
        )


# ---------------------------------------------------------------------------------------- checks

_Rules = list[tuple[str, Callable[[Any], bool], tuple[str, ...]]]


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < math.inf


def _is_floating_dtype(value: Any) -> bool:
    dtype = getattr(torch, value, None) if isinstance(value, str) else value
    return isinstance(dtype, torch.dtype) and dtype.is_floating_point


def _is_auto_map(value: Any) -> bool:
    # A tokenizer has two references, either of them None.
    return isinstance(value, dict) and all(isinstance(reference, (str, list, tuple)) for reference in value.values())


def _apply(rules: _Rules, fields: Mapping[str, Any]) -> None:
    for rule, holds, names in rules:
        for name in names:
            if name in fields and not holds(fields[name]):
                raise ValueError(f"{name}={fields[name]!r:.80} is not valid: {name} must be {rule}.")


_SIZES = (
    "vocab_size",
    "decoder_vocab_size",
    "d_model",
    "encoder_layers",
    "decoder_layers",
    "encoder_attention_heads",
    "decoder_attention_heads",
    "encoder_ffn_dim",
    "decoder_ffn_dim",
    "max_position_embeddings",
)
_HEAD_SIZES = ("d_k", "d_v")
_FIELD_RULES: _Rules = [
    ("a positive integer", lambda v: _is_int(v) and v > 0, _SIZES),
    ("a positive integer or None", lambda v: v is None or (_is_int(v) and v > 0), _HEAD_SIZES),
    ("an integer of at least 0", lambda v: _is_int(v) and v >= 0, ("position_offset", "decoder_start_token_id")),
    ("an integer of at least 0 or None", lambda v: v is None or (_is_int(v) and v >= 0), ("bos_token_id",)),
    ("an integer of at least 0", lambda v: _is_int(v) and v >= 0, ("pad_token_id",)),
    (
        "an integer of at least 0, a list of such integers, or None",
        lambda v: v is None or all(_is_int(i) and i >= 0 for i in (v if isinstance(v, list) else [v])),
        ("eos_token_id",),
    ),
    (
        "a probability in [0, 1)",
        lambda v: _is_number(v) and 0 <= v < 1,
        ("dropout", "attention_dropout", "activation_dropout", "label_smoothing"),
    ),
    ("a positive number", lambda v: _is_number(v) and v > 0, ("layer_norm_eps",)),
    ("a positive number or None", lambda v: v is None or (_is_number(v) and v > 0), ("init_std",)),
    (
        "true or false",
        lambda v: isinstance(v, bool),
        (
            "scale_embedding",
            "attention_bias",
            "output_bias",
            "share_encoder_decoder_embeddings",
            "tie_word_embeddings",
            "use_cache",
        ),
    ),
    ("true, false or None", lambda v: v is None or isinstance(v, bool), ("final_norm",)),
    (f"one of {NORM_POSITIONS}", lambda v: v in NORM_POSITIONS, ("norm_position",)),
    (
        f"one of {POSITION_EMBEDDING_TYPES}",
        lambda v: v in POSITION_EMBEDDING_TYPES,
        ("position_embedding_type",),
    ),
    (
        f"one of {SINUSOID_LAYOUTS} or None",
        lambda v: v is None or v in SINUSOID_LAYOUTS,
        ("sinusoid_layout",),
    ),
    (
        f"a name of transformers.activations.ACT2FN: {', '.join(sorted(ACT2FN))}",
        lambda v: isinstance(v, str) and v in ACT2FN,
        ("activation_function",),
    ),
]
# The library's own fields, where a wrong value does harm: it takes them in silence, or fails far from the cause.
_LIBRARY_RULES: _Rules = [
    ("true: this is an encoder-decoder model", lambda v: v is True, ("is_encoder_decoder",)),
    ("a floating-point dtype of torch, such as 'float32'", _is_floating_dtype, ("dtype", "torch_dtype")),
    (f"an integer from 0 to {_MOST_LABELS}", lambda v: _is_int(v) and 0 <= v <= _MOST_LABELS, ("num_labels",)),
    (
        "a dict of label names by their numbers",
        lambda v: isinstance(v, dict) and all(str(key).isdecimal() for key in v),
        ("id2label",),
    ),
    ("a dict of class references", _is_auto_map, ("auto_map",)),
    ("a dict", lambda v: isinstance(v, dict) or hasattr(v, "to_dict"), ("quantization_config",)),
    ("a dict", lambda v: isinstance(v, dict), ("task_specific_params",)),
    ("a string", lambda v: isinstance(v, str), ("prefix",)),
]


def _check_fields(config: VanillaTransformerConfig) -> None:
    fields = {name: getattr(config, name) for _, _, names in _FIELD_RULES for name in names}
    _apply(_FIELD_RULES, fields)
    for name, value in fields.items():
        for number in value if isinstance(value, list) else [value]:
            if _is_int(number) and number > _LARGEST_INTEGER:
                raise ValueError(f"{name}={value!r:.80} is too large: {name} can be {_LARGEST_INTEGER} at most.")


def _check_library_fields(cls: type[VanillaTransformerConfig], fields: dict[str, Any]) -> None:
    for name, value in fields.items():
        own = getattr(cls, name, None)
        is_of_class = callable(own) or isinstance(own, (dict, list, tuple))
        is_read_only = isinstance(own, property) and own.fset is None
        if is_of_class or is_read_only or name in _PRIVATE or name.startswith("__"):
            raise ValueError(f"{name}={value!r:.80} is not valid: {name} is not a field of a configuration.")
    _apply(_LIBRARY_RULES, {name: value for name, value in fields.items() if value is not None})


def _check_limits(config: VanillaTransformerConfig) -> None:
    limits = type(config)  # the class's, which a config.json cannot change
    for name in ("encoder_layers", "decoder_layers"):
        if getattr(config, name) > limits.max_layers:
            raise ValueError(
                f"{name}={getattr(config, name)} is more than the {limits.max_layers:,} layers that a stack may have. "
                "If it is meant, raise VanillaTransformerConfig.max_layers first."
            )
    total = config.num_trainable_parameters()
    if total > limits.max_parameters:
        sizes = ", ".join(f"{name}={getattr(config, name)}" for name in (*_SIZES, *_HEAD_SIZES, "position_offset"))
        raise ValueError(
            f"{sizes} make {total:,} parameters, more than the {limits.max_parameters:,} that a model may have. If "
            "they are meant, raise VanillaTransformerConfig.max_parameters first."
        )


def _check_combinations(config: VanillaTransformerConfig) -> None:
    for side in ("encoder", "decoder"):
        heads = getattr(config, f"{side}_attention_heads")
        if config.d_model % heads and (config.d_k is None or config.d_v is None):
            raise ValueError(
                f"d_model={config.d_model} is not divisible by {side}_attention_heads={heads}: choose a divisor of "
                "d_model, or set d_k and d_v yourself."
            )
    if config.position_embedding_type == "learned":
        if config.sinusoid_layout is not None:
            raise ValueError(
                f"sinusoid_layout={config.sinusoid_layout!r} has no meaning with position_embedding_type='learned': "
                "leave it None."
            )
    elif config.d_model % 2:
        raise ValueError(
            f"d_model={config.d_model} is odd: sinusoidal positions pair a sine with a cosine. Choose an even "
            "d_model, or position_embedding_type='learned'."
        )
    if config.position_embedding_type == "sinusoidal_tensor2tensor" and config.d_model < 4:
        raise ValueError(
            f"d_model={config.d_model} is too small for position_embedding_type='sinusoidal_tensor2tensor', which "
            "divides by d_model/2 - 1: choose at least 4."
        )
    if config.share_encoder_decoder_embeddings and config.decoder_vocab_size != config.vocab_size:
        raise ValueError(
            f"decoder_vocab_size={config.decoder_vocab_size} differs from vocab_size={config.vocab_size}, and "
            "share_encoder_decoder_embeddings=True needs one vocabulary: leave decoder_vocab_size None, or set "
            "share_encoder_decoder_embeddings=False."
        )


# The class then writes its file beside every config.json that it saves.
VanillaTransformerConfig.register_for_auto_class()
