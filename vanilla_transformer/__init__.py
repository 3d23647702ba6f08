"""The Transformer of "Attention Is All You Need" as a first-class citizen of the Hugging Face stack.

Importing this package registers the model with the Auto classes and gives `transformers.pipeline` its translation,
summarisation and text-to-text tasks. It touches torch and transformers alone; everything else loads on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .configuration_vanilla_transformer import VanillaTransformerConfig
from .modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration, VanillaTransformerModel
from .pretrained_vanilla_transformer import VanillaTransformerPreTrainedModel
from .registration import register

if TYPE_CHECKING:
    from .averaging import ExponentialMovingAverageCallback, average_checkpoints
    from .batching import TokenBudgetBatchSampler
    from .checkpointing import CompleteCheckpointCallback
    from .corpus import encode_pairs, load_parallel_dataset, load_parallel_files
    from .dataloading import token_budget_dataloader
    from .distillation import distil_targets
    from .metrics import TranslationScore, build_compute_metrics
    from .monitoring import RunHistoryCallback, TroubleWarningCallback
    from .optimization import get_noam_schedule
    from .quantization import quantize_int8
    from .shrinking import head_importance, keep_layers, prune_heads, trim_vocabulary
    from .streaming import BpeDropoutPairs, TokenBudgetStream
    from .tokenizer_training import iterate_texts, save_tokenizer, train_tokenizer
    from .trainer import VanillaTransformerTrainer
    from .training_arguments import VanillaTransformerTrainingArguments
    from .translation import translate_sentences

__version__ = "0.1.0"

_LAZY = {
    "BpeDropoutPairs": "streaming",
    "CompleteCheckpointCallback": "checkpointing",
    "ExponentialMovingAverageCallback": "averaging",
    "RunHistoryCallback": "monitoring",
    "TokenBudgetBatchSampler": "batching",
    "TokenBudgetStream": "streaming",
    "TranslationScore": "metrics",
    "TroubleWarningCallback": "monitoring",
    "VanillaTransformerTrainer": "trainer",
    "VanillaTransformerTrainingArguments": "training_arguments",
    "average_checkpoints": "averaging",
    "build_compute_metrics": "metrics",
    "distil_targets": "distillation",
    "encode_pairs": "corpus",
    "get_noam_schedule": "optimization",
    "head_importance": "shrinking",
    "iterate_texts": "tokenizer_training",
    "keep_layers": "shrinking",
    "load_parallel_dataset": "corpus",
    "load_parallel_files": "corpus",
    "prune_heads": "shrinking",
    "quantize_int8": "quantization",
    "save_tokenizer": "tokenizer_training",
    "token_budget_dataloader": "dataloading",
    "train_tokenizer": "tokenizer_training",
    "translate_sentences": "translation",
    "trim_vocabulary": "shrinking",
}

__all__ = [
    "BpeDropoutPairs",
    "CompleteCheckpointCallback",
    "ExponentialMovingAverageCallback",
    "RunHistoryCallback",
    "TokenBudgetBatchSampler",
    "TokenBudgetStream",
    "TranslationScore",
    "TroubleWarningCallback",
    "VanillaTransformerConfig",
    "VanillaTransformerForConditionalGeneration",
    "VanillaTransformerModel",
    "VanillaTransformerPreTrainedModel",
    "VanillaTransformerTrainer",
    "VanillaTransformerTrainingArguments",
    "average_checkpoints",
    "build_compute_metrics",
    "distil_targets",
    "encode_pairs",
    "get_noam_schedule",
    "head_importance",
    "iterate_texts",
    "keep_layers",
    "load_parallel_dataset",
    "load_parallel_files",
    "prune_heads",
    "quantize_int8",
    "register",
    "save_tokenizer",
    "token_budget_dataloader",
    "train_tokenizer",
    "translate_sentences",
    "trim_vocabulary",
]


def __getattr__(name: str) -> Any:
    """Load the parts that training needs on first use (PEP 562)."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_LAZY[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})


register()
