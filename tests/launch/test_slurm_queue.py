"""The queue of Slurm as other versions and sites answer: programs with recorded outputs of sbatch and sinfo.

`test_slurm.py` asks a real Slurm.
"""

import json
import os
import stat
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from command import Result, paceline
from paceline.cluster.published import find
from paceline.errors import LaunchError
from paceline.launch.slurm import client
from paceline.launch.slurm.queue import build_queue_parts, estimate_queue
from paceline.launch.slurm.site import Site
from paceline.plan.cost_model.cost import Bill
from paceline.plan.model.library import load_model
from paceline.plan.search.scaling import ScalingPoint, predict_scaling

PARTITIONS = "debug*|1:00:00|2\\nlong|infinite|8\\nlong|infinite|4"
WORDS = ("scale", "--model", "gpt2", "--cluster", "a100-40g:4x2", "--batch", "64", "--ranks", "4,8")
WORDS = (*WORDS, "--tokens", "2e8", "--queue", "--json", "a.json")


def write_program(folder: Path, name: str, lines: str) -> None:
    """Write a program of bash to the front of PATH."""
    path = folder / "bin" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/bash\n{lines}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def start_at(seconds: float) -> str:
    """Return the answer of Slurm 21 to 24 to --test-only, for a start after this time."""
    start = (datetime.now() + timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%S")
    return f"sbatch: Job 71 to start at {start} using 8 processors on nodes n[1-2] in partition debug"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose programs answer before those of this machine."""
    write_program(tmp_path, "sinfo", f"printf '{PARTITIONS}\\n'")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    return tmp_path


def points(seconds: float = 600.0, price: float | None = None) -> tuple[ScalingPoint, ...]:
    """Return points of 4 and 8 ranks whose trainings take so long, and half as long."""
    found = predict_scaling(load_model("gpt2"), find("a100-40g:4x2"), (4, 8), 64).strong.points
    bills = [Bill(seconds / factor, 1.0, None, price) for factor in (1, 2)]
    return tuple(
        ScalingPoint(point.ranks, point.nodes, point.batch, point.plan, point.cost, bill)
        for point, bill in zip(found, bills, strict=True)
    )


def answer_by_nodes(folder: Path, one: str, two: str) -> None:
    """Answer with one line to scripts of one node, and with another to those of two."""
    write_program(
        folder,
        "sbatch",
        f"grep -q -- '--nodes=2' <(cat) && printf '{two}\\n' >&2 || printf '{one}\\n' >&2; exit 0",
    )


def test_the_earliest_end_comes_first(site: Path) -> None:
    answer_by_nodes(site, start_at(30), start_at(3600))
    few, many = estimate_queue(points(), Site())
    assert (few.ranks, many.ranks) == (4, 8)
    assert few.wait_s == pytest.approx(30, abs=5)
    assert many.wait_s == pytest.approx(3600, abs=5)
    assert many.finish_s == pytest.approx(3600 + 300, abs=5)
    assert (few.jobs, many.jobs, few.refused, many.refused) == (1, 1, "", "")


@pytest.mark.parametrize(
    "lines",
    [
        "sbatch: lua: welcome to the cluster\\n{start}",
        "{start}\\nsbatch: verbose: the job has a comment",
        "sbatch: warning: can\\x27t run 1 processes on 2 nodes, setting nnodes to 1\\n{start}",
        "sbatch: \\xff\\xfe\\n{start}",
    ],
    ids=["plug-in", "line after it", "warning", "bytes"],
)
def test_other_lines_around_the_answer(lines: str, site: Path) -> None:
    text = lines.format(start=start_at(60))
    answer_by_nodes(site, text, text)
    assert all(each.wait_s == pytest.approx(60, abs=5) for each in estimate_queue(points(), Site()))


def test_a_start_in_the_past_is_now(site: Path) -> None:
    answer_by_nodes(site, start_at(-20), start_at(-20))
    assert [each.wait_s for each in estimate_queue(points(), Site())] == [0.0, 0.0]


def test_times_do_not_follow_the_settings_of_the_user(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SLURM_TIME_FORMAT changes the times that Slurm prints; the commands are run with the standard."""
    monkeypatch.setenv("SLURM_TIME_FORMAT", "relative")
    write_program(
        site,
        "sbatch",
        f'[ "$SLURM_TIME_FORMAT" = standard ] && printf "{start_at(60)}\\n" >&2 || '
        'echo "sbatch: Job 71 to start at Today using 8 processors" >&2',
    )
    assert all(each.wait_s is not None for each in estimate_queue(points(), Site()))


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("sbatch: Job 71 to start at Unknown using 8 processors", "it answers without a time: Job 71 to"),
        ("sbatch: Job 71 to start at 2026-13-45T99:00:00 using 8", "it answers without a time: Job 71 to"),
        ("", "it answers without a time: nothing"),
    ],
    ids=["unknown", "no date", "nothing"],
)
def test_answers_without_a_time(line: str, says: str, site: Path) -> None:
    answer_by_nodes(site, start_at(10), line)
    first, last = estimate_queue(points(), Site())
    assert (first.ranks, last.wait_s) == (4, None)
    assert last.refused.startswith(says)
    assert last.finish_s == float("inf")
    *_, sentence = build_queue_parts([first, last])
    assert sentence == f"8 ranks: Slurm refuses the job: {last.refused}"


def test_long_trainings_are_several_jobs(site: Path) -> None:
    """The default partition allows an hour; each job waits as long as the first."""
    answer_by_nodes(site, start_at(100), start_at(100))
    found = estimate_queue(points(5 * 3600, price=7.0), Site())
    few = next(each for each in found if each.ranks == 4)
    assert few.jobs == 6
    assert few.finish_s == pytest.approx(6 * 100 + 5 * 3600, abs=30)
    [long] = [each for each in estimate_queue(points(5 * 3600), Site(partition="long")) if each.ranks == 4]
    assert long.jobs == 1, "without a limit"


def check_sentence(done: Result, says: str) -> None:
    assert done.status != 0, done.all
    assert says in done.err
    assert "Traceback" not in done.all
    assert len(done.err.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("sinfo", "says"),
    [
        ("echo 'sinfo: error: Unable to contact slurm controller' >&2; exit 1", "sinfo: Unable to contact"),
        ("printf 'debug*|1:00:00|many\\n'", "partition debug* has the time limit '1:00:00' and 'many' nodes"),
        ("printf 'debug*|soon|2\\n'", "has the time limit 'soon' and '2' nodes, which cannot be read"),
        ("exit 3", "sinfo: it failed with exit status 3"),
    ],
    ids=["no controller", "nodes", "limit", "silent"],
)
def test_sinfo_fails(sinfo: str, says: str, site: Path) -> None:
    answer_by_nodes(site, start_at(10), start_at(10))
    write_program(site, "sinfo", sinfo)
    check_sentence(paceline(*WORDS, at=site), says)
    with pytest.raises(LaunchError):
        estimate_queue(points(), Site())


def test_refusals_are_reported_beside_the_others(site: Path) -> None:
    write_program(
        site,
        "sbatch",
        f"grep -q -- '--nodes=2' <(cat) && echo 'sbatch: error: QOSMaxNodePerUserLimit' >&2 && "
        "echo 'allocation failure: Job violates accounting/QOS policy' >&2 && exit 1; "
        f"echo '{start_at(10)}' >&2",
    )
    done = paceline(*WORDS, at=site)
    assert done.status == 0, done.all
    assert "8 ranks: Slurm refuses the job: sbatch: allocation failure: Job violates" in done.out
    rows = {row["ranks"]: row for row in json.loads((site / "a.json").read_text())["queue"]}
    assert rows[8]["wait_s"] is None
    assert rows[4]["wait_s"] is not None


@pytest.mark.parametrize("is_required", [True, False])
def test_a_program_that_cannot_start(is_required: bool, site: Path) -> None:
    """--queue fails; without it, a sentence reports that nobody was asked."""
    (site / "bin/sbatch").write_text("\x7fELF, but not really")
    (site / "bin/sbatch").chmod(0o755)
    words = WORDS if is_required else tuple(word for word in WORDS if word != "--queue")
    cluster = find("a100-40g:4x2").model_dump_json()
    (site / "cluster.json").write_text(cluster)
    if not is_required:  # the default asks for this machine alone
        words = tuple(word for word in words if word not in ("--cluster", "a100-40g:4x2"))
    done = paceline(*words, at=site, PATH=str(site / "bin"))  # else the next sbatch on it is started
    if is_required:
        check_sentence(done, "sbatch cannot be started: Exec format error; check PATH")
        return
    assert done.status == 0, done.all
    assert "warning: Slurm was not asked when jobs would start: sbatch cannot be started" in done.err


def test_slurm_that_does_not_answer_is_asked_once(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "ANSWER_S", 0.5)
    write_program(site, "sbatch", "echo x >> asked; exec sleep 60")
    monkeypatch.chdir(site)
    with pytest.raises(LaunchError, match=r"Slurm did not answer sbatch within 0 s; try again later"):
        estimate_queue(points(), Site())
    assert (site / "asked").read_text() == "x\n"


def test_without_slurm(site: Path) -> None:
    """Without sbatch on PATH nothing is asked, unless --queue requires it."""
    (site / "bin/sinfo").unlink()
    check_sentence(
        paceline(*WORDS, at=site, PATH=str(site / "bin")), "there is no sinfo on PATH; use a machine"
    )
    words = tuple(word for word in WORDS if word != "--queue")
    done = paceline(*words, at=site, PATH=str(site / "bin"))
    assert done.status == 0, done.all
    assert done.err == ""
