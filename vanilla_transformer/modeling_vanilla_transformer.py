"""The Transformer of "Attention Is All You Need" (Vaswani et al. 2017, arXiv 1706.03762), sections cited in place.

Axes in shape comments: B batch, S source tokens, T target tokens, P tokens already in the cache, D d_model, H heads,
K d_k, F d_ff, V vocabulary. In every attention mask 1 or True means: attend.
"""

from __future__ import annotations

import warnings
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import (
    BaseModelOutput,
    BaseModelOutputWithPastAndCrossAttentions,
    Seq2SeqLMOutput,
    Seq2SeqModelOutput,
)
from transformers.utils import can_return_tuple, logging

from .attention_vanilla_transformer import (
    CACHE_NAME,
    VanillaTransformerAttention,
    add_positions,
    causal_attention_mask,
    make_positions,
    padding_attention_mask,
)
from .beam_decoder_vanilla_transformer import SharedBeamDecoder  # noqa: F401 - so that the file ships with a checkpoint
from .beam_search_vanilla_transformer import BeamSearch  # noqa: F401 - likewise
from .configuration_vanilla_transformer import VanillaTransformerConfig
from .dropout_vanilla_transformer import dropout
from .generation_vanilla_transformer import PaperGenerationMixin, set_generation_defaults
from .length_limits_vanilla_transformer import pad_behind_end  # noqa: F401 - likewise
from .loss_vanilla_transformer import IGNORE_INDEX, cross_entropy_sum, label_smoothed_loss, token_count
from .parallel_vanilla_transformer import map_in_threads  # noqa: F401 - likewise
from .pipeline_vanilla_transformer import TranslationPipeline  # noqa: F401 - likewise
from .pretrained_vanilla_transformer import VanillaTransformerPreTrainedModel, tensor_parallel_plan
from .projection_vanilla_transformer import Projection  # noqa: F401 - likewise

logger = logging.get_logger(__name__)


# ---------------------------------------------------------------------------------------- layers (sections 3.1, 3.3)


class _TransformerLayer(GradientCheckpointingLayer):
    """What both kinds of layer share: residual connections around sublayers, and the feed-forward sublayer."""

    def __init__(self, config: VanillaTransformerConfig, ffn_dim: int) -> None:
        super().__init__()
        self.is_pre_norm = config.norm_position == "pre"
        self.dropout = config.dropout
        self.activation_dropout = config.activation_dropout
        self.activation_fn = ACT2FN[config.activation_function]
        self.self_attn_layer_norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)
        self.fc1 = nn.Linear(config.d_model, ffn_dim)
        self.fc2 = nn.Linear(ffn_dim, config.d_model)
        self.final_layer_norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)

    def sublayer_input(self, hidden_states: Tensor, norm: nn.Module) -> Tensor:
        """Post-norm (the paper): x. Pre-norm: LayerNorm(x)."""
        return norm(hidden_states) if self.is_pre_norm else hidden_states

    def add_and_norm(self, residual: Tensor, sublayer_output: Tensor, norm: nn.Module) -> Tensor:
        """Post-norm (the paper): LayerNorm(x + Dropout(Sublayer(x))). Pre-norm: x + Dropout(Sublayer(Norm(x)))."""
        hidden_states = residual + dropout(sublayer_output, self.dropout, self.training)
        return hidden_states if self.is_pre_norm else norm(hidden_states)

    def feed_forward(self, hidden_states: Tensor) -> Tensor:
        """FFN(x) = max(0, x W_1 + b_1) W_2 + b_2 (section 3.3), as a residual sublayer."""
        inner = self.activation_fn(self.fc1(self.sublayer_input(hidden_states, self.final_layer_norm)))  # [B, T, F]
        inner = dropout(inner, self.activation_dropout, self.training)
        return self.add_and_norm(hidden_states, self.fc2(inner), self.final_layer_norm)


class VanillaTransformerEncoderLayer(_TransformerLayer):
    """Self-attention, then feed-forward (section 3.1)."""

    def __init__(self, config: VanillaTransformerConfig, layer_idx: int) -> None:
        super().__init__(config, config.encoder_ffn_dim)
        self.self_attn = VanillaTransformerAttention(config, config.encoder_attention_heads, layer_idx)

    def forward(
        self, hidden_states: Tensor, attention_mask: Any, output_attentions: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Map [B, S, D] to [B, S, D] and the attention weights, if asked for."""
        states = self.sublayer_input(hidden_states, self.self_attn_layer_norm)
        attended, weights = self.self_attn(states, attention_mask, output_attentions=output_attentions)
        hidden_states = self.add_and_norm(hidden_states, attended, self.self_attn_layer_norm)
        return self.feed_forward(hidden_states), weights


class VanillaTransformerDecoderLayer(_TransformerLayer):
    """Causal self-attention, attention over the encoder's output, then feed-forward (section 3.1)."""

    def __init__(self, config: VanillaTransformerConfig, layer_idx: int) -> None:
        super().__init__(config, config.decoder_ffn_dim)
        heads = config.decoder_attention_heads
        self.self_attn = VanillaTransformerAttention(config, heads, layer_idx, is_causal=True)
        self.encoder_attn = VanillaTransformerAttention(config, heads, layer_idx)
        self.encoder_attn_layer_norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        attention_mask: Any,
        encoder_attention_mask: Any,
        cache: EncoderDecoderCache | None = None,
        output_attentions: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Map [B, T, D] to [B, T, D], the self-attention and the cross-attention weights, if asked for."""
        states = self.sublayer_input(hidden_states, self.self_attn_layer_norm)
        attended, self_weights = self.self_attn(
            states, attention_mask, cache=cache, output_attentions=output_attentions
        )
        hidden_states = self.add_and_norm(hidden_states, attended, self.self_attn_layer_norm)

        states = self.sublayer_input(hidden_states, self.encoder_attn_layer_norm)
        attended, cross_weights = self.encoder_attn(
            states, encoder_attention_mask, encoder_hidden_states, cache=cache, output_attentions=output_attentions
        )
        hidden_states = self.add_and_norm(hidden_states, attended, self.encoder_attn_layer_norm)
        return self.feed_forward(hidden_states), self_weights, cross_weights


# ---------------------------------------------------------------------------------------- models


class VanillaTransformerEncoder(VanillaTransformerPreTrainedModel):
    """N encoder layers over embeddings and positions."""

    _tp_plan: ClassVar[dict[str, str]] = tensor_parallel_plan("self_attn")

    def __init__(self, config: VanillaTransformerConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.d_model)
        self.embed_positions = make_positions(config)
        self.layers = nn.ModuleList(
            VanillaTransformerEncoderLayer(config, index) for index in range(config.encoder_layers)
        )
        self.layer_norm = _final_norm(config)
        self.gradient_checkpointing = False
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutput:
        """Encode a source.

        Args:
            input_ids: Source tokens [B, S].
            attention_mask: 1 for real tokens, 0 for padding [B, S].
            inputs_embeds: Embeddings in place of `input_ids`, unscaled, [B, S, D].
            output_attentions: Return attention weights, [B, H, S, S] a layer.
            output_hidden_states: Return the embedding sum and each layer's output, N + 1 tensors [B, S, D].
            **kwargs: The library's further arguments, unused.

        Returns:
            `last_hidden_state` [B, S, D], and what was asked for.
        """
        output_attentions = _output_attentions(self.config, output_attentions)
        embeddings = _embed(self.embed_tokens, input_ids, inputs_embeds, "input_ids", "inputs_embeds")
        hidden_states = add_positions(embeddings, self.embed_positions, self.config, attention_mask)
        hidden_states = dropout(hidden_states, self.config.dropout, self.training)
        mask = padding_attention_mask(self.config, hidden_states, attention_mask, hidden_states)

        all_states, all_weights = [hidden_states], []
        for layer in self.layers:
            hidden_states, weights = layer(hidden_states, mask, output_attentions)
            all_states.append(hidden_states)
            all_weights.append(weights)
        hidden_states = all_states[-1] = self.layer_norm(hidden_states)
        return BaseModelOutput(
            last_hidden_state=hidden_states,
            hidden_states=_if_asked(self.config.output_hidden_states, output_hidden_states, all_states),
            attentions=tuple(all_weights) if output_attentions else None,
        )


class VanillaTransformerDecoder(VanillaTransformerPreTrainedModel):
    """N decoder layers over embeddings and positions, attending to the encoder's output."""

    _tp_plan: ClassVar[dict[str, str]] = tensor_parallel_plan("self_attn", "encoder_attn")

    def __init__(self, config: VanillaTransformerConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.decoder_vocab_size, config.d_model)
        self.embed_positions = make_positions(config)
        self.layers = nn.ModuleList(
            VanillaTransformerDecoderLayer(config, index) for index in range(config.decoder_layers)
        )
        self.layer_norm = _final_norm(config)
        self.gradient_checkpointing = False
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPastAndCrossAttentions:
        """Decode target tokens against an encoded source.

        Args:
            input_ids: Target tokens, shifted right, [B, T]; with a cache only those that are not in it.
            attention_mask: 1 for real target tokens [B, P + T].
            encoder_hidden_states: The encoder's output [B, S, D].
            encoder_attention_mask: 1 for real source tokens [B, S].
            cache: Keys and values of the P tokens before.
            inputs_embeds: Embeddings in place of `input_ids`, unscaled, [B, T, D].
            use_cache: Return a cache for the next step; the default is the config's.
            output_attentions: Return self-attention [B, H, T, P + T] and cross-attention weights [B, H, T, S].
            output_hidden_states: Return the embedding sum and each layer's output, N + 1 tensors [B, T, D].
            past_key_values: Older name of `cache`.
            **kwargs: The library's further arguments, unused.

        Returns:
            `last_hidden_state` [B, T, D], the cache, and what was asked for.
        """
        if encoder_hidden_states is None:
            raise ValueError(
                "The decoder needs `encoder_hidden_states`: a decoder alone is not a model of this class."
            )
        output_attentions = _output_attentions(self.config, output_attentions)
        embeddings = _embed(self.embed_tokens, input_ids, inputs_embeds, "decoder_input_ids", "decoder_inputs_embeds")
        cache = self._prepare_cache(_one_cache(cache, past_key_values), use_cache)
        past_length = 0 if cache is None else cache.get_seq_length()
        hidden_states = add_positions(embeddings, self.embed_positions, self.config, attention_mask, past_length)
        hidden_states = dropout(hidden_states, self.config.dropout, self.training)
        self_mask = causal_attention_mask(self.config, hidden_states, attention_mask, cache, past_length)
        cross_mask = padding_attention_mask(self.config, hidden_states, encoder_attention_mask, encoder_hidden_states)

        all_states, all_self, all_cross = [hidden_states], [], []
        for layer in self.layers:
            hidden_states, self_weights, cross_weights = layer(
                hidden_states, encoder_hidden_states, self_mask, cross_mask, cache, output_attentions
            )
            all_states.append(hidden_states)
            all_self.append(self_weights)
            all_cross.append(cross_weights)
        hidden_states = all_states[-1] = self.layer_norm(hidden_states)
        return BaseModelOutputWithPastAndCrossAttentions(
            last_hidden_state=hidden_states,
            hidden_states=_if_asked(self.config.output_hidden_states, output_hidden_states, all_states),
            attentions=tuple(all_self) if output_attentions else None,
            cross_attentions=tuple(all_cross) if output_attentions else None,
            **{CACHE_NAME: cache},
        )

    def _prepare_cache(self, cache: Cache | None, use_cache: bool | None) -> EncoderDecoderCache | None:
        if self.gradient_checkpointing and self.training:
            if use_cache or cache is not None:
                logger.warning_once("Gradient checkpointing recomputes each layer and cannot fill a cache: no cache.")
            return None
        if cache is None:
            wanted = self.config.use_cache if use_cache is None else use_cache
            return EncoderDecoderCache(DynamicCache(), DynamicCache()) if wanted else None
        if isinstance(cache, EncoderDecoderCache):
            return cache
        return EncoderDecoderCache(cache, DynamicCache())


class VanillaTransformerModel(VanillaTransformerPreTrainedModel):
    """Encoder and decoder without the output projection (Figure 1 up to the last linear layer)."""

    _tp_plan: ClassVar[dict[str, str]] = {"shared": "embedding_rowwise"}

    def __init__(self, config: VanillaTransformerConfig) -> None:
        super().__init__(config)
        if config.share_encoder_decoder_embeddings:
            self.shared = nn.Embedding(config.vocab_size, config.d_model)
        self.encoder = VanillaTransformerEncoder(config)
        self.decoder = VanillaTransformerDecoder(config)
        self.post_init()
        if not config.share_encoder_decoder_embeddings:
            self._tp_plan.pop("shared", None)  # `post_init` made this model's own copy of the plan

    @property
    def _tied_weights_keys(self) -> dict[str, str] | None:
        if not self.config.share_encoder_decoder_embeddings:
            return None
        return {f"{side}.embed_tokens.weight": "shared.weight" for side in ("encoder", "decoder")}

    def get_input_embeddings(self) -> nn.Module:
        """Return the shared embeddings, or the source's where the vocabularies are separate."""
        return self.shared if self.config.share_encoder_decoder_embeddings else self.encoder.embed_tokens

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        """Set the shared embeddings, or the source's where the vocabularies are separate."""
        self.encoder.embed_tokens = value
        if self.config.share_encoder_decoder_embeddings:
            self.shared = value
            self.decoder.embed_tokens = value

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: BaseModelOutput | tuple[Tensor, ...] | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        decoder_inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> Seq2SeqModelOutput:
        """Encode a source and decode a target against it.

        Args:
            input_ids: Source tokens [B, S].
            attention_mask: 1 for real source tokens, 0 for padding [B, S].
            decoder_input_ids: Target tokens, shifted right, [B, T]. Without any, the source shifted right is taken (as
                BART does), for code that wants features from `input_ids` alone.
            decoder_attention_mask: 1 for real target tokens [B, P + T].
            encoder_outputs: A ready encoder output in place of `input_ids`.
            cache: Keys and values of the P tokens before.
            inputs_embeds: Source embeddings in place of `input_ids`, unscaled, [B, S, D].
            decoder_inputs_embeds: Target embeddings in place of `decoder_input_ids`, unscaled, [B, T, D].
            use_cache: Return a cache for the next step; the default is the config's.
            output_attentions: Return all attention weights.
            output_hidden_states: Return all layers' outputs.
            past_key_values: Older name of `cache`.
            **kwargs: The library's further arguments, unused; `return_dict=False` gives a tuple.

        Returns:
            `last_hidden_state` [B, T, D], the cache, the encoder's output, and what was asked for.
        """
        asked = {"output_attentions": output_attentions, "output_hidden_states": output_hidden_states}
        encoded: Any = encoder_outputs
        if encoded is None:
            encoded = self.encoder(input_ids, attention_mask, inputs_embeds, return_dict=True, **asked)
        elif isinstance(encoded, (tuple, list)):
            encoded = BaseModelOutput(*encoded)
        if decoder_input_ids is None and decoder_inputs_embeds is None:
            decoder_input_ids = self._decoder_input_ids_from_source(input_ids)
        decoded = self.decoder(
            decoder_input_ids,
            decoder_attention_mask,
            encoded.last_hidden_state,
            attention_mask,
            _one_cache(cache, past_key_values),
            decoder_inputs_embeds,
            use_cache,
            return_dict=True,
            **asked,
        )
        return Seq2SeqModelOutput(
            last_hidden_state=decoded.last_hidden_state,
            decoder_hidden_states=decoded.hidden_states,
            decoder_attentions=decoded.attentions,
            cross_attentions=decoded.cross_attentions,
            encoder_last_hidden_state=encoded.last_hidden_state,
            encoder_hidden_states=encoded.hidden_states,
            encoder_attentions=encoded.attentions,
            **{CACHE_NAME: decoded.get(CACHE_NAME)},
        )

    def _decoder_input_ids_from_source(self, input_ids: Tensor | None) -> Tensor:
        if input_ids is None or not self.config.share_encoder_decoder_embeddings:
            raise ValueError(
                "The decoder has no input: pass decoder_input_ids or decoder_inputs_embeds. "
                "Only a shared vocabulary and given input_ids allow to take the source for it."
            )
        return shift_tokens_right(input_ids, self.config.pad_token_id, self.config.decoder_start_token_id)


class VanillaTransformerForConditionalGeneration(PaperGenerationMixin, VanillaTransformerPreTrainedModel):
    """The whole Transformer: logits = decoder output · Eᵀ (section 3.4), the loss, and `generate()`.

    `generate()` decodes as the paper does by default: beam 4, ranked with α = 0.6 (`generation_config.gnmt_alpha`),
    and at most source length + 50 tokens for each sentence (`generation_config.max_length_offset`), so that the other
    sentences of a batch never change a result. An explicit `length_penalty` selects the library's ranking, an explicit
    `max_length` or `max_new_tokens` takes the cap's place.

    Example:
        >>> from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
        >>> model = VanillaTransformerForConditionalGeneration(VanillaTransformerConfig.tiny())
        >>> model.num_parameters() == model.config.num_trainable_parameters()
        True
    """

    final_logits_bias: nn.Parameter | None
    _tp_plan: ClassVar[dict[str, str]] = {"lm_head": "colwise_gather_output"}

    def __init__(self, config: VanillaTransformerConfig) -> None:
        super().__init__(config)
        self.model = VanillaTransformerModel(config)
        self.lm_head = nn.Linear(config.d_model, config.decoder_vocab_size, bias=False)
        bias = nn.Parameter(torch.zeros(1, config.decoder_vocab_size)) if config.output_bias else None
        self.register_parameter("final_logits_bias", bias)
        self.post_init()
        set_generation_defaults(self.generation_config)

    @property
    def _tied_weights_keys(self) -> dict[str, str] | None:
        keys = {
            f"model.{target}": f"model.{source}" for target, source in (self.model._tied_weights_keys or {}).items()
        }
        if self.config.tie_word_embeddings:
            shared = self.config.share_encoder_decoder_embeddings
            keys["lm_head.weight"] = "model.shared.weight" if shared else "model.decoder.embed_tokens.weight"
        return keys or None

    def get_output_embeddings(self) -> nn.Module:
        """Return the output projection."""
        return self.lm_head

    def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
        """Set the output projection."""
        self.lm_head = new_embeddings

    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Embedding:
        """Resize the shared vocabulary, or the source's where the vocabularies are separate; as in the library.

        Raises:
            ValueError: The padding or start token would be outside the new vocabulary.
        """
        if not self.config.share_encoder_decoder_embeddings:
            return self.model.resize_token_embeddings(new_num_tokens, pad_to_multiple_of, mean_resizing)
        embeddings: nn.Embedding = super().resize_token_embeddings(new_num_tokens, pad_to_multiple_of, mean_resizing)
        self._finish_resizing()
        return embeddings

    def resize_decoder_token_embeddings(
        self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Embedding:
        """Resize the target vocabulary where it is separate; the arguments are those of `resize_token_embeddings`.

        Raises:
            ValueError: The vocabulary is shared, or the padding or start token would be outside the new one.
        """
        if self.config.share_encoder_decoder_embeddings:
            raise ValueError("Source and target share their vocabulary here: call resize_token_embeddings instead.")
        self.config.check_token_ids(decoder_vocab_size=new_num_tokens)
        # The two resizing methods are the library's own, not public (5.0 to 5.24); MarianMTModel uses them likewise.
        decoder = self.model.decoder
        decoder.embed_tokens = self._get_resized_embeddings(
            decoder.embed_tokens, new_num_tokens, pad_to_multiple_of, mean_resizing
        )
        size = self.config.decoder_vocab_size = decoder.embed_tokens.num_embeddings
        self.lm_head = self._get_resized_lm_head(self.lm_head, size, mean_resizing=mean_resizing)
        self.tie_weights()
        self._finish_resizing()
        return decoder.embed_tokens

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        """Save as the library does; config.json says that the output projection is tied if it is.

        PEFT (seen in 0.21), after merging adapters, takes a projection tied to target embeddings of their own for
        untied, and writes that into the config: loading would then find no weights for it.
        """
        weights = [getattr(module, "weight", None) for module in (self.lm_head, self.model.decoder.embed_tokens)]
        if weights[0] is not None and weights[0] is weights[1]:
            self.config.tie_word_embeddings = True
        super().save_pretrained(*args, **kwargs)

    def _finish_resizing(self) -> None:
        self.lm_head.out_features = self.config.decoder_vocab_size  # 5.0 forgets it where the weight is tied
        if self.final_logits_bias is not None:
            old = self.final_logits_bias
            bias = nn.functional.pad(old.detach(), (0, self.config.decoder_vocab_size - old.shape[1]))
            self.final_logits_bias = nn.Parameter(bias, old.requires_grad)

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        """Return `labels` [B, T] shifted right behind the start token, padding in place of -100."""
        return shift_tokens_right(labels, self.config.pad_token_id, self.config.decoder_start_token_id)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: BaseModelOutput | tuple[Tensor, ...] | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        decoder_inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        past_key_values: Cache | None = None,
        num_items_in_batch: Tensor | int | None = None,
        return_logits: bool | None = None,
        **kwargs: Any,
    ) -> Seq2SeqLMOutput:
        """Compute logits and, with `labels`, the loss.

        In training mode the loss is label-smoothed (`config.label_smoothing`), computed without the full logits, and
        `logits` is None unless `return_logits=True`. In evaluation mode it is the plain negative log-likelihood, so
        that exp(loss) is a perplexity, and logits are returned. Both are means over the tokens that are not -100, or
        sums divided by `num_items_in_batch`.

        Args:
            input_ids: Source tokens [B, S].
            attention_mask: 1 for real source tokens, 0 for padding [B, S].
            decoder_input_ids: Target tokens, shifted right, [B, T]; made from `labels` if not given.
            decoder_attention_mask: 1 for real target tokens [B, P + T].
            encoder_outputs: A ready encoder output in place of `input_ids`.
            cache: Keys and values of the P tokens before.
            inputs_embeds: Source embeddings in place of `input_ids`, unscaled, [B, S, D].
            decoder_inputs_embeds: Target embeddings in place of `decoder_input_ids`, unscaled, [B, T, D].
            labels: Target tokens [B, T], -100 where there is no loss. Not shifted by the caller.
            use_cache: Return a cache for the next step; with `labels` the default is False, else the config's.
            output_attentions: Return all attention weights.
            output_hidden_states: Return all layers' outputs.
            past_key_values: Older name of `cache`.
            num_items_in_batch: Real target tokens of the whole update, as the Trainer passes it.
            return_logits: Return logits also in training mode with `labels`.
            **kwargs: The library's further arguments, unused; `return_dict=False` gives a tuple.

        Returns:
            `loss` (scalar), `logits` [B, T, V], the cache, and what was asked for.
        """
        if labels is not None:
            use_cache = bool(use_cache)
        if decoder_input_ids is None and decoder_inputs_embeds is None:
            if labels is None:
                raise ValueError(
                    "The decoder has no input: pass labels, decoder_input_ids or decoder_inputs_embeds. (Under "
                    "label_smoothing_factor the library's Trainer takes the labels away: give its collator the model, "
                    "DataCollatorForSeq2Seq(tokenizer, model=model), or smooth by config.label_smoothing.)"
                )
            decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
        outputs = self.model(
            input_ids,
            attention_mask,
            decoder_input_ids,
            decoder_attention_mask,
            encoder_outputs,
            _one_cache(cache, past_key_values),
            inputs_embeds,
            decoder_inputs_embeds,
            use_cache,
            output_attentions,
            output_hidden_states,
            return_dict=True,
        )
        hidden_states = outputs.last_hidden_state
        loss = logits = None
        if labels is None or not self.training or return_logits:
            logits = self.lm_head(hidden_states)  # [B, T, V]
            if self.final_logits_bias is not None:
                logits = logits + self.final_logits_bias
        if labels is not None:
            loss = self._loss(hidden_states, logits, labels, num_items_in_batch)
        fields = {name: value for name, value in outputs.items() if name != "last_hidden_state"}
        return Seq2SeqLMOutput(loss=loss, logits=logits, **fields)

    def _loss(
        self, hidden_states: Tensor, logits: Tensor | None, labels: Tensor, num_items_in_batch: Tensor | int | None
    ) -> Tensor:
        if self.training or logits is None:
            return label_smoothed_loss(
                hidden_states,
                self.lm_head,
                labels,
                label_smoothing=self.config.label_smoothing,
                bias=self.final_logits_bias,
                num_items_in_batch=num_items_in_batch,
            )
        labels = labels.reshape(-1).to(logits.device)
        total = cross_entropy_sum(logits.reshape(-1, logits.shape[-1]), labels)
        return total / token_count(labels, num_items_in_batch)


# ---------------------------------------------------------------------------------------- small parts


def shift_tokens_right(labels: Tensor, pad_token_id: int, decoder_start_token_id: int) -> Tensor:
    """Return the decoder's input for `labels` [B, T]: the start token, then all but the last label; -100 → padding."""
    shifted = labels.roll(1, dims=-1)
    shifted[:, 0] = decoder_start_token_id
    return shifted.masked_fill(shifted == IGNORE_INDEX, pad_token_id)


def _final_norm(config: VanillaTransformerConfig) -> nn.Module:
    """Pre-norm leaves a stack's sum unnormalised and so ends with a LayerNorm; the paper's post-norm has none."""
    if config.has_final_norm:
        return nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)
    return nn.Identity()


def _embed(
    embed_tokens: nn.Module, input_ids: Tensor | None, inputs_embeds: Tensor | None, ids_name: str, embeds_name: str
) -> Tensor:
    if (input_ids is None) == (inputs_embeds is None):
        raise ValueError(f"Pass exactly one of {ids_name} and {embeds_name}.")
    return embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds


def _one_cache(cache: Cache | None, past_key_values: Cache | None) -> Cache | None:
    """Return the cache under whichever name it came; both names work on every release of the library."""
    if past_key_values is None:
        return cache
    if CACHE_NAME == "cache":
        warnings.warn("`past_key_values` is deprecated, use `cache`.", FutureWarning, stacklevel=3)
    return past_key_values if cache is None else cache


def _output_attentions(config: VanillaTransformerConfig, asked: bool | None) -> bool:
    """Return whether to return attention weights; "sdpa" then computes them the eager way for this call."""
    wanted = bool(config.output_attentions if asked is None else asked)
    if wanted and config._attn_implementation not in (None, "eager", "sdpa"):
        raise ValueError(
            f"output_attentions=True: attn_implementation={config._attn_implementation!r} computes no attention "
            "weights. Load the model with attn_implementation='eager' or 'sdpa', or call "
            "model.set_attn_implementation('eager')."
        )
    return wanted


def _if_asked(default: bool | None, asked: bool | None, states: list[Tensor]) -> tuple[Tensor, ...] | None:
    return tuple(states) if (default if asked is None else asked) else None


VanillaTransformerModel.register_for_auto_class("AutoModel")
VanillaTransformerForConditionalGeneration.register_for_auto_class("AutoModelForSeq2SeqLM")
