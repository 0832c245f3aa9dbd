"""The packages that are installed in this environment, and those that a project needs of them."""

import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import Distribution, distributions
from pathlib import Path

from paceline.errors import LaunchError, SpecError
from paceline.files import open_regular, reason
from paceline.spec import suggest

NAME = re.compile(r"\s*([A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)\s*(?:\[([^\]]*)\])?", re.ASCII)
EXTRA = re.compile(r"""\bextra\s*==\s*['"]([^'"]+)['"]""")
VERSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9.+!_-]*", re.ASCII)
# extras of Paceline for its developers, which no training uses
DEVELOPMENT = frozenset({"bench", "dev", "docs"})
REQUIREMENTS, PROJECT = Path("requirements.txt"), Path("pyproject.toml")


def normalize(name: str) -> str:
    """Return the name of a package as indexes compare it: `Ruamel.YAML` is `ruamel-yaml`."""
    return re.sub(r"[-_.]+", "-", name).lower()


def list_installed() -> dict[str, Distribution]:
    """Return the installed packages by normalized name: those that an import finds first.

    Raises LaunchError for a name or a version that could not be a word of a command.
    """
    found: dict[str, Distribution] = {}
    for each in distributions():
        name = each.metadata["Name"]
        if name is None:  # the rest of an interrupted installation
            continue
        match = NAME.fullmatch(name)
        if match is None or match[2] is not None or not VERSION.fullmatch(each.version):
            raise LaunchError(f"the package {name!r} {each.version!r} has an invalid name; uninstall it")
        found.setdefault(normalize(name), each)
    return found


def parse_requirement(text: str) -> tuple[str, frozenset[str]]:
    """Return the normalized name and the extras of `Name[extra]>=1; marker`. Raises SpecError."""
    match = NAME.match(text)
    rest = text[match.end() :].strip() if match is not None else ""
    if match is None or (rest and rest[0] not in "=<>!~;(" and not rest.startswith("@ ")):
        raise SpecError(f"{text!r} is not the requirement of a package; write NAME or NAME==VERSION")
    extras = frozenset(normalize(word.strip()) for word in (match[2] or "").split(",") if word.strip())
    return normalize(match[1]), extras


def read_requirements(file: Path | None = None) -> list[str] | None:
    """Return the requirements of the project in this folder, without comments; None if it has none.

    file: requirements.txt or pyproject.toml; by default the file of this folder. Raises SpecError.
    """
    if file is None:
        file = next((path for path in (REQUIREMENTS, PROJECT) if path.is_file()), None)
        if file is None:
            return None
    try:
        with open_regular(file) as opened:
            text = opened.read().decode()
    except FileNotFoundError:
        raise SpecError(f"no such file: {file}; specify requirements.txt or pyproject.toml") from None
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"cannot read {file}: {reason(error)}") from error
    lines = _read_project(text, file) if file.suffix == ".toml" else _read_lines(text, file)
    for line in lines:
        if not line.isprintable():
            raise SpecError(f"{file}: {line!r} must be a single line of printable text")
        try:
            parse_requirement(line)
        except SpecError as error:
            raise SpecError(f"{file}: {error}") from error
    return lines


def _read_lines(text: str, file: Path) -> list[str]:
    joined = re.sub(r"\\\n", "", text)
    lines = [re.sub(r"(^|\s)#.*", "", line).strip() for line in joined.splitlines()]
    for line in lines:
        if line.startswith("-"):
            raise SpecError(
                f"{file}: the option {line.split()[0]!r} of pip has no meaning here; list only packages, and "
                "install others into this environment"
            )
    return [line for line in lines if line]


def _read_project(text: str, file: Path) -> list[str]:
    try:
        listed = tomllib.loads(text).get("project", {}).get("dependencies", [])
    except tomllib.TOMLDecodeError as error:
        raise SpecError(f"{file}: {error}") from error
    if not isinstance(listed, list) or not all(isinstance(line, str) for line in listed):
        raise SpecError(f"{file}: project.dependencies must be a list of texts, got {listed!r}")
    return listed


def check_pins(requirements: Iterable[str], installed: Mapping[str, Distribution]) -> None:
    """Raise SpecError if a requirement `NAME==VERSION` names another version than the installed one."""
    for line in requirements:
        name = parse_requirement(line)[0]
        for pin in re.findall(r"(?<![=<>!~])==\s*([\w.+!*-]+)", line.partition(";")[0]):
            if name not in installed:
                continue
            version = installed[name].version
            names = (version, version.partition("+")[0])  # also without the label of a build
            if pin.endswith(".*"):
                matches = any(f"{each}.".startswith(pin[:-1]) for each in names)
            else:
                matches = pin in names
            if not matches:
                raise SpecError(
                    f"{line} is required, and {name} {version} is installed in this environment; install the "
                    "required version, or change the requirement"
                )


def list_extras(installed: Mapping[str, Distribution]) -> list[str]:
    """Return the extras of Paceline for users all of whose packages are installed."""
    needed: dict[str, list[str]] = {}
    for line in installed["paceline"].requires or ():
        if (match := EXTRA.search(line)) is not None:
            needed.setdefault(match[1], []).append(parse_requirement(line)[0])
    return sorted(
        extra
        for extra, names in needed.items()
        if extra not in DEVELOPMENT and all(name in installed for name in names)
    )


def find_needed(
    requirements: Sequence[str], installed: Mapping[str, Distribution]
) -> dict[str, Distribution]:
    """Return the installed packages that requirements need, with what these need, by name.

    A requirement that holds only elsewhere, such as on Windows, counts if its package is installed.
    Raises SpecError if a package of the requirements is not installed, or in another version.
    """
    waiting = [parse_requirement(line) for line in requirements]
    for name, _ in waiting:
        if name not in installed:
            raise SpecError(
                f"{name} is required, and not installed in this environment; install it first: "
                f"pip install {name}{suggest(name, installed)}"
            )
    check_pins(requirements, installed)
    seen: set[tuple[str, str | None]] = set()
    while waiting:
        name, extras = waiting.pop()
        for extra in {None, *extras}:
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            for line in installed[name].requires or ():
                match = EXTRA.search(line)
                if (normalize(match[1]) if match is not None else None) != extra:
                    continue
                needed = parse_requirement(line)
                if needed[0] in installed:
                    waiting.append(needed)
    return {name: installed[name] for name in sorted({name for name, _ in seen})}
