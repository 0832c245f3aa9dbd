"""What the package exports, and which way its imports point."""

import importlib
import importlib.util
import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import paceline
from command import environment

# What plans, submits and reports works at once on a login node, without torch.
WITHOUT_TORCH = (
    "paceline",
    "paceline.__main__",
    "paceline.errors",
    "paceline.units",
    "paceline.spec",
    "paceline.events",
    "paceline.run",
    "paceline.task",
    "paceline.cluster.facts",
    "paceline.cluster.file",
    "paceline.cluster.local_cluster",
    "paceline.cluster.probe",
    "paceline.cluster.published",
    "paceline.plan.plan",
    "paceline.plan.search.best_plans",
    "paceline.plan.model.library",
    "paceline.plan.report.plan",
    "paceline.cli.plan",
    "paceline.distributed.world",
    "paceline.launch.slurm.srun",
    "paceline.launch.launchers",
    "paceline.launch.ray.actor",
    "paceline.launch.slurm.job_script",
    "paceline.launch.slurm.site",
    "paceline.launch.slurm.client",
    "paceline.report.summary",
    "paceline.cluster.text",
    "paceline.report.text",
    "paceline.report.progress",
    "paceline.cli",
    "paceline.cli.train",
    "paceline.cli.resume",
    "paceline.cli.submit",
    "paceline.cli.status",
    "paceline.cli.logs",
    "paceline.cli.cancel",
    "paceline.cli.show",
    "paceline.cli.export",
    "paceline.bench.result",
    "paceline.bench.timer",
    "paceline.bench.compare",
    "paceline.bench.collectives.request",
    "paceline.bench.collectives.operations",
    "paceline.bench.collectives.rank_groups",
    "paceline.bench.collectives.workers",
    "paceline.bench.collectives.alpha_beta",
    "paceline.bench.report.bench",
    "paceline.plotting.figure",
    "paceline.bench.report.collectives",
    "paceline.bench.report.busbw",
    "paceline.cli.bench.app",
    "paceline.bench.collect",
    "paceline.bench.suites",
    "paceline.bench.storage.io_ops",
    "paceline.bench.storage.suite",
    "paceline.bench.storage.advice",
    "paceline.bench.to_cluster",
    "paceline.bench.report.compute",
    "paceline.bench.report.overlap",
    "paceline.bench.report.storage",
    "paceline.bench.report.input",
    "paceline.bench.report.whole",
    "paceline.cli.bench.single",
    "paceline.cli.bench.all",
    "paceline.cli.probe",
    "paceline.cli.bench.collectives",
    "paceline.cli.internal.rank",
    "paceline.cli.launching",
)
EXPORTED = {"Error", "Layout", "Plan", "RunFolder", "Spec", "Task", "World", "train"}
WITHOUT = """
import importlib, sys
sys.modules["torch"] = None
if sys.argv[1].endswith("__main__"):
    sys.argv = ["paceline", "--version"]
    import runpy
    try:
        runpy.run_module("paceline", run_name="__main__")
    except SystemExit as over:
        assert not over.code
else:
    importlib.import_module(sys.argv[1])
"""


@pytest.mark.parametrize("module", WITHOUT_TORCH)
def test_no_torch_is_needed_for(module):
    result = subprocess.run([sys.executable, "-c", WITHOUT, module], capture_output=True, text=True, env=environment(), timeout=120)
    assert result.returncode == 0, result.stderr


def test_the_exported_names():
    assert {*paceline.__all__} == EXPORTED == {*dir(paceline)}
    found = {}
    exec("from paceline import *", found)
    assert {*found} - {"__builtins__"} == EXPORTED
    for name in EXPORTED:
        assert getattr(paceline, name).__name__ == name


def test_a_name_that_is_not_there():
    with pytest.raises(AttributeError, match="module 'paceline' has no attribute 'Trainer'"):
        paceline.Trainer  # noqa: B018


def test_each_error_is_one_that_is_meant():
    errors = importlib.import_module("paceline.errors")
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    assert all(issubclass(kind, paceline.Error) for kind in kinds)
    assert all(kind.__name__ in errors.__doc__ for kind in kinds)


RESOLVED = """
import warnings
warnings.simplefilter("ignore")  # setuptools calls its own function experimental
from setuptools.config.pyprojecttoml import read_configuration
print(read_configuration("pyproject.toml")["project"]["version"])
"""
REPORTED = """
import importlib.metadata, json
import paceline
from paceline.run import provenance
print(json.dumps([importlib.metadata.version("paceline"), paceline.__version__, provenance()["packages"]["paceline"]]))
"""


def test_the_version_is_written_in_one_place(tmp_path):
    """The metadata of an older installation, which an editable one keeps, change nothing."""
    root = Path(__file__).parent.parent
    assert "version" not in tomllib.loads((root / "pyproject.toml").read_text())["project"]
    if importlib.util.find_spec("setuptools") is not None:
        built = subprocess.run([sys.executable, "-c", RESOLVED], cwd=root, capture_output=True, text=True, timeout=60)
        assert built.stdout.strip() == paceline.__version__, built.stderr
    old = tmp_path / "paceline-9.9.9.dist-info"
    old.mkdir()
    (old / "METADATA").write_text("Metadata-Version: 2.1\nName: paceline\nVersion: 9.9.9\n")
    with_old = environment(PYTHONPATH=str(tmp_path))
    said = subprocess.run([sys.executable, "-c", REPORTED], capture_output=True, text=True, env=with_old, timeout=60)
    assert json.loads(said.stdout) == ["9.9.9", paceline.__version__, paceline.__version__], said.stderr
    said = subprocess.run([sys.executable, "-m", "paceline", "--version"], capture_output=True, text=True, env=with_old, timeout=60)
    assert said.stdout == f"paceline {paceline.__version__}\n"


def test_it_says_that_it_is_typed():
    assert (Path(paceline.__file__).parent / "py.typed").is_file()
