"""When trainings on several numbers of ranks would finish, waiting in the queue of Slurm included."""

import math
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.table import Table

from paceline.errors import LaunchError
from paceline.launch.slurm import client
from paceline.launch.slurm.job_script import build_job, render
from paceline.launch.slurm.site import Site
from paceline.plan.report.scale import format_amount, format_duration
from paceline.plan.search.scaling import ScalingPoint
from paceline.spec import Launch
from paceline.units import several

STARTS = re.compile(r"to start at (\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)")
TIME_MARGIN = 1.1  # of the requested time over the predicted time
MINUTE_S = 60


@dataclass(frozen=True)
class QueueEstimate:
    """A training in the queue, if it were submitted now.

    wait_s: until its first job starts; None if Slurm refuses the job, and then `refused` says why. jobs: of
    which the training consists, since a partition limits the time of a job; each waits as long as the first.
    """

    ranks: int
    nodes: int
    run_s: float
    jobs: int
    wait_s: float | None
    price: float | None
    currency: str
    refused: str = ""

    @property
    def finish_s(self) -> float:
        """Seconds from now to the end of the training; infinite if Slurm refuses the job."""
        return self.jobs * self.wait_s + self.run_s if self.wait_s is not None else math.inf


def estimate_queue(points: Iterable[ScalingPoint], site: Site) -> list[QueueEstimate]:
    """Return when the trainings of these points would finish, the earliest first.

    Slurm is asked by `sbatch --test-only`, which queues nothing. The points have bills. Raises LaunchError if
    Slurm does not answer.
    """
    limits = {partition.name: partition.limit_s for partition in client.list_partitions()}
    name = site.partition or next(iter(limits), None)
    limit_s = limits.get(name) if name is not None else None
    return sorted((_estimate(point, site, limit_s) for point in points), key=lambda found: found.finish_s)


def _estimate(point: ScalingPoint, site: Site, limit_s: int | None) -> QueueEstimate:
    assert point.bill is not None
    run_s = point.bill.seconds
    wanted_s = TIME_MARGIN * run_s + site.notice_s + MINUTE_S
    jobs = 1
    if limit_s is not None and wanted_s > limit_s:
        jobs = math.ceil(TIME_MARGIN * run_s / max(MINUTE_S, limit_s - site.notice_s))
        wanted_s = limit_s
    time = client.format_clock(math.ceil(wanted_s))
    launch = Launch(ranks=point.ranks, nodes=point.nodes)
    wait_s, refused = None, ""
    try:
        answer = client.dry_run_script(render(build_job(launch, site, Path("scale"), time), site))
        wait_s = _read_wait_s(answer)
        refused = f"it answers without a time: {answer}" if wait_s is None else ""
    except client.SlurmUnavailable:
        raise
    except LaunchError as error:
        refused = str(error)
    return QueueEstimate(
        point.ranks, point.nodes, run_s, jobs, wait_s, point.bill.price, point.bill.currency, refused
    )


def _read_wait_s(answer: str) -> float | None:
    """Return the seconds until the time in an answer of sbatch; None without a time."""
    if (match := STARTS.search(answer)) is None:
        return None
    try:
        start = datetime.fromisoformat(match[1])
    except ValueError:
        return None
    return max(0.0, (start - datetime.now()).total_seconds())


def build_queue_parts(found: list[QueueEstimate]) -> list[Table | str]:
    """Return the table of all trainings, and sentences: the earliest, and those that Slurm refuses."""
    possible = [each for each in found if each.wait_s is not None]
    has_price = any(each.price is not None for each in possible)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in (
        "ranks",
        "nodes",
        "waits",
        "runs",
        "jobs",
        "finished in",
        *([found[0].currency] if has_price else []),
    ):
        table.add_column(name, justify="right", no_wrap=True)
    for each in possible:
        price = format_amount(each.price) if each.price is not None else ""
        cells = [format_duration(each.wait_s or 0.0), format_duration(each.run_s), f"{each.jobs:,}"]
        cells += [format_duration(each.finish_s), *([price] if has_price else [])]
        table.add_row(f"{each.ranks:,}", f"{each.nodes:,}", *cells)
    parts: list[Table | str] = ["\nin the queue of Slurm now, the earliest end first"]
    if possible:
        best = possible[0]
        parts += [
            table,
            f"earliest: {several(best.ranks, 'rank')} on {several(best.nodes, 'node')}, finished in "
            f"{format_duration(best.finish_s)}",
        ]
    parts += [
        f"{several(each.ranks, 'rank')}: Slurm refuses the job: {each.refused}"
        for each in found
        if each.wait_s is None
    ]
    return parts


def queue_as_tree(found: list[QueueEstimate]) -> list[dict[str, Any]]:
    """Return the estimates for JSON; docs/json.md lists the keys."""
    return [asdict(each) | {"finish_s": each.finish_s if each.wait_s is not None else None} for each in found]
