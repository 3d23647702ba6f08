"""Makes the library know this package: the Auto classes, and the three pipelines that transformers 5 removed.

`import vanilla_transformer` calls `register()`. Without that import the library knows nothing of this package, even
where it is installed: it has no plug-in mechanism. What a user then meets:

- `AutoModelForSeq2SeqLM.from_pretrained(folder)` or `pipeline("translation", model=folder)` with a checkpoint of ours
  asks "Do you wish to run the custom code? [y/N]", or, where nobody can answer or `trust_remote_code=False` is given,
  raises the library's `ValueError` "The repository ... contains custom code which must be executed to correctly load
  the model. ... Please pass the argument `trust_remote_code=True` to allow custom code to be run." The text is the
  library's, and it raises before it reads a line of ours: a checkpoint cannot add "or import vanilla_transformer" to
  it, so the checkpoint's model card and the README say it.
- `pipeline("translation", model=another_model)` raises the library's `KeyError`: the task was removed (since 5.19), or
  is unknown (before).

The remedy of both is `import vanilla_transformer`. With `trust_remote_code=True` a checkpoint of ours also works
without this package, by the Python files in its folder.
"""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable
from typing import Any

import transformers
from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM, pipelines
from transformers.pipelines import PIPELINE_REGISTRY

from .configuration_vanilla_transformer import VanillaTransformerConfig
from .modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration, VanillaTransformerModel
from .pipeline_vanilla_transformer import SummarizationPipeline, Text2TextGenerationPipeline, TranslationPipeline

NEWEST_TESTED = "5.24"

# The default models are those of transformers 4, with the same commits.
_T5 = {"model": ("google-t5/t5-base", "a9723ea")}
_TASKS: dict[str, tuple[type, dict[Any, Any]]] = {
    "translation": (TranslationPipeline, {("en", target): _T5 for target in ("fr", "de", "ro")}),
    "summarization": (SummarizationPipeline, {"model": ("sshleifer/distilbart-cnn-12-6", "a4f8f3e")}),
    "text2text-generation": (Text2TextGenerationPipeline, _T5),
}
_MARK = "_resolves_language_pairs"


def register() -> None:
    """Register the Auto classes and the pipelines; called by `import vanilla_transformer`, harmless when repeated.

    Afterwards `AutoConfig`, `AutoModel` and `AutoModelForSeq2SeqLM` load checkpoints of this package without
    `trust_remote_code`, and `pipeline` knows the tasks "translation", "translation_xx_to_yy", "summarization" and
    "text2text-generation", for every sequence-to-sequence model. Tasks of these names that somebody else registered
    are replaced. One warning is given if transformers is newer than `NEWEST_TESTED`.
    """
    warn_if_untested(transformers.__version__)
    AutoConfig.register(VanillaTransformerConfig.model_type, VanillaTransformerConfig, exist_ok=True)
    AutoModel.register(VanillaTransformerConfig, VanillaTransformerModel, exist_ok=True)
    AutoModelForSeq2SeqLM.register(VanillaTransformerConfig, VanillaTransformerForConditionalGeneration, exist_ok=True)
    for task, (pipeline_class, default) in _TASKS.items():
        # Not by `PIPELINE_REGISTRY.register_pipeline`: the mark that leaves on the class makes
        # `Pipeline.save_pretrained` write code and `custom_pipelines` into the folder of any model, Marian's too, and
        # the folder then asks for trust.
        PIPELINE_REGISTRY.supported_tasks[task] = {
            "impl": pipeline_class,
            "pt": (AutoModelForSeq2SeqLM,),
            "default": default,
            "type": "text",
        }
        # Since 5.19 the library looks here first, and raises.
        getattr(pipelines, "REMOVED_TASKS", {}).pop(task, None)
    if not hasattr(PIPELINE_REGISTRY.check_task, _MARK):
        PIPELINE_REGISTRY.check_task = _with_language_pairs(PIPELINE_REGISTRY.check_task)


def _with_language_pairs(check_task: Callable[[str], Any]) -> Callable[[str], Any]:
    """Wrap the registry's `check_task`: `translation_xx_to_yy` is "translation" with the options (xx, yy).

    Transformers 5.0 does so itself for codes without an underscore; newer releases do not.
    """

    @functools.wraps(check_task)
    def check(task: str) -> Any:
        known = task in PIPELINE_REGISTRY.supported_tasks or task in PIPELINE_REGISTRY.task_aliases
        if known or not task.startswith("translation"):
            return check_task(task)
        pair = re.fullmatch(r"translation_(.+?)_to_(.+)", task)
        if pair is None:
            raise KeyError(
                f"Invalid translation task {task}, use 'translation' or 'translation_XX_to_YY', for example "
                "'translation_en_to_de'."
            )
        return "translation", PIPELINE_REGISTRY.supported_tasks["translation"], pair.groups()

    setattr(check, _MARK, True)
    return check


@functools.cache
def warn_if_untested(version: str) -> None:
    """Warn, once, if a version of transformers is of a newer minor release than `NEWEST_TESTED`.

    Args:
        version: A version such as "5.24.0" or "5.25.0.dev0".
    """
    found, newest = (tuple(map(int, re.findall(r"\d+", text)[:2])) for text in (version, NEWEST_TESTED))
    if found > newest:
        warnings.warn(
            f"vanilla-transformer was tested with transformers up to {NEWEST_TESTED}, and {version} is newer. If "
            f"something breaks, install transformers {NEWEST_TESTED} or a newer vanilla-transformer.",
            UserWarning,
            stacklevel=2,
        )
