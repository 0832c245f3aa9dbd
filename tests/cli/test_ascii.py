"""In an ASCII locale no command fails because of a character, and its output is readable."""

import io
import json
import sys
from pathlib import Path

import pytest

from command import TASK, paceline, write_task
from paceline import output

pytestmark = pytest.mark.processes

# Runs commands one after another in one process.
ALL = """
import json, sys, traceback
from pathlib import Path
from paceline.cli import main

ends = {}
for words in json.loads(Path("commands.json").read_text()):
    print(f"--- {' '.join(words).encode('ascii', 'replace').decode()}")
    sys.argv = ["paceline", *words]
    try:
        main()
    except SystemExit as error:
        ends[" ".join(words)] = error.code or 0
    except BaseException:
        traceback.print_exc()
        ends[" ".join(words)] = "traceback"
Path("ends.json").write_text(json.dumps(ends))
"""
RUN = "r-größe-λ-日本"
COMMANDS = {
    (
        "train",
        "größe.py:Größe",
        "--steps",
        "3",
        "--device",
        "cpu",
        "--run-dir",
        RUN,
        "--profile",
        "--set",
        "validation=5",
    ): 0,
    ("status", RUN): 0,
    ("show", RUN): 0,
    ("doctor", RUN): 0,
    ("diff", RUN, RUN): 0,
    ("profile", RUN, "--measured"): 2,  # a few steps, none of them profiled
    ("cancel", RUN): 2,
    ("resume", RUN): 2,
    ("show", "nö"): 2,
    ("plan", "gpt2", "--ranks", "4"): None,
    ("plan", "gpt2", "--ranks", "4", "--explain"): None,
    ("scale", "gpt2"): None,
    ("probe",): 0,
    ("train", "größe.py:Grösse", "--device", "cpu"): 2,
    ("train", "größe.py:Größe", "--set", "größe=1", "--device", "cpu"): 2,
    ("--help",): 0,
    ("--version",): 0,
    **{
        (name, "--help"): 0
        for name in (
            "train",
            "submit",
            "verify",
            "drill",
            "bench",
            "comms",
            "preflight",
            "evaluate",
            "export",
        )
    },
    ("bench", "storage", "--help"): 0,
    ("trän",): 2,
}


def test_commands_print_non_ascii_names_in_an_ascii_locale(tmp_path):
    write_task(tmp_path, TASK.replace("Regression", "Größe"), "größe.py")
    (tmp_path / "commands.json").write_text(json.dumps([*COMMANDS]))
    result = paceline(
        at=tmp_path, program=(sys.executable, "-c", ALL), LC_ALL="C", PYTHONIOENCODING="ascii", NO_COLOR="1"
    )
    assert result.status == 0, result.all
    ends = json.loads((tmp_path / "ends.json").read_text())
    for words, expected in COMMANDS.items():
        end = ends[" ".join(words)]
        assert end == expected or (expected is None and end in (0, 2)), (words, end, result.all)
    assert "Traceback" not in result.all
    assert "UnicodeEncodeError" not in result.all
    assert (result.out + result.err).isascii()
    assert " -> " in result.out, "the arrow of the closing table"


def test_unencodable_characters_are_transliterated():
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, "ascii", output.PLAIN)
    stream.write("3 × 2 … 1.0 → 0.5 ± 10 µs ╭─┬─╮│a│ 2² café ж \ud800")
    stream.flush()
    assert raw.getvalue() == b"3 x 2 ... 1.0 -> 0.5 +/- 10 us +-+-+|a| 22 cafe \\u0436 \\ud800"


def test_every_sign_in_the_source_has_an_ascii_form():
    """No sign in a sentence of the package is printed as an escape."""
    signs = {
        sign
        for path in Path(output.__file__).parent.rglob("*.py")
        for sign in path.read_text()
        if not sign.isascii()
    }
    for sign in signs:
        assert "\\" not in sign.encode("ascii", output.PLAIN).decode(), sign


FILES_IN_ASCII = """
import locale
from pathlib import Path
from paceline import spec
from paceline.spec import Launch, Spec
assert locale.getencoding().lower() not in ("utf-8", "utf8"), locale.getencoding()
launch = Launch(ranks=2, plan="ddp", chosen="90 \\u00b5s \\u00b1 3 % \\u2192")
spec.save(Path("spec.toml"), Spec(task="digits"), launch)
assert spec.load(Path("spec.toml"), {})[1].chosen == "90 \\u00b5s \\u00b1 3 % \\u2192"
"""


def test_files_are_utf8_in_every_locale(tmp_path):
    """Even without the UTF-8 mode of Python."""
    strict = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    result = paceline(at=tmp_path, program=(sys.executable, "-c", FILES_IN_ASCII), **strict)
    assert result.status == 0, result.all
    assert "± 3 % →" in (tmp_path / "spec.toml").read_text("utf-8")
