"""Hold plans against one process: the reference here, each plan on real ranks, and what comes of it."""

import math
import tempfile
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from paceline import task as tasks
from paceline.errors import PlanError, RankError, TaskError
from paceline.launch.rank_pool import Ranks
from paceline.plan.plan import Plan, ResolvedPlan, micro_batch_size
from paceline.spec import Spec
from paceline.task import Task
from paceline.verify.capture import PlanObservation, Plant, Reference, compare, grow, record
from paceline.verify.compare import ROUNDING, RTOL, Difference, apart_numbers, axis_of

if TYPE_CHECKING:
    from paceline.verify.asynchronous import Condition, TrainingOutcome


@dataclass(frozen=True)
class StepRow:
    """One step; the rest are relative differences to one process."""

    step: int
    loss: float
    norm: float
    of_loss: float
    of_norm: float
    of_gradients: float
    of_parameters: float  # and buffers


@dataclass(frozen=True)
class Verdict:
    """Whether a plan computes what one process does."""

    plan: Plan
    ranks: int
    microbatches: int = 1  # micro-batches of the one process
    of_whole: float | None = (
        None  # how far the losses of this one process are from those on whole batches, where that is another training
    )
    tolerance: float = RTOL  # the relative difference that is taken for rounding
    grown: float | None = None  # the largest that is, where the optimizer amplifies rounding
    rows: tuple[StepRow, ...] = ()
    first: Difference | None = None
    axis: str | None = None  # degrees that the factor of `first` equals
    only_on: tuple[int, ...] = ()  # the ranks that differ there first, where others that hold it do not
    cannot_be: str | None = None  # why the plan was refused
    failed: str | None = None  # what went wrong on the ranks

    @property
    def same(self) -> bool:
        return self.first is None and self.cannot_be is None and self.failed is None

    def furthest(self, of: str) -> float:
        return max((getattr(row, of) for row in self.rows), default=0.0)

    def as_json(self) -> dict[str, Any]:
        first = self.first
        found: dict[str, Any] = {
            "plan": str(self.plan),
            "ranks": self.ranks,
            "same": self.same if self.cannot_be is None else None,
            "max_rel_loss": _number(self.furthest("of_loss")),
            "max_rel_grad": _number(max(self.furthest("of_gradients"), self.furthest("of_norm"))),
            "max_rel_param": _number(self.furthest("of_parameters")),
            "first_difference": None,
        }
        if self.tolerance != RTOL or self.grown is not None:
            found["tolerance"] = _number(max(self.tolerance, self.grown or 0.0))
        if self.of_whole is not None:
            found["compared_with"] = {
                "microbatches": self.microbatches,
                "max_rel_loss_to_whole_batch": _number(self.of_whole),
            }
        if first is not None:
            keys = {
                "step": first.step,
                "what": first.what,
                "name": first.name,
                "factor": first.factor,
                "axis": self.axis,
            }
            found["first_difference"] = keys | (
                {"why": first.structure} if first.structure is not None else {}
            )
        for key, reason in (("cannot_be", self.cannot_be), ("failed", self.failed)):
            if reason is not None:
                found |= {key: reason, "max_rel_loss": None, "max_rel_grad": None, "max_rel_param": None}
        return found


def _number(value: float) -> float | None:
    """JSON has no infinity."""
    return value if value < float("inf") else None


class Verification:
    """One task on so many ranks. The ranks start with its context, and end with it if they were not given."""

    def __init__(self, spec: Spec, ranks: int | Ranks, timeout_s: float = 120.0):
        """spec: its steps are run, in float64, without dropout. `ranks`: how many, or some that are there already."""
        self.spec = spec.model_copy(
            update={
                "precision": "fp64",
                "batch_norm": "global",
                "allow_local_loss": True,  # it sees what becomes of them
                "timeout_s": timeout_s,
                "data": spec.data.model_copy(update={"workers": 0}),
            }
        )
        self.timeout_s = timeout_s
        self.references: dict[int, Reference] = {}  # micro-batches -> of one process that runs so many
        self.sees_micro_batches = False
        self.notes: tuple[str, ...] = ()  # what could not be checked
        self.no_float64: str | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="paceline-verify-")
        self._own = isinstance(ranks, int)
        self._ranks = Ranks(ranks) if isinstance(ranks, int) else ranks
        self.size = self._ranks.size

    def __enter__(self) -> "Verification":
        self._ranks.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._own:
            self._ranks.end()
        self._folder.cleanup()

    def reference(self, microbatches: int = 1) -> Reference:
        if microbatches not in self.references:
            if not self.references:
                self._check_weights(tasks.load_task(self.spec.task, self.spec.set))
            self.references[microbatches] = self._record(microbatches)
            self.references[microbatches].save(self._path(microbatches))
            self.sees_micro_batches |= self.references[microbatches].has_batch_norm
        return self.references[microbatches]

    def _check_weights(self, task: Task) -> None:
        """Raises TaskError where initial weights are not those of a plain construction: the reference would have them, too."""
        from paceline.training.initial_weights import check_initial_weights
        from paceline.training.model_analysis import build_meta_model

        built = build_meta_model(self.spec, task)
        self.notes += check_initial_weights(self.spec, task, built.model, built.weights)

    def _record(self, microbatches: int, rounding: float = 0.0) -> Reference:
        """In float64; in float32 where an operation of the model has no kernel for that."""
        task = tasks.load_task(self.spec.task, self.spec.set)
        try:
            found = record(self.spec, task, microbatches, rounding)
        except (TaskError, RuntimeError, TypeError) as error:
            if self.spec.precision == "fp32":
                raise
            spec = self.spec.model_copy(update={"precision": "fp32"})
            try:
                found = record(spec, task, microbatches, rounding)
            except (TaskError, RuntimeError, TypeError):
                raise error from None  # it is wrong in both
            self.spec, self.no_float64 = spec, str(error).partition("\n")[0]
        found.no_float64 = self.no_float64
        return found

    def _grow(self, microbatches: int) -> None:
        """Find out what becomes of rounding in one process, for the ranks to be compared by."""
        reference = self.reference(microbatches)
        grow(reference, self._record(microbatches, ROUNDING[reference.computes_in]))
        reference.save(self._path(microbatches))

    def _path(self, microbatches: int) -> Path:
        return Path(self._folder.name) / f"microbatches{microbatches}.pt"

    def verify(self, asked: Plan, plant: Plant = nullcontext) -> Verdict:
        """Raises PlanError and TaskError for a plan that cannot be, RankError when a rank failed."""
        plan = asked.resolve(self.size)
        if plan.is_asynchronous:
            raise PlanError(
                f"plan {asked} makes another update than that of one process; held() tells what holds of it instead"
            )
        micro_batch_size(self.spec.batch, plan)
        self.reference()
        microbatches = plan.microbatches if self.sees_micro_batches else 1
        verdict = self._held(asked, plan, microbatches, plant)
        if not verdict.same and plan.microbatches != microbatches and self._depends_on(plan.microbatches):
            return self._held(asked, plan, plan.microbatches, plant)
        return verdict

    def held(self, asked: Plan) -> "list[Condition]":
        """What must hold of an asynchronous plan, in place of equality. Raises PlanError, TaskError and RankError."""
        from paceline.verify.asynchronous import must_hold, on_rank

        micro_batch_size(self.spec.batch, asked.resolve(self.size))
        task = tasks.load_task(self.spec.task, self.spec.set)

        def run(spec: Spec, plan: Plan, path: Path) -> "list[TrainingOutcome]":
            return self._ranks(on_rank, spec, str(plan), path, timeout_s=self.timeout_s)

        return must_hold(self.spec, task, asked, self.reference(), run, Path(self._folder.name) / "runs")

    def _held(self, asked: Plan, plan: ResolvedPlan, microbatches: int, plant: Plant) -> Verdict:
        reference = self.reference(microbatches)
        seen = self._ranks(
            compare, self.spec, str(asked), self._path(microbatches), plant, timeout_s=self.timeout_s
        )
        verdict = judge(asked, plan, self.size, microbatches, reference, seen)
        if verdict.first is not None and verdict.first.may_be_rounding and not reference.grown:
            self._grow(microbatches)
            return self._held(asked, plan, microbatches, plant)
        return (
            replace(verdict, of_whole=self._of_whole(microbatches))
            if microbatches > 1 and not reference.has_batch_norm
            else verdict
        )

    def _of_whole(self, microbatches: int) -> float | None:
        """How far the losses of one process with so many micro-batches are from those on whole batches."""
        one, other = self.reference(), self.reference(microbatches)
        return max((apart_numbers(*pair) for pair in zip(other.losses, one.losses, strict=True)), default=0.0)

    def _depends_on(self, microbatches: int) -> bool:
        """Whether so many micro-batches are another training already under one process."""
        one, other = self.reference(), self.reference(microbatches)
        pairs = zip([*one.losses, *one.norms], [*other.losses, *other.norms], strict=True)
        self.sees_micro_batches |= any(apart_numbers(*pair) > one.tolerance for pair in pairs)
        return self.sees_micro_batches

    def outcome(self, plan: Plan, plant: Plant = nullcontext) -> Verdict:
        """As `verify`, with what it raises in the verdict."""
        try:
            return self.verify(plan, plant)
        except (PlanError, TaskError) as error:
            return Verdict(plan, self.size, cannot_be=str(error))
        except RankError as error:
            return Verdict(plan, self.size, failed=str(error))


def judge(
    asked: Plan,
    plan: ResolvedPlan,
    ranks: int,
    microbatches: int,
    reference: Reference,
    seen: list[PlanObservation],
) -> Verdict:
    """What the ranks saw, taken together. `microbatches`: the micro-batches of the one process."""
    rows: list[StepRow] = []
    found = [rank.first for rank in seen if rank.first is not None]
    found += _left_out(reference, seen)
    for at, (loss, norm) in enumerate(zip(seen[0].losses, seen[0].norms, strict=True)):
        of_loss, of_norm = apart_numbers(loss, reference.losses[at]), apart_numbers(norm, reference.norms[at])
        for what, value, expected, by in (
            ("loss", loss, reference.losses[at], of_loss),
            ("norm", norm, reference.norms[at], of_norm),
        ):
            if by > reference.allowed(at + 1, what, ""):
                found.append(
                    Difference(at + 1, what, "", 0, by, value / expected if expected else None, uniform=True)
                )
        looks = [rank.apart[step] for rank in seen for step in ((at, at + 1) if at == 0 else (at + 1,))]
        of_parameters = max(look.get(what, 0.0) for look in looks for what in ("parameter", "buffer"))
        rows.append(
            StepRow(
                at + 1,
                loss,
                norm,
                of_loss,
                of_norm,
                max(look.get("gradient", 0.0) for look in looks),
                of_parameters,
            )
        )
    first = min(found, key=lambda difference: difference.place, default=None)
    axis = (
        axis_of(first.factor, plan, ranks, of_norm=first.what == "norm")
        if first is not None and first.uniform
        else None
    )
    grown = max((value for look in reference.grown for value in look.values()), default=None)
    only_on = _only_on(first, seen)
    return Verdict(
        asked,
        ranks,
        microbatches,
        tolerance=reference.tolerance,
        grown=grown,
        rows=tuple(rows),
        first=first,
        axis=axis,
        only_on=only_on,
    )


def _only_on(first: Difference | None, seen: list[PlanObservation]) -> tuple[int, ...]:
    if first is None or not first.name:
        return ()
    differing = tuple(
        at for at, rank in enumerate(seen) if rank.first is not None and rank.first.place == first.place
    )
    holding = tuple(at for at, rank in enumerate(seen) if first.name in rank.names)
    return differing if differing != holding else ()


def _left_out(reference: Reference, seen: list[PlanObservation]) -> list[Difference]:
    """Tensors of the model that no rank holds."""
    here: set[str] = set().union(*(rank.names for rank in seen))
    return [
        Difference(0, "parameter", name, at, float("inf"), structure="is on no rank")
        for at, name in enumerate(reference.names)
        if name not in here
    ]


def batch_for(spec_batch: int, plans: list[Plan], ranks: int) -> int:
    """The least batch from `spec_batch` on that all of the plans can split that can be."""
    parts = 1
    for plan in plans:
        try:
            said = plan.resolve(ranks)
        except PlanError:
            continue
        parts = math.lcm(parts, said.dp * said.microbatches)
    return -(-spec_batch // parts) * parts
