"""The paper's training recipe (section 5) on the library's Seq2SeqTrainer, for any sequence-to-sequence model."""

from __future__ import annotations

import copy
import logging
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, cast

import datasets
import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, Sampler
from transformers import DataCollatorForSeq2Seq, EvalPrediction, Seq2SeqTrainer, Seq2SeqTrainingArguments
from transformers.trainer_utils import EvalLoopOutput, SchedulerType, seed_worker
from transformers.utils import is_torch_bf16_gpu_available

from .batching import LongestFirstSampler, TokenBudgetBatchSampler, sequence_lengths
from .optimization import get_noam_schedule

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

PAPER_MAX_STEPS = 100_000
PAPER_MAX_TOKENS_PER_BATCH = 25_000

# What the library does if nothing is said; a value that differs was set by the user.
_LIBRARY_DEFAULTS: dict[str, Any] = {f.name: f.default for f in fields(Seq2SeqTrainingArguments)}


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
        bf16: Whether to compute in bfloat16 mixed precision. None: if the processor does so natively: CUDA GPUs from
            Ampere on, ROCm, what the library knows of other accelerators (MPS apart), CPUs with AVX512-BF16, AMX or
            the Arm extension as far as torch can tell (`torch.cpu.get_capabilities`, torch >= 2.13; with an older
            torch a CPU computes in float32 unless told otherwise). On one core with AVX512-BF16 a training step of
            1,200 tokens took, against float32, 0.65 of the time at d_model 512 and 0.8 at 256, but 1.25 times as long
            at 128: for so small a model on a CPU pass False.
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
    bf16: bool | None = field(
        default=None, metadata={"help": "bfloat16 mixed precision (default: where the processor has it natively)."}
    )
    use_cpu: bool = field(
        default=False,
        metadata={"help": "Whether to train on the CPU; set by itself where bf16 is on and there is no accelerator."},
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
        super().__post_init__()
        if self.max_tokens_per_batch is not None:
            for name in ("split_batches", "dispatch_batches"):
                if getattr(self.accelerator_config, name):
                    raise ValueError(
                        f"accelerator_config {name}=True cuts batches by their number of sentences, which "
                        "token-budget batches do not fix: leave it out, or set max_tokens_per_batch=0."
                    )

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
                value, default = known(getattr(self, name)), known(_LIBRARY_DEFAULTS[name])
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


class VanillaTransformerTrainer(Seq2SeqTrainer):
    """The library's Seq2SeqTrainer with the paper's schedule and batches and an exact evaluation loss.

    Works for any sequence-to-sequence model of the library. What differs from `Seq2SeqTrainer`:

    - Training data (a map-style dataset with the columns "input_ids" and "labels") come in batches within
      `args.max_tokens_per_batch`, see `TokenBudgetBatchSampler`; every process gets its own, and training resumes in
      the middle of an epoch where it stopped.
    - The learning rate follows section 5.3 of the paper.
    - `eval_loss` is the mean over all tokens of the negative log likelihood, whatever the batch size and the number
      of processes (the library's is a mean of batch means), and `eval_perplexity` its exponential. The training
      `loss` in the log is the library's, a mean over updates, smoothed if the model smooths.
    - While translating, evaluation sorts by length; metrics and predictions are in the order of the dataset, and no
      sentence is counted twice on several processes.
    - Without `data_collator`, sources are padded by the tokenizer and labels with -100.

    Args:
        model: The model to train; or pass `model_init`.
        args: The arguments; without them the paper's, with output in "tmp_trainer".
        data_collator: Makes a batch of a list of rows; by default `DataCollatorForSeq2Seq` of `processing_class`.
        train_dataset: The training data.
        eval_dataset: The evaluation data, or several by name.
        processing_class: The tokenizer; saved with every checkpoint.
        **kwargs: Further arguments of `Seq2SeqTrainer`, such as `compute_metrics` and `callbacks`.

    Raises:
        TypeError: If `args` are not `VanillaTransformerTrainingArguments`.
        ValueError: If `args` do not fit the dataset, or neither `data_collator` nor `processing_class` is given.
    """

    args: VanillaTransformerTrainingArguments
    compute_metrics: Callable[[EvalPrediction], dict[str, Any]] | None
    lr_scheduler: torch.optim.lr_scheduler.LRScheduler | None

    def __init__(
        self,
        model: PreTrainedModel | nn.Module | None = None,
        args: VanillaTransformerTrainingArguments | None = None,
        data_collator: Callable[[list[Any]], dict[str, Any]] | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        **kwargs: Any,
    ) -> None:
        if args is None:
            args = VanillaTransformerTrainingArguments(output_dir="tmp_trainer")
        if not isinstance(args, VanillaTransformerTrainingArguments):
            raise TypeError(
                f"args must be VanillaTransformerTrainingArguments, got {type(args).__name__}: with the library's own "
                "arguments use its Seq2SeqTrainer."
            )
        _check_dataset(args, train_dataset)
        if data_collator is None:
            if processing_class is None:
                raise ValueError("Give processing_class (the tokenizer) or data_collator: batches need padding.")
            data_collator = DataCollatorForSeq2Seq(processing_class, label_pad_token_id=-100)
        self._train_sampler: TokenBudgetBatchSampler | None = None
        self._nll: list[tuple[torch.Tensor, torch.Tensor]] = []  # per evaluation batch: summed NLL, number of tokens
        super().__init__(
            model=model,
            args=args,
            data_collator=data_collator,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            **kwargs,
        )

    # Training

    def create_scheduler(
        self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
    ) -> torch.optim.lr_scheduler.LRScheduler:
        """The paper's schedule, or the library's if `args.lr_schedule` says so."""
        self.args._check_schedule()  # a hyperparameter search sets fields without a check
        if self.lr_scheduler is None and self.args.lr_schedule == "noam":
            self.lr_scheduler = get_noam_schedule(
                self.optimizer if optimizer is None else optimizer,
                d_model=None if self.args.peak_lr is not None else _model_width(self.model),
                warmup_steps=max(1, self.args.get_warmup_steps(num_training_steps)),
                factor=self.args.noam_factor,
                peak_lr=self.args.peak_lr,
            )
            # Private (5.0.0 to 5.24.0): makes a second train() begin with a new schedule.
            self._created_lr_scheduler = True
        return super().create_scheduler(num_training_steps, optimizer)

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Batches within the token budget; the library's if it is None or the dataset is a stream."""
        args = self.args
        if self.train_dataset is None or args.max_tokens_per_batch is None or _is_stream(self.train_dataset):
            return super().get_train_dataloader()
        dataset = self.train_dataset
        sampler = TokenBudgetBatchSampler(
            sequence_lengths(dataset, getattr(self.model, "main_input_name", "input_ids")),
            sequence_lengths(dataset, "labels"),
            args.max_tokens_per_batch,
            seed=args.seed if args.data_seed is None else args.data_seed,
            num_replicas=self.accelerator.num_processes,
            too_long=args.too_long,
        )
        logger.info("Token-budget batches: %s.", sampler.describe())
        collator = self.data_collator
        # Private (5.0.0 to 5.24.0): what the library's own get_train_dataloader does with superfluous columns.
        if isinstance(dataset, datasets.Dataset):
            dataset = self._remove_unused_columns(dataset, description="Training")
        else:
            collator = self._get_collator_with_removed_columns(collator, description="Training")
        loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=collator, **self._worker_options())
        prepared = self.accelerator.prepare(loader)
        _pass_epochs_on(prepared, sampler)
        self._train_sampler = sampler
        return cast("DataLoader[Any]", prepared)

    def _worker_options(self) -> dict[str, Any]:
        """The arguments that concern the data loader's workers."""
        args = self.args
        # Fields of newer releases than 5.0.0; there the library forks on MPS.
        context = getattr(args, "dataloader_multiprocessing_context", None)
        if context is None and torch.backends.mps.is_available() and args.dataloader_num_workers > 1:
            context = "fork"
        options = {
            "num_workers": args.dataloader_num_workers,
            "pin_memory": args.dataloader_pin_memory,
            "persistent_workers": args.dataloader_persistent_workers,
            "prefetch_factor": args.dataloader_prefetch_factor,
            "multiprocessing_context": context,
            "worker_init_fn": partial(seed_worker, num_workers=args.dataloader_num_workers, rank=args.process_index),
        }
        if not getattr(args, "dataloader_in_order", True):
            options["in_order"] = False
        return options

    def num_examples(self, dataloader: DataLoader[Any]) -> int:
        """Number of pairs of a data loader; those dropped as too long are not counted."""
        if self._train_sampler is not None and _sampler_of(dataloader) is self._train_sampler:
            return self._train_sampler.num_pairs
        return cast(int, super().num_examples(dataloader))

    def get_total_train_batch_size(self, args: Any) -> int:
        """Pairs of one update over all processes: the mean, as token-budget batches vary."""
        total = cast(int, super().get_total_train_batch_size(args))
        if self._train_sampler is None:
            return total
        mean = self._train_sampler.num_pairs / len(self._train_sampler)
        # Private (5.0.0 to 5.24.0): the number of sentences the library counts a batch as.
        return max(1, round(total * mean / self._train_batch_size))

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device) -> Any:
        """The batches of the next update; none when resumed at the last one, where the library makes one too many."""
        if self.state.global_step >= self.state.max_steps:
            return [], None
        return super().get_batch_samples(epoch_iterator, num_batches, device)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        """The model's loss; in evaluation its mean over the tokens of this process's batch."""
        if not model.training:
            num_items_in_batch = None
        return super().compute_loss(
            model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch
        )

    # Evaluation

    def _get_eval_sampler(self, eval_dataset: Any) -> Sampler[int] | None:
        """Longest first, when sentences are translated and their order can be restored.

        Private in the library (5.0.0 to 5.24.0).
        """
        args = self.args
        restorable = args.eval_do_concat_batches and not args.batch_eval_metrics and not args.dataloader_drop_last
        column = getattr(self.model, "main_input_name", "input_ids")
        if (
            args.predict_with_generate
            and restorable
            and isinstance(eval_dataset, datasets.Dataset)
            and column in eval_dataset.column_names
            and len(eval_dataset) > 0
        ):
            return LongestFirstSampler(sequence_lengths(eval_dataset, column))
        return cast("Sampler[int] | None", super()._get_eval_sampler(eval_dataset))

    def evaluation_loop(
        self,
        dataloader: DataLoader[Any],
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """The library's loop, with rows in the order of the dataset and the loss as a mean over tokens."""
        self._nll = []
        restore = self._row_restorer(dataloader)
        compute_metrics = self.compute_metrics
        if restore is not None and compute_metrics is not None:
            self.compute_metrics = lambda prediction: compute_metrics(_restored(prediction, restore))
        self.gather_function = self.accelerator.gather  # as evaluate() sets it; the rows gathered twice go below
        try:
            output = super().evaluation_loop(
                dataloader,
                description,
                prediction_loss_only=prediction_loss_only,
                ignore_keys=ignore_keys,
                metric_key_prefix=metric_key_prefix,
            )
        finally:
            self.compute_metrics = compute_metrics
        if restore is not None:
            output = output._replace(predictions=restore(output.predictions), label_ids=restore(output.label_ids))
        loss = self._mean_nll()
        if loss is not None:
            output.metrics[f"{metric_key_prefix}_loss"] = loss
            output.metrics[f"{metric_key_prefix}_perplexity"] = math.exp(loss) if loss < 700 else math.inf
        return output

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
        **gen_kwargs: Any,
    ) -> tuple[Any, Any, Any]:
        """The library's step, which also notes the summed NLL and the number of tokens of the batch."""
        labels = inputs.get("labels")
        if labels is not None:
            labels = self._without_repeated_rows(labels)
            inputs = {**inputs, "labels": labels}
        # The library's step writes its defaults, such as max_length 20, into the model's generation settings, where
        # they would hold for the next batch and be saved with the model: let it write into a copy.
        settings = getattr(self.model, "generation_config", None)
        if settings is not None:
            self.model.generation_config = copy.deepcopy(settings)
        try:
            loss, predictions, label_ids = super().prediction_step(
                model, inputs, prediction_loss_only, ignore_keys=ignore_keys, **gen_kwargs
            )
        finally:
            if settings is not None:
                self.model.generation_config = settings
        if loss is not None and labels is not None:
            tokens = labels.ne(-100).sum()
            self._nll.append((torch.where(tokens > 0, loss.double() * tokens, 0.0), tokens))
        return loss, predictions, label_ids

    def _without_repeated_rows(self, labels: torch.Tensor) -> torch.Tensor:
        """Labels in which rows that accelerate repeats to fill the last batch are -100 throughout. [B, T]."""
        state = self.accelerator.gradient_state
        if self.accelerator.num_processes == 1 or not state.end_of_dataloader or state.remainder <= 0:
            return labels
        own = max(0, state.remainder - self.accelerator.process_index * len(labels))
        labels = labels.clone()
        labels[own:] = -100
        return labels

    def _mean_nll(self) -> float | None:
        """NLL per token over the batches of all processes, in nats; None without labels."""
        if not self._nll:
            return None
        nll = sum(float(batch) for batch, _ in self._nll)
        tokens = sum(int(count) for _, count in self._nll)
        self._nll = []
        if self.accelerator.num_processes > 1:
            sums = torch.tensor([nll, tokens], dtype=torch.float64, device=self.accelerator.device)
            nll, tokens = self.accelerator.reduce(sums, reduction="sum").tolist()
        return nll / tokens if tokens else None

    def _row_restorer(self, dataloader: DataLoader[Any]) -> Callable[[Any], Any] | None:
        """Puts gathered rows in the order of the dataset and drops the repeated ones; None if there is no need."""
        processes = self.accelerator.num_processes
        sampler = _sampler_of(dataloader)
        in_order = not isinstance(sampler, LongestFirstSampler)
        dataset = getattr(dataloader, "dataset", None)
        if (in_order and processes == 1) or _is_stream(dataset) or self.args.dataloader_drop_last:
            return None
        if not self.args.eval_do_concat_batches or self.args.batch_eval_metrics:
            return None
        rows = len(cast(Any, dataset))
        position = np.arange(rows)
        if isinstance(sampler, LongestFirstSampler):
            position[sampler.order] = np.arange(rows)
        step = self.args.eval_batch_size * processes
        gathered = rows if processes == 1 else -(-rows // step) * step
        return partial(_take_rows, position=position, gathered=gathered)


def _pass_epochs_on(dataloader: Any, sampler: TokenBudgetBatchSampler) -> None:
    """Make the `set_epoch` of a data loader that accelerate prepared reach the sampler.

    accelerate (1.1 to 1.15) passes the epoch on to an attribute `sampler` of the batch samplers it knows of. Its
    wrapper for several processes has none, so that after a resume in mid-epoch, where a second wrapper skips the
    batches already seen, those of epoch 0 would be replayed.
    """
    if dataloader.batch_sampler is not sampler:
        dataloader.batch_sampler.sampler = sampler


def _take_rows(value: Any, *, position: npt.NDArray[np.int64], gathered: int) -> Any:
    """Rows of an array, or of arrays in tuples, by each sentence's position; several rows a sentence stay together.

    Raises:
        RuntimeError: If the array has not a whole number of rows for each gathered sentence.
    """
    if value is None:
        return None
    if isinstance(value, (tuple, list)):
        return type(value)(_take_rows(item, position=position, gathered=gathered) for item in value)
    if isinstance(value, dict):
        return {key: _take_rows(item, position=position, gathered=gathered) for key, item in value.items()}
    each, rest = divmod(len(value), gathered)
    if rest or not each:
        raise RuntimeError(
            f"Evaluation gathered {len(value):,} rows for {gathered:,} sentences; cannot match them up."
        )
    return value[(position[:, None] * each + np.arange(each)).reshape(-1)]


def _restored(prediction: EvalPrediction, restore: Callable[[Any], Any]) -> EvalPrediction:
    """The prediction with its rows in the order of the dataset; losses are per batch and stay as they are."""
    return EvalPrediction(
        predictions=restore(prediction.predictions),
        label_ids=restore(prediction.label_ids),
        inputs=restore(prediction.inputs),
        losses=prediction.losses,
    )


def _sampler_of(dataloader: Any) -> Any:
    """The sampler at the bottom of a data loader's wrappers, or the token-budget batch sampler."""
    sampler = getattr(dataloader, "batch_sampler", None)
    while sampler is not None and not isinstance(sampler, (TokenBudgetBatchSampler, LongestFirstSampler)):
        sampler = getattr(sampler, "batch_sampler", None) or getattr(sampler, "sampler", None)
    return sampler


def _is_stream(dataset: Any) -> bool:
    """Whether a dataset can only be iterated over."""
    return isinstance(dataset, (IterableDataset, datasets.IterableDataset)) or not hasattr(dataset, "__getitem__")


def _check_dataset(args: VanillaTransformerTrainingArguments, dataset: Any) -> None:
    """Raise if the arguments ask for batches that the training data cannot be made into."""
    budget = args.max_tokens_per_batch
    if dataset is None or budget is None:
        return
    sentences = args.per_device_train_batch_size
    if _is_stream(dataset):
        message = (
            f"A streamed dataset is batched by per_device_train_batch_size={sentences} sentences; token-budget "
            "batches need all lengths beforehand."
        )
        if budget != PAPER_MAX_TOKENS_PER_BATCH:
            raise ValueError(
                f"{message} Set max_tokens_per_batch=0 instead of {budget}, or load the dataset without streaming."
            )
        logger.warning("%s The default max_tokens_per_batch is not applied.", message)
    elif sentences != _LIBRARY_DEFAULTS["per_device_train_batch_size"]:
        raise ValueError(
            f"per_device_train_batch_size={sentences} has no effect on batches of max_tokens_per_batch={budget} "
            "tokens: leave it out, or set max_tokens_per_batch=0 to count batches in sentences."
        )


def _model_width(model: Any) -> int:
    """The model's d_model."""
    config = getattr(model, "config", None)
    for name in ("d_model", "hidden_size"):
        width = getattr(config, name, None)
        if width is not None:
            return int(width)
    raise ValueError(
        f"The paper's schedule depends on the model's width, but the config of {type(model).__name__} has neither "
        "d_model nor hidden_size: set peak_lr instead."
    )


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
