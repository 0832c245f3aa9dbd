"""Names and settings with the syntax of shells: scripts take them as they are, and run nothing of them."""

import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from command import clean_environment, paceline
from paceline.errors import LaunchError, SpecError
from paceline.launch.environment.bundle import render_install_script
from paceline.launch.slurm import client
from paceline.launch.slurm.job_script import Job, _expanded, render
from paceline.launch.slurm.jupyter import render_jupyter
from paceline.launch.slurm.site import Site
from paceline.launch.slurm.sweep import build_requests, parse_sweep, render_sweep
from paceline.spec import Launch, Spec
from slurm import start_cluster

ATTACKS = (
    "x$(touch HIT)",
    "x`touch HIT`",
    "x'; touch HIT; '",
    'x"; touch HIT; "',
    'x\\"; touch HIT #',
    "x${y:-$(touch HIT)}",
    "x & touch HIT & y",
    "x|touch HIT",
    "x; touch HIT",
    "x ü 中 * ? [a] {b,c} ~ !",
)
TEXTS = (
    "partition",
    "account",
    "qos",
    "constraint",
    "reservation",
    "gres",
    "memory",
    "conda",
    "interface",
    "log",
)
# Runs what srun would start; `module`, `conda` and containers do nothing.
STUBS = {
    "srun": '#!/bin/bash\nwhile [ $# -gt 0 ] && [ "$1" != bash ]; do shift; done\n[ $# = 0 ] || exec "$@"\n',
    **dict.fromkeys(("module", "conda", "apptainer", "podman", "scontrol"), "#!/bin/sh\n"),
}


def make_job(folder: Path) -> Job:
    folder.mkdir(parents=True, exist_ok=True)
    return Job(folder, folder.parent, nodes=1, ranks_per_node=1, time="1:00", python="/bin/true")


def run_script(script: str, folder: Path, **variables: str) -> None:
    """Run a job script with stand-ins, and check that nothing of the attack ran."""
    assert subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True).stderr == ""
    stubs = folder / "stubs"
    stubs.mkdir(exist_ok=True)
    for name, text in STUBS.items():
        (stubs / name).write_text(text)
        (stubs / name).chmod(0o755)
    env = clean_environment(
        PATH=f"{stubs}:/usr/bin:/bin", SLURM_JOB_ID="7", SLURM_JOB_NUM_NODES="1", **variables
    )
    (folder / "job.sh").write_text(script)
    subprocess.run(["bash", folder / "job.sh"], env=env, cwd=folder, capture_output=True, timeout=60)
    assert not list(folder.rglob("HIT*")), script


@pytest.mark.parametrize("attack", ATTACKS)
def test_no_setting_of_a_site_is_run(attack: str, tmp_path: Path) -> None:
    job = make_job(tmp_path / "run")
    sites = [
        Site(**dict.fromkeys(TEXTS, attack), modules=(attack,), environment={"A": attack}),
        Site(venv=attack),
        Site(container=attack, runtime="podman", environment={"A": attack}),
        Site(container=attack, runtime="pyxis"),
        Site(scratch=f"{tmp_path}/{attack.replace('/', '')}", stage_in=f"{tmp_path}/{attack}.tar"),
        Site(container=attack, scratch=attack),
    ]
    for site in sites:
        run_script(render(job, site), tmp_path)
    if "ü" not in attack:
        script = render_jupyter(job, Site(conda=attack, environment={"A": attack}))
        assert subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True).stderr == ""


@pytest.mark.parametrize("attack", [attack for attack in ATTACKS if "\\" not in attack])
def test_no_name_of_a_folder_is_run(attack: str, tmp_path: Path) -> None:
    job = make_job(tmp_path / attack / f"run {attack}")
    job = replace(job, python=f"/bin/{attack}")
    for script in (
        render(job, Site()),
        render(replace(job, restarts=2, nodes=2, least_nodes=1), Site()),
        render(job, Site(container="i.sif")) if not set(",:") & set(attack) else "",
        render_sweep([job], job.run.parent, Site(), None),
    ):
        run_script(script, tmp_path, SLURM_ARRAY_TASK_ID="0")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("$TMP/a ${TMP}b", "/tmp/x/a /tmp/xb"),
        ("${NONE:-/local}/d", "/local/d"),
        ("$(id)`id`\"'\\$", "$(id)`id`\"'\\$"),
        ("${TMP@P}$[1]$((1))", "${TMP@P}$[1]$((1))"),
    ],
)
def test_only_variables_are_expanded(text: str, expected: str) -> None:
    done = subprocess.run(
        ["bash", "-c", f"printf %s {_expanded(text)}"],
        env={"TMP": "/tmp/x", "PATH": "/bin"},
        capture_output=True,
        text=True,
    )
    assert (done.stdout, done.stderr) == (expected, "")


def test_folders_that_options_cannot_name() -> None:
    job = Job(Path("/r/a"), Path("/h/b:c"), 1, 1, "1:00", "python")
    for site in (Site(container="i"), Site(container="i", runtime="podman")):
        with pytest.raises(LaunchError, match="must have no colon and no comma, got '/h/b:c'"):
            render(job, site)
    assert "b:c" in render(job, Site())
    with pytest.raises(LaunchError, match="must have no backslash"):
        replace(job, run=Path("/r/a\\b"))
    with pytest.raises(ValueError, match="container must be a file or an address, got '--bind=/'"):
        Site(container="--bind=/")


@pytest.mark.parametrize(
    ("item", "names"),
    [
        ("set.text=$(touch HIT),`id`", ["text=__touch_HIT_", "text=_id_"]),
        ("set.text='a b',\"c\"", ["text=a_b", "text=c"]),
        ("set.text=../../x,é", ["text=.._.._x", "text=é"]),
        ("seed=1..9..4", ["seed=1", "seed=5", "seed=9"]),
        ("seed=-3..-1", None),
        ("lr=-1e-3,1e5", ["lr=-0.001", "lr=100000.0"]),
        (f"set.text={'中' * 200},x", ["text=" + "中" * 38, "text=x"]),
    ],
)
def test_odd_values_of_an_array(item: str, names: list[str] | None) -> None:
    if names is None:
        with pytest.raises(SpecError, match="seed"):
            build_requests(parse_sweep([item]), Spec(), Launch())
        return
    assert [name for name, _ in build_requests(parse_sweep([item]), Spec(), Launch())] == names


LONG = ",".join(map(str, range(9999)))


@pytest.mark.parametrize(
    "item", ["seed=1..9..0", "seed=1..100000", f"set.a={LONG}"], ids=["step", "range", "list"]
)
def test_arrays_that_are_too_long(item: str) -> None:
    with pytest.raises(SpecError, match=r"1 to 1,000 numbers|use at most 1,000"):
        parse_sweep([item])


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_scripts_pass_shellcheck() -> None:
    scripts = [path.read_text() for path in (Path(__file__).parent / "golden").glob("*.sh")]
    for script in (*scripts, render_install_script()):
        words = ["shellcheck", "--severity=warning", "--exclude=SC1007,SC2089,SC2090", "-"]
        done = subprocess.run(words, input=script, capture_output=True, text=True, timeout=60)
        assert done.stdout == ""


@pytest.mark.slurm
@pytest.mark.slow
def test_slurm_reads_names_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Job scripts in odd folders, and comments of another job that look like the state of a job."""
    (tmp_path / "slurm").mkdir()
    with start_cluster(tmp_path / "slurm") as slurm:
        for name, value in slurm.env.items():
            monkeypatch.setenv(name, value)
        for name in ("100%j", "a %a", 'q"x', "it's #1", "$(touch HIT)"):
            job = make_job(tmp_path / name)
            (job.run / "job.sh").write_text(render(job, Site(sbatch=("--comment='JobState=FAILED'",))))
            number = client.submit(job.run / "job.sh")
            slurm.wait_for_state(number, "COMPLETED")
            assert (job.run / f"slurm-{number}.out").exists(), os.listdir(job.run)
            assert client.status(number).state == "COMPLETED"
        words = ("sbatch", "--parsable", "--hold", "--output=/dev/null", "--wrap=true")
        victim = slurm.run(*words).strip()
        for comment in (f"x JobId={victim} JobState=COMPLETED", f"x\nJobId={victim} JobState=COMPLETED"):
            slurm.run(*words, f"--comment={comment}")
        assert client.list_statuses(os.getuid())[victim].state == "PENDING"
        array = slurm.run(*words, "--array=0-2").strip()
        assert {f"{array}_0", f"{array}_2"} <= client.list_statuses(os.getuid()).keys()
        assert client.status(f"{array}_1").state == "PENDING"
        assert client.status("99999") is None
        refused = paceline("status", tmp_path / "100%j", at=tmp_path, **slurm.env)
        assert "Traceback" not in refused.all
    assert not list(tmp_path.rglob("HIT"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0:42", "00:00:42"),
        ("10:00", "00:10:00"),
        ("1:02:03", "01:02:03"),
        ("12:00:00", "12:00:00"),
        ("1-02:03:04", "1-02:03:04"),
        ("UNLIMITED", "UNLIMITED"),
        ("INVALID", "INVALID"),
    ],
)
def test_times_of_squeue_have_hours(text: str, expected: str) -> None:
    assert client._pad_clock(text) == expected
