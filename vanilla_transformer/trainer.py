"""The paper's training recipe (section 5) on the library's Seq2SeqTrainer, for any sequence-to-sequence model."""

from __future__ import annotations

import copy
import errno
import logging
import math
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import datasets
import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError
from torch import nn
from torch.utils.data import DataLoader, Sampler
from transformers import DataCollatorForSeq2Seq, EvalPrediction, PreTrainedTokenizerBase, Seq2SeqTrainer
from transformers.trainer_utils import EvalLoopOutput

from .batching import LongestFirstSampler, TokenBudgetBatchSampler, sequence_lengths
from .checkpointing import (
    CompleteCheckpointCallback,
    check_resumable,
    checkpoints_of,
    is_disk_full,
    last_complete_checkpoint,
)
from .dataloading import is_stream, sampler_of, token_budget_dataloader
from .model_card import ModelCardMixin
from .optimization import get_noam_schedule
from .training_arguments import LIBRARY_DEFAULTS, VanillaTransformerTrainingArguments

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)


class VanillaTransformerTrainer(ModelCardMixin, Seq2SeqTrainer):
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
    - `create_model_card`, and so `push_to_hub`, writes this package's card for its own models.
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
        self._throughput = _Throughput()
        self._nll: list[tuple[torch.Tensor, torch.Tensor]] = []  # per evaluation batch: summed NLL, number of tokens
        self._endings: list[torch.Tensor] = []  # per evaluation batch: translations, those without end, copied ones
        self._samples: list[str] = []
        super().__init__(
            model=model,
            args=args,
            data_collator=data_collator,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            **kwargs,
        )
        self.add_callback(CompleteCheckpointCallback())  # the last one: its marker says that all else is written

    # Training

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """The library's training, which resumes from complete checkpoints only.

        Args:
            resume_from_checkpoint: True for the newest complete checkpoint in the output folder, or a folder.
            *args: As in the library.
            **kwargs: As in the library.

        Raises:
            FileNotFoundError: If there is nothing to resume from; after training, if the best checkpoint, whose
                weights were to be loaded, was removed.
            ValueError: If what there is to resume from is not complete.
            OSError: If the disk is full; the message says which checkpoint is the last complete one.
        """
        folder = self.args.output_dir
        if resume_from_checkpoint is True:
            found = last_complete_checkpoint(folder)
            if found is None:
                raise FileNotFoundError(f"There is no checkpoint in {folder} to resume from: leave the option out.")
            resume_from_checkpoint = str(found)
        elif resume_from_checkpoint:
            check_resumable(resume_from_checkpoint)
        # For callbacks: the library does not tell them where it resumes.
        self.args.resume_from_checkpoint = resume_from_checkpoint or None
        marking = self.pop_callback(CompleteCheckpointCallback)
        if marking is not None:  # after callbacks that were added since: they may write into a checkpoint, too
            self.add_callback(marking)
        self._throughput = _Throughput()
        try:
            result = super().train(resume_from_checkpoint, *args, **kwargs)
        except (OSError, RuntimeError, SafetensorError) as error:
            if not is_disk_full(error):
                raise
            raise OSError(
                errno.ENOSPC,
                f"The disk is full: update {self.state.global_step:,} could not be saved in {folder}. What was saved "
                "before is complete. Make room, lower save_total_limit, and go on with resume_from_checkpoint=True",
            ) from error
        self._check_best_was_there()
        return result

    def _check_best_was_there(self) -> None:
        """Raise if the best checkpoint was removed: the library only logs that it kept the last weights instead."""
        best = self.state.best_model_checkpoint
        if self.args.load_best_model_at_end and best and self.is_world_process_zero() and not Path(best).is_dir():
            there = ", ".join(path.name for _, path in sorted(checkpoints_of(self.args.output_dir).items()))
            raise FileNotFoundError(
                f"The best checkpoint, {best}, was removed, so the model has the weights of the last update, not the "
                f"best. The run is done and what else was saved is there: {there or 'nothing'}."
            )

    def training_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        """The library's step; counts tokens."""
        self._throughput.count(inputs)
        return cast(torch.Tensor, super().training_step(model, inputs, *args, **kwargs))

    def log(self, logs: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """The library's log; with the training loss come real target tokens a second and the share of padding."""
        if "loss" in logs:
            logs = {**logs, **self._throughput.read(self.accelerator)}
        super().log(logs, *args, **kwargs)

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
        """Batches within the token budget; the library's if it is None."""
        budget = self.args.max_tokens_per_batch
        if self.train_dataset is None or budget is None:
            return cast("DataLoader[Any]", super().get_train_dataloader())
        loader = token_budget_dataloader(self, budget, too_long=self.args.too_long)
        sampler = sampler_of(loader)
        self._train_sampler = sampler if isinstance(sampler, TokenBudgetBatchSampler) else None
        return loader

    def num_examples(self, dataloader: DataLoader[Any]) -> int:
        """Number of pairs of a data loader; those dropped as too long are not counted."""
        if self._train_sampler is not None and sampler_of(dataloader) is self._train_sampler:
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
        self._nll, self._endings = [], []
        self._throughput.pause()
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
        for name, value in self._ending_percentages().items():
            output.metrics[f"{metric_key_prefix}_{name}"] = value
        self._samples = self._describe_samples(dataloader, output)
        return output

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """The library's evaluation; `args.eval_samples` of its translations go to the log as "eval_samples"."""
        metrics = cast("dict[str, float]", super().evaluate(*args, **kwargs))
        if self._samples:
            self.log({"eval_samples": "\n".join(self._samples)})
        return metrics

    def _describe_samples(self, dataloader: Any, output: EvalLoopOutput) -> list[str]:
        """The first translations of an evaluation, each with its source and its reference."""
        tokenizer, ids = self.processing_class, output.predictions
        dataset: Any = getattr(dataloader, "dataset", None)
        wanted = (
            self.args.predict_with_generate
            and isinstance(ids, np.ndarray)
            and isinstance(tokenizer, PreTrainedTokenizerBase)
        )
        if not wanted or is_stream(dataset) or output.label_ids is None or len(ids) != len(output.label_ids):
            return []
        count = min(self.args.eval_samples, len(ids))
        if count < 1:
            return []
        column = getattr(self.model, "main_input_name", "input_ids")
        sources = [dataset[index][column] for index in range(count)]
        rows = [
            np.where(part[:count] == -100, tokenizer.pad_token_id, part[:count]) for part in (ids, output.label_ids)
        ]
        texts = [tokenizer.batch_decode(part, skip_special_tokens=True) for part in (sources, *rows)]
        return [
            f"{source} → {found} (reference: {reference})" for source, found, reference in zip(*texts, strict=True)
        ]

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
        if self.args.predict_with_generate and not prediction_loss_only and isinstance(predictions, torch.Tensor):
            self._note_endings(inputs, predictions, labels)
        return loss, predictions, label_ids

    def _note_endings(self, inputs: dict[str, Any], predictions: torch.Tensor, labels: torch.Tensor | None) -> None:
        """Count translations, those without an end token, and those that are their source, token for token."""
        settings = self.model.generation_config
        ends = torch.as_tensor(settings.eos_token_id, device=predictions.device).reshape(-1)
        source = inputs.get(getattr(self.model, "main_input_name", "input_ids"))
        each = 1 if source is None else len(predictions) // len(source)
        real = torch.ones(len(predictions), dtype=torch.bool, device=predictions.device)
        if labels is not None and len(labels) * each == len(predictions):
            real = labels.ne(-100).any(dim=-1).repeat_interleave(each)
        unended = ~torch.isin(predictions[:, 1:], ends).any(dim=-1) & real
        copied = torch.zeros_like(real)
        if source is not None and getattr(self.model.config, "share_encoder_decoder_embeddings", True):
            special = torch.cat([ends, ends.new_tensor([settings.pad_token_id or 0])]).tolist()
            texts = [
                [[token for token in row if token not in special] for row in rows.tolist()]
                for rows in (source.repeat_interleave(each, dim=0), predictions[:, 1:])
            ]
            same = [bool(first) and first == second for first, second in zip(*texts, strict=True)]
            copied = torch.tensor(same, device=real.device) & real
        self._endings.append(torch.stack([real.sum(), unended.sum(), copied.sum()]))

    def _ending_percentages(self) -> dict[str, float]:
        """Percentages of the translations of all processes; empty where nothing was translated."""
        counts = torch.stack(self._endings).sum(dim=0) if self._endings else None
        self._endings = []
        if counts is None:
            return {}
        if self.accelerator.num_processes > 1:
            counts = self.accelerator.reduce(counts, reduction="sum")
        total, unended, copied = counts.tolist()
        return {
            "unended_percent": 100.0 * unended / max(1, total),
            "copied_percent": 100.0 * copied / max(1, total),
        }

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
        sampler = sampler_of(dataloader)
        in_order = not isinstance(sampler, LongestFirstSampler)
        dataset = getattr(dataloader, "dataset", None)
        if (in_order and processes == 1) or is_stream(dataset) or self.args.dataloader_drop_last:
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


def _check_dataset(args: VanillaTransformerTrainingArguments, dataset: Any) -> None:
    """Raise if the arguments ask for batches that the training data cannot be made into."""
    budget = args.max_tokens_per_batch
    if dataset is None or budget is None:
        return
    sentences = args.per_device_train_batch_size
    if sentences != LIBRARY_DEFAULTS["per_device_train_batch_size"]:
        raise ValueError(
            f"per_device_train_batch_size={sentences} has no effect on batches of max_tokens_per_batch={budget} "
            "tokens: leave it out, or set max_tokens_per_batch=0 to count batches in sentences."
        )
    if not is_stream(dataset):
        return
    if args.max_steps <= 0:
        raise ValueError("A stream does not say how long it is: set max_steps in place of num_train_epochs.")
    for name in ("eval_strategy", "save_strategy", "logging_strategy"):
        if getattr(args, name) == "epoch":
            raise ValueError(f'{name}="epoch": a stream does not say how long it is. Set it to "steps".')
    if args.dataloader_num_workers > 1:
        raise ValueError(
            f"dataloader_num_workers={args.dataloader_num_workers}: a stream is read by one worker, as several would "
            "each read all of it. Set it to 1, or to 0."
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


class _Throughput:
    """Counts the tokens of training batches and the time spent on them, evaluations left out."""

    def __init__(self) -> None:
        self._counts: torch.Tensor | None = None  # real target tokens, real tokens of both sides, all of both sides
        self._seconds = 0.0
        self._since: float | None = None

    def count(self, inputs: dict[str, Any]) -> None:
        """Add a batch; nothing waits for the device."""
        if self._since is None:
            self._since = time.perf_counter()
        labels, mask = inputs.get("labels"), inputs.get("attention_mask")
        if labels is None or mask is None:
            return
        target, source = labels.ne(-100).sum(), mask.sum()
        counts = torch.stack([target, target + source, torch.full_like(target, labels.numel() + mask.numel())])
        self._counts = counts if self._counts is None else self._counts + counts

    def pause(self) -> None:
        """Stop the clock until the next batch."""
        if self._since is not None:
            self._seconds += time.perf_counter() - self._since
            self._since = None

    def read(self, accelerator: Any) -> dict[str, float]:
        """Real target tokens a second, and percent of padding, over all processes since the last reading."""
        self.pause()
        counts, seconds = self._counts, self._seconds
        self._counts, self._seconds = None, 0.0
        if counts is None or not seconds:
            return {}
        if accelerator.num_processes > 1:
            counts = accelerator.reduce(counts.to(accelerator.device), reduction="sum")
        target, real, padded = counts.tolist()
        return {"target_tokens_per_second": target / seconds, "padding_percent": 100.0 * (1 - real / padded)}
