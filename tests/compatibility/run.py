"""Try the package, and the code that ships with a checkpoint, on several releases of transformers.

    python tests/compatibility/run.py                       # 5.0.0, 5.9.0, 5.17.0 and the newest 5.x
    python tests/compatibility/run.py 5.0.0 --tests         # one release, and the whole test suite with it
    python tests/compatibility/run.py --write docs/compatibility.md

Each release gets an environment of its own under .compat/, with everything else as constraints.txt says. The
environment of constraints.txt itself (.venv) is the reference: it makes a checkpoint, every release must load it, give
the same logits and the same tokens, train a step and save; then the reference must load what they saved.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROBE = Path(__file__).with_name("probe.py")
RELEASES = ("5.0.0", "5.9.0", "5.17.0", "newest")
MODES = {"package": "package imported", "folder": "from the folder alone, trusted"}
CHECKS = ("load", "forward", "greedy", "beam 4", "pipelines", "Trainer step", "save, load")
BACK = "back on the reference"
# What depends on transformers' own release; pip chooses it for each.
OWN_CHOICE = ("transformers", "tokenizers", "huggingface_hub", "hf-xet", "httpx2", "httpcore2", "typer", "safetensors")
TABLE_MARK = "<!-- table: make compat -->"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("releases", nargs="*", default=list(RELEASES), metavar="RELEASE", help="5.x.y or newest")
    parser.add_argument("--environments", type=Path, default=ROOT / ".compat", help="where environments are kept")
    parser.add_argument("--tests", action="store_true", help="also run the test suite on each release")
    parser.add_argument("--write", type=Path, help="Markdown file whose table is to be replaced")
    arguments = parser.parse_args()
    for release in arguments.releases:
        if release != "newest" and not re.fullmatch(r"5\.\d+\.\d+", release):
            parser.error(f"{release} is not a release of transformers 5: write it as 5.9.0, or newest")

    rows, good = [], True
    with tempfile.TemporaryDirectory() as scratch:
        reference = Path(scratch, "reference")
        made = probe(sys.executable, ["make", reference], scratch)
        print(f"reference: transformers {version(sys.executable)}, {made}", flush=True)
        for release in arguments.releases:
            python = environment(arguments.environments, release)
            name = version(python) + (" (newest)" if release == "newest" else "")
            for mode, shown in MODES.items():
                following = Path(scratch, f"{release}-{mode}")
                results = probe(python, ["try", reference, following, mode], scratch)
                if following.is_dir():
                    results[BACK] = one_line(probe(sys.executable, ["again", following, "package"], scratch))
                rows.append([name, shown, *(results.get(check, "not reached") for check in (*CHECKS, BACK))])
                print(" | ".join(rows[-1]), flush=True)
            if arguments.tests:
                good &= run_tests(python, name)
    text = table(rows)
    print(f"\n{text}")
    if arguments.write:
        replace_table(arguments.write, text)
    return 0 if good and all(cell == "ok" for row in rows for cell in row[2:]) else 1


def environment(folder: Path, release: str) -> str:
    """Return the Python of the environment of a release; build it if it is missing or its requirements changed."""
    place = folder / release
    python = str(place / "bin" / "python")
    wanted = "transformers>=5,<6" if release == "newest" else f"transformers=={release}"
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    torch = next(line for line in constraints if line.startswith("torch=="))
    kept = [line for line in constraints if line.partition("==")[0] not in OWN_CHOICE]
    mark, state = place / "installed", "\n".join([wanted, *kept, (ROOT / "pyproject.toml").read_text("utf-8")])
    if mark.is_file() and mark.read_text(encoding="utf-8") == state:
        return python
    print(f"installing {wanted} into {place} ...", flush=True)
    shutil.rmtree(place, ignore_errors=True)
    venv.create(place, with_pip=True)
    loosened = place / "constraints.txt"
    loosened.write_text("\n".join(kept) + "\n", encoding="utf-8")
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    index = os.environ.get("TORCH_INDEX")  # as `make` takes it
    # First and exact: a range would let pip pick a larger build.
    subprocess.run([*pip, *(["--index-url", index] if index else []), torch], check=True)
    subprocess.run([*pip, "-c", str(loosened), wanted, "-e", f"{ROOT}[dev,plot]"], check=True)
    mark.write_text(state, encoding="utf-8")
    return python


def version(python: str) -> str:
    """Return the release of transformers in an environment."""
    code = "from importlib.metadata import version; print(version('transformers'))"
    return subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def probe(python: str, arguments: list[object], scratch: str) -> dict[str, str]:
    """Run the probe in a process of its own, without network and without anybody to ask."""
    variables = {
        **os.environ,
        "HF_HOME": str(Path(scratch, "home")),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    variables.pop("PYTHONPATH", None)
    done = subprocess.run(
        [python, str(PROBE), *map(str, arguments)],
        env=variables,
        cwd=scratch,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    lines = done.stdout.splitlines()
    found = json.loads(lines[-1]) if done.returncode == 0 and lines else {"load": last_line(done.stderr)}
    if any(result != "ok" for result in (found.values() if isinstance(found, dict) else ())):
        print(done.stderr, file=sys.stderr)
    return found


def last_line(text: str) -> str:
    """Return the last line that says something."""
    return next((line for line in reversed(text.splitlines()) if line.strip()), "no output")


def one_line(results: dict[str, str]) -> str:
    """Return "ok", or the checks that failed."""
    wrong = [f"{check}: {result}" for check, result in results.items() if result != "ok"]
    return "; ".join(wrong) or "ok"


def run_tests(python: str, name: str) -> bool:
    """Run the test suite in an environment; print its last line."""
    print(f"tests on {name} ...", flush=True)
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [python, "-m", "pytest", "-n", "auto", "-m", "not slow", "--quiet"]
    return subprocess.run(command, cwd=ROOT, env=variables).returncode == 0


def table(rows: list[list[str]]) -> str:
    """Return a Markdown table."""
    head = ["transformers", "how", *CHECKS, BACK]
    lines = [head, ["---"] * len(head), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def replace_table(path: Path, text: str) -> None:
    """Put the table behind the mark in a Markdown file, in place of the one there."""
    before, mark, after = path.read_text(encoding="utf-8").partition(TABLE_MARK)
    if not mark:
        raise ValueError(f"{path} has no line {TABLE_MARK!r} for the table to stand under")
    rest = re.sub(r"\A\s*(\|[^\n]*\n)*\s*", "", after)
    path.write_text(f"{before}{mark}\n\n{text}\n" + (f"\n{rest}" if rest else ""), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
