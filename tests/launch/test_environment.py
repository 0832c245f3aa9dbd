"""This environment on other machines: wheels of installed packages, bundles, images of Apptainer.

python tests/launch/test_environment.py   rewrites the golden files; read them before committing
"""

import base64
import csv
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
import zipfile
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from command import paceline
from mounts import mount_tmpfs
from paceline.errors import LaunchError, SpecError
from paceline.launch.environment.bundle import check_bundle_name, render_install_script, write_bundle
from paceline.launch.environment.image import (
    ImageContents,
    check_image_name,
    describe_image,
    render_definition,
    write_image_files,
)
from paceline.launch.environment.installed import (
    check_pins,
    find_needed,
    list_extras,
    list_installed,
    parse_requirement,
    read_requirements,
)
from paceline.launch.environment.wheel import pack_wheel
from pages import read_blocks

GOLDEN = Path(__file__).parent / "golden"


def make_package(site: Path) -> Distribution:
    """Install a package by hand, with scripts, data and names that CSV quotes."""
    information = site / "odd_name-1.0.dist-info"
    files = {
        site / "odd" / "__init__.py": "x = 1\n",
        site / "odd" / "a,b.txt": "comma\n",
        site / "odd" / "__pycache__" / "x.pyc": "cache",
        information / "METADATA": "Metadata-Version: 2.1\nName: Odd.Name\nVersion: 1.0\n",
        information / "WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py2-none-any\n"
        "Tag: py3-none-any\n",
        information / "INSTALLER": "pip\n",
        information / "entry_points.txt": "[console_scripts]\ngenerated = odd:x\n",
        site.parents[2] / "bin" / "generated": "#!/old/bin/python\n",
        site.parents[2] / "bin" / "own": "#!/old/bin/python3\nimport odd\nprint(odd.x)\n",
        site.parents[2] / "share" / "odd" / "data": "data\n",
    }
    names = []
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        names.append(os.path.relpath(path, site))
    (site.parents[2] / "bin" / "own").chmod(0o755)
    record = information / "RECORD"
    with record.open("w", newline="") as file:
        csv.writer(file).writerows([(name, "", "") for name in [*names, os.path.relpath(record, site)]])
    return Distribution.at(information)


def check_record(wheel: Path) -> set[str]:
    """Compare the files of a wheel with the digests of its RECORD, and return their names."""
    with zipfile.ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith(".dist-info/RECORD")]
        rows = [row for row in csv.reader(archive.read(name).decode().splitlines()) if row[0] != name]
        for path, digest, size in rows:
            content = archive.read(path)
            actual = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
            assert (digest, int(size)) == (f"sha256={actual}", len(content))
        assert {row[0] for row in rows} == {*archive.namelist()} - {name}
        return {row[0] for row in rows}


def test_the_wheel_of_an_installed_package(tmp_path):
    package = make_package(tmp_path / "lib/python3.11/site-packages")
    wheel = pack_wheel(package, tmp_path)
    assert wheel.name == "odd_name-1.0-py2.py3-none-any.whl"
    information = {f"odd_name-1.0.dist-info/{name}" for name in ("METADATA", "WHEEL", "entry_points.txt")}
    outside = {"odd_name-1.0.data/scripts/own", "odd_name-1.0.data/data/share/odd/data"}
    assert check_record(wheel) == {"odd/__init__.py", "odd/a,b.txt"} | information | outside
    with zipfile.ZipFile(wheel) as archive:
        script = archive.read("odd_name-1.0.data/scripts/own").decode()
        assert script == "#!python\nimport odd\nprint(odd.x)\n"
        assert archive.getinfo("odd_name-1.0.data/scripts/own").external_attr >> 16 == 0o100755
    (tmp_path / "again").mkdir()
    again = pack_wheel(package, tmp_path / "again")
    assert again.read_bytes() == wheel.read_bytes()
    (tmp_path / "lib/python3.11/site-packages/odd/a,b.txt").unlink()
    with pytest.raises(LaunchError, match=r"Odd\.Name lacks its file .*; install it again"):
        pack_wheel(package, tmp_path / "again")


def test_wheels_of_a_compiled_and_of_an_editable_package(tmp_path):
    compiled = distribution("psutil")
    wheel = pack_wheel(compiled, tmp_path)
    check_record(wheel)
    with zipfile.ZipFile(wheel) as archive:
        libraries = [name for name in archive.namelist() if name.endswith(".so")]
        assert libraries
        for name in libraries:
            assert archive.read(name) == Path(str(compiled.locate_file(name))).read_bytes()
    own = list_installed()["paceline"]
    names = check_record(pack_wheel(own, tmp_path))
    assert {"paceline/__init__.py", "paceline/cluster/published.toml"} <= names
    assert not [name for name in names if "__pycache__" in name or "direct_url" in name]


REQUIREMENTS = [
    "torch",
    "Ruamel.YAML>=1,<2",
    "scikit_learn==1.5 ; python_version > '3.8'",
    "ray[Default,tune] >= 2",
    "name@ https://host/file.whl",
    "name (>=1)",
]


@pytest.mark.parametrize("text", REQUIREMENTS, ids=range(len(REQUIREMENTS)))
def test_requirements_are_read_as_packaging_reads_them(text):
    expected = Requirement(text)
    extras = frozenset(map(canonicalize_name, expected.extras))
    assert parse_requirement(text.replace("name@", "name @")) == (canonicalize_name(expected.name), extras)


@pytest.mark.parametrize("text", ["", "-e .", "./folder", "two words", "a;rm".replace(";", "&")])
def test_what_is_no_requirement(text):
    with pytest.raises(SpecError, match="is not the requirement of a package"):
        parse_requirement(text)


def test_needed_packages_equal_those_of_the_markers():
    """The reference evaluates markers, and this environment has packages of its platform only."""
    installed = list_installed()

    def follow(requirement: Requirement, seen: set[tuple[str, str]]) -> None:
        name = canonicalize_name(requirement.name)
        for extra in {"", *requirement.extras}:
            if (name, extra) in seen or name not in installed:
                continue
            seen.add((name, extra))
            for line in installed[name].requires or ():
                each = Requirement(line)
                if each.marker is None or each.marker.evaluate({"extra": extra}):
                    follow(each, seen)

    seen: set[tuple[str, str]] = set()
    for line in ("pytest", "pydantic", "torch"):
        follow(Requirement(line), seen)
    found = {*find_needed(["pytest", "pydantic", "torch"], installed)}
    assert {name for name, _ in seen} <= found
    assert len(found - {name for name, _ in seen}) <= 3  # of other platforms or versions, installed anyway
    with pytest.raises(SpecError, match="no-such-package is required, and not installed"):
        find_needed(["no-such-package"], installed)
    assert not {"dev", "docs", "bench"} & {*list_extras(installed)}


def test_requirements_of_the_project(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert read_requirements() is None
    Path("pyproject.toml").write_text('[project]\ndependencies = ["timm>=1", "einops"]\n')
    assert read_requirements() == ["timm>=1", "einops"]
    Path("requirements.txt").write_text("# comment\ntimm>=1 \\\n  ,<2  # why\n\neinops\n")
    assert read_requirements() == ["timm>=1   ,<2", "einops"]
    Path("requirements.txt").write_text("einops\n--index-url https://host/simple\n")
    with pytest.raises(SpecError, match=r"requirements\.txt: the option '--index-url' of pip has no meaning"):
        read_requirements()
    with pytest.raises(SpecError, match="no such file: other"):
        read_requirements(Path("other"))


def test_a_pinned_version_must_be_the_installed_one():
    installed = list_installed()
    numpy, torch = (distribution(name).version for name in ("numpy", "torch"))
    major = numpy.partition(".")[0]
    base = torch.partition("+")[0]
    good = [f"numpy=={numpy}", f"numpy=={major}.*", f"torch=={torch}", f"torch=={base}", "none==1", "rich>=1"]
    check_pins(good, installed)
    for bad in ("numpy==0.1", "torch ==99 ; python_version > '3'", f"numpy==1{major}.*", "rich>=1,==0.*"):
        with pytest.raises(SpecError, match=r"is required, and \w+ \S+ is installed"):
            check_pins([bad], installed)


# bundle


def test_the_name_of_a_bundle_is_checked():
    assert check_bundle_name(Path("x/env-1.tar")) == "env-1"
    for name in ("env.zip", "-rf.tar", "a b.tar", "..tar", "$(x).tar"):
        with pytest.raises(LaunchError, match=r"the bundle must be a file such as env\.tar"):
            check_bundle_name(Path(name))


def test_a_full_disk_leaves_no_bundle(tmp_path):
    packages = find_needed(["rich"], list_installed())
    with mount_tmpfs(tmp_path, "size=200k"):
        with pytest.raises(LaunchError, match=r"cannot write .*env\.tar: No space left on device"):
            write_bundle(tmp_path / "env.tar", packages, lambda done, total: None)
        assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_an_interrupted_bundle_leaves_nothing(tmp_path):
    command = [sys.executable, "-m", "paceline", "bundle", "env.tar"]
    deadline = time.monotonic() + 240
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as process:
        while not list(tmp_path.glob(".bundle-*")):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.terminate()
        assert process.wait(timeout=60) == 130
        assert "Traceback" not in process.stderr.read()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_an_interrupted_installation_leaves_nothing(tmp_path):
    write_bundle(tmp_path / "env.tar", find_needed(["rich"], list_installed()), lambda done, total: None)
    with tarfile.open(tmp_path / "env.tar") as archive:
        archive.extractall(tmp_path, filter="data")
    env = {**os.environ, "PYTHON": sys.executable}
    new = tmp_path / "new folder"
    process = subprocess.Popen([tmp_path / "env/install.sh", new], env=env, start_new_session=True)
    deadline = time.monotonic() + 120
    while not (new / "bin/python").exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGTERM)
    assert process.wait(timeout=60) == 1
    assert not new.exists()


@pytest.mark.slow
def test_a_bundle_installs_without_a_network(tmp_path):
    installed = list_installed()
    packages = find_needed(["rich", "psutil", "setuptools"], installed)
    size = write_bundle(tmp_path / "env.tar", packages, lambda done, total: None)
    assert size.num_packages == len(packages)
    (tmp_path / "again").mkdir()
    write_bundle(tmp_path / "again" / "env.tar", packages, lambda done, total: None)
    assert (tmp_path / "again" / "env.tar").read_bytes() == (tmp_path / "env.tar").read_bytes()
    with tarfile.open(tmp_path / "env.tar") as archive:
        archive.extractall(tmp_path, filter="data")
    # settings of pip, and packages of loaded modules, must not count
    odd = {"PIP_USER": "1", "PIP_INDEX_URL": "http://127.0.0.1:1", "PIP_TARGET": str(tmp_path / "target")}
    site = str(distribution("rich").locate_file(""))
    env = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": site, **odd}
    offline = ["unshare", "-n"] if subprocess.run(["unshare", "-n", "true"]).returncode == 0 else []

    def install(folder: str) -> "subprocess.CompletedProcess[str]":
        command = [*offline, tmp_path / "env/install.sh", tmp_path / folder]
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=200)

    done = install("new")
    assert (done.returncode, done.stderr) == (0, "")
    for package in packages.values():
        for path in package.files or ():
            if path.suffix in (".py", ".so") and ".." not in path.parts:
                copy = next((tmp_path / "new/lib").glob("python3*")) / "site-packages" / path
                assert copy.read_bytes() == Path(str(path.locate())).read_bytes(), path
    assert not (tmp_path / "target").exists()
    env = {name: value for name, value in env.items() if name != "PYTHONPATH"}
    python = tmp_path / "new/bin/python"
    code = "import psutil, rich.console; print(psutil.cpu_count() > 0)"
    result = subprocess.run([python, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert (result.stdout, result.stderr) == ("True\n", "")
    assert "exists; specify a new folder" in install("new").stderr
    # a wheel that was changed on its way is refused
    wheel = next((tmp_path / "env/wheels").glob("rich-*"))
    wheel.write_bytes(wheel.read_bytes() + b"x")
    assert "HASHES" in install("other").stderr
    assert not (tmp_path / "other").exists()


def test_the_script_refuses_another_python(tmp_path):
    script = tmp_path / "install.sh"
    script.write_text(render_install_script())
    result = subprocess.run(
        ["sh", script, tmp_path / "new"],
        env={**os.environ, "PYTHON": "/bin/false"},
        capture_output=True,
        text=True,
        timeout=20,
    )
    assert (result.returncode, result.stdout) == (2, "")
    assert "these packages require Python 3." in result.stderr
    assert not (tmp_path / "new").exists()


# images

PINS = ("numpy==2.3.1", "rich==14.0.0")
REQUIRED = ("paceline[plot]==0.2.0", "timm>=1,<2 ; python_version > '3.8'")
IMAGES = {
    "image-cuda.def": ImageContents("cuda", "3.11", "2.13.0+cu130", PINS, REQUIRED),
    "image-rocm.def": ImageContents("rocm", "3.11", "2.13.0+cpu", PINS, REQUIRED),
    "image-cpu.def": ImageContents("cpu", "3.12", "2.13.0", PINS, REQUIRED),
    "image-base.def": ImageContents("rocm", "3.12", "2.13.0", PINS, REQUIRED, "/appl/images/torch rocm.sif"),
}


@pytest.mark.parametrize("name", IMAGES)
def test_a_definition_file(name):
    text = render_definition(IMAGES[name], "paceline.files")
    assert text == (GOLDEN / name).read_text(), (
        "if this is intended, run python tests/launch/test_environment.py and review the changes"
    )
    post = text.partition("%post\n")[2].partition("\n%")[0]
    assert subprocess.run(["sh", "-n"], input=post, text=True, capture_output=True, timeout=20).stderr == ""


def test_torch_of_an_image_is_that_of_its_device():
    words = {
        (device, torch): ImageContents(device, "3.11", torch, (), ()).torch_words
        for device in ("cuda", "rocm", "cpu")
        for torch in ("2.13.0", "2.13.0+cpu", "2.13.0+cu130", "2.13.0+rocm7.1")
    }
    assert {row[0] for row in words.values()} == {"torch==2.13.0"}
    indexes = {key: row[2].rpartition("/")[2] for key, row in words.items() if len(row) > 1}
    assert indexes == {
        ("cuda", "2.13.0+cu130"): "cu130",
        ("rocm", "2.13.0+rocm7.1"): "rocm7.1",
        **{("cpu", torch): "cpu" for device, torch in words if device == "cpu"},
    }


@pytest.mark.parametrize("base", ["a\n%post", "$(id)", "a b", "{{ x }}.sif", "-x"])
def test_a_base_image_that_would_break_the_file(base):
    with pytest.raises(LaunchError):
        ImageContents("cuda", "3.11", "2.13.0", (), (), base)


def test_the_name_of_an_image_is_checked(tmp_path):
    check_image_name(tmp_path / "paceline.sif")
    (tmp_path / "old.sif").touch()
    for name, sentence in {
        "a b.sif": "must be a file such as",
        "x.img": "must be",
        "old.sif": "exists",
    }.items():
        with pytest.raises(LaunchError, match=sentence):
            check_image_name(tmp_path / name)


def test_an_image_has_the_versions_of_this_environment():
    installed = list_installed()
    contents = describe_image("cuda", ["rich"], installed)
    assert f"psutil=={distribution('psutil').version}" in contents.constraints
    assert not [line for line in contents.constraints if line.startswith(("torch==", "nvidia-", "paceline"))]
    assert contents.requirements[0].endswith(f"=={installed['paceline'].version}")
    assert contents.requirements[1:] == ("rich",)


@pytest.mark.slow
def test_the_section_post_installs_paceline(tmp_path):
    """The section runs for real, in an environment that stands for a base image with torch."""
    installed = list_installed()
    contents = describe_image("cpu", ["rich"], installed)
    definition = write_image_files(tmp_path / "paceline.sif", contents, installed)
    text = definition.read_text()
    place = tmp_path / "paceline.files"
    post = text.partition("%post\n")[2].partition("\n%")[0].replace("/opt/paceline", str(place))
    test = text.partition("%test\n")[2].partition("\n%")[0]
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "base"], check=True, timeout=120)
    [site] = (tmp_path / "base/lib").glob("python3*/site-packages")
    packages = Path(str(distribution("torch").locate_file("")))
    for folder in site.glob("setuptools*"):  # older than that of the constraints
        shutil.rmtree(folder)
    for path in packages.iterdir():
        if not path.name.startswith(("paceline", "__editable__")) and not (site / path.name).exists():
            (site / path.name).symlink_to(path)
    env = {
        **os.environ,
        "PATH": f"{tmp_path / 'base/bin'}:{os.environ['PATH']}",
        "PIP_NO_INDEX": "1",
        "PIP_IGNORE_INSTALLED": "0",
        "PYTHONPATH": "",
    }
    done = subprocess.run(["sh"], input=post + test, env=env, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (site / "paceline/cluster/published.toml").is_file()
    assert not (place / "wheels").exists()
    assert f"torch=={distribution('torch').version}" in (place / "constraints.txt").read_text()


BLOCKS = read_blocks("docs/environments.md")


@pytest.mark.slow
def test_submit_builds_no_image_without_apptainer(tmp_path):
    (tmp_path / "requirements.txt").write_text("rich\n")
    result = paceline(*BLOCKS["image"].split()[1:], at=tmp_path, PATH=os.path.dirname(sys.executable))
    assert result.status == 0, result.all
    assert f"run: cd {tmp_path} && apptainer build paceline.sif paceline.def" in result.out
    assert "container = " in result.out
    files = {path.name for path in (tmp_path / "paceline.files").rglob("*")}
    assert {"constraints.txt", "requirements.txt", "wheels"} <= files
    dry = paceline("submit", "--build-image", "cuda", "--dry-run", at=tmp_path)
    assert dry.out == (tmp_path / "paceline.def").read_text()
    apptainer = tmp_path / "bin" / "apptainer"
    apptainer.parent.mkdir()
    apptainer.write_text('#!/bin/sh\necho "$@" > called\nexit "$(cat status)"\n')
    apptainer.chmod(0o755)
    for status, ends in {"0": 0, "7": 2}.items():
        (tmp_path / "status").write_text(status)
        result = paceline(
            "submit", "--build-image", "cpu", at=tmp_path, PATH=f"{apptainer.parent}:{os.environ['PATH']}"
        )
        assert result.status == ends, result.all
        assert (tmp_path / "called").read_text() == "build paceline.sif paceline.def\n"
    assert "apptainer ended with exit status 7" in result.err


@pytest.mark.slow
def test_the_command_bundle(tmp_path):
    """With torch, as users run it. The lock has what the project needs, and nothing else of this place."""
    (tmp_path / "requirements.txt").write_text("rich\n")
    result = paceline(*BLOCKS["bundle"].split()[1:], at=tmp_path)
    assert result.status == 0, result.all
    assert result.out.endswith("on the other machine: tar -xf env.tar && env/install.sh NEW_FOLDER\n")
    with tarfile.open(tmp_path / "env.tar") as archive:
        names = archive.getnames()
        lock = archive.extractfile("env/requirements.lock").read().decode()
    packages = {line.partition("==")[0] for line in lock.splitlines()}
    assert {"paceline", "torch", "rich", "numpy", "typer"} <= packages
    assert not {"pytest", "ruff", "pip"} & packages
    assert len(names) == len(packages) + 2


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("submit", "--build-image", "gpu"), "--build-image must be cuda, rocm, cpu, got 'gpu'"),
        (("submit", "--build-image", "cuda", "--nodes", "2"), "--build-image builds an image for all"),
        (("submit", "--image-base", "x"), "--image-base requires --build-image"),
        (("bundle", "env.zip"), "the bundle must be a file such as env.tar"),
        (("bundle", "env.tar", "--requirements", "none.txt"), "no such file: none.txt"),
    ],
    ids=["device", "others", "base", "name", "requirements"],
)
def test_bad_input_of_images_and_bundles(words, sentence, tmp_path):
    result = paceline(*words, at=tmp_path)
    assert result.status == 2
    assert result.err.startswith(f"paceline: {sentence}")
    assert list(tmp_path.iterdir()) == []


if __name__ == "__main__":
    for name, contents in IMAGES.items():
        (GOLDEN / name).write_text(render_definition(contents, "paceline.files"))
