"""Reference pages generated from the code: commands, keys of the request, records of a run, Python API."""

import ast
import dataclasses
import inspect
import io
import re
import textwrap
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import PurePath
from typing import Any

import paceline
from paceline import cli, events
from paceline.cli.options import keys
from paceline.doctor.heartbeat import Heartbeat
from paceline.training.checkpoint.index import Index

COLUMN = re.compile(r"^(\w+) {2,}(\S.*)$", re.M)  # a field and its meaning in a docstring


def pages() -> Iterator[tuple[str, str]]:
    """Yield path and text of each page."""
    names = [name for name in cli.COMMANDS if name not in cli.HIDDEN]
    rows = [(f"[`paceline {name}`]({name}.md)", _text(cli.COMMANDS[name])) for name in names]
    yield "cli/index.md", _page("Commands", _table(("command", "what it does"), rows), _contents(names))
    for name in names:
        yield f"cli/{name}.md", _page(f"paceline {name}", *_command(f"paceline {name}", cli.load(name)))
    yield "keys.md", _page("Configuration keys", *_keys())
    yield "records.md", _page("Records of a run", *_records())
    yield "api.md", _page("Python interface", *_interface())


def _page(title: str, *parts: str) -> str:
    return "\n\n".join([f"# {title}", *filter(None, parts)]) + "\n"


def _contents(names: Sequence[str]) -> str:
    return "\n".join(["```{toctree}", ":hidden:", "", *names, "```"])


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in cells)


def _text(text: str) -> str:
    """Return plain text as MyST that shows it unchanged, except for words in backticks."""
    return _escape(" ".join(text.split()), r"\\*_\[\]<>{}$#", "")


def _code(text: str) -> str:
    return f"`{text}`" if text else ""


# Commands


def _command(name: str, command: Any, level: int = 2) -> Iterator[str]:
    """Yield usage, help, arguments and options of a command, and the same of the commands below it."""
    below = getattr(command, "commands", {})
    takes = [one for one in command.params if not getattr(one, "hidden", False)]
    arguments, options = (
        [one for one in takes if (one.param_type_name == kind)] for kind in ("argument", "option")
    )
    words = [
        name,
        *(["[OPTIONS]"] if options else []),
        *(["[COMMAND]"] if below else []),
        *map(_argument, arguments),
    ]
    yield f"```text\n{' '.join(words)}\n```"
    yield from (_text(part) for part in inspect.cleandoc(command.help or "").split("\n\n"))
    if arguments:
        yield _table(("argument", "meaning"), [(_code(_argument(one)), _meaning(one)) for one in arguments])
    if options:
        yield _table(("option", "meaning"), [(_option(one), _meaning(one)) for one in options])
    for word, inner in below.items():
        yield f"{'#' * level} {name} {word}"
        yield from _command(f"{name} {word}", inner, level + 1)


def _argument(one: Any) -> str:
    name = (one.metavar or one.name).upper() + ("..." if one.nargs != 1 else "")
    return name if one.required else f"[{name}]"


def _option(one: Any) -> str:
    value = "" if one.is_flag else f" {one.metavar or keys.type_name(one.type_descriptor.annotation).upper()}"
    return ", ".join(_code(word + value) for word in one.opts + one.secondary_opts)


def _meaning(one: Any) -> str:
    default = (
        "" if one.required or one.default in (None, False, (), []) or callable(one.default) else one.default
    )
    shown = str(default) if isinstance(default, PurePath) else default
    return _text(one.help or "") + (rf" \[default: `{shown}`\]" if shown not in ("", True) else "")


# Keys


def _keys() -> Iterator[str]:
    yield (
        "`--set NAME=VALUE` and a TOML file set these keys. In TOML, keys that start with `spec.` stand at "
        "the top of the file without that word, and the others in the table of their name. "
        "`paceline train TASK --keys` prints this list with the fields of a task."
    )
    rows: dict[str, list[Sequence[str]]] = {}
    for key in keys.list_request_keys():
        rows.setdefault(key.name.partition(".")[0], []).append(
            (_code(key.name), _code(key.type), _code(key.default), _text(key.meaning))
        )
    for table, keys_of_table in rows.items():
        yield f"## {table}"
        yield _table(("key", "type", "default", "meaning"), keys_of_table)


# Records


def _records() -> Iterator[str]:
    yield (
        "The keys of the JSON files in a [run folder](/files.md). A type with `None` may be `null`; a key "
        "with a default may be absent."
    )
    yield "## Events of events.jsonl"
    yield (
        "Every event has `time`, in seconds since the epoch, and `event`: "
        f"{', '.join(map(_code, events.KINDS))}."
    )
    for name, kind in events.KINDS.items():
        yield f"### {name}"
        yield _about(kind)
        yield _fields(kind, without=("time",))
    yield "## ckpt/step_N/checkpoint.json"
    yield _fields(Index)
    yield "The file also has `crc`, the CRC-32 of the other keys."
    yield "## ranks/N.alive"
    yield _fields(Heartbeat)


def _about(kind: type) -> str:
    """Return the docstring of a record as MyST, without the list of its fields."""
    doc = inspect.getdoc(kind) or ""
    if doc.startswith(f"{kind.__name__}("):  # dataclass wrote it
        return ""
    parts = [part for part in doc.split("\n\n") if not COLUMN.match(part)]
    return "\n\n".join(
        f"```python\n{textwrap.dedent(part)}\n```" if part.startswith(" ") else _text(part) for part in parts
    )


def _fields(kind: type, without: Sequence[str] = ()) -> str:
    comments: dict[str, str] = {}
    for base in reversed(kind.__mro__[:-1]):
        comments |= _comments(base)
    rows = []
    for field in dataclasses.fields(kind):
        is_required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if field.name not in without:
            shown = (
                keys.type_name(field.type)
                if isinstance(field.type, type)
                else str(field.type).replace("typing.", "")
            )
            shown = shown.replace("collections.abc.", "")
            rows.append(
                (
                    _code(field.name),
                    _code(shown),
                    "yes" if is_required else "",
                    _text(comments.get(field.name, "")),
                )
            )
    return _table(("key", "type", "required", "meaning"), rows)


def _comments(kind: type) -> dict[str, str]:
    """Return the meaning of each field of a class, from its docstring or the comments in its source."""
    columns = dict(COLUMN.findall(inspect.getdoc(kind) or ""))
    if columns:
        return columns
    source = textwrap.dedent(inspect.getsource(kind))
    by_line = {
        token.start[0]: token.string.removeprefix("#").strip()
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    body = ast.parse(source).body[0]
    assert isinstance(body, ast.ClassDef)
    return {
        node.target.id: by_line[node.end_lineno]
        for node in body.body
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Name)
        and node.end_lineno in by_line
    }


# Python


def _interface() -> Iterator[str]:
    yield "These names are public: `from paceline import Task`. Other modules may change in any release."
    names = [name for name in paceline.__all__ if name != "__version__"]
    functions = [name for name in names if not inspect.isclass(getattr(paceline, name))]
    errors = [name for name in names if name.endswith("Error")]
    kinds = [name for name in names if name in ("Event", *(kind.__name__ for kind in events.KINDS.values()))]
    classes = sorted(set(names) - {*functions, *errors, *kinds})
    groups = {
        "Functions": functions,
        "Classes": classes,
        "Events": ["Event", *kinds],
        "Errors": ["Error", *errors],
    }
    for title, members in groups.items():
        yield f"## {title}"
        for name in dict.fromkeys(members):
            kind = "class" if inspect.isclass(getattr(paceline, name)) else "function"
            options = "\n   :members:" if kind == "class" else ""
            yield f"### {name}\n\n```{{eval-rst}}\n.. auto{kind}:: paceline.{name}{options}\n```"
    yield f"## Version\n\n`paceline.__version__` is the version as text, here `{paceline.__version__}`."


def as_rst(lines: Sequence[str]) -> list[str]:
    """Return a docstring, plain text with words in backticks, as reStructuredText that shows it unchanged."""
    found = []
    for paragraph in "\n".join(lines).split("\n\n"):
        if paragraph.startswith(" ") or re.search(r"\S {2,}\S", paragraph):  # columns
            found += ["::", "", *("   " + line for line in paragraph.splitlines()), ""]
            continue
        if re.match(r"\w+: ", paragraph):  # parameters: lines "name: meaning"
            items = re.split(r"\n(?=\w+: )", paragraph)
            for name, _, meaning in (item.partition(": ") for item in items):
                found += [f"* ``{name}``: {_rst(' '.join(meaning.split()))}"]
            found.append("")
            continue
        found += [*_rst(paragraph).splitlines(), ""]
    return found


def _rst(text: str) -> str:
    return _escape(text, r"\\*_|", "`")


def _escape(text: str, special: str, quote: str) -> str:
    """Escape special characters outside of backticks, and put `quote` around words in backticks."""
    parts = re.split(r"(`[^`]+`)", text)
    return "".join(
        f"{quote}{part}{quote}" if part.startswith("`") else re.sub(f"([{special}])", r"\\\1", part)
        for part in parts
    )
