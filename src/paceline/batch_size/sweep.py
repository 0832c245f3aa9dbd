"""Trainings of one request with several batches, in a folder; a folder that exists is continued."""

import json
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from paceline.batch_size.branch import branch, find_branch_point
from paceline.batch_size.result import WIDEST, BatchResult, read_result
from paceline.batch_size.target import Target
from paceline.errors import DivergedError, RunError, SpecError
from paceline.events import Ended, Event, last, read
from paceline.files import open_regular, write_whole
from paceline.launch.train_run import train
from paceline.run import RunFolder, create
from paceline.spec import Launch, Save, Spec, Stop
from paceline.task import has_own_optimizer, load_task

STATE = "batch-size.json"  # what the trainings in a folder have in common
FACTORS = (0.5, 1.0, 2.0)  # on the scaled learning rate, which --tune tries first
# Optimizers whose update is proportional to the gradient, so that their learning rate scales linearly
LINEAR = ("sgd", "asgd", "lars")


@dataclass(frozen=True)
class Sweep:
    """What to train. spec: with the batch for which its learning rate was chosen.

    period: samples between evaluations. source: the run to branch from. tunes: whether to try several
    learning rates.
    """

    spec: Spec
    launch: Launch
    batches: tuple[int, ...]
    target: Target
    folder: Path
    period: int
    source: Path | None = None
    tunes: bool = False

    def spec_of(self, batch: int, factor: float = 1.0) -> Spec:
        """Return the request of a training: as many samples, evaluated as often, with a scaled rate."""
        from paceline.training.optimization.batch_scaling import multiply_rates

        spec = self.spec
        base = spec.schedule.base_batch or spec.batch
        rule = spec.schedule.lr_scale or ("linear" if spec.optimizer.name in LINEAR else "sqrt")
        samples = spec.steps * spec.batch if spec.steps is not None else None
        return Spec.model_validate(
            {
                **dict(spec),
                "batch": batch,
                "steps": -(-samples // batch) if samples is not None else None,
                "schedule": spec.schedule.model_copy(update={"base_batch": base, "lr_scale": rule}),
                "optimizer": multiply_rates(spec.optimizer, factor),
                "stop": Stop(metric=self.target.metric, target=self.target.value),
                "save": Save(keep=1, minutes=spec.save.minutes, best=self.target.metric),
                "evaluate_every": max(1, round(self.period / batch)),
                "profile": False,
            }
        )

    @cached_property
    def has_own_optimizer(self) -> bool:
        """Whether the task defines its optimizer, whose learning rates are not those of the request."""
        return has_own_optimizer(load_task(self.spec.task, self.spec.set))

    def path_of(self, batch: int, factor: float = 1.0) -> Path:
        """Return the folder of a training."""
        return self.folder / (f"batch-{batch}" + (f"-lr-{factor:g}" if factor != 1 else ""))

    def describe(self) -> dict[str, Any]:
        """Return what must be the same for all trainings of a folder, as JSON."""
        launch = self.launch
        settings = {
            "spec": self.spec.model_dump(mode="json"),
            "until": str(self.target),
            "plan": launch.plan,
            "ranks": launch.ranks,
            "device": launch.device,
            "period": self.period,
            "from": str(self.source.resolve()) if self.source is not None else None,
        }
        return dict(json.loads(json.dumps(settings)))

    def open(self) -> None:
        """Create the folder, or check that it is of this request. Raises RunError and SpecError."""
        if not self.spec.batches.is_constant:
            raise SpecError("batch-size compares constant batches; leave out batch_schedule and batch_warmup")
        if self.spec.evaluate_every is not None:
            raise SpecError(
                f"batch-size evaluates every batch after the same samples, got evaluate_every="
                f"{self.spec.evaluate_every} steps; leave it out, or use --evaluate-samples"
            )
        if self.spec.stop != Stop():
            raise SpecError(
                f"batch-size ends each training at --until {self.target}, but the request has [stop]; leave "
                "stop.* and --patience out"
            )
        if self.tunes and self.has_own_optimizer:
            raise SpecError(
                "--tune changes the learning rate of --lr, which the task's optimizer() does not read; leave "
                "--tune or optimizer() out"
            )
        for batch in self.batches:
            self.spec_of(batch)
        path = self.folder / STATE
        if self.folder.exists():
            self._check_same(path)
        if self.source is not None:
            find_branch_point(self.source, self.batches)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(f"cannot create {self.folder}: {error.strerror}") from error
        write_whole(path, json.dumps(self.describe(), indent=1) + "\n")

    def _check_same(self, path: Path) -> None:
        """Raise RunError if the folder has trainings of another request, or is not of a comparison."""
        try:
            with open_regular(path) as file:
                before = json.load(file)
            now = self.describe()
            changes = [
                f"{name}={now[name]!r} instead of {before.get(name)!r}"
                for name in now.keys() - {"spec"}
                if before.get(name) != now[name]
            ]
            changes += [
                f"{name}={value!r} instead of {before['spec'].get(name)!r}"
                for name, value in now["spec"].items()
                if before["spec"].get(name) != value
            ]
        except (OSError, ValueError, AttributeError, KeyError, TypeError):
            raise RunError(
                f"{self.folder} exists, and has no {STATE} of such a comparison; choose another --run-dir"
            ) from None
        if changes and any(self.folder.glob("batch-*/ckpt/step_*")):
            raise RunError(
                f"{self.folder} was made with other settings ({'; '.join(sorted(changes))}); repeat them to "
                "continue, or choose another --run-dir"
            )


def run_sweep(sweep: Sweep, show: Callable[[str, Event | None], None]) -> Iterator[BatchResult]:
    """Train with each batch, smallest first, and yield its result. Call `sweep.open` before.

    A training that is complete is only read, and one that was stopped continues. show: called with the name
    of the training and each event.
    """
    for batch in sweep.batches:
        if not sweep.tunes:
            yield _run(sweep, batch, 1.0, show)
            continue
        found = {factor: _run(sweep, batch, factor, show) for factor in FACTORS}
        while True:
            best = min(found, key=lambda factor: _rank(found[factor], sweep.target))
            at_edge = best in (min(found), max(found)) and 1 / WIDEST < best < WIDEST
            if not at_edge:
                break
            factor = best * (2 if best == max(found) else 0.5)
            found[factor] = _run(sweep, batch, factor, show)
        yield found[best]


def _rank(result: BatchResult, target: Target) -> tuple[float, float]:
    """Return a key that sorts better results first."""
    if result.steps is not None:
        return result.steps, 0.0
    if result.best is None:
        return float("inf"), float("inf")
    return float("inf"), -result.best if target.is_maximum else result.best


def _run(sweep: Sweep, batch: int, factor: float, show: Callable[[str, Event | None], None]) -> BatchResult:
    """Train with a batch, if its run is not complete, and return its result."""
    from paceline.training.optimization.batch_scaling import scale_optimizer

    spec, run = sweep.spec_of(batch, factor), RunFolder(sweep.path_of(batch, factor))
    name = run.path.name
    show(name, None)
    why = ""
    is_new = not run.path.exists()
    if not _is_complete(run):
        if not run.spec.exists() and sweep.source is not None:
            checkpoint, index = find_branch_point(sweep.source, sweep.batches)
            branch(checkpoint, index, create(run.path, spec, sweep.launch), batch)
        try:
            launch = sweep.launch
            training = train(
                spec, launch.plan, ranks=launch.ranks or 1, run=run, device=launch.device, monitor="off"
            )
            with closing(training):
                for event in training:
                    show(name, event)
        except DivergedError as error:
            why = str(error).partition(";")[0]
        except SpecError:  # such as an unknown metric, which only an evaluation shows
            if is_new and run.path.exists():
                run.delete()
            raise
    lr = scale_optimizer(spec, spec.optimizer).lr if not sweep.has_own_optimizer else None
    result = replace(read_result(read(run.events), batch, lr, sweep.target), lr_factor=factor)
    if result.best is None and not why and result.steps is None:
        raise SpecError(
            f"--until {sweep.target}: the evaluations of {run.path} have no {sweep.target.name}, or it is NaN"
        )
    return replace(result, why=why) if why else result


def _is_complete(run: RunFolder) -> bool:
    ended = last(run.events, Ended) if run.events.exists() else []
    return bool(ended) and isinstance(ended[0], Ended) and ended[0].reason == "done"
