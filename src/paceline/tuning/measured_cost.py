"""Energy and price of trials as objectives: what they need, and their values."""

import contextlib
import math
import os
from collections.abc import Mapping

from paceline.cluster import file, local_cluster
from paceline.errors import ClusterError, SpecError
from paceline.monitor.node import CpuEnergySensor
from paceline.monitor.sensor import AbsentSensorError
from paceline.report.machine_samples import MachineSamples
from paceline.run import RunFolder
from paceline.tuning.definition import StudyDefinition

JOULES_PER_KWH = 3.6e6
# Why a measured quantity can be missing after a training.
WHY_MISSING = {
    "memory": "memory is measured in profiled steps, and the trial has none; add --set spec.profile=true",
    "energy": "the samples of the machine have no energy; use 'min predicted.energy'",
    "price": "price_per_device_hour is not known",
}


def check_measured_cost(definition: StudyDefinition) -> None:
    """Raise SpecError if an objective of the study cannot be measured here."""
    names = {goal.name: str(goal) for goal in definition.objectives}
    if "price" in names and read_price() is None:
        raise SpecError(
            f"--metric {names['price']!r} requires price_per_device_hour, and cluster.json does not give "
            "it; add it, or use 'min time'"
        )
    if "energy" in names:
        _check_energy(definition, f"--metric {names['energy']!r}")


def _check_energy(definition: StudyDefinition, option: str) -> None:
    search = definition.search
    if search.ranks_per_trial != search.ranks_per_node:
        raise SpecError(
            f"{option}: the energy of a node cannot be divided between trials that share it; use "
            f"--ranks-per-trial {search.ranks_per_node}, the ranks of a node, or 'min predicted.energy'"
        )
    if definition.request.get("monitor") == "off":
        raise SpecError(f"{option} requires samples of the machine, got monitor=off; leave it out")
    if search.launcher == "local" and not os.path.exists("/dev/nvidiactl"):
        try:
            CpuEnergySensor()
        except AbsentSensorError as error:
            raise SpecError(
                f"{option}: this machine does not measure energy: {error}; use 'min time'"
            ) from error


def read_price() -> float | None:
    """Return the price of a device for an hour, from cluster.json of the working directory."""
    if (path := local_cluster.find_file()) is not None:
        with contextlib.suppress(ClusterError):  # a study without this objective does not need the file
            price = file.read(path).price_per_device_hour
            return price.value if price is not None else None
    return None


def measure_cost(run: RunFolder, rank_seconds: float, price: float | None) -> Mapping[str, float]:
    """Return the energy (kWh) and the price of a trial; without those that are not known.

    rank_seconds: of all its starts. price: of a device for an hour. The energy is that of its node, from the
    first to the last sample.
    """
    found = {} if price is None else {"price": rank_seconds / 3600 * price}
    samples = MachineSamples(run.monitor)
    samples.refresh()
    if samples.has_energy:
        found["energy"] = samples.find_energy_J(math.inf) / JOULES_PER_KWH
    return found
