r"""Make a smaller model of a trained one: fewer layers, fewer heads, fewer tokens, in this order.

    python scripts/shrink.py --model runs/en-de --keep_decoder_layers 0 --output_dir runs/student-start
    python scripts/shrink.py --model runs/en-de --trim_vocabulary corpus.en corpus.de --output_dir runs/trimmed
    python scripts/shrink.py --model runs/en-de --prune_heads 1 --importance_data val.en val.de \
        --output_dir runs/pruned

The result is a checkpoint folder like any other. A model without some of its layers has to be trained on:
`scripts/train.py --model_name_or_path runs/student-start`, best on a teacher's translations (scripts/distil.py). One
without a few heads gains by it. A trimmed vocabulary needs nothing. docs/shrinking.md has figures.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.append(sys.path.pop(0))  # this folder last: its evaluate.py must not hide the library of that name

from arguments import clear_errors, parse, require_at_least


@dataclass
class ShrinkArguments:
    """Which model, what goes, and where to."""

    model: str = field(metadata={"help": "Checkpoint folder of this package."})
    output_dir: str = field(metadata={"help": "Folder to write; new or empty."})
    keep_encoder_layers: list[int] | None = field(
        default=None, metadata={"help": "Numbers of the encoder layers to keep, from 0 on; default: all."}
    )
    keep_decoder_layers: list[int] | None = field(
        default=None, metadata={"help": "Numbers of the decoder layers to keep, from 0 on; default: all."}
    )
    prune_heads: list[int] | None = field(
        default=None,
        metadata={
            "help": "How many heads each attention loses, the least important ones; or two numbers, for each of the "
            "encoder and each of the decoder. Needs --importance_data."
        },
    )
    importance_data: list[str] | None = field(
        default=None, metadata={"help": "Parallel text to measure the heads on: one file or two."}
    )
    importance_pairs: int = field(default=1000, metadata={"help": "How many pairs of it, from the first on."})
    source_lang: str | None = field(default=None, metadata={"help": "Source language code, for a table."})
    target_lang: str | None = field(default=None, metadata={"help": "Target language code, for a table."})
    max_tokens_per_batch: int = field(
        default=2048, metadata={"help": "Most source and most target tokens together in measuring."}
    )
    trim_vocabulary: list[str] | None = field(
        default=None, metadata={"help": "Text files of both languages: keep the tokens that they need."}
    )


def main() -> None:
    """Shrink, write the folder, and say what became smaller."""
    (arguments,) = parse(sys.argv[1:], __doc__, [ShrinkArguments])
    with clear_errors():
        check_arguments(arguments)
        from transformers.utils import logging

        from vanilla_transformer.convert.vanilla import read

        logging.disable_progress_bar()
        model, tokenizer = read(arguments.model)
        smaller, smaller_tokenizer, steps = shrink(model, tokenizer, arguments)
        write(smaller, smaller_tokenizer, arguments, steps)
    for name, folder, which in (("from", arguments.model, model), ("to", arguments.output_dir, smaller)):
        print(f"{name} {which.num_parameters():,} parameters, {megabytes(folder):.1f} MB of weights: {folder}")
    print(f"{'; '.join(steps)}")


def check_arguments(arguments: Any) -> None:
    """Refuse what cannot work before the model is loaded."""
    from vanilla_transformer.output_folders import is_free

    if not is_free(Path(arguments.output_dir)):
        raise ValueError(f"--output_dir {arguments.output_dir} is not an empty folder: choose another one")
    if not any(
        getattr(arguments, name)
        for name in ("keep_encoder_layers", "keep_decoder_layers", "prune_heads", "trim_vocabulary")
    ):
        raise ValueError(
            "nothing to shrink: give --keep_encoder_layers, --keep_decoder_layers, --prune_heads or --trim_vocabulary"
        )
    if bool(arguments.prune_heads) != bool(arguments.importance_data):
        raise ValueError("--prune_heads and --importance_data go together: give both or neither")
    if arguments.prune_heads and len(arguments.prune_heads) > 2:
        raise ValueError(
            f"--prune_heads has {len(arguments.prune_heads)} numbers: one, or two for encoder and decoder"
        )
    require_at_least(1, arguments, "importance_pairs", "max_tokens_per_batch")
    for name in ("importance_data", "trim_vocabulary"):
        for file in getattr(arguments, name) or []:
            if not Path(file).is_file():
                raise ValueError(f"--{name} {file}: no such file")


def shrink(model: Any, tokenizer: Any, arguments: Any) -> tuple[Any, Any, list[str]]:
    """Return the smaller model, its tokenizer, and what was done, in words."""
    from vanilla_transformer.shrinking import head_importance, keep_layers, prune_heads, trim_vocabulary
    from vanilla_transformer.tokenizer_training import iterate_texts

    before, steps = model.config, []
    if tokenizer is None and (arguments.prune_heads or arguments.trim_vocabulary):
        raise ValueError(f"--model {arguments.model} has no tokenizer, which --prune_heads and --trim_vocabulary need")
    if arguments.keep_encoder_layers or arguments.keep_decoder_layers:
        model = keep_layers(model, arguments.keep_encoder_layers, arguments.keep_decoder_layers)
        after = model.config
        steps.append(
            f"{after.encoder_layers} of {before.encoder_layers} encoder and {after.decoder_layers} of "
            f"{before.decoder_layers} decoder layers"
        )
    if arguments.prune_heads:
        encoder, decoder = arguments.prune_heads * (2 if len(arguments.prune_heads) == 1 else 1)
        importance = head_importance(model, importance_batches(tokenizer, arguments))
        model = prune_heads(model, importance, encoder=encoder, decoder=decoder)
        steps.append(
            f"{model.config.encoder_attention_heads} of {before.encoder_attention_heads} heads in each attention of "
            f"the encoder, {model.config.decoder_attention_heads} of {before.decoder_attention_heads} in the decoder's"
        )
    if arguments.trim_vocabulary:
        model, tokenizer = trim_vocabulary(model, tokenizer, iterate_texts(arguments.trim_vocabulary))
        steps.append(f"{model.config.vocab_size:,} of {before.vocab_size:,} tokens")
    return model, tokenizer, steps


def importance_batches(tokenizer: Any, arguments: Any) -> Iterator[Any]:
    """Return batches of the pairs that heads are measured on."""
    from torch.utils.data import DataLoader
    from transformers import DataCollatorForSeq2Seq

    from vanilla_transformer.batching import TokenBudgetBatchSampler, sequence_lengths
    from vanilla_transformer.corpus import encode_pairs, load_parallel_files

    pairs, _ = load_parallel_files(
        arguments.importance_data, source_lang=arguments.source_lang, target_lang=arguments.target_lang
    )
    encoded, _ = encode_pairs(pairs.take(min(arguments.importance_pairs, len(pairs))), tokenizer)
    source, target = (sequence_lengths(encoded, name) for name in ("input_ids", "labels"))
    sampler = TokenBudgetBatchSampler(source, target, arguments.max_tokens_per_batch, shuffle=False, too_long="drop")
    return iter(DataLoader(encoded, batch_sampler=sampler, collate_fn=DataCollatorForSeq2Seq(tokenizer)))


def write(model: Any, tokenizer: Any, arguments: Any, steps: list[str]) -> None:
    """Write the folder; its card keeps what stays true of the larger model, and so no scores."""
    from transformers import PreTrainedTokenizerFast

    from vanilla_transformer.model_card import RunFacts, facts_of_configs, read_record, write_model_card
    from vanilla_transformer.output_folders import whole_folder
    from vanilla_transformer.tokenizer_training import save_tokenizer

    known = read_record(Path(arguments.model)).get("facts", {})
    known |= {"parameters": model.num_parameters(), "scores": {}}
    known |= facts_of_configs(model.config, model.generation_config)
    smaller = f"from {Path(arguments.model).resolve().name} with {'; '.join(steps)}"
    known["training"] = {**known.get("training", {}), "made smaller afterwards": smaller}
    folder = Path(arguments.output_dir)
    with whole_folder(folder) as scratch:
        model.save_pretrained(scratch)
        if isinstance(tokenizer, PreTrainedTokenizerFast):
            save_tokenizer(tokenizer, scratch)
        elif tokenizer is not None:
            tokenizer.save_pretrained(scratch)
        write_model_card(scratch, RunFacts(**known), model_name=folder.resolve().name, model_path=str(folder))


def megabytes(folder: str) -> float:
    """Return the size of the weights in a folder."""
    return sum(path.stat().st_size for path in Path(folder).glob("*.safetensors")) / 1e6


if __name__ == "__main__":
    main()
