"""What the package exports, and which way its imports point."""

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


def test_torch_free_files_are_imported_without_torch():
    """All files of the contract in pyproject.toml that forbids torch, and all that docs/tree.md marks."""
    contracts = tomllib.loads((SOURCE.parents[1] / "pyproject.toml").read_text())["tool"]["importlinter"]
    [torch_free] = [one for one in contracts["contracts"] if one.get("forbidden_modules") == ["torch"]]
    files = set(re.findall(r"^  (\S+\.py) +·", (SOURCE.parents[1] / "docs/tree.md").read_text(), re.M))
    for module in torch_free["source_modules"]:
        path = SOURCE.parent / module.replace(".", "/")
        found = path.rglob("*.py") if path.is_dir() else [path.with_suffix(".py")]
        of_contract = {str(file.relative_to(SOURCE)) for file in found}
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
        [sys.executable, "-c", WITHOUT, "paceline.training.loop"],
        capture_output=True,
        text=True,
        env=clean_environment(),
    )
    assert result.stdout.startswith("paceline.training.loop ")


def test_no_class_name_occurs_twice():
    found = [
        (node.name, str(path.relative_to(SOURCE)))
        for path in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    ]
    names = Counter(name for name, _ in found)
    assert [where for where in found if names[where[0]] > 1] == []


def test_a_wrong_import_breaks_the_layers(tmp_path):
    """As `make lint` finds it, in a copy of the package."""
    shutil.copytree(SOURCE, tmp_path / "paceline")
    shutil.copy(SOURCE.parents[1] / "pyproject.toml", tmp_path)
    assert "0 broken" in layers(tmp_path)
    with (tmp_path / "paceline/units.py").open("a") as file:
        file.write(
            "\n\ndef planted():\n    from paceline.plan.plan import Plan\n    import torch\n    return "
            "Plan, torch\n"
        )
    said = layers(tmp_path)
    assert "paceline.units -> paceline.plan.plan" in said
    assert "layers BROKEN" in said
    assert "planning, reporting and diagnosing do not import torch BROKEN" in said


def layers(at: Path) -> str:
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
from paceline.run import collect_provenance
installed = importlib.metadata.version("paceline")
print(json.dumps([installed, paceline.__version__, collect_provenance()["packages"]["paceline"]]))
"""


def test_the_version_is_written_in_one_place(tmp_path):
    """The metadata of an older installation, which an editable one keeps, change nothing."""
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
    said = subprocess.run(
        [sys.executable, "-c", REPORTED], capture_output=True, text=True, env=with_old, timeout=60
    )
    assert json.loads(said.stdout) == ["9.9.9", paceline.__version__, paceline.__version__], said.stderr
    said = subprocess.run(
        [sys.executable, "-m", "paceline", "--version"],
        capture_output=True,
        text=True,
        env=with_old,
        timeout=60,
    )
    assert said.stdout == f"paceline {paceline.__version__}\n"


def test_it_says_that_it_is_typed():
    assert (Path(paceline.__file__).parent / "py.typed").is_file()
