"""Job scripts, a pure function of the job and the site, compared with golden files; and site files.

python tests/launch/test_job_script.py   rewrites the golden files; read them before committing
"""

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.errors import SpecError
from paceline.launch.slurm.job_script import Job, render
from paceline.launch.slurm.site import Site, read_site

GOLDEN = Path(__file__).parent / "golden"
JOB = Job(
    Path("/home/me/runs/a"),
    Path("/home/me"),
    nodes=2,
    ranks_per_node=4,
    time="02:00:00",
    python="/home/me/.venv/bin/python3",
)
SCRIPTS = {
    "plain.sh": (JOB, Site()),
    "centre.sh": (
        replace(JOB, time=None),
        Site(
            partition="gpu",
            account="physics",
            qos="long",
            constraint="a100&nvlink",
            gres="gpu:a100:4",
            cpus_per_rank=8,
            memory="240G",
            modules=("cuda/12.4", "python/3.11"),
            conda="train",
            interface="ib0",
            scratch="$TMPDIR/data",
            stage_in="/store/physics/data.tar",
            log="%x-%j.log",
            notice_s=300,
            sbatch=("--exclusive", "--mail-type=END"),
            environment={"OMP_PROC_BIND": "false"},
        ),
    ),
    "elastic.sh": (replace(JOB, nodes=4, least_nodes=2, restarts=3), Site(cpus_per_rank=8)),
    "container.sh": (
        replace(JOB, run=Path("/home/me/my runs/it's"), folder=Path("/home/me/my work")),
        Site(
            gpus_per_node=4,
            modules=("apptainer",),
            container="/images/torch 2.sif",
            scratch="/local/$USER",
            environment={"DATA": "a b"},
        ),
    ),
    "pyxis.sh": (
        replace(JOB, run=Path("/scratch/runs/a"), folder=Path("/home/me/my work")),
        Site(container="nvcr.io#nvidia/pytorch:25.06-py3", runtime="pyxis", setup=("source set_vars.sh",)),
    ),
    "podman.sh": (
        JOB,
        Site(
            container="docker.io/pytorch/pytorch",
            runtime="podman",
            reservation="course",
            environment={"DATA": "a b"},
        ),
    ),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_job_script(name):
    script = render(*SCRIPTS[name])
    assert script == (GOLDEN / name).read_text(), (
        "if this is intended, run python tests/launch/test_job_script.py and review the changes"
    )
    assert (
        subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True, timeout=20).stderr == ""
    )


def test_every_field_changes_the_script():
    """Every field of the job and of the site appears in the script."""
    others = [
        replace(JOB, nodes=3),
        replace(JOB, ranks_per_node=1),
        replace(JOB, time="1-0"),
        replace(JOB, python="/bin/python"),
    ]
    assert len({render(job, Site()) for job in [JOB, *others]}) == 5
    values = {
        "conda": "a",
        "interface": "ib1",
        "environment": {"A": "1"},
        "sbatch": ["--comment=x"],
        "container": "i.sif",
        "log": "%j.log",
    }
    assert len({render(JOB, Site.model_validate({name: value})) for name, value in values.items()}) == len(
        values
    )


def test_a_virtual_environment_provides_python():
    script = render(JOB, Site(venv="/home/me/my env"))
    assert "source '/home/me/my env'/bin/activate\n" in script
    assert " python -m paceline rank" in script
    assert JOB.python not in script


# site.toml


def site(tmp_path: Path, text: str) -> Site:
    (tmp_path / "site.toml").write_text(text)
    return read_site(tmp_path / "site.toml")


def test_a_site_file(tmp_path):
    loaded = site(
        tmp_path,
        'partition = "gpu"\nmodules = ["cuda/12.4"]\nsbatch = ["--exclusive"]\n[environment]\nA = "1"\n',
    )
    assert loaded == Site(
        partition="gpu", modules=("cuda/12.4",), sbatch=("--exclusive",), environment={"A": "1"}
    )


def test_the_site_file_of_this_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert read_site(None) == Site()
    Path("site.toml").write_text('account = "physics"\n')
    assert read_site(None) == Site(account="physics")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('partiton = "gpu"', "site.toml: unknown key partiton; did you mean partition?"),
        ("gpus_per_node = 0", "site.toml: gpus_per_node must be greater than or equal to 1, got 0"),
        ('modules = "cuda"', 'site.toml: modules must be a list, such as ["A","B"], got \'cuda\''),
        ('backups = ["store"]', "backups must be absolute folders such as '$HOME' or '/store', got 'store'"),
        ('conda = "a"\nvenv = "b"', "conda='a' and venv='b' exclude each other; keep only one"),
        (
            'gres = "gpu:2"\ngpus_per_node = 2',
            "gres='gpu:2' and gpus_per_node=2 exclude each other; keep only one",
        ),
        ('runtime = "podman"', "runtime='podman' requires container, the image that it starts"),
        ('stage_in = "data.tar"', "stage_in='data.tar' requires scratch, the folder to unpack it to"),
        ('account = "a\\nrm -rf b"', "account must be a single line of printable text, got 'a\\nrm -rf b'"),
        ('account = ""', "site.toml: account must not be empty; leave it out"),
        ('modules = ["a", ""]', "site.toml: modules must not be empty; leave it out"),
        ('log = "../x"', "log must be the name of a file in the run folder, got '../x'"),
        ('sbatch = ["--comment=\'a"]', "with an open quotation mark; close it"),
        ('sbatch = ["exclusive"]', "sbatch must be options such as '--exclusive', got 'exclusive'"),
        ('[environment]\n"A B" = "1"', "environment must have names of variables, got 'A B'"),
        ("partition =", "is not TOML"),
    ],
)
def test_an_invalid_site_file_is_refused(text, message, tmp_path):
    with pytest.raises(SpecError) as error:
        site(tmp_path, text)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_site_file_is_refused(tmp_path):
    with pytest.raises(SpecError, match=r"cannot read .*nowhere\.toml: No such file"):
        read_site(tmp_path / "nowhere.toml")


@pytest.mark.parametrize(
    ("there", "flag"),
    [((), "--nv"), (("nvidiactl",), "--nv"), (("kfd",), "--rocm"), (("kfd", "nvidiactl"), "--nv")],
)
def test_a_container_gets_the_gpus_of_its_node(there: tuple[str, ...], flag: str, tmp_path: Path) -> None:
    for name in there:
        (tmp_path / name).touch()
    script = render(*SCRIPTS["container.sh"]).replace("/dev/", f"{tmp_path}/")
    begin = script.index("in_container() {")
    function = script[begin : script.index("\n}\n", begin) + 3]
    stub = tmp_path / "apptainer"
    stub.write_text("#!/bin/sh\necho $*\n")
    stub.chmod(0o755)
    program = f"PATH={tmp_path}:$PATH\n{function}in_container echo hello"
    output = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True).stdout
    assert output.startswith(f"exec -e {flag} --bind ")


@pytest.mark.parametrize(
    ("there", "devices"),
    [
        ((), ""),
        (("nvidiactl",), "--device nvidia.com/gpu=all "),
        (("kfd",), "--device {}/kfd --device {}/dri "),
    ],
    ids=["cpu", "nvidia", "amd"],
)
def test_podman_gets_the_gpus_and_the_variables_of_its_rank(
    there: tuple[str, ...], devices: str, tmp_path: Path
) -> None:
    for name in there:
        (tmp_path / name).touch()
    script = render(*SCRIPTS["podman.sh"]).replace("/dev/", f"{tmp_path}/")
    begin = script.index("in_container() {")
    function = script[begin : script.index("\n}\n", begin) + 3]
    stub = tmp_path / "podman"
    stub.write_text("#!/bin/sh\necho $*\n")
    stub.chmod(0o755)
    program = f"PATH={tmp_path}:$PATH\nexport SLURM_PROCID=3 run=/r\n{function}in_container echo hello"
    output = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True).stdout
    assert output.startswith("run --rm --network host --ipc host --userns keep-id ")
    assert "-e SLURM_PROCID" in output
    assert "-e run" in output
    assert output.endswith(f"{devices.format(tmp_path, tmp_path)}docker.io/pytorch/pytorch echo hello\n")


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for name, arguments in SCRIPTS.items():
        (GOLDEN / name).write_text(render(*arguments))
