"""The arguments of the paper's training recipe (section 5), checked before anything is spent on it."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import torch
from transformers import Seq2SeqTrainingArguments
from transformers.trainer_utils import SchedulerType
from transformers.utils import is_torch_bf16_gpu_available

PAPER_MAX_STEPS = 100_000
PAPER_MAX_TOKENS_PER_BATCH = 25_000

# Ends of the names of metrics of which a lower value is the better one.
LOWER_IS_BETTER = ("loss", "perplexity", "ter", "unended_percent", "copied_percent")

# What the library does if nothing is said; a value that differs was set by the user.
LIBRARY_DEFAULTS: dict[str, Any] = {f.name: f.default for f in fields(Seq2SeqTrainingArguments)}


@dataclass
class VanillaTransformerTrainingArguments(Seq2SeqTrainingArguments):
    """`Seq2SeqTrainingArguments` whose defaults are the paper's, plus its schedule and its batches.

    Everything the library's arguments offer is there; below is what is new or has another default. Where two settings
    contradict each other, or one would be without effect, a ValueError says so: nothing is silently ignored.

    Args:
        max_steps: Number of updates. If neither it nor `num_train_epochs` is given: 100,000, the paper's base model.
        num_train_epochs: Number of passes over the data, in place of `max_steps`: one of the two, not both.
        lr_schedule: "noam": the paper's, section 5.3, from `warmup_steps` and `noam_factor` or `peak_lr`. "library":
            the library's, from `learning_rate`, `lr_scheduler_type` and `warmup_steps`.
        warmup_steps: Number of updates over which the learning rate grows; below 1 a share of all updates.
        noam_factor: What the paper's learning rate is multiplied by; None is 1, unless `peak_lr` is given.
        peak_lr: The learning rate at the end of the warmup, in place of `noam_factor`: one of the two, not both.
        adam_beta1, adam_beta2, adam_epsilon: 0.9, 0.98 and 1e-9, as in the paper. With `weight_decay` 0 the
            library's AdamW is Adam.
        max_grad_norm: Where to clip the norm of the gradients; 0, as in the paper, not at all.
        max_tokens_per_batch: How many padded source tokens, and how many padded target tokens, one device's forward
            batch may hold. (The paper's 25,000 of each are spread over 8 GPUs.) None or 0: batches are counted in
            sentences, by `per_device_train_batch_size`. Under `torch.nn.DataParallel` (several GPUs, one process)
            it is the budget of all of them together.
        too_long: What to do with a training pair longer than `max_tokens_per_batch`: "error", or "drop", which
            counts them in the log.
        per_device_eval_batch_size: Sentences of an evaluation batch; sorted by length when they are translated.
        predict_with_generate: Whether evaluation translates, so that `compute_metrics` can give BLEU.
        eval_samples: How many of the translations of an evaluation go to the log, with source and reference.
        bf16: Whether to compute in bfloat16 mixed precision. None: if the processor does so natively: CUDA GPUs from
            Ampere on, ROCm, what the library knows of other accelerators (MPS apart), CPUs with AVX512-BF16, AMX or
            the Arm extension as far as torch can tell (`torch.cpu.get_capabilities`, torch >= 2.13; with an older
            torch a CPU computes in float32 unless told otherwise). On one core with AVX512-BF16 a training step of
            1,024 tokens took, against float32, 0.55 of the time at d_model 256 and 0.64 at 128.
        logging_nan_inf_filter: False: a loss that is not finite shows in the log. (The library puts the mean of the
            others in its place.)
        greater_is_better: By default False for a loss, also for a perplexity and TER, else True.
        ddp_find_unused_parameters: False: the model uses all its parameters, so the search is wasted time.
        label_smoothing_factor: Must stay 0: smoothing is the model's own (`config.label_smoothing`).

    Raises:
        ValueError: If a value is out of its range or two settings contradict each other.
    """

    max_steps: int = field(
        default=-1, metadata={"help": "Number of updates; without it and num_train_epochs 100,000 (paper, base)."}
    )
    num_train_epochs: float | None = field(
        default=None, metadata={"help": "Number of passes over the data, in place of max_steps."}
    )
    lr_schedule: Literal["noam", "library"] = field(
        default="noam",
        metadata={"help": "The paper's schedule, or the library's by learning_rate and lr_scheduler_type."},
    )
    warmup_steps: float = field(
        default=4000, metadata={"help": "Updates over which the learning rate grows; below 1: share of all updates."}
    )
    noam_factor: float | None = field(
        default=None, metadata={"help": "What the paper's learning rate is multiplied by (default 1)."}
    )
    peak_lr: float | None = field(
        default=None, metadata={"help": "The learning rate at the end of the warmup, in place of noam_factor."}
    )
    adam_beta1: float = field(default=0.9, metadata={"help": "Adam's beta1 (paper, section 5.3)."})
    adam_beta2: float = field(default=0.98, metadata={"help": "Adam's beta2 (paper, section 5.3)."})
    adam_epsilon: float = field(default=1e-9, metadata={"help": "Adam's epsilon (paper, section 5.3)."})
    weight_decay: float = field(default=0.0, metadata={"help": "AdamW's weight decay; 0 makes it Adam."})
    max_grad_norm: float = field(default=0.0, metadata={"help": "Norm to clip gradients at; 0: no clipping."})
    max_tokens_per_batch: int | None = field(
        default=PAPER_MAX_TOKENS_PER_BATCH,
        metadata={
            "help": "Padded source tokens, and padded target tokens, of one device's batch; "
            "0: batches of per_device_train_batch_size sentences."
        },
    )
    too_long: Literal["error", "drop"] = field(
        default="error", metadata={"help": "What to do with training pairs longer than max_tokens_per_batch."}
    )
    per_device_eval_batch_size: int = field(default=32, metadata={"help": "Sentences of an evaluation batch."})
    predict_with_generate: bool = field(default=True, metadata={"help": "Whether evaluation translates, for BLEU."})
    eval_samples: int = field(default=3, metadata={"help": "Translations of an evaluation that are logged as text."})
    bf16: bool | None = field(
        default=None, metadata={"help": "bfloat16 mixed precision (default: where the processor has it natively)."}
    )
    use_cpu: bool = field(
        default=False,
        metadata={"help": "Whether to train on the CPU; set by itself where bf16 is on and there is no accelerator."},
    )
    logging_nan_inf_filter: bool = field(
        default=False, metadata={"help": "Whether to hide a loss that is not finite behind the mean of the others."}
    )
    ddp_find_unused_parameters: bool | None = field(
        default=False, metadata={"help": "Whether DDP looks for unused parameters; the model has none."}
    )

    def __post_init__(self) -> None:
        """Check the values and fill in those that depend on others or on the machine."""
        self._check_schedule()
        self._check_batches()
        self._choose_length_of_training()
        self._choose_precision()
        if getattr(self, "greater_is_better", None) is None and (self.metric_for_best_model or "").endswith(
            LOWER_IS_BETTER
        ):
            self.greater_is_better = False  # the library knows it of a loss alone
        super().__post_init__()
        if self.max_tokens_per_batch is not None:
            for name in ("split_batches", "dispatch_batches"):
                if getattr(self.accelerator_config, name):
                    raise ValueError(
                        f"accelerator_config {name}=True cuts batches by their number of sentences, which "
                        "token-budget batches do not fix: leave it out, or set max_tokens_per_batch=0."
                    )

    def __getstate__(self) -> dict[str, Any]:
        """What is pickled, as into training_args.bin: all but the token, which would go to the Hub with it."""
        return {**self.__dict__, "hub_token": None}

    def _check_schedule(self) -> None:
        """Raise if the settings of the learning rate or of the loss are wrong or at odds."""
        if self.lr_schedule not in ("noam", "library"):
            raise ValueError(f'lr_schedule must be "noam" or "library", got {self.lr_schedule!r}.')
        for name in ("noam_factor", "peak_lr"):
            value = getattr(self, name)
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise ValueError(f"{name} must be a finite number above 0, got {value}.")
        if self.noam_factor is not None and self.peak_lr is not None:
            raise ValueError(
                f"noam_factor={self.noam_factor} and peak_lr={self.peak_lr} both set the height of the schedule: give "
                "one of the two."
            )
        if self.lr_schedule == "library":
            if self.noam_factor is not None or self.peak_lr is not None:
                raise ValueError(
                    'lr_schedule="library" takes its height from learning_rate: leave noam_factor and peak_lr out.'
                )
        else:
            for name, known in (("learning_rate", float), ("lr_scheduler_type", SchedulerType)):
                value, default = known(getattr(self, name)), known(LIBRARY_DEFAULTS[name])
                if value != default:
                    raise ValueError(
                        f"{name}={getattr(self, name)} has no effect on the paper's schedule: set its height by "
                        'noam_factor or peak_lr, or set lr_schedule="library".'
                    )
            if self.lr_scheduler_kwargs:
                raise ValueError('lr_scheduler_kwargs need lr_schedule="library".')
            if not self.warmup_steps > 0:
                raise ValueError(f"The paper's schedule needs warmup_steps above 0, got {self.warmup_steps}.")
        if self.label_smoothing_factor != 0:
            raise ValueError(
                f"label_smoothing_factor={self.label_smoothing_factor} would take the labels away from the model, "
                "which smooths by itself and leaves the evaluation loss plain: set the model's "
                "config.label_smoothing instead, or train with the library's Seq2SeqTrainer."
            )

    def _check_batches(self) -> None:
        """Raise if the settings of the batches are wrong or at odds; 0 tokens becomes None."""
        if self.max_tokens_per_batch == 0:
            self.max_tokens_per_batch = None
        if self.too_long not in ("error", "drop"):
            raise ValueError(f'too_long must be "error" or "drop", got {self.too_long!r}.')
        budget = self.max_tokens_per_batch
        if budget is None:
            return
        if budget != int(budget) or budget < 1:
            raise ValueError(
                f"max_tokens_per_batch must be a whole number above 0 (or 0 to count sentences), got {budget}."
            )
        # train_sampling_strategy since 5.2, group_by_length before.
        if getattr(self, "train_sampling_strategy", "random") != "random" or getattr(self, "group_by_length", False):
            raise ValueError(
                "Token-budget batches have an order of their own: leave train_sampling_strategy (group_by_length) "
                "out, or set max_tokens_per_batch=0 to count batches in sentences."
            )
        if self.auto_find_batch_size:
            raise ValueError(
                "auto_find_batch_size looks for a number of sentences: lower max_tokens_per_batch instead, or set it "
                "to 0."
            )
        if self.dataloader_drop_last:
            raise ValueError(
                "dataloader_drop_last has no effect on token-budget batches, of which none is incomplete: leave it "
                "out, or set max_tokens_per_batch=0."
            )

    def _choose_length_of_training(self) -> None:
        """The paper's number of updates unless the user says how long; the library wants numbers in both fields."""
        if self.num_train_epochs is not None and self.num_train_epochs < 0:
            raise ValueError(f"num_train_epochs must be above 0, got {self.num_train_epochs}.")
        if self.num_train_epochs and self.max_steps > 0:
            raise ValueError(
                f"max_steps={self.max_steps} and num_train_epochs={self.num_train_epochs} both set the length of the "
                "training: give one of the two."
            )
        if not self.num_train_epochs:
            self.num_train_epochs = 0.0
            if self.max_steps <= 0:
                self.max_steps = PAPER_MAX_STEPS

    def _choose_precision(self) -> None:
        """Whether to compute in bfloat16, unless the user or `accelerate launch --mixed_precision` says."""
        launched_on_cpu = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes", "y", "on", "t")
        on_cpu = self.use_cpu or launched_on_cpu or not _has_accelerator()
        if self.bf16 is None:
            launched = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
            if launched != "no":
                self.bf16 = launched == "bf16"
            else:
                self.bf16 = not self.fp16 and _computes_bf16(on_cpu)
        if on_cpu:
            self.dataloader_pin_memory = False  # pinning is for copies to an accelerator; torch warns without one
        if self.bf16 and on_cpu:
            # The library refuses bf16 on a machine without accelerator unless it is told that this is meant.
            self.use_cpu = True


def _has_accelerator() -> bool:
    """Whether torch sees a GPU or another accelerator."""
    if hasattr(torch, "accelerator"):  # torch >= 2.6
        return torch.accelerator.is_available()
    return torch.cuda.is_available() or torch.backends.mps.is_available() or torch.xpu.is_available()


def _computes_bf16(on_cpu: bool) -> bool:
    """Whether the processor that would be trained on computes in bfloat16 natively."""
    if on_cpu:
        capabilities = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
        return any(capabilities.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16"))
    if torch.cuda.is_available():
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return is_torch_bf16_gpu_available() and not torch.backends.mps.is_available()
