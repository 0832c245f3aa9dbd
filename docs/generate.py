"""Write into docs/generated the pages of the site that repeat the code or another file of the repository."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

import reference

ROOT = Path(__file__).parent.parent
GENERATED = "generated"
# Pages outside of docs/ that the site shows, by their name on the site.
COPIED = {
    "benchmarks/README.md": "benchmarks",
    "CHANGELOG.md": "changelog",
    "CONTRIBUTING.md": "contributing",
    "SECURITY.md": "security",
    "examples/README.md": "examples",
}
LINK = re.compile(r"\[([^\]]*)\]\(([^)#:\s]+)(#[^)\s]*)?\)")


def relink(text: str, folder: Path, page_folder: Path) -> str:
    """Rewrite the links of a file in `folder`, so that they hold on a page of the site in `page_folder`.

    A copied page is linked to under its name on the site; other files outside of docs/ become downloads,
    and of a link to a folder only its text is left.
    """

    def moved(link: re.Match[str]) -> str:
        text, address, anchor = link[1], link[2], link[3] or ""
        target = Path(os.path.normpath(folder / address))
        if not target.is_relative_to(ROOT) or not target.exists():
            return link[0]
        if target.is_dir():
            return text
        path = target.relative_to(ROOT).as_posix()
        if path in COPIED:
            return f"[{text}](/{GENERATED}/{COPIED[path]}.md{anchor})"
        near = os.path.relpath(target, page_folder)
        is_shown = path.startswith("docs/") and target.suffix in (".md", ".png", ".svg")
        return f"[{text}]({near if is_shown else f'path:{near}'}{anchor})"

    return LINK.sub(moved, text)


def pages(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield path and text of each page, below `folder`."""
    for path, name in COPIED.items():
        yield f"{name}.md", relink((ROOT / path).read_text(), (ROOT / path).parent, folder)
    yield from reference.pages()


def write(folder: Path) -> None:
    """Write all pages. A page that has not changed keeps its time, so that Sphinx does not build it again."""
    wanted = dict(pages(folder))
    for path in folder.rglob("*.md"):
        if path.relative_to(folder).as_posix() not in wanted:
            path.unlink()
    for name, text in wanted.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
