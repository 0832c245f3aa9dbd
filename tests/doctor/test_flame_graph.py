"""`paceline profile --stacks` with the real py-spy, and with a small program in its place."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from command import paceline, set_sample_delay, start, write_task
from pages import read_blocks

pytestmark = pytest.mark.processes

# Like py-spy: it records its arguments, and writes the file, or fails as py-spy fails without permission.
PY_SPY = f"""#!{sys.executable}
import os, sys
from pathlib import Path
if os.environ.get("DENIED"):
    print("Permission Denied: Try running again with elevated permissions", file=sys.stderr)
    sys.exit(1)
Path(sys.argv[sys.argv.index("--output") + 1]).write_text("<svg>" + " ".join(sys.argv))
"""


def why_no_py_spy() -> str | None:
    """Return why py-spy cannot read a process of this user."""
    if shutil.which("py-spy") is None:
        return "py-spy is not installed: pip install py-spy"
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        dump = subprocess.run(["py-spy", "dump", "--pid", str(process.pid)], capture_output=True, text=True)
        process.kill()
    return f"py-spy is not permitted: {dump.stderr.strip()[:100]}" if "Permission" in dump.stderr else None


@pytest.mark.slow
def test_flame_graph_of_a_rank(tmp_path):
    if reason := why_no_py_spy():
        pytest.skip(reason)
    write_task(tmp_path)
    delay = set_sample_delay(tmp_path / "slow", 0.02)
    words = ("train", "my.py:Regression", "--batch", "8", "--ranks", "2", "--steps", "5000")
    with start(*words, "--run-dir", "runs/a", at=tmp_path, SLOW=str(delay)) as running:
        running.wait_for_step(tmp_path / "runs/a", 2)
        command = read_blocks("docs/traces.md")["stacks"].split()[1:]
        result = paceline(*command, at=tmp_path)
        assert result.status == 0, result.all
        svg = (tmp_path / "stacks.svg").read_text()
        assert "__getitem__ (my.py" in svg  # where the samples of this task take their time
        assert running.process.poll() is None


def test_command_and_errors(tmp_path):
    """The arguments for py-spy, and one sentence for each thing that can be wrong."""
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin/py-spy"
    program.write_text(PY_SPY)
    program.chmod(0o755)
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    without = ":".join(part for part in path.split(":") if not Path(part, "py-spy").exists())
    write_task(tmp_path)
    delay = set_sample_delay(tmp_path / "slow", 0.02)
    words = ("train", "my.py:Regression", "--batch", "8", "--ranks", "2", "--steps", "5000")

    def profile(*options: str, search: str = path, **env: str) -> str:
        result = paceline("profile", "run", "--stacks", *options, at=tmp_path, PATH=search, **env)
        assert result.status == 2
        assert "Traceback" not in result.all
        return result.err

    with start(*words, "--run-dir", "run", at=tmp_path, SLOW=str(delay)) as running:
        running.wait_for_step(tmp_path / "run", 2)
        options = ("--stacks", "a.svg", "--rank", "1", "--seconds", "3")
        assert paceline("profile", "run", *options, at=tmp_path, PATH=path).status == 0
        arguments = (tmp_path / "a.svg").read_text().split()
        assert arguments[arguments.index("--pid") + 1] == str(running.ranks()[1].pid)
        assert arguments[arguments.index("--duration") + 1] == "3"
        assert {"record", "--nonblocking", "--subprocesses"} <= {*arguments}
        assert "--rank 2, but run has 2 ranks, from 0" in profile("b.svg", "--rank", "2")
        assert "requires py-spy, which is not installed" in profile("b.svg", search=without)
        assert "a flame graph is an SVG file, got b.png" in profile("b.png")
        assert "no such folder: no" in profile("no/b.svg")
        assert "leave out --json, --plot and --update" in profile("b.svg", "--update")
        denied = profile("b.svg", DENIED="1")
        assert "py-spy failed on rank 0 (process" in denied
        assert "Permission Denied" in denied
        assert not (tmp_path / "b.svg").exists()
    assert "rank 0 of run does not run" in profile("b.svg")
