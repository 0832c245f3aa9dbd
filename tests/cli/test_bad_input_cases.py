"""Each bad input of bad_inputs.py gives an exit status and one sentence, without a traceback or new files."""

import os
import random
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from bad_inputs import CASES, DAMAGED, FILES, FOLDER
from command import PACELINE, Result, paceline, succeed

USAGE_ERROR = "─ Error ─"  # printed by typer, in a box


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bad")
    for name, content in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    os.mkfifo(folder / "pipe")
    words = "train bad.py:Small --steps 4 --batch 8 --save-every 2 --run-dir run --device cpu --profile"
    succeed(*words.split(), at=folder)
    for name, changes in DAMAGED.items():
        shutil.copytree(folder / "run", folder / name)
        for pattern, content in changes.items():
            for path in [*(folder / name).glob(pattern)] or [folder / name / pattern]:
                replace(path, content)
    return folder


def replace(path: Path, content: bytes | object | None) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    if content is FOLDER:
        path.mkdir()
    elif isinstance(content, bytes):
        path.write_bytes(content)


def tree(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if "__pycache__" not in path.parts}


def find_mistakes(
    case: tuple[str, str] | tuple[str, str, int], here: Path, run: Callable[..., Result]
) -> list[str]:
    """Return what is wrong with the result of a bad input; [] if nothing is."""
    words, parts, status = case if len(case) == 3 else (*case, 2)
    before = tree(here)
    result = run(*shlex.split(words), at=here, timeout_s=120)
    output = result.out + result.err
    sentence = result.err.startswith("paceline: ") and result.err.count("\n") == 1
    mistakes = [f"exit status {result.status}, not {status}"] if result.status != status else []
    mistakes += [f"no {part!r}" for part in parts.split("|") if part not in output]
    mistakes += ["a traceback"] if "Traceback (most recent call last)" in output else []
    mistakes += (
        ["not one sentence"] if status and not (sentence or USAGE_ERROR in output or not result.err) else []
    )
    mistakes += [f"left behind: {path.relative_to(here)}" for path in sorted(tree(here) - before)]
    return [*mistakes, result.all] if mistakes else []


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0][:80].encode("unicode_escape").decode())
def test_bad_input_prints_one_sentence_and_leaves_no_files(case, here):
    assert not (mistakes := find_mistakes(case, here, paceline)), "\n".join(mistakes)


@pytest.mark.slow
def test_some_bad_inputs_in_new_processes(here):
    """New processes import everything, as on a command line."""

    def cold(*words: str, at: Path, timeout_s: float) -> Result:
        return paceline(*words, at=at, timeout_s=timeout_s, program=PACELINE)

    for case in random.sample(CASES, 30):
        assert not (mistakes := find_mistakes(case, here, cold)), f"{case[0][:200]}\n" + "\n".join(mistakes)
