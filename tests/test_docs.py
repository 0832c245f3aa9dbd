"""The documentation site builds without a warning, and its pages load nothing from other sites."""

import json
import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import paceline
from command import succeed
from paceline.cluster import machine
from paceline.debug.diff import RunDiff
from paceline.debug.settings import SettingDifference
from paceline.debug.steps import QuantityDifference, StepsComparison
from paceline.debug.tensors import CheckpointComparison, GroupComparison, TensorDifference
from paceline.doctor.diagnose import Diagnosis
from paceline.doctor.heartbeat import Collective, Frame, Heartbeat
from paceline.doctor.rank_state import RankState, ReaderProcess
from paceline.inspect.finding import Finding
from paceline.spec import Value

ROOT = Path(__file__).parent.parent
pytestmark = [pytest.mark.docs, pytest.mark.slow]
# Attributes that load only in these elements. src and srcset always load.
LOADING = {
    "href": {"link"},
    "data": {"object"},
    "poster": {"video"},
}
OUTSIDE = re.compile(r"(?:[a-z][a-z0-9+.-]*:)?//", re.I)


class Page(HTMLParser):
    """The addresses that a page loads, its links and its anchors."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self._in_style = False
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._in_style = tag == "style"
        for name, value in attrs:
            if name in ("src", "srcset") or tag in LOADING.get(name, ()):
                self.loads.append(value or "")
            elif name == "style":
                self.loads += loaded_by_css(value or "")
            elif (tag, name) == ("a", "href"):
                self.links.append(value or "")
            elif name == "id":
                self.anchors.add(value or "")

    def handle_data(self, data: str) -> None:
        if self._in_style:
            self.loads += loaded_by_css(data)


def loaded_by_css(text: str) -> list[str]:
    return [match[1] for match in re.finditer(r"""(?:url\(|@import)\s*["']?([^"')\s;]+)""", text)]


def is_outside(address: str) -> bool:
    return bool(OUTSIDE.match(address))


def build(docs: Path) -> subprocess.CompletedProcess[str]:
    """Build the site with the command of `make docs`."""
    [line] = re.findall(r"^docs:.*\n\t\$\(BIN\)/python (.*)$", (ROOT / "Makefile").read_text(), re.M)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.run(
        [sys.executable, *line.split()],
        cwd=docs.parent,
        capture_output=True,
        text=True,
        env=environment,
        timeout=280,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    for name in ("sphinx", "myst_parser", "furo"):
        pytest.importorskip(name)
    root = tmp_path_factory.mktemp("site")
    shutil.copytree(ROOT / "docs", root / "docs", ignore=shutil.ignore_patterns("generated"))
    for path in ("src", "tests", "benchmarks", "examples", *(page.name for page in ROOT.glob("*.md"))):
        (root / path).symlink_to(ROOT / path)
    done = build(root / "docs")
    assert done.returncode == 0, done.stderr
    return root / "build/docs"


@pytest.fixture(scope="module")
def pages(site):
    return {path: Page(path.read_text()) for path in site.rglob("*.html")}


def test_pages_load_nothing_from_other_sites(site, pages):
    assert len(pages) > 20
    addresses = {
        (path.name, address) for path, page in pages.items() for address in page.loads if is_outside(address)
    }
    addresses |= {
        (path.name, address)
        for path in site.rglob("*.css")
        for address in loaded_by_css(path.read_text())
        if is_outside(address)
    }
    assert not addresses


def test_links_within_the_site_exist(site, pages):
    for path, page in pages.items():
        for address in page.links + page.loads:
            parts = urlsplit(address)
            if parts.scheme or parts.netloc or not (parts.path or parts.fragment):
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            assert target.is_relative_to(site), f"{path.name}: {address}"
            assert target.exists(), f"{path.name}: {address}"
            if target in pages and parts.fragment:
                assert unquote(parts.fragment) in pages[target].anchors, f"{path.name}: {address}"


def test_table_of_contents_and_search_list_every_page(site):
    """The index of the search is a script, so that browsers read it from file://."""
    index = (site / "searchindex.js").read_text()
    content = json.loads(index.removeprefix("Search.setIndex(").removesuffix(")"))
    assert {path.stem for path in (ROOT / "docs").glob("*.md")} <= set(content["docnames"])
    assert "zbv" in content["terms"]
    assert "searchindex.js" in (site / "search.html").read_text()


def sections(html: str) -> dict[str, str]:
    """Return the text of each section of a page, without its subsections, by its anchor."""
    parts = re.split(r'<section id="([^"]+)">', html)
    return {name: re.sub(r"<[^>]+>", "", text) for name, text in zip(parts[1::2], parts[2::2], strict=True)}


def test_reference_has_every_option(site, tmp_path):
    """Compare with the output of --help, not with the source of the pages."""
    commands = re.findall(r"^│ (\w+) ", succeed("--help", at=tmp_path).out, re.M)
    assert len(commands) > 15
    for command in commands:
        page = re.sub(r"<[^>]+>", "", (site / f"generated/cli/{command}.html").read_text())
        options = set(
            re.findall(r"^│ +(?:\* +)?(--[\w-]+)", succeed(command, "--help", at=tmp_path).out, re.M)
        )
        assert options
        assert not {option for option in options - {"--help"} if not re.search(rf"{option}\b", page)}, command


def test_reference_has_every_key(site, tmp_path):
    printed = re.findall(r"^  ([a-z]+\.[a-z_]+) ", succeed("train", "--keys", at=tmp_path).out, re.M)
    assert len(printed) > 40
    page = (site / "generated/keys.html").read_text()
    assert not [key for key in printed if f">{key}<" not in page]


def test_reference_has_every_public_name(site):
    page = (site / "generated/api.html").read_text()
    assert not [name for name in {*paceline.__all__} - {"__version__"} if f'id="paceline.{name}"' not in page]


def test_reference_of_records_has_every_key(site, tmp_path):
    succeed("train", "digits", "--steps", "2", "--ranks", "2", "--profile", "--run-dir", "run", at=tmp_path)
    pages = sections((site / "generated/records.html").read_text())
    lines = [json.loads(line) for line in (tmp_path / "run/events.jsonl").read_text().splitlines()]
    assert len({line["event"] for line in lines}) > 4
    records = [(line.pop("event"), line.keys() - {"time"}) for line in lines]
    records += [
        (
            "ckpt-step-n-checkpoint-json",
            json.loads((tmp_path / "run/ckpt/step_2/checkpoint.json").read_text()).keys(),
        )
    ]
    records += [("ranks-n-alive", json.loads((tmp_path / "run/ranks/0.alive").read_text()).keys())]
    for name, keys in records:
        assert not {key for key in keys if not re.search(rf"\b{key}\b", pages[name])}, name


def test_loads_from_other_sites_are_detected():
    html = """<a href="https://a.org"></a><link href="//b.org/c.css"><script src="HTTP://d.org/e.js"></script>
    <img srcset="f.png 2x">
    <style>@import "https://g.org/h.css"; body { background: url(https://i.org/j.png) }</style>
    <p style="background: url('//k.org/l')"></p>"""
    outside = [urlsplit(address).netloc for address in Page(html).loads if is_outside(address)]
    assert outside == ["b.org", "d.org", "g.org", "i.org", "k.org"]


@pytest.mark.parametrize(
    "mistake",
    ["[nothing](nothing.md)", "[nothing](plans.md#nothing)", "{term}`nothing`", "![nothing](nothing.png)"],
)
def test_broken_link_fails_the_build(site, mistake):
    docs = site.parent.parent / "docs"
    page = (ROOT / "docs/start.md").read_text()
    (docs / "start.md").write_text(f"{page}\n{mistake}\n")
    done = build(docs)
    (docs / "start.md").write_text(page)
    assert done.returncode != 0
    assert "nothing" in done.stderr


def test_glossary_is_in_alphabetical_order():
    terms = re.findall(r"^(\S.*)\n  \S", (ROOT / "docs/glossary.md").read_text(), re.M)
    assert len(terms) > 50
    assert terms == sorted(set(terms), key=lambda term: term.lower().replace("-", " "))


def test_files_page_describes_every_file_of_a_run(tmp_path):
    succeed("train", "digits", "--steps", "2", "--ranks", "2", "--run-dir", "run", at=tmp_path)
    page = (ROOT / "docs/files.md").read_text()
    for path in (tmp_path / "run").iterdir():
        assert f"`{path.name}/" in page if path.is_dir() else f"`{path.name}`" in page, path.name
    for path in (tmp_path / "run/ranks").iterdir():
        assert f"`ranks/{re.sub('[0-9]+', 'N', path.name)}`" in page, path.name
    for path in (tmp_path / "run/ckpt/step_2").iterdir():
        assert f"`{path.name}`" in page or f"`*{path.suffix}`" in page, path.name
    keys = set(json.loads((tmp_path / "run/provenance.json").read_text()))
    assert keys <= set(re.findall(r"^\| `(\w+)` \|", page, re.M))


# Objects whose keys are names: parts of a step, metrics, columns …
BY_PART = (
    *("time_s", "memory_bytes", "metrics", "losses", "shares", "wall_s", "axes", "curves", "evaluation_axes"),
    *("columns", "totals", "hardware", "absent", "evidence", "not_checked", "provenance", "request"),
)
JSON = {
    "plan": "--model gpt2 --cluster h100:8@50 --batch 64 --tokens 1e9 --price 2 --top 1",
    "scale": "--model gpt2 --cluster h100:8@50 --ranks 1:4 --batch 64 --tokens 1e9",
    "comms": "digits --plan ddp --ranks 2",
    "preflight": "digits --ranks 2 --steps 2",
    "verify": "digits --plan ddp --ranks 2 --steps 2",
    "drill": "digits --ranks 2 --faults kill",
    "profile": "run",
    "report": "run",
    "evaluate": "run --ranks 1",
    "doctor": "run",
}


def keys_of(tree: object, path: str = "") -> set[str]:
    """Return the paths of all keys of a JSON value."""
    if isinstance(tree, list):
        return {key for entry in tree for key in keys_of(entry, f"{path}[]")}
    if not isinstance(tree, dict):
        return set()
    keys = set()
    for name, value in tree.items():
        key = f"{path}.{name}".lstrip(".")
        inner = (
            {under for part in value.values() for under in keys_of(part, f"{key}.*")}
            if name in BY_PART and isinstance(value, dict)
            else keys_of(value, key)
        )
        keys |= {key} | (set() if name in ("set", "wrong", "evidence", "not_checked") else inner)
    return keys


# Classes whose fields are keys, by the path of the object. On this machine, some of these objects are null.
CLASSES: dict[str, dict[str, type]] = {
    "diff": {
        "": RunDiff,
        "settings[].": SettingDifference,
        "steps.": StepsComparison,
        "steps.differences[].": QuantityDifference,
        "checkpoints[].": CheckpointComparison,
        "checkpoints[].groups[].": GroupComparison,
        "checkpoints[].groups[].first.": TensorDifference,
    },
    "doctor": {
        "": Diagnosis,
        "findings[].": Finding,
        "seen[].": RankState,
        "seen[].beat.": Heartbeat,
        "seen[].stack[].": Frame,
        "seen[].collectives[].": Collective,
        "seen[].readers[].": ReaderProcess,
        "seen[].readers[].stack[].": Frame,
    },
    "probe": {
        "": machine.Machine,
        "cpu.": machine.Cpu,
        "memory.": machine.MemoryFacts,
        "accelerators[].": machine.Accelerator,
        "accelerators[].mig[].": machine.MigInstance,
        "offered_modules[].": machine.OfferedModule,
        "topology.": machine.Topology,
        "interfaces[].": machine.Interface,
        "torch.": machine.Torch,
        "torch.backends[].": machine.BackendFacts,
        "torch.communication[].": machine.BackendFacts,
        "mpi.": machine.BackendFacts,
        "slurm.": machine.Slurm,
        "directories[].": machine.Directory,
        "directories[].quota.": machine.Quota,
    },
}


def described_keys() -> dict[str, set[str]]:
    """Return the keys in docs/json.md by command: the first columns of the tables of its section."""
    page = (ROOT / "docs/json.md").read_text()
    return {
        command: {
            key
            for line in text.splitlines()
            if line.startswith("| `")
            for key in re.findall(r"`([^`]+)`", line.split(" | ")[0])
        }
        for command, text in re.findall(r"^## paceline (\w+)\n(.*?)(?=^## |\Z)", page, re.M | re.S)
    }


def test_json_page_describes_every_key(tmp_path):
    described = described_keys()
    assert described.keys() == JSON.keys() | CLASSES.keys() | {"bench"}
    succeed("train", "digits", "--steps", "4", "--ranks", "2", "--profile", "--run-dir", "run", at=tmp_path)
    for command, words in JSON.items():
        succeed(command, *words.split(), "--json", "found.json", at=tmp_path)
        keys = {
            key.replace("weak.", "strong.")
            for key in keys_of(json.loads((tmp_path / "found.json").read_text()))
        }
        assert len(keys) > 2
        assert not keys - described[command], command


@pytest.mark.parametrize("command", [*CLASSES])
def test_json_page_describes_every_field_of_a_class(command):
    keys = {
        path + name
        for path, kind in CLASSES[command].items()
        for name in (kind.model_fields if issubclass(kind, Value) else kind.__dataclass_fields__)
    }
    assert not keys - described_keys()[command]


def test_json_page_describes_every_key_of_a_bench(tmp_path):
    succeed("bench", "--seconds", "5", "--device", "cpu", "--directory", ".", "--out", "found", at=tmp_path)
    files = [path for path in (tmp_path / "found").glob("*.json") if path.name != "cluster.json"]
    assert len(files) == 6
    keys = {key for path in files for key in keys_of(json.loads(path.read_text()))}
    assert not keys - described_keys()["bench"]


def test_commands_of_getting_started(tmp_path):
    page = (ROOT / "docs/start.md").read_text()
    [program] = re.findall(r"```python\n(.*?)```", page, re.S)
    (tmp_path / "my.py").write_text(program)
    commands = re.findall(r"^paceline (.*?)(?: *#.*)?$", page, re.M)
    assert len(commands) == 7
    for command in commands:
        succeed(*command.split(), at=tmp_path)
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"first", "one", "two"}
