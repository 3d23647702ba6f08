"""What the library needs to know of the models here: initialisation, ties, resizing, sharding, adapters.

The models themselves are in `modeling_vanilla_transformer.py`; whoever reads that beside the paper can leave this out.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .configuration_vanilla_transformer import VanillaTransformerConfig, check_missing_weights


class VanillaTransformerPreTrainedModel(PreTrainedModel):
    """Initialisation, and what the library needs to know of all classes here."""

    config_class = VanillaTransformerConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    _no_split_modules: ClassVar[list[str]] = ["VanillaTransformerEncoderLayer", "VanillaTransformerDecoderLayer"]

    def __init__(self, config: VanillaTransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        config.check()  # again: fields may have changed since, also by `from_pretrained(folder, d_model=...)`

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; the embeddings and the output projection are looked at for adapters."""
        if name in ("shared", "embed_tokens", "lm_head"):
            _prepare_for_adapter(name, value)
        super().__setattr__(name, value)

    def _init_weights(self, module: nn.Module) -> None:
        """Xavier-uniform weights, zero biases, embeddings normal with std d_model^-0.5, as tensor2tensor.

        With `config.init_std` weights and embeddings are normal with that std.
        """
        std = self.config.init_std
        # The functions of `nn.init` are guarded while a checkpoint loads: weights that came from it stay untouched.
        if isinstance(module, nn.Linear):
            if std is None:
                nn.init.xavier_uniform_(module.weight)
            else:
                nn.init.normal_(module.weight, std=std)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=self.config.d_model**-0.5 if std is None else std)
        elif isinstance(module, nn.LayerNorm):
            nn.init.ones_(module.weight)
            nn.init.zeros_(module.bias)
        bias = getattr(module, "final_logits_bias", None)
        if isinstance(bias, nn.Parameter):
            nn.init.zeros_(bias)

    def _move_missing_keys_from_meta_to_device(self, missing_keys: Any, *args: Any, **kwargs: Any) -> None:
        """Refuse a config that asks for far more than the weights file holds, before the library allocates it."""
        # The library's own, not public (5.0 to 5.24): up to here a model that loads takes no memory for what its file
        # lacks, or has in another shape. The library allocates both, and then complains of the second.
        sizes = {name: parameter.numel() for name, parameter in self.named_parameters(remove_duplicate=False)}
        missing = sum(sizes.get(name, 0) for name in set(missing_keys) - set(self.all_tied_weights_keys))
        held = sum(sizes[name] for name in set(sizes) - set(missing_keys))
        check_missing_weights(missing, held)
        super()._move_missing_keys_from_meta_to_device(missing_keys, *args, **kwargs)

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        """Return which parameter is tied to which.

        The library's own version ties nothing when `tie_word_embeddings` is False; whether source and target share
        their embeddings is a choice of its own here (`share_encoder_decoder_embeddings`).
        """
        if all_submodels:
            return super().get_expanded_tied_weights_keys(all_submodels=True)
        return dict(self._tied_weights_keys or {})

    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Embedding:
        """Resize as the library does, unless the padding or start token would be outside the new vocabulary."""
        shared = self.config.share_encoder_decoder_embeddings
        self.config.check_token_ids(new_num_tokens, new_num_tokens if shared else None)
        embeddings: nn.Embedding = super().resize_token_embeddings(new_num_tokens, pad_to_multiple_of, mean_resizing)
        self.config.vocab_size = embeddings.num_embeddings
        return embeddings

    @property
    def dummy_inputs(self) -> dict[str, Tensor]:
        """Two short sentences, for tools that trace the model."""
        input_ids = torch.tensor([[3, 4, 5, 1], [3, 4, 1, 0]], device=self.device)
        return {"input_ids": input_ids, "attention_mask": input_ids.ne(0), "decoder_input_ids": input_ids}


def tensor_parallel_plan(*attentions: str) -> dict[str, str]:
    """Return how several processes share a stack: by heads, by units of the feed-forward layers, by tokens.

    The names of the ways are the library's (seen in 5.24, where `from_pretrained(distributed_config=...)` reads them).
    """
    plan = {"embed_tokens": "embedding_rowwise", "layers.*.fc1": "colwise", "layers.*.fc2": "rowwise"}
    for attention in attentions:
        plan |= {f"layers.*.{attention}.{name}_proj": "colwise" for name in "qkv"}
        plan[f"layers.*.{attention}.out_proj"] = "rowwise"
    return plan


def _prepare_for_adapter(name: str, module: Any) -> None:
    """Make a matrix that is tied to others safe to be wrapped by an adapter of PEFT (seen in 0.21).

    PEFT merges a low-rank adapter in place: where the matrix is tied, into all its users, so that a merged model gives
    other outputs. The wrapper gets a copy of its own.

    Raises:
        ValueError: The adapter is on `shared`, which no forward pass calls.
    """
    if name == "shared" and (hasattr(module, "base_layer") or hasattr(module, "modules_to_save")):
        raise ValueError(
            "An adapter on 'shared' would do nothing: encoder and decoder call their own 'embed_tokens'. Name "
            "'embed_tokens' and 'lm_head' in target_modules or modules_to_save, without ensure_weight_tying, or train "
            "single tokens by trainable_token_indices."
        )
    weight = getattr(getattr(module, "base_layer", None), "weight", None)
    if isinstance(weight, nn.Parameter):
        module.base_layer.weight = nn.Parameter(weight.detach().clone(), weight.requires_grad)
