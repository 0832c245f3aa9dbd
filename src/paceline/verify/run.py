"""Compare plans with one process: the reference in this process, each plan on real ranks."""

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
from paceline.spec import Spec, Stop
from paceline.task import Task
from paceline.verify.capture import (
    PlanObservation,
    Plant,
    Reference,
    measure_amplification,
    observe_plan,
    record_reference,
)
from paceline.verify.compare import RTOL, Difference, find_axis, scalar_difference

if TYPE_CHECKING:
    from paceline.verify.asynchronous import Condition, TrainingOutcome


@dataclass(frozen=True)
class StepRow:
    """Loss and norm of one step, and relative differences from one process."""

    step: int
    loss: float
    norm: float
    loss_difference: float
    norm_difference: float
    gradient_difference: float
    parameter_difference: float  # and buffers


@dataclass(frozen=True)
class Verdict:
    """Whether a plan computes the same training as one process."""

    plan: Plan
    ranks: int
    microbatches: int = 1  # micro-batches of the single process
    # Difference between its losses and those of one process on whole batches, if that is another training.
    whole_batch_difference: float | None = None
    tolerance: float = RTOL  # the relative difference that counts as rounding
    amplified: float | None = None  # the largest tolerance, if the optimizer amplifies rounding
    rows: tuple[StepRow, ...] = ()
    first: Difference | None = None
    axis: str | None = None  # degrees of the plan that the factor of `first` equals
    only_on: tuple[
        int, ...
    ] = ()  # ranks with the first difference, if other ranks hold the tensor without it
    cannot_be: str | None = None  # why the plan was refused
    failed: str | None = None  # why the ranks failed

    @property
    def same(self) -> bool:
        return self.first is None and self.cannot_be is None and self.failed is None

    def max_difference(self, name: str) -> float:
        """Return the maximum over all steps of a field of StepRow."""
        return max((getattr(row, name) for row in self.rows), default=0.0)

    def as_json(self) -> dict[str, Any]:
        first = self.first
        content: dict[str, Any] = {
            "plan": str(self.plan),
            "ranks": self.ranks,
            "same": self.same if self.cannot_be is None else None,
            "max_rel_loss": _finite(self.max_difference("loss_difference")),
            "max_rel_grad": _finite(
                max(self.max_difference("gradient_difference"), self.max_difference("norm_difference"))
            ),
            "max_rel_param": _finite(self.max_difference("parameter_difference")),
            "first_difference": None,
        }
        if self.tolerance != RTOL or self.amplified is not None:
            content["tolerance"] = _finite(max(self.tolerance, self.amplified or 0.0))
        if self.whole_batch_difference is not None:
            content["compared_with"] = {
                "microbatches": self.microbatches,
                "max_rel_loss_to_whole_batch": _finite(self.whole_batch_difference),
            }
        if first is not None:
            keys = {
                "step": first.step,
                "what": first.what,
                "name": first.name,
                "factor": first.factor,
                "axis": self.axis,
            }
            content["first_difference"] = keys | (
                {"why": first.structure} if first.structure is not None else {}
            )
        for key, reason in (("cannot_be", self.cannot_be), ("failed", self.failed)):
            if reason is not None:
                content |= {key: reason, "max_rel_loss": None, "max_rel_grad": None, "max_rel_param": None}
        return content


def _finite(value: float) -> float | None:
    """Return the value, or None for infinity, which JSON does not have."""
    return value if value < float("inf") else None


class Verification:
    """Verifies plans for one task. The context starts the ranks, and ends them if it created them."""

    def __init__(self, spec: Spec, ranks: int | Ranks, timeout_s: float = 120.0):
        """spec: its steps are run in float64 and without dropout. ranks: their number, or existing ranks."""
        self.spec = spec.model_copy(
            update={
                "precision": "fp64",
                "batch_norm": "global",
                "allow_local_loss": True,  # such a loss shows as a difference
                "timeout_s": timeout_s,
                "max_time": None,
                "stop": Stop(),
                "evaluate_splits": (),
                "data": spec.data.model_copy(update={"workers": 0}),
            }
        )
        self.timeout_s = timeout_s
        self.references: dict[int, Reference] = {}  # by number of micro-batches
        self.depends_on_microbatches = False
        self.notes: tuple[str, ...] = ()  # what could not be checked, and what was checked besides plans
        self.float64_error: str | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="paceline-verify-")
        self._owns_ranks = isinstance(ranks, int)
        self._ranks = Ranks(ranks) if isinstance(ranks, int) else ranks
        self.size = self._ranks.size

    def __enter__(self) -> "Verification":
        self._ranks.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._owns_ranks:
            self._ranks.end()
        self._folder.cleanup()

    def reference(self, microbatches: int = 1) -> Reference:
        """Return the training with one process, recorded at the first call."""
        if microbatches not in self.references:
            if not self.references:
                self._check_weights(tasks.load_task(self.spec.task, self.spec.set))
            self.references[microbatches] = self._record(microbatches)
            self.references[microbatches].save(self._path(microbatches))
            self.depends_on_microbatches |= self.references[microbatches].has_batch_norm
        return self.references[microbatches]

    def _check_weights(self, task: Task) -> None:
        """Raise TaskError if initial weights differ from those of a plain construction.

        The reference would repeat the error. It would also repeat attention between packed documents."""
        from paceline.training.checks.initial_weights import check_initial_weights
        from paceline.training.model_facts.model_analysis import build_meta_model
        from paceline.verify.isolation import check_isolation

        built = build_meta_model(self.spec, task)
        self.notes += check_initial_weights(self.spec, task, built.model, built.weights)
        sentence = check_isolation(self.spec, task, built.model, built.weights)
        self.notes += () if sentence is None else (sentence,)

    def _record(self, microbatches: int, rounding_dtype: str | None = None) -> Reference:
        """Return the reference in float64, or in float32 if an operation has no float64 kernel."""
        task = tasks.load_task(self.spec.task, self.spec.set)
        try:
            reference = record_reference(self.spec, task, microbatches, rounding_dtype)
        except (TaskError, RuntimeError, TypeError) as error:
            if self.spec.precision == "fp32":
                raise
            spec = self.spec.model_copy(update={"precision": "fp32"})
            try:
                reference = record_reference(spec, task, microbatches, rounding_dtype)
            except (TaskError, RuntimeError, TypeError):
                raise error from None  # both dtypes fail
            self.spec, self.float64_error = spec, str(error).partition("\n")[0]
        reference.float64_error = self.float64_error
        return reference

    def _measure_amplification(self, microbatches: int) -> None:
        """Measure how one process amplifies rounding, and save it with the reference."""
        reference = self.reference(microbatches)
        measure_amplification(reference, self._record(microbatches, reference.narrowest_dtype))
        reference.save(self._path(microbatches))

    def _path(self, microbatches: int) -> Path:
        return Path(self._folder.name) / f"microbatches{microbatches}.pt"

    def verify(self, plan: Plan, plant: Plant = nullcontext) -> Verdict:
        """Return the verdict on a plan.

        Raises PlanError or TaskError for an impossible plan, RankError if a rank fails."""
        resolved = plan.resolve(self.size)
        if resolved.is_asynchronous:
            raise PlanError(
                f"the update of plan {plan} differs from that of one process by design; "
                "use check_conditions() for it"
            )
        micro_batch_size(self.spec.batch, resolved)
        self.reference()
        microbatches = resolved.microbatches if self.depends_on_microbatches else 1
        verdict = self._compare(plan, resolved, microbatches, plant)
        if (
            not verdict.same
            and resolved.microbatches != microbatches
            and self._check_microbatches(resolved.microbatches)
        ):
            return self._compare(plan, resolved, resolved.microbatches, plant)
        return verdict

    def check_conditions(self, plan: Plan) -> "list[Condition]":
        """Return the conditions that an asynchronous plan must satisfy instead of equality.

        Raises PlanError, TaskError and RankError."""
        from paceline.verify.asynchronous import check_conditions, train_on_rank

        micro_batch_size(self.spec.batch, plan.resolve(self.size))
        task = tasks.load_task(self.spec.task, self.spec.set)

        def run(spec: Spec, plan: Plan, path: Path) -> "list[TrainingOutcome]":
            return self._ranks(train_on_rank, spec, str(plan), path, timeout_s=self.timeout_s)

        folder = Path(self._folder.name) / "runs"
        return check_conditions(self.spec, task, plan, self.reference(), run, folder)

    def _compare(self, plan: Plan, resolved: ResolvedPlan, microbatches: int, plant: Plant) -> Verdict:
        reference = self.reference(microbatches)
        observations = self._ranks(
            observe_plan, self.spec, str(plan), self._path(microbatches), plant, timeout_s=self.timeout_s
        )
        verdict = build_verdict(plan, resolved, self.size, microbatches, reference, observations)
        if verdict.first is not None and verdict.first.may_be_rounding and not reference.amplified:
            self._measure_amplification(microbatches)
            return self._compare(plan, resolved, microbatches, plant)
        if microbatches > 1 and not reference.has_batch_norm:
            return replace(verdict, whole_batch_difference=self._whole_batch_difference(microbatches))
        return verdict

    def _whole_batch_difference(self, microbatches: int) -> float | None:
        """Return the difference between the losses of one process with micro-batches and on whole batches."""
        whole, split = self.reference(), self.reference(microbatches)
        pairs = zip(split.losses, whole.losses, strict=True)
        return max((scalar_difference(*pair) for pair in pairs), default=0.0)

    def _check_microbatches(self, microbatches: int) -> bool:
        """Return whether micro-batches already change the training of one process."""
        whole, split = self.reference(), self.reference(microbatches)
        pairs = zip([*whole.losses, *whole.norms], [*split.losses, *split.norms], strict=True)
        self.depends_on_microbatches |= any(scalar_difference(*pair) > whole.tolerance for pair in pairs)
        return self.depends_on_microbatches

    def try_verify(self, plan: Plan, plant: Plant = nullcontext) -> Verdict:
        """Return the verdict like `verify`, with an error as a part of the verdict."""
        try:
            return self.verify(plan, plant)
        except (PlanError, TaskError) as error:
            return Verdict(plan, self.size, cannot_be=str(error))
        except RankError as error:
            return Verdict(plan, self.size, failed=str(error))


def build_verdict(
    plan: Plan,
    resolved: ResolvedPlan,
    ranks: int,
    microbatches: int,
    reference: Reference,
    observations: list[PlanObservation],
) -> Verdict:
    """Combine the observations of all ranks. microbatches: of the single process."""
    rows: list[StepRow] = []
    differences = [rank.first for rank in observations if rank.first is not None]
    differences += _find_missing_tensors(reference, observations)
    for at, (loss, norm) in enumerate(zip(observations[0].losses, observations[0].norms, strict=True)):
        step = at + 1
        loss_difference = scalar_difference(loss, reference.losses[at])
        norm_difference = scalar_difference(norm, reference.norms[at])
        for what, value, expected, relative in (
            ("loss", loss, reference.losses[at], loss_difference),
            ("norm", norm, reference.norms[at], norm_difference),
        ):
            if relative > reference.allowed(step, what, ""):
                factor = value / expected if expected else None
                differences.append(Difference(step, what, "", 0, relative, factor, uniform=True))
        # The first row includes the parameters before the first step.
        numbers = (at, step) if at == 0 else (step,)
        tensors = [rank.differences[number] for rank in observations for number in numbers]
        rows.append(
            StepRow(
                step,
                loss,
                norm,
                loss_difference,
                norm_difference,
                max(kinds.get("gradient", 0.0) for kinds in tensors),
                max(kinds.get(what, 0.0) for kinds in tensors for what in ("parameter", "buffer")),
            )
        )
    first = min(differences, key=lambda difference: difference.sort_key, default=None)
    axis = None
    if first is not None and first.uniform:
        axis = find_axis(first.factor, resolved, ranks, of_norm=first.what == "norm")
    amplified = max(
        (value for step_values in reference.amplified for value in step_values.values()), default=None
    )
    return Verdict(
        plan,
        ranks,
        microbatches,
        tolerance=reference.tolerance,
        amplified=amplified,
        rows=tuple(rows),
        first=first,
        axis=axis,
        only_on=_find_differing_ranks(first, observations),
    )


def _find_differing_ranks(first: Difference | None, observations: list[PlanObservation]) -> tuple[int, ...]:
    """Return the ranks with the first difference; empty if all ranks that hold the tensor have it."""
    if first is None or not first.name:
        return ()
    differing = tuple(
        number
        for number, rank in enumerate(observations)
        if rank.first is not None and rank.first.sort_key == first.sort_key
    )
    holding = tuple(number for number, rank in enumerate(observations) if first.name in rank.names)
    return differing if differing != holding else ()


def _find_missing_tensors(reference: Reference, observations: list[PlanObservation]) -> list[Difference]:
    """Return a difference for each tensor of the model that no rank holds."""
    names: set[str] = set().union(*(rank.names for rank in observations))
    return [
        Difference(0, "parameter", name, position, float("inf"), structure="is on no rank")
        for position, name in enumerate(reference.names)
        if name not in names
    ]


def choose_batch(min_batch: int, plans: list[Plan], ranks: int) -> int:
    """Return the smallest batch of at least `min_batch` that all possible plans can divide."""
    divisor = 1
    for plan in plans:
        try:
            resolved = plan.resolve(ranks)
        except PlanError:
            continue
        divisor = math.lcm(divisor, resolved.dp * resolved.microbatches)
    return -(-min_batch // divisor) * divisor
