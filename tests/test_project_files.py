"""The files around the code: changelog, citation, forms, hooks."""

import re
from pathlib import Path

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
