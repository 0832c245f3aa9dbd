"""The files around the code: changelog, citation, forms, hooks."""

import re
from pathlib import Path

import pytest

import paceline

ROOT = Path(__file__).parent.parent
KINDS = ["Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"]  # in the order of Keep a Changelog


def test_the_changelog_has_each_heading_once_and_in_order():
    _, *releases = re.split(r"^## ", (ROOT / "CHANGELOG.md").read_text(), flags=re.M)
    assert releases[0].startswith("[Unreleased]\n")
    for release in releases:
        headings = re.findall(r"^### (.*)$", release, re.M)
        assert headings == [kind for kind in KINDS if kind in headings], release.splitlines()[0]
        lines = [line for line in release.splitlines()[1:] if line and not line.startswith("### ")]
        assert all(line.startswith(("- ", "  ")) for line in lines)
        assert len(lines) == len({*lines}), "a merge left a line twice"


def test_the_citation_has_the_version():
    assert re.findall(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.M) == [paceline.__version__]


def test_the_hooks_run_what_make_lint_runs():
    hooks = re.findall(r"entry: \.venv/bin/(.*)$", (ROOT / ".pre-commit-config.yaml").read_text(), re.M)
    [recipe] = re.findall(r"^lint:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.M)
    assert hooks == re.findall(r"\$\(BIN\)/(.*)", recipe)


FILES = [".pre-commit-config.yaml", "CITATION.cff", *(f".github/ISSUE_TEMPLATE/{name}.yml" for name in ("bug", "feature", "config"))]


@pytest.mark.parametrize("name", FILES)
def test_it_is_yaml(name):
    yaml = pytest.importorskip("yaml")
    found = yaml.safe_load((ROOT / name).read_text())
    for field in found.get("body", ()):
        assert {"type", "id", "attributes"} <= {*field}
        assert {"label"} <= {*field["attributes"]}
    if "body" in found:
        assert {"name", "description"} <= {*found}
        assert len({field["id"] for field in found["body"]}) == len(found["body"])
