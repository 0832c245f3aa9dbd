"""Jobs in a real Slurm of two nodes: submit, start, save at the time limit, requeue, cancel, refuse."""

import json
import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from command import (
    PACELINE,
    Result,
    checkpoint_weights,
    clean_environment,
    events_of_kind,
    last_step,
    paceline,
    read_events,
    run_and_list_imports,
    set_sample_delay,
    start,
    succeed,
    write_task,
)
from paceline.events import Ended, Started, Step
from pages import read_blocks
from slurm import PATH, Slurm, find_missing_accounting, start_cluster, wait_until

TRAIN_OPTIONS = (
    "--steps",
    "24",
    "--batch",
    "24",
    "--set",
    "dropout=0.0",
    "--precision",
    "fp64",
    "--device",
    "cpu",
    "--no-profile",
)


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    with start_cluster(tmp_path_factory.mktemp("slurm")) as slurm:
        yield slurm


def submit(slurm: Slurm, folder: Path, *words: str, **env: str) -> str:
    """Submit a training and return the number of the job."""
    write_task(folder)
    env = clean_environment(
        OMP_NUM_THREADS="1", **(slurm.env | env)
    )  # no mark of a command, because the job would inherit it
    command = [*PACELINE, "submit", "my.py:Regression", *TRAIN_OPTIONS, *words]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=60)
    match = re.fullmatch(r"\S+: job (\d+)\n", done.stdout)
    assert match, done.stdout + done.stderr
    return match[1]


def queue(slurm: Slurm) -> str:
    return slurm.run("squeue", "-h", "-o", "%i %T")


@pytest.mark.slurm
@pytest.mark.slow
@pytest.mark.parametrize("ranks_per_node", [1, 2])
def test_job_saves_at_its_time_limit_and_continues(ranks_per_node, slurm, tmp_path):
    """On two nodes, the losses equal those of one process, up to exactly the requested last step."""
    slow, run = set_sample_delay(tmp_path / "slow", 0.05 * ranks_per_node), tmp_path / "runs/a"
    words = (
        "--nodes",
        "2",
        "--ranks-per-node",
        str(ranks_per_node),
        "--time",
        "00:10:00",
        "--plan",
        "zero1",
        "--run-dir",
        "runs/a",
    )
    job = submit(slurm, tmp_path, *words, SLOW=str(slow))
    assert "; not started yet\n" in succeed("status", "runs/a", at=tmp_path, **slurm.env).out
    wait_until(lambda: last_step(run) >= 3, "at step 3", run)
    status = succeed("status", "runs/a", at=tmp_path, **slurm.env)
    assert re.fullmatch(
        rf"runs/a: job {job} RUNNING on n\[1-2\], 00:\d\d:\d\d of 00:10:00; step \d+ of 24, loss "
        r"\d\.\d+, [\d.]+ samples/s\n",
        status.out,
    )
    slurm.run("scancel", "--signal=USR1", "--batch", job)  # as --signal=B:USR1@120 does before the time limit
    slurm.wait_for_state(job, "PENDING")
    [stopped] = events_of_kind(run, Ended)
    assert stopped.reason == "stopped"
    assert 3 <= stopped.step < 24
    set_sample_delay(slow, 0.0)
    slurm.wait_for_state(job, "COMPLETED", timeout_s=120)
    assert [start.step for start in events_of_kind(run, Started)] == [0, stopped.step]
    assert [event.step for event in events_of_kind(run, Step)] == [*range(1, 25)], (
        "each step must be recorded once"
    )
    assert events_of_kind(run, Ended)[-1].reason == "done"
    assert (
        f"job {job} is queued again"
        in succeed("logs", "runs/a", at=tmp_path, program=PACELINE, **slurm.env).out
    )
    assert not [path for path in run.iterdir() if path.name.startswith(".")], "a rendezvous file is left"
    succeed("train", "my.py:Regression", *TRAIN_OPTIONS, "--run-dir", "single", at=tmp_path)
    assert [step.loss for step in events_of_kind(run, Step)] == pytest.approx(
        [step.loss for step in events_of_kind(tmp_path / "single", Step)], rel=1e-10
    )

    if ranks_per_node == 1:
        return
    # A user submits the job again, on other nodes, after the training is complete.
    events_before = read_events(run)
    second_job = slurm.run(
        "sbatch", "--parsable", "--nodes=1", "--ntasks-per-node=1", str(run / "job.sh")
    ).strip()
    slurm.wait_for_state(second_job, "COMPLETED")
    assert read_events(run) == events_before
    message = succeed("status", "runs/a", at=tmp_path, **slurm.env).out
    assert message.startswith(f"runs/a: job {second_job} COMPLETED; done at step 24, loss ")


def assert_queried_once(at: Path, slurm: Slurm, *runs: tuple[str, str, str]) -> None:
    """Assert that the status of several runs takes one query of Slurm.

    `runs`: name, job and state of each.
    """
    (at / "bin").mkdir()
    squeue = shutil.which("squeue", path=slurm.env.get("PATH"))
    (at / "bin/squeue").write_text(f'#!/bin/sh\necho "$@" >> {at}/queries\nexec {squeue} "$@"\n')
    (at / "bin/squeue").chmod(0o755)
    path = f"{at}/bin:{slurm.env.get('PATH', os.environ['PATH'])}"
    message = succeed("status", at=at, **slurm.env | {"PATH": path}).out
    for name, job, state in runs:
        assert re.search(rf"^runs/{name}: job {job} {state}", message, re.MULTILINE), message
    assert len((at / "queries").read_text().splitlines()) == 1


@pytest.mark.slurm
def test_cancel_saves_a_running_job_and_removes_a_pending_job(slurm, tmp_path):
    """`status` queries Slurm once for both jobs. A second cancel is refused."""
    slow, run = set_sample_delay(tmp_path / "slow", 0.1), tmp_path / "runs/a"
    job = submit(slurm, tmp_path, "--time", "10", "--run-dir", "runs/a", SLOW=str(slow))
    pending = submit(slurm, tmp_path, "--nodes", "2", "--ranks-per-node", "4", "--run-dir", "runs/b")
    wait_until(lambda: last_step(run) >= 2, "at step 2", run)
    assert re.match(
        rf"runs/b: job {pending} PENDING", succeed("status", "runs/b", at=tmp_path, **slurm.env).out
    )
    assert_queried_once(tmp_path, slurm, ("a", job, "RUNNING"), ("b", pending, "PENDING"))
    for name, number in (("b", pending), ("a", job)):
        message = succeed("cancel", f"runs/{name}", at=tmp_path, **slurm.env).out
        assert (
            message == f"runs/{name}: job {number} is cancelled; continue with: sbatch runs/{name}/job.sh\n"
        )
    slurm.wait_for_state(job, "CANCELLED")
    wait_until(lambda: events_of_kind(run, Ended) != [], "ended", run)
    slurm.wait_for_state(pending, "CANCELLED")
    [ended] = events_of_kind(run, Ended)
    assert ended.reason == "stopped"
    assert checkpoint_weights(run, ended.step)
    assert "queued again" not in (run / f"slurm-{job}.out").read_text()
    second = paceline("cancel", "runs/a", at=tmp_path, **slurm.env)
    assert second.status == 2
    assert (
        second.err == f"paceline: runs/a is not running: stopped at step {ended.step}; "
        "continue with: paceline resume runs/a\n"
    )
    assert paceline("logs", "runs/b", at=tmp_path, **slurm.env).err == (
        f"paceline: runs/b has no output yet: job {pending} has not started; see paceline status runs/b\n"
    )


@pytest.mark.slurm
@pytest.mark.slow
def test_train_uses_all_nodes_of_an_allocation(slurm, tmp_path):
    write_task(tmp_path)
    inside = ("salloc", "--quiet", "--nodes=2", "--ntasks-per-node=1", *PACELINE)
    words = (
        "train",
        "my.py:Regression",
        *TRAIN_OPTIONS,
        "--nodes",
        "2",
        "--ranks-per-node",
        "1",
        "--plan",
        "zero3",
        "--run-dir",
        "r",
    )
    with start(
        *words,
        at=tmp_path,
        program=inside,
        OMP_NUM_THREADS="1",
        SLOW=str(set_sample_delay(tmp_path / "slow", 0.01)),
        **slurm.env,
    ) as running:
        running.wait_for_step(tmp_path / "r", 2)
        process = next(
            process
            for process in running.remaining_processes()
            if "train" in process.cmdline() and "salloc" not in process.cmdline()
        )
        process.terminate()
        result = running.wait()
    assert result.status == 75, result.all
    assert (tmp_path / "r/report.html").exists()
    assert events_of_kind(tmp_path / "r", Started)[0].ranks == 2
    assert events_of_kind(tmp_path / "r", Ended)[-1].reason == "stopped"


@pytest.mark.slurm
def test_allocation_with_too_few_nodes_is_refused(slurm, tmp_path):
    write_task(tmp_path)
    inside = ("salloc", "--quiet", "--nodes=1", *PACELINE)
    result = paceline("train", "my.py:Regression", "--nodes", "2", at=tmp_path, program=inside, **slurm.env)
    assert result.status == 2
    assert re.search(
        r"^paceline: --nodes must be at most 1, the nodes of Slurm job \d+ \(n1\), got 2; use --nodes 1$",
        result.err,
        re.M,
    ), result.all
    assert not (tmp_path / "runs").exists()


ARRAY = """#!/bin/sh
#SBATCH --array=0-1
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --output=array-%a.out
srun "$@"
"""


@pytest.mark.slurm
@pytest.mark.slow
def test_trainings_of_a_job_array_are_independent(slurm, tmp_path):
    """They run at the same time on the same nodes with the same options, but share no ports or files."""
    write_task(tmp_path)
    (tmp_path / "array.sh").write_text(ARRAY)
    env = clean_environment(
        OMP_NUM_THREADS="1", SLOW=str(set_sample_delay(tmp_path / "slow", 0.01)), **slurm.env
    )
    words = ["sbatch", "--parsable", "array.sh", *PACELINE, "train", "my.py:Regression", *TRAIN_OPTIONS]
    job = subprocess.run(
        words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=True
    ).stdout.strip()
    for index in range(2):
        slurm.wait_for_state(f"{job}_{index}", "COMPLETED", timeout_s=120)
    runs = list((tmp_path / "runs").iterdir())
    assert len(runs) == 2, runs
    first, second = ([step.loss for step in events_of_kind(run, Step)] for run in runs)
    assert first == second
    assert len(first) == 24
    starts, ends = ([read_events(run)[index].time for run in runs] for index in (0, -1))
    assert max(starts) < min(ends), "they must train at the same time"


@pytest.mark.slurm
@pytest.mark.slow
def test_failing_ranks_print_one_error(slurm, tmp_path):
    job = submit(
        slurm, tmp_path, "--nodes", "2", "--ranks-per-node", "2", "--set", "widht=3", "--run-dir", "r"
    )
    slurm.wait_for_state(job, "FAILED")
    log = (tmp_path / f"r/slurm-{job}.out").read_text()
    assert log.count("has no field widht; did you mean width?") == 1, log
    assert "Traceback" not in log


@pytest.mark.slurm
@pytest.mark.slow
def test_job_in_a_container_with_staged_data(slurm, tmp_path):
    """A script replaces apptainer. Like apptainer -e, it passes only the variables that are specified."""
    image, stage = tmp_path / "bin/apptainer", tmp_path / "data.tar"
    image.parent.mkdir()
    image.write_text(
        '#!/bin/bash\nwhile [ "$1" != image.sif ]; do shift; done; shift\n'
        'for name in ${!APPTAINERENV_*}; do inside+=("${name#APPTAINERENV_}=${!name}"); done\n'
        '[ "$1" = python ] && shift\nexec env -i PATH="$PATH" PYTHONPATH="$PYTHONPATH" '
        f'"${{inside[@]}}" {sys.executable} "$@"\n'
    )
    image.chmod(image.stat().st_mode | stat.S_IXUSR)
    (tmp_path / "hello").write_text("hello")
    os.system(f"tar -C {tmp_path} -cf {stage} hello")
    (tmp_path / "site.toml").write_text(
        f'container = "image.sif"\nscratch = "{tmp_path}/$SLURMD_NODENAME"\n'
        f'stage_in = "{stage}"\n[environment]\nOMP_NUM_THREADS = "1"\n'
    )
    path = f"{image.parent}:{PATH}"
    job = submit(slurm, tmp_path, "--nodes", "2", "--ranks-per-node", "1", "--run-dir", "r", PATH=path)
    slurm.wait_for_state(job, "COMPLETED", "FAILED", timeout_s=120)
    assert events_of_kind(tmp_path / "r", Ended), next((tmp_path / "r").glob("slurm-*")).read_text()
    assert events_of_kind(tmp_path / "r", Started)[0].ranks == 2
    assert [(tmp_path / node / "hello").read_text() for node in ("n1", "n2")] == ["hello", "hello"]


# Checks before a job is queued


def preflight(folder: Path, *words: str, **env: str) -> tuple[Result, dict[str, list[str]]]:
    """Run preflight. Return its result, and for each check its findings, which start with the verdict.

    `words` replace the options of TRAIN_OPTIONS that they repeat, since a repeated option is refused.
    """
    pairs = zip(TRAIN_OPTIONS[:-1:2], TRAIN_OPTIONS[1::2], strict=True)
    options = [word for pair in pairs if pair[0] not in words for word in pair] + [TRAIN_OPTIONS[-1]]
    result = paceline(
        "preflight", "my.py:Regression", *options, *words, "--json", "findings.json", at=folder, **env
    )
    findings: dict[str, list[str]] = {}
    for entry in json.loads((folder / "findings.json").read_text()):
        findings.setdefault(entry["check"], []).append(f"{entry['verdict']}: {entry['message']}")
    return result, findings


@pytest.mark.slurm
def test_preflight_queries_slurm_without_queueing(slurm, tmp_path):
    write_task(tmp_path)
    (tmp_path / "site.toml").write_text('partition = "short"\n')
    words = ("--nodes", "2", "--ranks-per-node", "2", "--precision", "fp32")
    result, findings = preflight(tmp_path, *words, "--time", "00:20:00", SBATCH_QOS="long", **slurm.env)
    assert result.status == 0, result.all
    accepted, overridden = findings["slurm"]
    assert re.match(
        r"passes: Slurm accepts the job: Job \d+ to start at \S+ using 4 processors on nodes n\[1-2\] "
        r"in partition short$",
        accepted,
    )
    assert overridden.startswith("warns: SBATCH_QOS=long overrides the default qos; unset SBATCH_QOS, or ")
    (time,) = findings["time"]
    assert re.match(
        r"passes: .* predicted .*: 30 s to start, 24 steps of .*; the limit of the job is 00:20:00$", time
    )
    _, findings = preflight(tmp_path, *words, **slurm.env)
    assert findings["time"][0].endswith("; the limit of the partition is 00:30:00")
    assert queue(slurm) == ""
    assert not (tmp_path / "runs").exists()


@pytest.mark.slurm
@pytest.mark.parametrize(
    ("site", "words", "message"),
    [
        (
            'partition = "shrt"',
            (),
            "fails: Slurm: Invalid partition name specified: shrt; did you mean short?",
        ),
        (
            "",
            ("--ranks-per-node", "9", "--batch", "72"),
            "fails: sbatch: allocation failure: Requested node configuration is not available",
        ),
    ],
)
def test_preflight_reports_what_slurm_would_refuse(site, words, message, slurm, tmp_path):
    write_task(tmp_path)
    (tmp_path / "site.toml").write_text(site)
    result, findings = preflight(tmp_path, *words, **slurm.env)
    assert result.status == 2
    assert findings["slurm"] == [message]
    assert {
        check for check, lines in findings.items() if any(line.startswith("fails") for line in lines)
    } == {"slurm"}


@pytest.mark.slurm
def test_preflight_knows_reservations_and_features_of_nodes(slurm, tmp_path):
    """Slurm itself answers: a reservation that exists is accepted, and an unknown one is not."""
    write_task(tmp_path)
    slurm.run(
        "scontrol", "create", "reservation=course", "starttime=now", "duration=30", "user=root", "nodes=n2"
    )  # fmt: skip
    found = {}
    try:
        for setting in ('reservation = "course"', 'reservation = "curse"', 'constraint = "a100"'):
            (tmp_path / "site.toml").write_text(setting)
            found[setting] = preflight(tmp_path, "--nodes", "1", "--ranks-per-node", "2", **slurm.env)[1]
    finally:
        slurm.run("scontrol", "delete", "reservation=course")
    accepted, unknown, featureless = (findings["slurm"][0] for findings in found.values())
    assert re.match(r"passes: Slurm accepts the job: Job \d+ to start at \S+ .* on nodes n2 ", accepted)
    assert re.match(r"fails: sbatch: .*Requested reservation is invalid", unknown)
    assert re.match(r"fails: sbatch: .*Invalid feature specification", featureless)


@pytest.mark.slurm
@pytest.mark.slow
def test_preflight_knows_accounts_and_qualities_of_service(tmp_path):
    """Slurm itself answers, from a database of accounts. A job over a limit would wait forever."""
    if reason := find_missing_accounting():
        pytest.skip(reason)
    write_task(tmp_path)
    (tmp_path / "slurm").mkdir()
    found = {}
    with start_cluster(tmp_path / "slurm", has_accounting=True) as slurm:
        for words in (
            "add account physics",
            "add qos quick set MaxWall=10 Flags=DenyOnLimit",
            "add qos others",
            "add user root account=physics qos=normal,quick defaultqos=normal",
            "modify user where name=root set defaultaccount=physics",
        ):
            slurm.run("sacctmgr", "-i", *words.split())
        for setting in ("", 'qos = "quick"', 'qos = "quikc"', 'qos = "others"', 'account = "physcis"'):
            (tmp_path / "site.toml").write_text(setting)
            found[setting] = preflight(tmp_path, "--nodes", "1", "--time", "5", **slurm.env)[1]["slurm"][0]
        (tmp_path / "site.toml").write_text('qos = "quick"')
        found["long"] = preflight(tmp_path, "--nodes", "1", "--time", "20", **slurm.env)[1]["slurm"][0]
        (tmp_path / "site.toml").write_text('qos = "others"')
        refused = paceline("submit", "my.py:Regression", "--time", "5", at=tmp_path, **slurm.env)
        assert queue(slurm) == ""
    assert found.pop("").startswith("passes: Slurm accepts the job")
    assert found.pop('qos = "quick"').startswith("passes: Slurm accepts the job")
    assert found == {
        'qos = "quikc"': "fails: sbatch: allocation failure: Invalid qos specification",
        'qos = "others"': "fails: sbatch: allocation failure: Invalid qos specification",
        'account = "physcis"': "fails: sbatch: allocation failure: Invalid account or account/partition "
        "combination specified",
        "long": "fails: sbatch: allocation failure: Job violates accounting/QOS policy (job submit limit, "
        "user's size and/or time limits)",
    }
    assert (refused.status, refused.out) == (2, "")
    assert "Invalid qos specification" in refused.err


# The commands of docs/slurm.md

PAGE = read_blocks("docs/slurm.md")


def run_page_commands(name: str, slurm: Slurm, folder: Path) -> None:
    (folder / "site.toml").write_text(PAGE["site.toml"])
    env = clean_environment(
        OMP_NUM_THREADS="1", **slurm.env | {"PATH": f"{Path(sys.executable).parent}:{PATH}"}
    )
    for line in PAGE[name].splitlines():
        command = line.partition("#")[0].strip()
        if command.startswith("paceline logs"):
            wait_until(lambda: [*(folder / "runs/a").glob("slurm-*.out")] != [], "started", folder / "runs/a")
        done = subprocess.run(
            ["bash", "-c", command], cwd=folder, capture_output=True, text=True, env=env, timeout=100
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"


@pytest.mark.slurm
def test_commands_of_the_slurm_page(slurm, tmp_path):
    run_page_commands("commands", slurm, tmp_path)
    slurm.run("scancel", "--user=root")
    wait_until(lambda: queue(slurm) == "", "out of the queue", tmp_path / "runs/a")
    assert "#SBATCH --comment=paceline\n" in (tmp_path / "runs/a/job.sh").read_text()


@pytest.mark.slurm
@pytest.mark.slow
def test_allocation_commands_of_the_slurm_page(slurm, tmp_path):
    run_page_commands("allocation", slurm, tmp_path)
    assert [events_of_kind(run, Started)[0].ranks for run in (tmp_path / "runs").iterdir()] == [2, 2]


# Refused requests print one sentence and leave no files


def assert_refused(result: Result, folder: Path, message: str) -> None:
    assert result.status == 2, result.all
    assert result.err == f"paceline: {message}\n"
    assert not [*folder.glob("runs/*")]


@pytest.mark.slurm
@pytest.mark.parametrize(
    ("site", "words", "message"),
    [
        ('partition = "shrt"', (), "Slurm: Invalid partition name specified: shrt; did you mean short?"),
        (
            'partition = "short"',
            ("--time", "02:00:00"),
            "Slurm: PartitionTimeLimit: --time 02:00:00 is over the limit of partition short, 00:30:00",
        ),
        ("", ("--nodes", "4"), "Slurm: PartitionNodeLimit: --nodes 4, but partition debug has 2"),
        (
            "",
            ("--ranks-per-node", "9", "--batch", "72"),
            "Slurm would never start the job: PartitionConfig; it was cancelled",
        ),
        (
            'partition = "closed"\naccount = "sports"',
            (),
            "Slurm would never start the job: Job's account not known, so it can't use this partition "
            "(closed allows physics); it was cancelled",
        ),
        ('sbatch = ["--mem=x"]', (), "sbatch: Invalid --mem specification"),
        (
            "notice_s = 900",
            ("--time", "10"),
            "--time must be above notice_s=900, the seconds for saving a checkpoint, got 10",
        ),
    ],
)
def test_jobs_that_slurm_refuses(site, words, message, slurm, tmp_path):
    (tmp_path / "site.toml").write_text(site)
    before = queue(slurm)
    assert_refused(paceline("submit", "digits", *words, at=tmp_path, **slurm.env), tmp_path, message)
    assert queue(slurm) == before


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("digits", "--site", "no.toml"), "cannot read no.toml: No such file or directory"),
        (
            ("digits", "--nodes", "2", "--ranks", "3"),
            "3 ranks cannot be spread evenly over 2 nodes; use --ranks 4",
        ),
        (("digits", "--nodes", "2", "--ranks", "3", "--ranks-per-node", "2"), None),
        (
            ("digits", "--nodes", "3"),
            "batch 64 is not divisible by ranks × microbatches = 3 × 1 = 3: use --batch 66 or 63",
        ),
        (
            ("digits", "--nodes", "2:4"),
            "--nodes 2:4 requires restarts, to continue on fewer nodes; specify their maximum number: "
            "--restarts 3",
        ),
        (
            ("digits", "--nodes", "4:2", "--restarts", "1"),
            "--nodes must be MINIMUM:MAXIMUM, got 4:2; write 2:4",
        ),
        (
            ("digits", "--nodes", "two"),
            "--nodes must be a number of nodes, got 'two'; write 4, or 2:4 for 2 to 4 nodes",
        ),
        (("digts",), None),
        (("nowhere.py:Net",), "no such file: nowhere.py; available: my.py"),
        (("my.py:Regresion",), "my.py has no class Regresion; did you mean Regression?"),
        (("digits", "--time", "two hours"), None),
    ],
)
def test_invalid_requests_are_refused_before_slurm_is_queried(words, message, tmp_path):
    """There is no Slurm in this test. `message` None: any one sentence."""
    write_task(tmp_path)
    result = paceline("submit", *words, at=tmp_path)
    assert_refused(
        result,
        tmp_path,
        message if message is not None else result.err.removeprefix("paceline: ").removesuffix("\n"),
    )
    assert result.err.count("\n") == 1


def test_commands_without_slurm_are_refused(tmp_path):
    slurm = {"PATH": str(tmp_path)}
    message = (
        "there is no sbatch on PATH; submit from a machine with Slurm, or train here with paceline train "
        "(--dry-run shows the script)"
    )
    assert_refused(paceline("submit", "digits", at=tmp_path, **slurm), tmp_path, message)
    result = paceline("train", "digits", "--nodes", "2", at=tmp_path)
    assert "--nodes 2 requires a Slurm allocation; queue the training with paceline submit" in result.err
    assert result.status == 2


def test_dry_run_prints_the_script_and_writes_no_files(tmp_path):
    words = (
        "submit",
        "digits",
        "--nodes",
        "2",
        "--ranks-per-node",
        "4",
        "--time",
        "1:00:00",
        "--run-dir",
        "runs/a",
        "--dry-run",
    )
    script = succeed(*words, at=tmp_path).out
    assert script.startswith(
        "#!/bin/bash\n#SBATCH --job-name=a\n#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=4\n#SBATCH "
        "--time=1:00:00\n"
    )
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    "words", [("submit", "my.py:Regression", "--dry-run"), ("status", "r"), ("cancel", "r")]
)
def test_slurm_commands_do_not_import_torch(words, tmp_path):
    write_task(tmp_path)
    succeed("train", "my.py:Regression", "--steps", "1", "--device", "cpu", "--run-dir", "r", at=tmp_path)
    _, imported = run_and_list_imports(*words, at=tmp_path)
    assert f"paceline.cli.operate.{words[0]}" in imported
    assert not {name for name in imported if name.partition(".")[0] in ("torch", "numpy", "tensorboard")}


# On this machine, without Slurm


def test_status_and_cancel_of_a_local_training(tmp_path):
    write_task(tmp_path)
    slow = set_sample_delay(tmp_path / "slow", 0.02)
    assert paceline("status", at=tmp_path).err == "paceline: no runs in runs/; specify the folder of a run\n"
    with start(
        "train",
        "my.py:Regression",
        *TRAIN_OPTIONS,
        "--ranks",
        "1",
        "--run-dir",
        "runs/a",
        at=tmp_path,
        SLOW=str(slow),
    ) as running:
        running.wait_for_step(tmp_path / "runs/a", 2)
        assert re.fullmatch(
            r"runs/a: running, step \d+ of 24, loss \d\.\d+, [\d.]+( k)? samples/s\n",
            succeed("status", at=tmp_path).out,
        )
        assert re.fullmatch(
            r"runs/a: asked process \d+ on \S+ to save and stop; continue with: paceline resume runs/a\n",
            succeed("cancel", "runs/a", at=tmp_path).out,
        )
        assert running.wait().status == 75
    assert re.match(
        r"runs/a: stopped at step \d+; continue with", succeed("status", "runs/a", at=tmp_path).out
    )
    message = succeed("logs", "runs/a", at=tmp_path, program=PACELINE).out
    assert re.search(r"step \d+  stopped", message), message
    assert paceline("cancel", "runs/a", at=tmp_path).status == 2
    (tmp_path / "runs/a/ranks").mkdir(exist_ok=True)
    (tmp_path / "runs/a/ranks/1.restart-2.log").write_text("output of rank 1\n")
    assert (
        "runs/a has no log of rank 7; ranks with a log: 1"
        in paceline("logs", "runs/a", "--rank", "7", at=tmp_path).err
    )
    assert succeed("logs", "runs/a", "--rank", "1", at=tmp_path, program=PACELINE).out == "output of rank 1\n"


def test_scale_asks_the_queue(slurm: Slurm, tmp_path: Path) -> None:
    """One of two nodes is busy for an hour: a training on both finishes after a slower one on one node."""
    (tmp_path / "site.toml").write_text('sbatch = ["--exclusive"]\n')
    words = ("scale", "--model", "gpt2", "--cluster", "a100-40g:4x2", "--batch", "64", "--ranks", "4,8,16")
    words = (*words, "--tokens", "2e8", "--json", "a.json")
    blocker = slurm.run(
        "sbatch", "--parsable", "-N1", "--exclusive", "-t60", "-o/dev/null", "--wrap", "sleep 600"
    ).strip()
    slurm.wait_for_state(blocker, "RUNNING")
    try:
        done = succeed(*words, "--queue", at=tmp_path, **slurm.env)
        rows = {row["ranks"]: row for row in json.loads((tmp_path / "a.json").read_text())["queue"]}
        assert rows[4]["wait_s"] < 60
        assert 3000 < rows[8]["wait_s"] <= 3600
        assert rows[8]["run_s"] < rows[4]["run_s"]
        assert rows[4]["finish_s"] < rows[8]["finish_s"]
        assert rows[16]["refused"]
        assert "earliest: 4 ranks on 1 node" in done.out
        assert "16 ranks: Slurm refuses the job: " in done.out
    finally:
        slurm.run("scancel", blocker)
    slurm.wait_for_state(blocker, "CANCELLED")
    succeed(*words, "--queue", at=tmp_path, **slurm.env)
    rows = {row["ranks"]: row for row in json.loads((tmp_path / "a.json").read_text())["queue"]}
    assert rows[8]["finish_s"] < rows[4]["finish_s"]  # negative control: both nodes are free
    succeed(*words, at=tmp_path, **slurm.env)
    assert "queue" not in json.loads((tmp_path / "a.json").read_text())


@pytest.mark.slow
def test_scale_measures_in_jobs(slurm: Slurm, tmp_path: Path) -> None:
    """Outside of an allocation, each number of ranks trains in a job; nothing but the results is kept."""
    write_task(tmp_path)
    words = ("scale", "my.py:Regression", "--batch", "24", "--set", "norm=false", "--measure", "1,2")
    words = (*words, "--launcher", "slurm", "--plan", "ddp", "--json", "a.json")
    succeed(*words, at=tmp_path, OMP_NUM_THREADS="1", **slurm.env)
    found = json.loads((tmp_path / "a.json").read_text())["measured"]
    assert [(point["ranks"], point["batch"]) for point in found["weak"]["points"]] == [(1, 24), (2, 48)]
    assert found["strong"]["failed"] == []
    jobs = slurm.run("scontrol", "show", "job", "-o").splitlines()
    assert sum("JobState=COMPLETED" in job and str(tmp_path) in job for job in jobs) == 3
    assert not (tmp_path / "runs").exists()
