"""The programs and commands of docs/hugging-face.md."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from command import clean_environment, succeed
from pages import read_blocks

pytest.importorskip("transformers")


@pytest.mark.processes
@pytest.mark.slow
def test_programs_and_commands_of_the_page(tmp_path: Path) -> None:
    blocks = read_blocks("docs/hugging-face.md")
    for name in ("small.py", "use.py"):
        (tmp_path / name).write_text(blocks[name])
    for line in blocks["commands"].splitlines():
        program, *words = shlex.split(line)
        if program == "paceline":
            succeed(*words, at=tmp_path)
        else:
            subprocess.run([sys.executable, *words], cwd=tmp_path, env=clean_environment(), check=True)
    used = subprocess.run(
        [sys.executable, "use.py"], cwd=tmp_path, env=clean_environment(), check=True, capture_output=True
    )
    assert used.stdout.decode().startswith("12 and 30 are")
    [command] = blocks["generate"].splitlines()
    text = succeed(*shlex.split(command)[1:], at=tmp_path).out
    (tmp_path / "generate.py").write_text(blocks["generate.py"])
    texts = subprocess.run(
        [sys.executable, "generate.py"],
        cwd=tmp_path,
        env=clean_environment(),
        check=True,
        capture_output=True,
        text=True,
    )
    assert texts.stdout.startswith("12 and 30 are" + text.rstrip("\n"))
    trained = {path.name for path in (tmp_path / "trained").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= trained
