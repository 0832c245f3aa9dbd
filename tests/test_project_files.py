"""Files of the project: changelog, citation, issue forms, hooks, CONTRIBUTING.md."""

import re
from collections import Counter
from pathlib import Path

import pytest

import paceline

ROOT = Path(__file__).parent.parent
KINDS = ["Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"]  # in the order of Keep a Changelog


def test_changelog_has_each_heading_once_and_in_order():
    _, *releases = re.split(r"^## ", (ROOT / "CHANGELOG.md").read_text(), flags=re.M)
    assert releases[0].startswith("[Unreleased]\n")
    for release in releases:
        headings = re.findall(r"^### (.*)$", release, re.M)
        assert headings == [kind for kind in KINDS if kind in headings], release.splitlines()[0]
        lines = [line for line in release.splitlines()[1:] if line and not line.startswith("### ")]
        assert all(line.startswith(("- ", "  ")) for line in lines)
        assert len(lines) == len({*lines}), "a line occurs twice, as after a merge"


def test_names_of_test_modules_differ():
    """pytest imports them by these names."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []


def test_citation_has_the_version_of_the_package():
    assert re.findall(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.M) == [paceline.__version__]


def test_hooks_equal_the_commands_of_make_lint():
    hooks = re.findall(r"entry: \.venv/bin/(.*)$", (ROOT / ".pre-commit-config.yaml").read_text(), re.M)
    recipes = re.findall(r"^check-[a-z]+:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.M)
    checks = re.findall(r"\$\(BIN\)/([a-z-]+(?: format| check)*(?: --check)?)", "".join(recipes))
    assert sorted(hooks) == sorted(checks)


FILES = [
    ".pre-commit-config.yaml",
    "CITATION.cff",
    *(f".github/ISSUE_TEMPLATE/{name}.yml" for name in ("bug", "feature", "config")),
]


@pytest.mark.parametrize("name", FILES)
def test_file_is_valid_yaml(name):
    yaml = pytest.importorskip("yaml")
    content = yaml.safe_load((ROOT / name).read_text())
    for field in content.get("body", ()):
        assert {"type", "id", "attributes"} <= {*field}
        assert {"label"} <= {*field["attributes"]}
    if "body" in content:
        assert {"name", "description"} <= {*content}
        assert len({field["id"] for field in content["body"]}) == len(content["body"])


def test_names_in_contributing_exist():
    """The page names existing files, targets of make, classes, tables and functions."""
    page = (ROOT / "CONTRIBUTING.md").read_text()
    quoted = set(re.findall(r"`([^`\n]+)`", page))
    paths = {word for word in quoted if re.fullmatch(r"(src|tests|docs)/[\w./]+\w", word)}
    assert len(paths) > 25
    assert not [path for path in paths if not (ROOT / path).exists()]
    sources = "\n".join(
        path.read_text() for folder in ("src", "tests") for path in (ROOT / folder).rglob("*.py")
    )
    names = {
        word for word in quoted if re.fullmatch(r"[A-Z]{4,}\w*|[A-Z][a-z]+[A-Z]\w+|_[a-z]\w+|test_\w+", word)
    } - {"PLAN"}
    assert len(names) > 15
    assert not [name for name in names if not re.search(rf"\b{name}\b", sources)]
    targets = set(re.findall(r"make ([\w-]+)`", page))
    assert (
        {"install", "lint", "test"}
        <= targets
        <= {*re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)}
    )
