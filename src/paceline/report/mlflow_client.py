"""Send a run to MLflow: the request as parameters, steps and evaluations as metrics, files as artifacts."""

import json
import math
import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from paceline import files
from paceline.events import Ended, Evaluated, Event, EventReader, Failed, Started, Step
from paceline.report.hyperparameters import read_hyperparameters
from paceline.report.progress import SCALARS_S, build_tag
from paceline.run import RunFolder

MAX_METRICS, MAX_PARAMS = 1000, 100  # that MLflow accepts in a request
MAX_VALUE = 6000  # characters of a parameter
UNUSUAL = re.compile(r"[^\w\-. /:]", re.ASCII)  # what names of MLflow do not have
QUANTITIES = ("loss", "grad_norm", "lr", "samples_per_s", "step_s", "data_s")
TEXTS = ("spec.toml", "provenance.json", "report.html")  # of the run folder, that become artifacts


class MlflowRun:
    """A run of MLflow that follows a run folder. Methods raise what MLflow raises.

    The file mlflow.json of the run folder has its identifier, and how far the events were sent, so that a
    resumed training continues the same run."""

    def __init__(self, run: RunFolder, uri: str):
        from mlflow.tracking import MlflowClient

        self._run, self._uri = run, uri
        self._client: Any = MlflowClient(tracking_uri=uri)
        self._state = run.path / "mlflow.json"
        stored = self._read_state()
        self.id = stored.get("run_id", "")
        self._reader = EventReader(run.events, stored.get("sent_bytes", 0) if self.id else 0)
        self._written = self._reader.position
        self._last_step_time = -math.inf
        self._end: Event | None = None
        self._source: Iterator[Event] | None = None  # of a call that has failed
        self._pending: list[Any] = []

    def _read_state(self) -> dict[str, Any]:
        """Return what mlflow.json has about this server; empty if it has nothing that is usable."""
        with suppress(OSError, ValueError, RecursionError), files.open_regular(self._state) as file:
            state = json.load(file)
            is_usable = (
                isinstance(state, dict)
                and state.get("uri") == self._uri
                and isinstance(state.get("run_id"), str)
                and type(state.get("sent_bytes")) is int
            )
            return state if is_usable else {}
        return {}

    def _write_state(self) -> None:
        state = {"uri": self._uri, "run_id": self.id, "sent_bytes": self._reader.position}
        files.write_whole(self._state, json.dumps(state, indent=1) + "\n")
        self._written = self._reader.position

    def begin(self) -> None:
        """Create the run, or continue that of an earlier start."""
        from mlflow.entities import Param

        if self.id:
            self._client.update_run(self.id, status="RUNNING")
            return
        spec, _ = self._run.request()
        task = spec.task.rpartition("/")[2]
        found = self._client.get_experiment_by_name(task)
        experiment = found.experiment_id if found is not None else self._client.create_experiment(task)
        created = self._client.create_run(experiment, run_name=self._run.path.absolute().name)
        self.id = created.info.run_id
        self._write_state()
        rows = [
            Param(_clean(name), str(value)[:MAX_VALUE])
            for name, value in read_hyperparameters(self._run).items()
        ]
        for at in range(0, len(rows), MAX_PARAMS):
            self._client.log_batch(self.id, params=rows[at : at + MAX_PARAMS])

    def send_new(self) -> None:
        """Send the metrics of the events since the last call. The next call sends what fails."""
        if self._source is None:
            self._source = self._reader.new()
        for event in self._source:
            if isinstance(event, (Ended, Failed, Started)):
                self._end = event
            self._pending += self._convert(event)
            if len(self._pending) >= MAX_METRICS:
                self._send_pending()
        self._send_pending()
        self._source = None
        if self._reader.position != self._written:
            self._write_state()

    def _send_pending(self) -> None:
        while self._pending:
            self._client.log_batch(self.id, metrics=self._pending[:MAX_METRICS])
            del self._pending[:MAX_METRICS]

    def _convert(self, event: Event) -> list[Any]:
        """Return the values of an event; of at most ten steps a second."""
        from mlflow.entities import Metric

        if isinstance(event, Step) and event.time - self._last_step_time < SCALARS_S:
            return []
        if isinstance(event, Step):
            self._last_step_time = event.time
        return [
            Metric(_clean(name), value, int(event.time * 1000), step)
            for name, value, step in _list_values(event)
        ]

    def end(self) -> None:
        """Send the rest, the files of the run, and its state."""
        self.send_new()
        for name in TEXTS:
            path = self._run.path / name
            if path.is_file() and not path.is_symlink():
                self._client.log_artifact(self.id, str(path))
        self._client.set_terminated(self.id, _find_status(self._end))


def _list_values(event: Event) -> Iterator[tuple[str, float, int]]:
    """Yield the numbers of a step or an evaluation under their names for TensorBoard."""
    if isinstance(event, Step):
        for name in QUANTITIES:
            value = getattr(event, name)
            if value is not None:
                yield f"train/{name}", value, event.step
        for name, value in event.losses.items():
            yield f"train/{name}", value, event.step
    elif isinstance(event, Evaluated):
        for name, value in event.metrics.items():
            yield build_tag(name), value, event.step


def _find_status(last: Event | None) -> str:
    if isinstance(last, Ended):
        return "FINISHED" if last.reason == "done" else "KILLED"
    return "FAILED"


def _clean(name: str) -> str:
    return UNUSUAL.sub("_", name)[:250] or "_"


def describe(error: BaseException) -> str:
    """Return the first line of an error of MLflow."""
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__)[:300]
