"""A wheel of an installed package, from its files, without a network.

The format is that of the binary distribution format of the Python Packaging Authority (PEP 427). A package
that is installed in editable mode has its files in a folder of sources, from which they are taken.
"""

import base64
import hashlib
import importlib.util
import json
import os
import re
import zipfile
from collections.abc import Iterator
from importlib.metadata import Distribution
from pathlib import Path
from typing import NamedTuple

from paceline.errors import LaunchError

# what pip writes while it installs
LEFT_OUT = frozenset({"INSTALLER", "RECORD", "REQUESTED", "direct_url.json"})
DATE = (1980, 1, 1, 0, 0, 0)  # the earliest of zip: equal files make equal wheels
SHEBANG = re.compile(rb"#!.*python[^\n]*\n")


class PackedFile(NamedTuple):
    """A file of a wheel: its name there, and where it is now."""

    name: str
    source: Path


def pack_wheel(package: Distribution, folder: Path) -> Path:
    """Write the wheel of an installed package into a folder, and return its path. Raises LaunchError."""
    stem = _find_stem(package)
    files = sorted({*_list_files(package, stem)})
    wheel = folder / f"{stem}-{_join_tags(package)}.whl"
    records = []
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for file in files:
            digest, size = _add(archive, file, is_script=".data/scripts/" in file.name)
            records.append(f"{_quote(file.name)},sha256={digest},{size}\n")
        record = f"{stem}.dist-info/RECORD"
        archive.writestr(zipfile.ZipInfo(record, DATE), "".join([*records, f"{record},,\n"]))
    return wheel


def _find_stem(package: Distribution) -> str:
    """Return NAME-VERSION as the folder of the metadata writes them. Raises LaunchError."""
    for path in package.files or ():
        if path.name == "METADATA" and path.parent.name.endswith(".dist-info"):
            return path.parent.name.removesuffix(".dist-info")
    raise LaunchError(
        f"{package.metadata['Name']} has no list of its files; install it again: pip install -I "
        f"{package.metadata['Name']}"
    )


def _join_tags(package: Distribution) -> str:
    """Return the tags of the name of a wheel: py3-none-any."""
    tags = re.findall(r"^Tag:\s*(\w[\w.]*)-(\w+)-([\w.]+)\s*$", package.read_text("WHEEL") or "", re.M)
    if not tags:
        raise LaunchError(
            f"{package.metadata['Name']} was not installed from a wheel; install it again by pip"
        )
    return "-".join(".".join(sorted({*words})) for words in zip(*tags, strict=True))


def is_editable(package: Distribution) -> bool:
    """Return whether imports of a package find its sources."""
    text = package.read_text("direct_url.json")
    return text is not None and bool(json.loads(text).get("dir_info", {}).get("editable"))


def _list_files(package: Distribution, stem: str) -> Iterator[PackedFile]:
    """Yield the files of a package by their names in a wheel. Raises LaunchError."""
    name = package.metadata["Name"]
    generated = {entry.name for entry in package.entry_points if entry.group.endswith("_scripts")}
    for path in package.files or ():
        source = Path(str(path.locate()))
        parts = path.parts
        if "__pycache__" in parts or path.name.startswith("__editable__"):
            continue
        if path.parent.name.endswith(".dist-info") and path.name in LEFT_OUT:
            continue
        if not source.is_file():
            raise LaunchError(f"{name} lacks its file {source}; install it again: pip install -I {name}")
        if ".." not in parts:
            yield PackedFile(path.as_posix(), source)
        elif (outside := _name_outside(package, source, f"{stem}.data", generated)) is not None:
            yield PackedFile(outside, source)
    if is_editable(package):
        yield from _list_sources(package)


def _name_outside(package: Distribution, source: Path, data: str, generated: set[str]) -> str | None:
    """Return the name of a file outside of site-packages; None for a script that pip generates."""
    site = Path(str(package.locate_file(""))).absolute()
    prefix = site.parents[2]  # of PREFIX/lib/python3.11/site-packages
    real = Path(os.path.normpath(source.absolute()))
    if not real.is_relative_to(prefix):
        raise LaunchError(
            f"{package.metadata['Name']} has a file outside of the environment, {real}; leave it out"
        )
    inside = real.relative_to(prefix)
    if inside.parts[0] != "bin":
        return f"{data}/data/{inside.as_posix()}"
    return None if inside.name in generated else f"{data}/scripts/{inside.name}"


def _list_sources(package: Distribution) -> Iterator[PackedFile]:
    """Yield the source files of a package in editable mode, without caches and hidden files."""
    tops = (package.read_text("top_level.txt") or "").split()
    for top in tops:
        spec = importlib.util.find_spec(top)
        if spec is None or spec.origin is None:
            raise LaunchError(f"{package.metadata['Name']} in editable mode lacks {top}; install it again")
        if not spec.submodule_search_locations:
            yield PackedFile(Path(spec.origin).name, Path(spec.origin))
            continue
        folder = Path(spec.origin).parent
        for path in folder.rglob("*"):
            inside = path.relative_to(folder)
            if path.is_file() and not any(
                part == "__pycache__" or part.startswith(".") for part in inside.parts
            ):
                yield PackedFile(f"{top}/{inside.as_posix()}", path)
    if not tops:
        raise LaunchError(
            f"{package.metadata['Name']} is installed in editable mode without top_level.txt; install it "
            "without -e"
        )


def _add(archive: zipfile.ZipFile, file: PackedFile, is_script: bool) -> tuple[str, int]:
    """Add a file to a wheel, and return its digest and size there."""
    info = zipfile.ZipInfo(file.name, DATE)
    info.compress_type = zipfile.ZIP_DEFLATED
    is_executable = bool(file.source.stat().st_mode & 0o100)
    info.external_attr = (0o100755 if is_executable else 0o100644) << 16
    info.file_size = file.source.stat().st_size  # zip64 for large files
    digest, size = hashlib.sha256(), 0
    with file.source.open("rb") as source, archive.open(info, "w") as target:
        if is_script and (match := SHEBANG.match(source.read(1024))) is not None:
            source.seek(match.end())
            size += target.write(line := b"#!python\n")  # pip replaces it by its own Python
            digest.update(line)
        else:
            source.seek(0)
        for block in iter(lambda: source.read(2**20), b""):
            size += target.write(block)
            digest.update(block)
    return base64.urlsafe_b64encode(digest.digest()).rstrip(b"=").decode(), size


def _quote(name: str) -> str:
    """Return a name as a cell of CSV."""
    return '"' + name.replace('"', '""') + '"' if set(name) & set(',"') else name
