"""paceline bench without a subcommand: all benches, one after another, in under two minutes."""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from paceline.cli.measure.bench.options import INTERRUPTED, make_console
from paceline.cli.measure.bench.single import with_progress
from paceline.errors import BenchError, ClusterError, Error, TaskError
from paceline.units import several

if TYPE_CHECKING:
    from paceline.bench.collect import CollectedResult
    from paceline.bench.result import Result
    from paceline.bench.suites import Watch
    from paceline.cluster.facts import Cluster

    Measure = Callable[[float, Watch], CollectedResult]

DEFAULT_TASK = "digits"
TIME_SHARES = {
    "collectives": 0.22,
    "compute": 0.24,
    "host": 0.18,
    "overlap": 0.1,
    "storage": 0.13,
    "data": 0.13,
}
PICTURES = {
    "collectives": "paceline.bench.report.busbw:draw",
    "compute": "paceline.bench.report.compute:draw",
    "overlap": "paceline.bench.report.overlap:draw",
    "storage": "paceline.bench.report.storage:draw",
    "data": "paceline.bench.report.data:draw",
}


def run_all(
    task: str | None,
    directories: list[Path],
    ranks: int | None,
    device: str | None,
    seconds: float,
    out: Path,
) -> None:
    """Run all benches, print a summary, and write results, pictures and cluster.json to the folder `out`.

    If a bench fails or is interrupted, the results until then are printed and written.
    """
    from paceline.launch.launchers import check_count

    check_count(ranks or 1)
    measures, notes = _prepare_benches(task, directories, ranks, device)
    _create_folder(out)
    cluster = _read_cluster(out / "cluster.json")
    results: list[Result] = []
    ended: Error | KeyboardInterrupt | None = None
    for kind, measure in measures.items():
        try:
            budget_s = seconds * TIME_SHARES[kind]
            collected = with_progress(partial(measure, budget_s))
        except (Error, KeyboardInterrupt) as error:
            ended = error
            break
        results.append(collected.result)
        if collected.interrupted:
            ended = KeyboardInterrupt()
            break
    _save(cluster, [result for result in results if result.rows], notes, out)
    if isinstance(ended, KeyboardInterrupt):
        raise typer.Exit(INTERRUPTED)
    if ended is not None:
        raise ended
    if num_wrong := sum(bool(row.get("wrong")) for result in results for row in result.rows):
        print(f"WRONG elements in {several(num_wrong, 'row')} of bench collectives")
        raise typer.Exit(1)


def _create_folder(out: Path) -> None:
    from paceline.plotting.paths import check_path

    try:
        out.mkdir(exist_ok=True)
    except OSError as error:
        raise BenchError(
            f"cannot create the folder {out}: {error.strerror}; specify another with --out"
        ) from error
    check_path(out / "cluster.json")


def _read_cluster(path: Path) -> "Cluster":
    """Return the cluster in a file, including what a person wrote there; without a file, probe this machine.

    Raises ClusterError if the file cannot be read, or describes another machine.
    """
    from paceline.cluster import file
    from paceline.cluster.local_cluster import build_cluster
    from paceline.cluster.probe import probe

    probed = build_cluster(probe())
    if not path.exists():
        return probed
    known = file.read(path)
    if known.device.name != probed.device.name:
        raise ClusterError(
            f"{path} describes {known.device.name}, but this machine has {probed.device.name}; "
            "specify another folder with --out"
        )
    return known


def _prepare_benches(
    task: str | None, directories: list[Path], ranks: int | None, device: str | None
) -> "tuple[dict[str, Measure], list[str]]":
    """Return the benches by kind, and notes on benches that are left out.

    Raises an Error if a bench cannot be run as requested.
    """
    from paceline.bench import suites
    from paceline.bench.data_loading import default_worker_counts, loader_settings
    from paceline.bench.storage.suite import check_directories
    from paceline.cli.options.launching import read_request
    from paceline.task import load_task

    notes: list[str] = []
    checked = check_directories(directories or [path for path in (Path(), Path("/dev/shm")) if path.is_dir()])
    spec, _ = read_request(task or DEFAULT_TASK, {}, [])
    try:
        loaded = load_task(spec.task, spec.set)
        loaded.dataset("train")
    except (TaskError, ImportError) as error:
        if task is not None:
            raise
        loaded = None
        notes.append(f"bench data is left out: {error}; specify your own task with --task my.py:Class")
    from paceline.bench.collectives import backends
    from paceline.bench.device import choose_bench_device

    device_used = choose_bench_device(device)

    count = ranks or (backends.default_ranks() if device_used.type == "cuda" else 2)
    benches: dict[str, Measure] = {
        "storage": lambda budget_s, watch: suites.run_storage(checked, budget_s / len(checked), 4, watch),
        "collectives": lambda budget_s, watch: suites.run_collectives(count, device_used, budget_s, watch),
        "compute": lambda budget_s, watch: suites.run_compute(
            device_used, budget_s, spec if loaded else None, loaded, watch
        ),
        "overlap": lambda budget_s, watch: suites.run_overlap(device_used, max(2, count), budget_s, watch),
    }
    if device_used.type == "cpu":
        benches["host"] = lambda budget_s, watch: suites.run_host(max(2, count), budget_s, watch)
    if loaded is not None:
        data_task = loaded
        settings = loader_settings(default_worker_counts(), [2])
        benches["data"] = lambda budget_s, watch: suites.run_data(
            spec, data_task, device_used, budget_s, settings, watch
        )
    return benches, notes


def _save(cluster: "Cluster", results: "list[Result]", notes: list[str], out: Path) -> None:
    """Write results, pictures and the updated cluster.json; print the summary."""
    from paceline.bench.report.whole import heading, merge_notes, summary_table
    from paceline.bench.result import write
    from paceline.bench.to_cluster import update_cluster
    from paceline.cluster import file

    for result in results:
        write(result, out / f"{result.kind}.json")
    file.write(out / "cluster.json", update_cluster(cluster, results))
    console = make_console()
    if results:
        console.print(heading(results[0]), markup=False, soft_wrap=True)
        console.print(summary_table(results))
    for note in (*merge_notes(results), *notes, *_draw_pictures(results, out)):
        console.print(note, style="dim", markup=False, soft_wrap=True)
    console.print(
        f"{out}/: cluster.json, and for each bench its result (.json) and its picture (.svg)",
        markup=False,
        soft_wrap=True,
    )


def _draw_pictures(results: "list[Result]", out: Path) -> list[str]:
    """Draw all pictures; if they cannot be drawn, return the reason as a note."""
    from paceline.plotting.figure import check_picture

    try:
        check_picture(out / "a.svg")
    except BenchError as error:
        return [str(error)]
    for result in (result for result in results if result.kind in PICTURES):
        module, _, name = PICTURES[result.kind].partition(":")
        getattr(import_module(module), name)(result, out / f"{result.kind}.svg")
    return []
