"""Exports, versions and import layers of the package."""

import ast
import importlib
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

import pytest

import paceline
from command import clean_environment

SOURCE = Path(paceline.__file__).parent
WITHOUT = """
import importlib, sys, traceback
sys.modules["torch"] = None
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except ImportError:
        print(name, traceback.format_exc().splitlines()[-1])
"""


def test_files_without_torch_import_without_torch():
    """Check the files of the contract in pyproject.toml that forbids torch, and those in docs/tree.md."""
    contracts = tomllib.loads((SOURCE.parents[1] / "pyproject.toml").read_text())["tool"]["importlinter"]
    [torch_free] = [entry for entry in contracts["contracts"] if entry.get("forbidden_modules") == ["torch"]]
    files = set(re.findall(r"^  (\S+\.py) +·", (SOURCE.parents[1] / "docs/tree.md").read_text(), re.M))
    for module in torch_free["source_modules"]:
        path = SOURCE.parent / module.replace(".", "/")
        paths = path.rglob("*.py") if path.is_dir() else [path.with_suffix(".py")]
        of_contract = {str(file.relative_to(SOURCE)) for file in paths}
        assert of_contract <= files, f"docs/tree.md does not mark {sorted(of_contract - files)}"
    names = [
        f"paceline.{file.removesuffix('.py').replace('/', '.')}".removesuffix(".__init__")
        for file in sorted(files - {"__main__.py"})
    ]
    assert len(names) > 100
    result = subprocess.run(
        [sys.executable, "-c", WITHOUT, *names],
        capture_output=True,
        text=True,
        env=clean_environment(),
        timeout=120,
    )
    assert (result.stdout, result.stderr, result.returncode) == ("", "", 0)
    result = subprocess.run(
        [sys.executable, "-c", WITHOUT, "paceline.training.train"],
        capture_output=True,
        text=True,
        env=clean_environment(),
    )
    assert result.stdout.startswith("paceline.training.train ")


def test_class_names_are_unique():
    classes = [
        (node.name, str(path.relative_to(SOURCE)))
        for path in SOURCE.rglob("*.py")
        if {"course", "exercises"}.isdisjoint(path.parts)  # programs of students
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    ]
    names = Counter(name for name, _ in classes)
    assert [entry for entry in classes if names[entry[0]] > 1] == []


def test_forbidden_import_is_detected(tmp_path):
    """Run the import check of `make lint` on a changed copy of the package."""
    shutil.copytree(SOURCE, tmp_path / "paceline")
    shutil.copy(SOURCE.parents[1] / "pyproject.toml", tmp_path)
    assert "0 broken" in check_layers(tmp_path)
    with (tmp_path / "paceline/units.py").open("a") as file:
        file.write(
            "\n\ndef planted():\n    from paceline.plan.plan import Plan\n    import torch\n    return "
            "Plan, torch\n"
        )
    output = check_layers(tmp_path)
    assert "paceline.units -> paceline.plan.plan" in output
    assert "layers BROKEN" in output
    assert "planning, reporting and diagnosing do not import torch BROKEN" in output


def check_layers(at: Path) -> str:
    code = (
        "import sys; sys.path.insert(0, '.'); from importlinter.cli import lint_imports_command; "
        "lint_imports_command()"
    )
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=at,
        capture_output=True,
        text=True,
        env=clean_environment(),
        timeout=120,
    ).stdout


def test_unknown_name_raises():
    with pytest.raises(AttributeError, match="module 'paceline' has no attribute 'Teacher'"):
        paceline.Teacher  # noqa: B018


def test_each_error_derives_from_error_and_is_documented():
    errors = importlib.import_module("paceline.errors")
    classes = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    assert all(issubclass(kind, paceline.Error) for kind in classes)
    assert all(kind.__name__ in errors.__doc__ for kind in classes)


RESOLVED = """
import warnings
warnings.simplefilter("ignore")  # setuptools warns that this function is experimental
from setuptools.config.pyprojecttoml import read_configuration
print(read_configuration("pyproject.toml")["project"]["version"])
"""
REPORTED = """
import importlib.metadata, json
import paceline
from paceline.run import collect_provenance
installed = importlib.metadata.version("paceline")
print(json.dumps([installed, paceline.__version__, collect_provenance()["packages"]["paceline"]]))
"""


def test_version_is_that_of_the_imported_package(tmp_path):
    """Metadata of an older installation, which an editable installation keeps, have no effect."""
    root = Path(__file__).parent.parent
    assert "version" not in tomllib.loads((root / "pyproject.toml").read_text())["project"]
    if importlib.util.find_spec("setuptools") is not None:
        built = subprocess.run(
            [sys.executable, "-c", RESOLVED], cwd=root, capture_output=True, text=True, timeout=60
        )
        assert built.stdout.strip() == paceline.__version__, built.stderr
    old = tmp_path / "paceline-9.9.9.dist-info"
    old.mkdir()
    (old / "METADATA").write_text("Metadata-Version: 2.1\nName: paceline\nVersion: 9.9.9\n")
    with_old = clean_environment(PYTHONPATH=str(tmp_path))
    result = subprocess.run(
        [sys.executable, "-c", REPORTED], capture_output=True, text=True, env=with_old, timeout=60
    )
    assert json.loads(result.stdout) == ["9.9.9", paceline.__version__, paceline.__version__], result.stderr
    result = subprocess.run(
        [sys.executable, "-m", "paceline", "--version"],
        capture_output=True,
        text=True,
        env=with_old,
        timeout=60,
    )
    assert result.stdout == f"paceline {paceline.__version__}\n"


def test_package_is_marked_as_typed():
    assert (Path(paceline.__file__).parent / "py.typed").is_file()
