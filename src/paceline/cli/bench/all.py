"""paceline bench without more: all benches one after another, in less than two minutes."""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from paceline.cli.bench.options import INTERRUPTED, terminal
from paceline.cli.bench.single import device_for, watched
from paceline.errors import BenchError, ClusterError, Error, TaskError

if TYPE_CHECKING:
    from paceline.bench.collect import CollectedResult
    from paceline.bench.result import Result
    from paceline.bench.suites import Watch
    from paceline.cluster.facts import Cluster

    Measure = Callable[[float, Watch], CollectedResult]

DEFAULT_TASK = "digits"
SHARES = {
    "collectives": 0.22,
    "compute": 0.24,
    "host": 0.18,
    "overlap": 0.1,
    "storage": 0.13,
    "input": 0.13,
}  # of the time
PICTURES = {
    "collectives": "paceline.bench.report.busbw:busbw",
    "compute": "paceline.bench.report.compute:draw",
    "overlap": "paceline.bench.report.overlap:draw",
    "storage": "paceline.bench.report.storage:draw",
    "input": "paceline.bench.report.input:draw",
}


def whole(
    task: str | None,
    directories: list[Path],
    ranks: int | None,
    device: str | None,
    seconds: float,
    out: Path,
) -> None:
    """Print a summary, and leave results, pictures and cluster.json in `out`: of what there is, where one fails or is interrupted."""
    from paceline.launch.launchers import check_count

    check_count(ranks or 1)
    measures, notes = _measures(task, directories, ranks, device)
    _make(out)
    before = _known(out / "cluster.json")
    results: list[Result] = []
    ended: Error | KeyboardInterrupt | None = None
    for kind, measure in measures.items():
        try:
            found = watched(lambda watch, kind=kind, measure=measure: measure(seconds * SHARES[kind], watch))  # type: ignore[misc]
        except (Error, KeyboardInterrupt) as error:
            ended = error
            break
        results.append(found.result)
        if found.interrupted:
            ended = KeyboardInterrupt()
            break
    _keep(before, [result for result in results if result.rows], notes, out)
    if isinstance(ended, KeyboardInterrupt):
        raise typer.Exit(INTERRUPTED)
    if ended is not None:
        raise ended
    if wrong := sum(bool(row.get("wrong")) for result in results for row in result.rows):
        print(f"{wrong} rows of bench collectives came out WRONG")
        raise typer.Exit(1)


def _make(out: Path) -> None:
    from paceline.plotting.paths import check_path

    try:
        out.mkdir(exist_ok=True)
    except OSError as error:
        raise BenchError(
            f"cannot make the folder {out}: {error.strerror}; name another one with --out"
        ) from error
    check_path(out / "cluster.json")


def _known(path: Path) -> "Cluster":
    """This machine as a file says, so that what a person wrote into it is kept, or else as it can be probed. Raises ClusterError."""
    from paceline.cluster import file
    from paceline.cluster.local_cluster import cluster
    from paceline.cluster.probe import probe

    here = cluster(probe())
    if not path.exists():
        return here
    known = file.read(path)
    if known.device.name != here.device.name:
        raise ClusterError(
            f"{path} is of {known.device.name}, and this is {here.device.name}; name another folder with --out"
        )
    return known


def _measures(
    task: str | None, directories: list[Path], ranks: int | None, device: str | None
) -> "tuple[dict[str, Measure], list[str]]":
    """By kind, and what was left out. Raises the Error of whatever was asked for and cannot be."""
    from paceline.bench import suites
    from paceline.bench.data_loading import up_to_cores, ways
    from paceline.bench.storage.suite import check
    from paceline.cli.launching import read_request
    from paceline.task import load_task

    notes: list[str] = []
    places = check(directories or [path for path in (Path(), Path("/dev/shm")) if path.is_dir()])
    spec, _ = read_request(task or DEFAULT_TASK, {}, [])
    try:
        work = load_task(spec.task, spec.set)
        work.dataset("train")
    except (TaskError, ImportError) as error:
        if task is not None:
            raise
        work = None
        notes.append(f"bench input was left out, {error}; name a task of yours with --task my.py:Class")
    here = device_for(device)
    from paceline.bench.collectives import backends

    count = ranks or (backends.devices() if here.type == "cuda" else 2)
    found: dict[str, Measure] = {
        "storage": lambda budget_s, watch: suites.storage(places, budget_s / len(places), 4, watch),
        "collectives": lambda budget_s, watch: suites.collectives(count, here, budget_s, watch),
        "compute": lambda budget_s, watch: suites.compute(
            here, budget_s, spec if work else None, work, watch
        ),
        "overlap": lambda budget_s, watch: suites.overlap(here, max(2, count), budget_s, watch),
    }
    if here.type == "cpu":
        found["host"] = lambda budget_s, watch: suites.host(max(2, count), budget_s, watch)
    if work is not None:
        task_of = work
        found["input"] = lambda budget_s, watch: suites.read(
            spec, task_of, here, budget_s, ways(up_to_cores(), [2]), watch
        )
    return found, notes


def _keep(before: "Cluster", results: "list[Result]", notes: list[str], out: Path) -> None:
    from paceline.bench.report.whole import heading, table
    from paceline.bench.report.whole import notes as remarks
    from paceline.bench.result import write
    from paceline.bench.to_cluster import updated
    from paceline.cluster import file

    for result in results:
        write(result, out / f"{result.kind}.json")
    file.write(out / "cluster.json", updated(before, results))
    console = terminal()
    if results:
        console.print(heading(results[0]), markup=False, soft_wrap=True)
        console.print(table(results))
    for note in (*remarks(results), *notes, *_drawn(results, out)):
        console.print(note, style="dim", markup=False, soft_wrap=True)
    console.print(
        f"{out}/: cluster.json, and of each bench its figures (.json) and its picture (.svg)",
        markup=False,
        soft_wrap=True,
    )


def _drawn(results: "list[Result]", out: Path) -> list[str]:
    """Draws all; or says why not."""
    from paceline.plotting.figure import check_picture

    try:
        check_picture(out / "a.svg")
    except BenchError as error:
        return [str(error)]
    for result in (result for result in results if result.kind in PICTURES):
        place, _, name = PICTURES[result.kind].partition(":")
        getattr(import_module(place), name)(result, out / f"{result.kind}.svg")
    return []
