"""Pushing to a Hub on 127.0.0.1: what arrives, what people then load from it, what is refused, where the token goes.

The server speaks as much of the Hub's protocol as `huggingface_hub` needs to make a repository, to commit to it (small
files in the commit, weights by git LFS), and to load from it.
"""

import base64
import hashlib
import json
import os
import re
import subprocess
import sys
import threading
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml

from vanilla_transformer import VanillaTransformerForConditionalGeneration, save_tokenizer, train_tokenizer
from vanilla_transformer.hub import facts_of_checkpoint
from vanilla_transformer.model_card import write_model_card

ROOT = Path(__file__).resolve().parents[1]
TOKEN = "hf_" + "NotARealTokenButAsLongAsOne1234567"
CHECKPOINT = {
    "README.md",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    *(path.name for path in (ROOT / "vanilla_transformer").glob("*_vanilla_transformer.py")),
}


class Hub(ThreadingHTTPServer):
    """The repositories of the fake Hub: their files by branch, whether they are private, and their commit messages."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Answer)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.files, self.private, self.messages = {}, {}, {}
        self.objects, self.requests = {}, []
        threading.Thread(target=self.serve_forever, daemon=True).start()


class Answer(BaseHTTPRequestHandler):
    """Answers a request; a repository named "status-403" answers every write with that."""

    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, *_):
        """Say nothing."""

    def body(self):
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def reply(self, status, content=b"", **headers):
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def missing(self, code):
        self.reply(404, {"error": code}, X_Error_Code=code)

    def route(self):
        url = urllib.parse.urlsplit(self.path)
        path, body = urllib.parse.unquote(url.path), self.body()
        self.server.requests.append((self.command, path, self.headers.get("Authorization")))
        name = json.loads(body).get("name", "") if path == "/api/repos/create" else path
        if status := re.search(r"status-(\d+)", name):
            refusal = f"Not with {self.headers.get('Authorization')}."  # a server that gives secrets away
            return self.reply(int(status[1]), {"error": refusal}, X_Error_Message=refusal)
        is_write = self.command in ("POST", "PUT") and "/lfs/" not in path
        if is_write and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self.reply(401, {"error": "Invalid username or password."})
        for method, pattern, answer in ROUTES:
            found = re.fullmatch(pattern, path)
            if found and self.command in method:
                return answer(self, body, **found.groupdict())
        return self.missing("EntryNotFound")

    do_GET = do_HEAD = do_POST = do_PUT = route  # noqa: N815 - names of the base class

    def create(self, body):
        wanted = json.loads(body)
        repo = f"{wanted['organization'] or 'me'}/{wanted['name']}"
        if repo in self.server.files:
            return self.reply(
                409, {"error": "You already created this model repo", "url": f"{self.server.url}/{repo}"}
            )
        self.server.files[repo] = {"main": {}}
        self.server.private[repo] = wanted.get("visibility") == "private" or wanted.get("private") is True
        self.server.messages[repo] = []
        return self.reply(200, {"url": f"{self.server.url}/{repo}", "name": repo})

    def info(self, _, repo, branch="main"):
        if repo not in self.server.files:
            return self.missing("RepoNotFound")
        files = [{"rfilename": name} for name in self.server.files[repo][branch]]
        private = self.server.private[repo]
        return self.reply(200, {"id": repo, "modelId": repo, "private": private, "sha": "1" * 40, "siblings": files})

    def branch(self, _, repo, branch):
        self.server.files[repo][branch] = dict(self.server.files[repo]["main"])
        return self.reply(201, {})

    def tree(self, _, repo, branch):
        files = self.server.files[repo][branch]
        return self.reply(200, [{"type": "file", "path": p, "size": len(c), "oid": "0"} for p, c in files.items()])

    def validate(self, body):
        """Refuse what is no YAML, as the Hub does."""
        try:
            yaml.safe_load(json.loads(body)["content"].split("---\n")[1])
        except (yaml.YAMLError, IndexError) as problem:
            return self.reply(400, {"errors": [{"message": str(problem)}]})
        return self.reply(200, {"errors": [], "warnings": []})

    def preupload(self, body, repo, branch):
        names = [file["path"] for file in json.loads(body)["files"]]
        lfs = [] if repo.endswith("-plain") else [name for name in names if name.endswith(".safetensors")]
        modes = {name: "lfs" if name in lfs else "regular" for name in names}
        return self.reply(
            200, {"files": [{"path": n, "uploadMode": m, "shouldIgnore": False} for n, m in modes.items()]}
        )

    def batch(self, body, repo):
        objects = [
            {**o, "actions": {"upload": {"href": f"{self.server.url}/lfs/{o['oid']}"}}}
            for o in json.loads(body)["objects"]
        ]
        return self.reply(200, {"transfer": "basic", "objects": objects})

    def upload(self, body, oid):
        assert hashlib.sha256(body).hexdigest() == oid
        self.server.objects[oid] = body
        return self.reply(200)

    def commit(self, body, repo, branch):
        files = self.server.files[repo][branch]
        for line in body.splitlines():
            entry = json.loads(line)
            key, value = entry["key"], entry["value"]
            if key == "header":
                self.server.messages[repo].append(value["summary"])
            elif key == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif key == "lfsFile":
                files[value["path"]] = self.server.objects[value["oid"]]
            elif key == "deletedFile":
                del files[value["path"]]
        return self.reply(200, {"commitUrl": f"{self.server.url}/{repo}/commit/{'1' * 40}", "commitOid": "1" * 40})

    def resolve(self, _, repo, branch, path):
        content = self.server.files.get(repo, {}).get("main" if branch == "1" * 40 else branch, {}).get(path)
        if content is None:
            return self.missing("EntryNotFound" if repo in self.server.files else "RepoNotFound")
        return self.reply(200, content, ETag=f'"{hashlib.sha256(content).hexdigest()}"', X_Repo_Commit="1" * 40)


REPO = r"(?P<repo>[^/]+/[^/]+)"
ROUTES = [
    ("POST", "/api/repos/create", Answer.create),
    ("POST", "/api/validate-yaml", Answer.validate),
    ("GET", f"/api/models/{REPO}", Answer.info),
    ("GET", rf"/api/models/{REPO}/revision/(?P<branch>[^/]+)", Answer.info),
    ("GET", rf"/api/models/{REPO}/tree/(?P<branch>[^/]+)", Answer.tree),
    ("POST", rf"/api/models/{REPO}/branch/(?P<branch>.+)", Answer.branch),
    ("POST", rf"/api/models/{REPO}/preupload/(?P<branch>.+)", Answer.preupload),
    ("POST", rf"/api/models/{REPO}/commit/(?P<branch>.+)", Answer.commit),
    ("POST", rf"/{REPO}\.git/info/lfs/objects/batch", Answer.batch),
    ("PUT", r"/lfs/(?P<oid>\w+)", Answer.upload),
    (("GET", "HEAD"), rf"/{REPO}/resolve/(?P<branch>[^/]+)/(?P<path>.+)", Answer.resolve),
]


@pytest.fixture(scope="module")
def hub():
    """A Hub of this module's own."""
    server = Hub()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def folder(make_folder, tmp_path_factory):
    """A run's folder: a checkpoint, its card, and what else lies there."""
    return make_folder(tmp_path_factory.mktemp("runs") / "en-de")


@pytest.fixture(scope="module")
def make_folder():
    def make(folder):
        tokenizer = train_tokenizer(["the cat sees a dog", "der Hund sieht eine Katze"] * 2, vocab_size=290)
        config = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1}
        model = VanillaTransformerForConditionalGeneration.config_class.tiny(vocab_size=len(tokenizer), **config)
        VanillaTransformerForConditionalGeneration(model).save_pretrained(folder)
        save_tokenizer(tokenizer, folder)
        facts = facts_of_checkpoint(folder)
        facts.languages, facts.license, facts.example_source = ("en", "de"), "mit", "the cat sees a dog"
        facts.scores = {"test": {"bleu": 12.5}}
        write_model_card(folder, facts)
        for name in ("checkpoint-2/optimizer.pt", "runs/events.out.tfevents.1", "training_args.bin", "metrics.json"):
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(b"x")
        return folder

    return make


# Calls the script as a user does, several times in one process, as an import of transformers takes long.
DRIVER = """
import json, runpy, sys
import vanilla_transformer.hub as hub
script, quick, commands = json.loads(sys.argv[1])
if quick:  # tested elsewhere, and slow
    hub.self_check = lambda folder, sentence, task: "checked"
for command in commands:
    sys.argv = [script, *command]
    sys.path.insert(0, script.rpartition("/")[0])  # as `python script` does
    for stream in (sys.stdout, sys.stderr):
        print("=====", file=stream, flush=True)
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        print("exit", end.code)
"""


def environment(hub, home, **more):
    """A machine that is logged in at the fake Hub."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    return {
        **kept,
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(home),
        "HF_TOKEN": TOKEN,
        "HF_HUB_DISABLE_XET": "1",  # its storage is a protocol of its own
        "OMP_NUM_THREADS": "1",
        "PYTHONIOENCODING": "utf-8",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        **more,
    }


def python(program, *arguments, env, cwd):
    result = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env=env,
        cwd=cwd,
        capture_output=True,
        encoding="utf-8",
        check=False,
        stdin=subprocess.DEVNULL,
    )
    assert result.returncode == 0, result.stderr
    return result


def push(commands, env, cwd, quick=True):
    """Run the script once for each command, and return for each what it printed and what its errors were."""
    commands = [list(map(str, command)) for command in commands]
    arguments = json.dumps([(ROOT / "scripts" / "push_to_hub.py").as_posix(), quick, commands])
    result = python(DRIVER, arguments, env=env, cwd=cwd)
    assert TOKEN not in result.stdout + result.stderr
    parts = [stream.split("=====\n")[1:] for stream in (result.stdout, result.stderr)]
    return list(zip(*parts, strict=True))


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture(scope="module")
def pushed(hub, folder, tmp_path_factory):
    """What a dry run and a push of the same folder printed."""
    before, home = contents(folder), tmp_path_factory.mktemp("home")
    command = [folder, "--repo_id", "me/small", "--commit_message", "First"]
    dry, real = push([[*command, "--dry_run"], command], environment(hub, home), home, quick=False)
    assert contents(folder) == before
    assert TOKEN.encode() not in b"".join(contents(home).values())
    return dry, real


def test_a_dry_run_says_what_would_be_pushed(pushed, hub):
    output, errors = pushed[0]
    sizes = {name: size for size, name in re.findall(r"^ *([\d,]+)  (\S+)$", output, flags=re.MULTILINE)}
    files = hub.files["me/small"]["main"]
    assert sizes == {name: f"{len(content):,}" for name, content in files.items()}
    assert "left out: checkpoint-2/, metrics.json, model_card.json, runs/, training_args.bin" in output
    assert "self-check: without the package as with it, 'the cat sees a dog' gives " in output
    assert output.endswith("dry run: nothing was pushed to me/small\n")
    assert "error" not in errors


def test_the_checkpoint_arrives_and_nothing_else(pushed, hub, folder):
    output, errors = pushed[1]
    files = hub.files["me/small"]["main"]
    assert set(files) == CHECKPOINT
    for name in CHECKPOINT - {"README.md"}:
        assert files[name] == (folder / name).read_bytes(), name
    assert hub.messages["me/small"] == ["First"]
    assert not hub.private["me/small"]
    assert output.endswith(f"pushed: {hub.url}/me/small/commit/{'1' * 40}\n")
    assert "warning" not in errors
    assert {who for _, path, who in hub.requests if "me/small" in path and "/lfs/" not in path} == {f"Bearer {TOKEN}"}
    assert TOKEN.encode() not in b"".join(files.values())


def test_the_card_speaks_of_the_repository(pushed, hub):
    _, block, body = hub.files["me/small"]["main"]["README.md"].decode().split("---\n", 2)
    metadata = yaml.safe_load(block)
    assert metadata["license"] == "mit"
    assert metadata["model-index"][0]["name"] == "small"
    assert "# small\n" in body
    assert body.count('model="me/small"') == 2
    assert "en-de" not in block + body


def test_people_load_it_as_the_card_says(pushed, hub, tmp_path):
    card = hub.files["me/small"]["main"]["README.md"].decode()
    with_package, without = re.findall(r"^```python\n(.*?)^```", card, flags=re.MULTILINE | re.DOTALL)
    absent = "import sys\nsys.modules['vanilla_transformer'] = None\n"
    answers = []
    for name, program in (("with", with_package), ("without", absent + without)):
        env = environment(hub, tmp_path / name, HF_TOKEN="")
        answers.append(python(program, env=env, cwd=tmp_path).stdout)
    assert answers[0] == answers[1]
    translation = re.search(r"gives (.*)", pushed[1][0])[1]
    assert answers[0] == f"[{{'translation_text': {translation}}}]\n"


@pytest.fixture(scope="module")
def small_things(hub, make_folder, tmp_path_factory):
    """Several pushes of one process, without the self-check."""
    home, folder = tmp_path_factory.mktemp("home"), make_folder(tmp_path_factory.mktemp("runs") / "mine")
    readme = folder / "README.md"
    readme.write_text(readme.read_text(encoding="utf-8") + "\nMy own words, see figures/a.png.\n", encoding="utf-8")
    (folder / "figures").mkdir()
    (folder / "figures" / "a.png").write_bytes(b"a picture")
    hub.files["me/old"] = {
        "main": {"model-00001-of-00002.safetensors": b"", "model.safetensors.index.json": b"", "notes.md": b""}
    }
    hub.private["me/old"], hub.messages["me/old"] = False, []
    commands = {
        "edited": ["--repo_id", "me/edited", "--license", "cc-by-4.0", "--include", "figures/*", "--private"],
        "branch": ["--repo_id", "me/edited", "--revision", "v2"],
        "public": ["--repo_id", "me/old", "--private"],
        "old": ["--repo_id", "me/old"],
        **{f"status {status}": ["--repo_id", f"me/status-{status}"] for status in (401, 403, 500)},
    }
    env = environment(hub, home, HF_DEBUG="1")  # the client logs its requests
    results = push([[folder, *command] for command in commands.values()], env, home)
    return dict(zip(commands, results, strict=True))


def test_edits_by_hand_and_further_files_are_pushed(small_things, hub):
    files = hub.files["me/edited"]["main"]
    card = files["README.md"].decode()
    assert card.endswith("\nMy own words, see figures/a.png.\n")
    assert "license: cc-by-4.0" in card
    assert "# edited\n" in card
    assert files["figures/a.png"] == b"a picture"
    assert hub.private["me/edited"]


def test_a_branch_is_made(small_things, hub):
    assert "license: mit" in hub.files["me/edited"]["v2"]["README.md"].decode()
    assert "license: cc-by-4.0" in hub.files["me/edited"]["main"]["README.md"].decode()
    assert small_things["branch"][0].splitlines()[-1].startswith("pushed: ")


def test_a_public_repository_is_not_taken_for_a_private_one(small_things):
    output, errors = small_things["public"]
    assert output == "exit 2\n"
    assert "push_to_hub.py: error: me/old exists already and is public" in errors


def test_weights_of_an_earlier_push_go(small_things, hub):
    # Left beside the new file they would be dead weight; the other way round, the old file would be loaded.
    assert set(hub.files["me/old"]["main"]) == CHECKPOINT | {"notes.md"}


@pytest.mark.parametrize(
    ("status", "remedy"),
    [(401, "log in anew"), (403, "may not write to me/status-403"), (500, "try again later")],
)
def test_the_hub_says_no(small_things, status, remedy):
    output, errors = small_things[f"status {status}"]
    (line,) = [line for line in errors.splitlines() if line.startswith("push_to_hub.py: error:")]
    assert output == "exit 2\n"
    assert remedy in line
    assert f"status {status}: Not with Bearer <token>." in line
    assert "Traceback" not in errors


def test_a_log_of_the_requests_was_really_kept(small_things):
    # So that the absence of the token in it, checked where the script is run, says something.
    assert "api/repos/create" in small_things["status 500"][1]
    assert "authorization" in small_things["status 500"][1].lower()


def test_without_a_hub(hub, folder, tmp_path):
    unreachable = environment(hub, tmp_path, HF_ENDPOINT="http://127.0.0.1:9")
    ((output, errors),) = push([[folder, "--repo_id", "me/x"]], unreachable, tmp_path)
    assert output == "exit 2\n"
    assert re.search(
        r"error: Nothing was pushed to me/x: check the connection to http://127.0.0.1:9 \(.*\)\n$", errors
    )


def test_the_client_s_other_way_of_uploading(hub, folder, tmp_path):
    # With hf_xet the client has code of its own for folders; for small files it needs no other server.
    env = environment(hub, tmp_path, HF_HUB_DISABLE_XET="")
    ((output, _),) = push([[folder, "--repo_id", "me/all-plain"]], env, tmp_path)
    assert output.splitlines()[-1].startswith("pushed: ")
    assert set(hub.files["me/all-plain"]["main"]) == CHECKPOINT


TRAIN = """
import sys
import datasets
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
from vanilla_transformer import VanillaTransformerTrainer, VanillaTransformerTrainingArguments
folder, token = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(folder)
ids = tokenizer(["the cat sees a dog"] * 2).input_ids
arguments = VanillaTransformerTrainingArguments(
    "trained", max_steps=2, max_tokens_per_batch=60, use_cpu=True, report_to="none", bf16=False, hub_strategy="end",
    push_to_hub=True, hub_model_id="me/trained", hub_token=token,
)
trainer = VanillaTransformerTrainer(
    AutoModelForSeq2SeqLM.from_pretrained(folder),
    arguments,
    train_dataset=datasets.Dataset.from_dict({"input_ids": ids, "labels": ids}),
    processing_class=tokenizer,
)
trainer.train()
trainer.push_to_hub(language=["en", "de"], license="mit", dataset="two sentences")
"""


def test_the_trainer_pushes_the_same_kind_of_card(hub, folder, tmp_path):
    # The token comes by the arguments, which the library pickles into the folder.
    env = environment(hub, tmp_path / "home", HF_TOKEN="", HF_DEBUG="1")
    result = python(TRAIN, str(folder), TOKEN, env=env, cwd=tmp_path)
    assert TOKEN not in result.stdout + result.stderr
    files = hub.files["me/trained"]["main"]
    card = files["README.md"].decode()
    for text in (
        "license: mit",
        "# trained\n",
        "| data | two sentences |",
        "| updates | 2 |",
        "| started from | en-de |",
    ):
        assert text in card
    assert card.count('model="me/trained"') == 2
    assert set(files) > CHECKPOINT
    assert TOKEN.encode() not in b"".join([*files.values(), *contents(tmp_path).values()])


def test_train_pushes_at_its_end(hub, tmp_path):
    sentences = {"en": "the cat sees a dog\na red house\n", "de": "die Katze sieht einen Hund\nein rotes Haus\n"}
    for language, text in sentences.items():
        (tmp_path / f"train.{language}").write_text(text * 2, encoding="utf-8")
    command = (
        "--train_file train.en train.de --source_lang en --target_lang de --preset tiny --vocab_size 290 --d_model 16 "
        "--encoder_layers 1 --decoder_layers 1 --max_steps 2 --max_tokens_per_batch 100 --bf16 false --use_cpu "
        "--report_to none --output_dir model --push_to_hub --hub_model_id me/by-train --hub_strategy end --license mit"
    )
    result = subprocess.run(
        [sys.executable, ROOT / "scripts" / "train.py", *command.split()],
        env=environment(hub, tmp_path / "home"),
        cwd=tmp_path,
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.endswith(f"pushed: {hub.url}/me/by-train/commit/{'1' * 40}\n")
    assert set(hub.files["me/by-train"]["main"]) == CHECKPOINT
    assert "| data | train.en and train.de |" in hub.files["me/by-train"]["main"]["README.md"].decode()
    assert TOKEN not in result.stdout + result.stderr
