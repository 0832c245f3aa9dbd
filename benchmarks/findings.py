"""Findings of planted faults and of healthy runs: which faults are found, and which alarms are false.

Each case is a real training, or a recording of samples that is written here. The rules and their limits
are in src/paceline/inspect and docs/findings.md; they are fixed before this script scores them.
"""

import argparse
import contextlib
import json
import math
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from findings_case import LIMIT_S, Case
from findings_invented import INVENTED_FAULTS, INVENTED_HEALTHY
from findings_planted import FAULTS, HEALTHY
from findings_recordings import RECORDED_FAULTS, RECORDED_HEALTHY
from machine import description
from paceline.errors import Error
from paceline.inspect.facts import RunFacts
from paceline.inspect.find import find
from paceline.inspect.read_facts import read_facts, read_recorded_facts
from paceline.run import RunFolder

RUN = "run"  # the name of the run of a case, or of its recording


def train(case: Case, folder: Path, name: str) -> Path:
    """Run the training of a case in a folder. Return its run folder, or the file of a recording."""
    words = [sys.executable, "-m", "paceline", "train", case.task, "--run-dir", name, "--timeout", "60"]
    words += ["--steps", str(case.steps)] if case.steps is not None else []
    words += ["--batch", str(case.batch)] if case.batch is not None else []
    for key, value in case.fields.items():
        words += ["--set", f"{key}={json.dumps(value) if not isinstance(value, str) else value}"]
    done = subprocess.run(
        [*words, *case.options] if case.command is None else case.command(name),
        cwd=folder,
        text=True,
        capture_output=True,
        timeout=LIMIT_S,
    )
    path = folder / name
    if done.returncode and not (path.is_file() or (path / "events.jsonl").exists()):
        raise RuntimeError(f"{case.name}: {done.stderr.strip()[-400:]}")
    return path


def make_run(case: Case, folder: Path) -> None:
    """Leave the run or the recording of a case in its folder."""
    if case.recording is not None:
        (folder / RUN).write_text(case.recording())
        return
    for number, other in enumerate(case.before):
        train(other, folder, f"before-{number}")
    with case.around(folder) if case.around is not None else contextlib.nullcontext(folder) as at:
        run = train(case, at, RUN)
        if case.edit is not None:
            case.edit(run)
        if at != folder:
            shutil.copytree(run, folder / RUN)


def read_case(case: Case, folder: Path) -> RunFacts:
    """Return the facts of a case, which is trained first if its folder does not exist."""
    if not folder.exists():
        new = folder.with_suffix(".new")
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir()
        make_run(case, new)
        new.rename(folder)
    path = folder / RUN
    return read_recorded_facts(path) if path.is_file() else read_facts(RunFolder(path))


def run_cases(cases: Sequence[Case], folder: Path) -> tuple[int, int]:
    """Print a line for each case. Return the cases as expected, and those with an unexpected finding."""
    good = alarms = 0
    for case in cases:
        began = time.monotonic()
        try:
            result = find(read_case(case, folder / re.sub(r"\W+", "-", case.name)))
        except (RuntimeError, subprocess.SubprocessError, Error) as error:
            print(f"{'failed':12}{case.name:52}{error}", flush=True)
            continue
        rules = {finding.rule for finding in result.findings}
        missed = {*case.expected} - rules
        extra = rules - {*case.expected, *case.also}
        good += not missed and (bool(case.expected) or not extra)
        alarms += bool(extra)
        verdict = "missed" if missed else "false alarm" if extra else "ok"
        print(
            f"{verdict:12}{case.name:52}{', '.join(sorted(rules)) or '-':40}{time.monotonic() - began:5.0f} s"
        )
        for finding in result.findings:
            if finding.rule in extra:
                print(f"            {finding.sentence}")
        for name in missed:
            reasons = "; ".join(sorted({*result.missing.values()}))
            print(f"            {name} did not find it; not checked: {reasons}")
        sys.stdout.flush()
    return good, alarms


def choose(cases: Sequence[Case], arguments: argparse.Namespace) -> list[Case]:
    """Return the cases that the options of the command line name."""
    part, parts = (int(word) for word in arguments.part.split("/"))
    chosen = [case for case in cases if re.search(arguments.only, case.name)]
    return [case for number, case in enumerate(chosen) if number % parts == part - 1]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="cases whose names match this regular expression")
    parser.add_argument("--recorded", action="store_true", help="only recordings, no training")
    parser.add_argument("--part", default="1/1", metavar="K/N", help="each Nth case, from the Kth")
    parser.add_argument(
        "--keep", type=Path, metavar="DIR", help="keep the runs in this folder, and train only those it lacks"
    )
    arguments = parser.parse_args()
    is_recorded = arguments.recorded
    faults = [*([] if is_recorded else [*FAULTS, *INVENTED_FAULTS]), *RECORDED_FAULTS]
    healthy = [*([] if is_recorded else [*HEALTHY, *INVENTED_HEALTHY]), *RECORDED_HEALTHY]
    print(description())
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.keep if arguments.keep is not None else Path(temporary)
        rows = []
        for name, cases in (("faults", faults), ("healthy", healthy)):
            chosen = choose(cases, arguments)
            (folder / name).mkdir(parents=True, exist_ok=True)
            good, alarms = run_cases(chosen, folder.absolute() / name)
            rows.append((name, good, len(chosen), alarms))
    for name, good, count, alarms in rows:
        what = "found" if name == "faults" else "without a finding"
        print(f"{name}: {good} of {count} {what}; {alarms} with an unexpected finding")
    if any(good < count for _, good, count, _ in rows) or math.fsum(row[3] for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
