"""The way to the Hub: which files of a folder are the checkpoint, a check that they work by themselves, the push."""

from __future__ import annotations

import contextlib
import copy
import inspect
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import HfApi, get_token

from .model_card import (
    CARD,
    FACTS,
    MODEL_TYPE,
    TASKS,
    RunFacts,
    card_metadata,
    check_metadata,
    check_repo_id,
    facts_of_configs,
    read_record,
    render_card,
    split_card,
)

PACKAGE = __name__.partition(".")[0]
# A push takes these files of a folder, and no others unless it is told to.
REQUIRED = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
WEIGHTS, WEIGHTS_INDEX = "model.safetensors", "model.safetensors.index.json"
OPTIONAL = (
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*.json",
    "merges.txt",
    "*.spm",
    "LICENSE*",
    "NOTICE*",
)
CODE = "*_vanilla_transformer.py"
# Weights of an earlier push that the new ones do not replace would be loaded in their place.
STALE = ("model.safetensors", "model-*-of-*.safetensors", "model.safetensors.index.json")
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")
TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{30,}\b")


@dataclass
class Push:
    """What a push has done, or would do.

    Args:
        repo_id: The repository.
        files: Size in bytes of each file, by its name in the repository.
        left_out: Files of the folder, and subfolders with a "/", that stay where they are.
        warnings: What the user should know, a sentence each.
        sentence: What the self-check translated.
        translation: What came out.
        url: The commit on the Hub; None in a dry run.
    """

    repo_id: str
    files: dict[str, int]
    left_out: list[str]
    warnings: list[str]
    sentence: str
    translation: str
    url: str | None = None


@dataclass
class _Contents:
    """The files to upload: the card's text, and the path of each other file by its name in the repository."""

    card: str
    files: dict[str, Path]
    warnings: list[str] = field(default_factory=list)

    def stage(self, folder: Path) -> None:
        """Put them into an empty folder as they will lie in the repository, by links where the system has them."""
        (folder / CARD).write_text(self.card, encoding="utf-8")
        for name, path in self.files.items():
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                target.symlink_to(path.resolve())
            except OSError:  # Windows, without the privilege
                shutil.copyfile(path, target)


def push_checkpoint(
    folder: str | Path,
    repo_id: str,
    *,
    private: bool = False,
    license: str | None = None,
    revision: str | None = None,
    commit_message: str | None = None,
    include: Iterable[str] = (),
    token: str | None = None,
    dry_run: bool = False,
) -> Push:
    """Push a checkpoint folder of this package to the Hub, after a check that it works there for everybody.

    The checkpoint's own files go, of the weights safetensors alone, with README.md as it lies in the folder but for
    the repository's name and address. Checkpoints of the run, optimizer states and logs stay. Nothing in the folder
    changes.

    Args:
        folder: Checkpoint folder.
        repo_id: "owner/name"; made if it does not exist.
        private: Make a private repository, or raise if the one that exists is public.
        license: Licence of the weights, in place of the card's.
        revision: Branch to push to, made if it does not exist; "main" by default.
        commit_message: Message of the commit.
        include: Patterns of further files, such as "figures/*.png".
        token: Token with write access; by default that of `HF_TOKEN` or `hf auth login`.
        dry_run: Do everything but the push; needs neither token nor network.

    Returns:
        What was pushed, or would be.

    Raises:
        ValueError: If the folder, its card or an argument is not right, the checkpoint does not work by itself, or
            there is no token.
        OSError: If the Hub can't be reached or refuses; the message never holds the token.
    """
    folder = Path(folder)
    check_repo_id("repo_id", repo_id)
    if "/" not in repo_id:
        raise ValueError(
            f"repo_id {repo_id!r} must be owner/name: your user name or organisation and the model's name."
        )
    contents = _contents(folder, repo_id, license, include)
    token = None if dry_run else token or get_token()
    if not dry_run and not token:
        raise ValueError(
            "No token for the Hub: log in by `hf auth login`, or put a token with write access into the environment "
            "variable HF_TOKEN."
        )
    sentence = read_record(folder).get("facts", {}).get("example_source") or "This is a test."
    task = split_card(contents.card)[0]["pipeline_tag"]
    with tempfile.TemporaryDirectory() as scratch:
        stage = Path(scratch) / "checkpoint"
        stage.mkdir()
        contents.stage(stage)
        translation = self_check(stage, sentence, task if task in TASKS else "translation")
        push = Push(
            repo_id=repo_id,
            files={path.relative_to(stage).as_posix(): path.stat().st_size for path in _files_below(stage)},
            left_out=_left_out(folder, contents),
            warnings=contents.warnings,
            sentence=sentence,
            translation=translation,
        )
        if token:
            push.url = _upload(stage, repo_id, private, revision, commit_message, token)
    return push


def _files_below(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _left_out(folder: Path, contents: _Contents) -> list[str]:
    """The files that are not uploaded; of those in a subfolder the subfolder's name alone."""
    uploaded = {*contents.files.values(), folder / CARD}
    parts = [path.relative_to(folder).parts for path in _files_below(folder) if path not in uploaded]
    return sorted({name[0] if len(name) == 1 else f"{name[0]}/" for name in parts})


# The folder


def _contents(folder: Path, repo_id: str, license: str | None, include: Iterable[str]) -> _Contents:
    """The files to upload, checked as far as that goes without loading them."""
    _check_folder(folder)
    names = [*REQUIRED, *weight_files(folder)]
    if (folder / WEIGHTS_INDEX).is_file() and WEIGHTS not in names:
        names.append(WEIGHTS_INDEX)
    here = [path.name for path in sorted(folder.iterdir()) if path.is_file()]
    names += [name for name in here if any(fnmatch(name, pattern) for pattern in (CODE, *OPTIONAL))]
    files = {name: folder / name for name in names}
    files |= {name: folder / name for name in _included(folder, include)}
    card, warnings = card_for_hub(folder, repo_id, license)
    for name, text in {CARD: card, **{name: _text(path) for name, path in files.items()}}.items():
        if TOKEN.search(text):
            raise ValueError(f"{folder / name} holds what looks like an access token of the Hub: take it out first.")
    return _Contents(card, files, warnings)


def _check_folder(folder: Path) -> None:
    """Raise if a folder is no whole checkpoint of this package."""
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder")
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} has no config.json, so it holds no checkpoint")
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        model_type = config.get("model_type")
        code = {reference.rpartition("--")[2].partition(".")[0] for reference in config.get("auto_map", {}).values()}
    except (ValueError, AttributeError) as problem:
        raise ValueError(f"{folder / 'config.json'} cannot be read: {problem}") from None
    if model_type != MODEL_TYPE:
        raise ValueError(
            f"{folder} holds a model of the type {model_type!r}, not {MODEL_TYPE!r}: push it by its own "
            "model.push_to_hub(...)"
        )
    if not code:
        raise ValueError(
            f"{folder / 'config.json'} has no auto_map: load the model and save it by save_pretrained again"
        )
    needed = [*REQUIRED, *weight_files(folder), *(f"{name}.py" for name in sorted(code))]
    missing = [name for name in needed if not (folder / name).is_file()]
    if missing:
        raise ValueError(
            f"{folder} lacks {', '.join(missing)}: load model and tokenizer, and save both there by save_pretrained"
        )


def weight_files(folder: Path) -> list[str]:
    """Names of the safetensors files that `from_pretrained` reads.

    Raises:
        ValueError: If there are none.
    """
    if (folder / WEIGHTS).is_file():
        return [WEIGHTS]
    index = folder / WEIGHTS_INDEX
    if not index.is_file():
        raise ValueError(
            f"{folder} has no weights in the safetensors format ({WEIGHTS}): save the model there by save_pretrained"
        )
    try:
        return sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as problem:
        raise ValueError(f"{index} cannot be read: {problem!r}") from None


def _included(folder: Path, patterns: Iterable[str]) -> list[str]:
    """Names of the further files that the user asks for."""
    names = []
    for pattern in patterns:
        if not pattern or Path(pattern).is_absolute() or ".." in Path(pattern).parts:
            raise ValueError(
                f"include {pattern!r} must be a pattern of files inside the folder, such as figures/*.png"
            )
        found = [path.relative_to(folder).as_posix() for path in sorted(folder.glob(pattern)) if path.is_file()]
        if not found:
            raise ValueError(f"include {pattern!r} fits no file in {folder}")
        pickled = [name for name in found if Path(name).suffix in PICKLES]
        if pickled:
            raise ValueError(f"include {pattern!r} fits {pickled[0]}: nothing that has to be unpickled is pushed")
        names += [name for name in found if name not in (CARD, FACTS)]
    return names


def _text(path: Path) -> str:
    """What a file says that is text, "" for another."""
    if path.suffix == ".safetensors":
        return ""
    return path.read_text(encoding="utf-8", errors="ignore")


# The card


def card_for_hub(folder: Path, repo_id: str, license: str | None = None) -> tuple[str, list[str]]:
    """The card of a folder with the repository's name and address in it; the folder's own stays as it is.

    README.md is taken as it lies there, with what was edited by hand. Without it the card is filled from
    model_card.json, and without that from the checkpoint alone.

    Args:
        folder: Checkpoint folder.
        repo_id: Where the card is to stand.
        license: Licence in place of the card's.

    Returns:
        The text, and warnings.

    Raises:
        ValueError: If the metadata are not what the Hub takes.
    """
    record, warnings, name = read_record(folder), [], repo_id.rpartition("/")[2]
    text = (folder / CARD).read_text(encoding="utf-8") if (folder / CARD).is_file() else ""
    metadata, head, body = split_card(text)
    if not metadata:
        facts = RunFacts(**record["facts"]) if record else facts_of_checkpoint(folder)
        if not record:
            warnings.append(f"no {FACTS}: what the card has of the model is from the checkpoint alone")
        if not body.strip():
            body = split_card(render_card(facts, model_name=name, model_path=repo_id))[2]
        metadata = dict(card_metadata(name, facts).to_dict())  # type: ignore[no-untyped-call]
        head = ""
    wanted = {"library_name": "transformers", "pipeline_tag": "translation", **copy.deepcopy(metadata)}
    if license is not None:
        wanted["license"] = license
    warnings += check_metadata(wanted)
    if record.get("model_path"):
        body = body.replace(f"model={_quoted(record['model_path'])}", f"model={_quoted(repo_id)}")
    if record.get("model_name"):
        heading = re.compile(rf"^# {re.escape(record['model_name'])}[ \t]*$", flags=re.MULTILINE)
        body = heading.sub(f"# {name}", body, count=1)
        for entry in wanted.get("model-index", []):
            entry["name"] = name if entry["name"] == record["model_name"] else entry["name"]
    for path in dict.fromkeys(re.findall(r'pipeline\([^)]*?model="(.*?)"', body)):
        if path != repo_id:
            warnings.append(f"{CARD} shows how to load {path}, not {repo_id}")
    if not head or wanted != metadata:
        head = f"---\n{yaml.safe_dump(wanted, sort_keys=False, allow_unicode=True)}---\n"
    return head + body, warnings


def facts_of_checkpoint(folder: Path) -> RunFacts:
    """What a checkpoint folder says by itself: the model, and nothing of its training."""
    from safetensors import safe_open
    from transformers import AutoConfig, GenerationConfig

    parameters = 0
    for name in weight_files(folder):
        with safe_open(folder / name, framework="pt") as weights:
            parameters += sum(math.prod(weights.get_slice(key).get_shape()) for key in weights.keys())  # noqa: SIM118
    configs = AutoConfig.from_pretrained(folder), GenerationConfig.from_pretrained(folder)
    known: dict[str, Any] = facts_of_configs(*configs)
    return RunFacts(parameters=parameters, **known)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


# The self-check


def self_check(folder: str | Path, sentence: str, task: str = "translation") -> str:
    """Compare what this package translates and what, in another process, the folder's code alone does.

    The other process cannot import this package, does not ask the Hub, and is given no token.

    Args:
        folder: Checkpoint folder.
        sentence: What to translate.
        task: Name of the pipeline.

    Returns:
        The translation.

    Raises:
        ValueError: If the folder does not work by itself, or not in the same way.
    """
    folder = Path(folder).resolve()
    try:
        ours = _translate_once(str(folder), sentence, task, False)
    except Exception as problem:
        raise ValueError(f"The checkpoint does not work: {type(problem).__name__}: {problem}") from problem
    alone = _translate_alone(folder, sentence, task)
    wrong = [f"{kind} {', '.join(alone[kind][:3])}" for kind in ("missing_keys", "unexpected_keys") if alone[kind]]
    if wrong:
        raise ValueError(f"The weights do not fit the code beside them: {'; '.join(wrong)}.")
    if alone["text"] != ours["text"] or not math.isclose(alone["loss"], ours["loss"], rel_tol=1e-4, abs_tol=1e-5):
        raise ValueError(
            f"The code beside the weights makes {alone['text']!r} (loss {alone['loss']:.5f}) of {sentence!r}, this "
            f"package {ours['text']!r} (loss {ours['loss']:.5f}): the folder's Python files are of another version. "
            "Load the model and save it by save_pretrained again."
        )
    return str(ours["text"])


def _translate_once(folder: str, sentence: str, task: str, trust_remote_code: bool) -> dict[str, Any]:
    """Load a checkpoint and use it; stands alone, for `_translate_alone` runs this source without the package."""
    from transformers import AutoModelForSeq2SeqLM, pipeline

    options = {"trust_remote_code": trust_remote_code}
    _, report = AutoModelForSeq2SeqLM.from_pretrained(folder, output_loading_info=True, **options)
    translate = pipeline(task, model=folder, device="cpu", **options)
    text = next(iter(translate(sentence)[0].values()))
    inputs = translate.tokenizer(sentence, text_target=text, return_tensors="pt")
    inputs = {name: inputs[name] for name in ("input_ids", "attention_mask", "labels")}
    return {
        "text": text,
        "loss": translate.model(**inputs).loss.item(),
        "missing_keys": sorted(report["missing_keys"]),
        "unexpected_keys": sorted(report["unexpected_keys"]),
    }


def _translate_alone(folder: Path, sentence: str, task: str) -> dict[str, Any]:
    """What `_translate_once` gives in a process that cannot import this package."""
    program = "\n".join(
        [
            "from __future__ import annotations",
            "import json, sys",
            "from typing import Any",
            f"sys.modules[{PACKAGE!r}] = None  # importing it fails, installed or not",
            inspect.getsource(_translate_once),
            "print(json.dumps(_translate_once(*json.loads(sys.argv[1]))))",
        ]
    )
    with tempfile.TemporaryDirectory() as scratch:
        environment = {name: value for name, value in os.environ.items() if not name.endswith("_TOKEN")}
        environment |= {
            "HF_HUB_OFFLINE": "1",
            "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1",
            "HF_MODULES_CACHE": scratch,  # nobody's earlier copy of the code
            "PYTHONIOENCODING": "utf-8",
        }
        result = subprocess.run(
            [sys.executable, "-c", program, json.dumps([str(folder), sentence, task, True])],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            cwd=scratch,
            env=environment,
            check=False,
        )
    if result.returncode:
        reason = next(iter(result.stderr.strip().splitlines()[-1:]), f"exit status {result.returncode}")
        raise ValueError(f"The checkpoint does not work without this package: {reason}")
    found: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return found


# The push


def _upload(
    stage: Path, repo_id: str, private: bool, revision: str | None, commit_message: str | None, token: str
) -> str:
    """Make the repository where it is missing, and commit a folder to it; the URL of the commit."""
    api = HfApi(token=token)
    with _one_line_errors(repo_id, api):
        api.create_repo(repo_id, private=True if private else None, exist_ok=True)
        is_public = private and not api.model_info(repo_id).private
    if is_public:
        raise ValueError(f"{repo_id} exists already and is public: make it private in its settings on the Hub first.")
    with _one_line_errors(repo_id, api):
        if revision is not None and revision != "main" and not revision.startswith("refs/"):
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        commit = api.upload_folder(
            repo_id=repo_id,
            folder_path=stage,
            revision=revision,
            commit_message=commit_message or "Upload checkpoint",
            delete_patterns=list(STALE),
        )
    return str(commit.commit_url)


@contextlib.contextmanager
def _one_line_errors(repo_id: str, api: HfApi) -> Iterator[None]:
    """Turn what the Hub's client raises into an OSError of one line with a remedy and without the token."""
    try:
        yield
    except Exception as problem:  # HTTP, connection and protocol errors have no class in common
        status = getattr(getattr(problem, "response", None), "status_code", None)
        reason = " ".join(str(getattr(problem, "server_message", None) or problem).split())
        remedies: dict[Any, str] = {
            None: f"check the connection to {api.endpoint}",
            401: "the token is not valid, log in anew by `hf auth login`",
            403: f"the token may not write to {repo_id}, take one with write access or another owner",
            404: "there is no such repository, or the token may not see it",
        }
        remedy = remedies.get(status, "try again later" if status and status >= 500 else "see what it says")
        what = f"{type(problem).__name__}: {reason}" if status is None else f"status {status}: {reason}"
        raise OSError(
            f"Nothing was pushed to {repo_id}: {remedy} ({what})".replace(str(api.token), "<token>")
        ) from None
