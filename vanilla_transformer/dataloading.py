"""Data loaders of token-budget batches for a Trainer: the one of this package, or any of the library."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any, Literal, cast

import datasets
import torch
from torch.utils.data import DataLoader, IterableDataset
from transformers.trainer_utils import seed_worker

from .batching import LongestFirstSampler, TokenBudgetBatchSampler, sequence_lengths
from .streaming import BpeDropoutPairs, TokenBudgetStream, stream_loader

logger = logging.getLogger(__name__)


def token_budget_dataloader(
    trainer: Any, max_tokens_per_batch: int, *, too_long: Literal["error", "drop"] = "error"
) -> DataLoader[Any]:
    """The training data of a Trainer in batches of at most so many padded source, and so many padded target, tokens.

    `VanillaTransformerTrainer` uses it by itself. A `Seq2SeqTrainer` gets such batches by one line:

        trainer.get_train_dataloader = lambda: token_budget_dataloader(trainer, 4096)

    Its `per_device_train_batch_size` and `train_sampling_strategy` are then without effect. Data that can be indexed
    go through a `TokenBudgetBatchSampler`, streams through a `TokenBudgetStream`, whose docstrings say what holds.

    Args:
        trainer: A `transformers.Trainer` whose training data have the columns "input_ids" and "labels".
        max_tokens_per_batch: The budget, in tokens, for each of the two sides, of one device's forward batch.
        too_long: What to do with a pair longer than the budget: "error", or "drop", which counts them in the log.

    Returns:
        The data loader, prepared for the trainer's device and processes.

    Raises:
        ValueError: As the sampler or the stream does.
    """
    args, dataset = trainer.args, trainer.train_dataset
    seed = int(args.seed if args.data_seed is None else args.data_seed)
    column = getattr(trainer.model, "main_input_name", "input_ids")
    # Private (5.0.0 to 5.24.0), here and below: what the library's own get_train_dataloader does with superfluous
    # columns.
    collator = trainer._get_collator_with_removed_columns(trainer.data_collator, description="Training")
    if is_stream(dataset):
        rank, processes = trainer.accelerator.process_index, trainer.accelerator.num_processes
        if isinstance(dataset, BpeDropoutPairs):
            # Each process draws pieces of its own: no two see one stream of which each could keep its batches.
            dataset.share, rank, processes = (rank, processes), 0, 1
        stream = TokenBudgetStream(
            dataset,
            max_tokens_per_batch,
            seed=seed,
            rank=rank,
            num_replicas=processes,
            too_long=too_long,
            repeat=True,  # else a resumed run would look for its place in the first pass alone
            source_column=column,
        )
        device = trainer.accelerator.device
        return cast(
            "DataLoader[Any]", stream_loader(stream, device=device, collate_fn=collator, **_worker_options(args))
        )
    sampler = TokenBudgetBatchSampler(
        sequence_lengths(dataset, column),
        sequence_lengths(dataset, "labels"),
        max_tokens_per_batch,
        seed=seed,
        num_replicas=trainer.accelerator.num_processes,
        too_long=too_long,
    )
    logger.info("Token-budget batches: %s.", sampler.describe())
    if isinstance(dataset, datasets.Dataset):
        dataset = trainer._remove_unused_columns(dataset, description="Training")
        collator = trainer.data_collator
    loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=collator, **_worker_options(args))
    prepared = trainer.accelerator.prepare(loader)
    _pass_epochs_on(prepared, sampler)
    return cast("DataLoader[Any]", prepared)


def _worker_options(args: Any) -> dict[str, Any]:
    """The arguments of a data loader that concern its workers."""
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


def _pass_epochs_on(dataloader: Any, sampler: TokenBudgetBatchSampler) -> None:
    """Make the `set_epoch` of a data loader that accelerate prepared reach the sampler.

    accelerate (1.1 to 1.15) passes the epoch on to an attribute `sampler` of the batch samplers it knows of. Its
    wrapper for several processes has none, so that after a resume in mid-epoch, where a second wrapper skips the
    batches already seen, those of epoch 0 would be replayed.
    """
    if dataloader.batch_sampler is not sampler:
        dataloader.batch_sampler.sampler = sampler


def sampler_of(dataloader: Any) -> Any:
    """The sampler at the bottom of a data loader's wrappers, or the token-budget batch sampler."""
    sampler = getattr(dataloader, "batch_sampler", None)
    while sampler is not None and not isinstance(sampler, (TokenBudgetBatchSampler, LongestFirstSampler)):
        sampler = getattr(sampler, "batch_sampler", None) or getattr(sampler, "sampler", None)
    return sampler


def is_stream(dataset: Any) -> bool:
    """Whether a dataset can only be iterated over."""
    return isinstance(dataset, (IterableDataset, datasets.IterableDataset)) or not hasattr(dataset, "__getitem__")
