"""Write the ratios of measured to predicted times of short trainings into a cluster.json."""

from collections.abc import Sequence
from pathlib import Path

from paceline.cluster import file
from paceline.cluster.facts import CalibrationRecord
from paceline.cluster.local_cluster import find_file
from paceline.plan.cost_model.calibration import build_record
from paceline.short_runs.request import ShortRequest
from paceline.short_runs.training import ShortRun
from paceline.units import several

DEFAULT_FILE = Path("bench/cluster.json")  # where paceline bench writes it


def build_records(request: ShortRequest, runs: Sequence[ShortRun]) -> list[CalibrationRecord]:
    """Return a record for each training that has a profile.

    Predictions use no earlier calibration, so that the ratios do not depend on the order of trainings.
    """
    machine = request.cluster.model_copy(update={"calibrations": ()})
    records = []
    for run in runs:
        if run.breakdown is None or (run.breakdown.started.device == "cpu") != (machine.device.kind == "cpu"):
            continue
        cost = request.with_batch(run.batch).predict(run.plan, run.ranks, machine)
        records.append(
            build_record(run.breakdown.name, str(run.plan), run.ranks, run.breakdown.seconds, cost)
        )
    return records


def write_records(request: ShortRequest, runs: Sequence[ShortRun], name: str | None) -> str:
    """Add the records to the cluster.json, and return a sentence about it.

    name: the file [default: that of the working directory, else a new bench/cluster.json].
    """
    records = build_records(request, runs)
    if not records:
        return "later predictions are not calibrated: no step of these trainings was profiled"
    path = Path(name) if name is not None else find_file() or DEFAULT_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    before = file.read(path) if path.exists() else request.cluster
    file.write(path, before.updated(calibrations=records))
    return f"{path} has the ratios of {several(len(records), 'training')}, which correct later predictions"
