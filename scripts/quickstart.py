"""Train on the embedded phrase grammar, measure on held-out combinations, translate through `pipeline`.

    make quickstart

Some five minutes on two cores, without a download of data. A second call finds the trained model and only shows it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

sys.path.append(sys.path.pop(0))  # this folder last: its evaluate.py must not hide the library of that name

ROOT = Path(__file__).resolve().parents[1]
FOLDER = Path("runs/quickstart")
RECIPE = Path("scripts/recipes/phrase_grammar.yaml")
SENTENCES_SHOWN = 5


def main() -> None:
    """Train if there is no model yet, then show what it can do."""
    folder = ROOT / FOLDER
    if not (folder / "metrics.json").is_file():
        if folder.exists():
            sys.exit(f"quickstart: {FOLDER} holds an unfinished run: remove it (rm -r {FOLDER}) and start again.")
        command = ["scripts/train.py", str(RECIPE), "--output_dir", str(FOLDER)]
        print("$ python " + " ".join(command), flush=True)
        status = subprocess.run([sys.executable, *command], cwd=ROOT, check=False).returncode
        if status:
            sys.exit(status)
    else:
        print(f"{FOLDER} holds a trained model already; remove it (rm -r {FOLDER}) to train anew.", flush=True)
    show(folder)


def show(folder: Path) -> None:
    """Print scores beside the memoriser's, five translations, and where everything lies."""
    import transformers

    import vanilla_transformer  # noqa: F401 - registers model and pipelines
    from vanilla_transformer.metrics import TranslationScore
    from vanilla_transformer.phrase_grammar import NearestSentenceMemoriser, generate_splits

    transformers.utils.logging.disable_progress_bar()
    splits = generate_splits()
    sources = [source for source, _ in splits.test]
    references = [target for _, target in splits.test]
    memoriser = NearestSentenceMemoriser(splits.train).translate(sources)
    scores = {
        "this model": json.loads((folder / "metrics.json").read_text(encoding="utf-8"))["scores"]["test"],
        "nearest training sentence": TranslationScore().compute(predictions=memoriser, references=references),
    }
    print(f"\n{len(sources):,} test sentences of generated text, each with a combination that training never saw:")
    for name, score in scores.items():
        print(f"  {name:26} BLEU {score['bleu']:5.1f}   chrF {score['chrf']:5.1f}   exact {score['exact_match']:.1f}%")
    print(f"  {scores['this model']['bleu_signature']}")

    print('\nTranslated by pipeline("translation") from the saved folder:')
    translate = transformers.pipeline("translation", model=str(folder))
    for source, result in zip(sources, translate(sources[:SENTENCES_SHOWN]), strict=False):
        print(f"  {source}\n    → {result['translation_text']}")
    print(NEXT)


NEXT = f"""
Where things lie
  {FOLDER}              model.safetensors, config.json, tokenizer.json, README.md (the model card), metrics.json
  {RECIPE}   the settings of this run

What to do next
  echo "The old man buys a red book." | .venv/bin/python scripts/translate.py --model {FOLDER}
  .venv/bin/python scripts/train.py --train_file train.en train.de --validation_file val.en val.de \\
      --source_lang en --target_lang de --preset tiny --max_steps 8000 --output_dir runs/mine
  README.md: training on your own text, from the smallest corpus to the paper's"""


if __name__ == "__main__":
    main()
