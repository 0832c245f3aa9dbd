"""Rules about memory and disks of the nodes: growing, nearly full, swapping, filling."""

import itertools
import statistics

from paceline.inspect.facts import RunFacts
from paceline.inspect.finding import Evidence, Missing, Outcome
from paceline.inspect.growth import BLOCKS, Growth, GrowthLimits, find_growth
from paceline.inspect.windows import Window, block_medians
from paceline.units import format_bytes, format_seconds, numbered

MiB = 2**20
MIN_SAMPLES = 15
MIN_GROWTH_SAMPLES = 6
# Of the memory of a rank. Busy machines slow down, so that a leak does, too.
GROWTH = GrowthLimits(MiB=48.0, share=0.08, late=0.25, falling=1)
CLEAR_SAMPLES = 10  # fewer must grow by more, in all parts
CLEAR_GROWTH = GrowthLimits(MiB=128.0, share=0.25, late=0.6, falling=0)
FREED_SHARE, MAX_END_SHARE = 0.6, 0.25  # of the highest memory, and of the samples of a recording
MAX_NAMED = 4  # ranks
FULL_SHARE = 0.95
OWN_SHARE = 0.2  # of the memory of a node that the ranks use, for its fullness to be theirs
SWAP_MBPS, SWAP_SAMPLE_SHARE = 0.5, 0.1
PRESSED_SHARE = 0.85  # of the memory: below, the system swaps out what nobody uses
SPARE_SAVES = 2  # checkpoints for which there must be space


def _no_samples(facts: RunFacts, count: int = MIN_SAMPLES) -> Missing:
    return Missing(f"it needs {count} samples of the node{facts.why_no_samples}")


def check_memory_growth(facts: RunFacts) -> Outcome:
    """Memory of a rank, or of its workers, that grows steadily."""
    found: list[Evidence] = []
    was_checked = False
    for window in facts.windows:
        for column, owner in (("memory", ""), ("workers memory", "the workers of ")):
            series = {rank: _read_own_memory(window, f"rank{rank}", column) for rank in window.ranks}
            if facts.is_recording:
                series = {rank: _leave_out_end(rows) for rank, rows in series.items()}
            known = {rank: rows for rank, rows in series.items() if len(rows) >= MIN_GROWTH_SAMPLES}
            was_checked |= bool(known)
            growths = [growth for rank, rows in known.items() if (growth := _find_growth(rank, rows))]
            if growths:
                found.append(_describe_growth(growths, owner, window))
    return found if was_checked else _no_samples(facts, MIN_GROWTH_SAMPLES)


def _read_own_memory(window: Window, rank: str, column: str) -> list[tuple[float, float]]:
    """Return times and memory without mapped files, such as samples, whose pages the system can free."""
    of_files = f"{rank} {column.replace('memory', 'file memory')}"
    if not window.values(of_files):  # of an older version
        return window.timed(f"{rank} {column}")
    rows = window.timed_rows(f"{rank} {column}", of_files)
    return [(time, used - in_files) for time, used, in_files in rows]


def _leave_out_end(rows: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the rows without those in which a process frees its memory and ends."""
    highest = max((value for _, value in rows), default=0.0)
    until = len(rows)
    while until and rows[until - 1][1] < FREED_SHARE * highest:
        until -= 1
    return rows[:until] if len(rows) - until <= MAX_END_SHARE * len(rows) else rows


def _find_growth(rank: int, series: list[tuple[float, float]]) -> Growth | None:
    return find_growth(rank, series, GROWTH if len(series) >= CLEAR_SAMPLES else CLEAR_GROWTH)


def _describe_growth(growths: list[Growth], owner: str, window: Window) -> Evidence:
    worst = max(growths, key=lambda growth: growth.MiB_per_s)
    rate = sum(growth.MiB_per_s for growth in growths)
    free = _find_free_MiB(window)
    until = f"; the machine has memory for {format_seconds(free / rate)} more" if free is not None else ""
    names = numbered("rank", [growth.number for growth in growths[:MAX_NAMED]])
    more = f" and {len(growths) - MAX_NAMED} more" if len(growths) > MAX_NAMED else ""
    return Evidence(
        f"the memory of {owner}{names}{more} grows by {format_bytes(worst.MiB_per_s * 60 * MiB)} a minute"
        f"{' each' if len(growths) > 1 else ''}, from {format_bytes(worst.first_MiB * MiB)} to "
        f"{format_bytes(worst.last_MiB * MiB)}{until}",
        {
            "ranks": len(growths),
            "MiB_per_s": worst.MiB_per_s,
            "first_MiB": worst.first_MiB,
            "last_MiB": worst.last_MiB,
            "seconds": worst.seconds,
        },
        None,
        "look for lists that keep tensors of each step, such as losses without .item() or .detach()",
    )


def _find_free_MiB(window: Window) -> float | None:
    rows = window.pairs("job memory used", "job memory limit") or window.pairs("memory used", "memory total")
    return max(0.0, rows[-1][1] - rows[-1][0]) if rows else None


def check_memory(facts: RunFacts) -> Outcome:
    """Nodes whose memory is nearly full."""
    found, was_checked = [], False
    for window in facts.windows:
        for used_name, total_name, what in (
            ("job memory used", "job memory limit", "the memory limit of the job"),
            ("memory used", "memory total", "the memory"),
        ):
            rows = [row for row in window.pairs(used_name, total_name) if row[1] > 0]
            was_checked |= len(rows) >= MIN_SAMPLES
            full = [row for row in rows if row[0] / row[1] >= FULL_SHARE]
            if len(rows) < MIN_SAMPLES or len(full) < 3:
                continue
            ranks = [window.values(f"rank{rank} memory") for rank in window.ranks]
            own = sum(max(values) for values in ranks if values)
            if what == "the memory" and own < OWN_SHARE * rows[0][1]:
                continue  # other programs use it
            used, total = max(full, key=lambda row: row[0] / row[1])
            found.append(
                Evidence(
                    f"{used / total:.0%} of {what} of {window.node} was in use ({format_bytes(used * MiB)}); "
                    f"the ranks used {format_bytes(own * MiB)}: more ends the job",
                    {"used_MiB": used, "total_MiB": total, "ranks_MiB": own},
                    None,
                    "fewer --workers, fewer ranks per node, or --plan zero2 or zero3",
                )
            )
            break
    return found if was_checked else _no_samples(facts)


def check_swapping(facts: RunFacts) -> Outcome:
    """Nodes that read memory back from swap space while their memory is short."""
    found, was_checked = [], False
    for window in facts.windows:
        rates = window.values("swap in")
        if len(rates) < MIN_SAMPLES:
            continue
        was_checked = True
        swapping = [rate for rate in rates if rate > SWAP_MBPS]
        used = [row[0] / row[1] for row in window.pairs("memory used", "memory total") if row[1] > 0]
        share = len(swapping) / len(rates)
        if share < SWAP_SAMPLE_SHARE or len(swapping) < 3:
            continue
        if used and max(used) < PRESSED_SHARE:
            continue
        found.append(
            Evidence(
                f"{window.node} read {statistics.fmean(swapping):.3g} MB/s from swap space in {share:.0%} of "
                "the samples: its memory is short",
                {"swap_in_MBps": statistics.fmean(swapping), "share": share},
                None,
                "fewer --workers, fewer ranks per node, a smaller --batch, or --plan zero2 or zero3",
            )
        )
    return found if was_checked else _no_samples(facts)


def check_disk(facts: RunFacts) -> Outcome:
    """A disk or a quota that is full, or will be before the end of the training."""
    failed = [event for event in facts.failures if event.what == "save"]
    full = [event for event in failed if "space" in event.message.lower() or "quota" in event.message.lower()]
    fix = f"free space, keep fewer checkpoints ({facts.again} --keep 1), or choose another --run-dir"
    if full:
        return [
            Evidence(f"a checkpoint was not saved: {full[-1].message}", {"failures": len(full)}, None, fix)
        ]
    series = [point for window in facts.windows[:1] for point in window.timed("disk free")]
    free_MiB = facts.disk_free_bytes / MiB if facts.disk_free_bytes is not None else None
    if free_MiB is None and series:
        free_MiB = series[-1][1]
    if free_MiB is None:
        return Missing("the free space was not recorded" + facts.why_no_samples)
    save_MiB = max((event.bytes for event in facts.saved[-3:]), default=0) / MiB
    if save_MiB and free_MiB < SPARE_SAVES * save_MiB:
        return [
            Evidence(
                f"disk or quota of the run have {format_bytes(free_MiB * MiB)} left, less than {SPARE_SAVES} "
                f"checkpoints of {format_bytes(save_MiB * MiB)}",
                {"free_MiB": free_MiB, "checkpoint_MiB": save_MiB},
                None,
                fix,
            )
        ]
    evidence = _find_filling(series, facts, fix)
    return [evidence] if evidence is not None else []


def _find_filling(series: list[tuple[float, float]], facts: RunFacts, fix: str) -> Evidence | None:
    """Return a finding if the free space falls steadily, and ends before the training."""
    if len(series) < MIN_SAMPLES or not facts.remaining_s:
        return None
    medians = block_medians([value for _, value in series], BLOCKS)
    falls = sum(after < before for before, after in itertools.pairwise(medians))
    fallen = medians[0] - medians[-1]
    if falls < BLOCKS // 2 or fallen < 0.02 * medians[0]:
        return None
    rate = fallen / max((series[-1][0] - series[0][0]) * (BLOCKS - 1) / BLOCKS, 1e-3)
    left_s = medians[-1] / rate
    if left_s > facts.remaining_s:
        return None
    return Evidence(
        f"the disk of the run will be full in {format_seconds(left_s)}, before the training ends: it loses "
        f"{format_bytes(rate * 60 * MiB)} a minute",
        {"free_MiB": medians[-1], "MiB_per_s": rate, "seconds_left": left_s},
        None,
        fix,
    )
