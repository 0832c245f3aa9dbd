"""Measured scaling: short trainings on several numbers of ranks, strong and weak."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from paceline.errors import DivergedError, LaunchError, PlanError, RankError, RunError
from paceline.plan.cost_model.cost import RUN_NOISE, Cost
from paceline.short_runs.request import ShortRequest
from paceline.short_runs.serial_share import Sample, SerialShare, fit_amdahl, fit_gustafson
from paceline.short_runs.training import ShortRun, count_steps, train_shortly
from paceline.units import format_seconds, several


@dataclass(frozen=True)
class MeasuredPoint:
    """A short training, and what was predicted of it before. speedup: of samples per second, relative to the
    fewest ranks. efficiency: the speed-up divided by the factor of ranks."""

    run: ShortRun
    predicted: Cost
    speedup: float = 1.0
    efficiency: float = 1.0

    @property
    def sample(self) -> Sample:
        """The step with its error, that between two trainings included."""
        return Sample(self.run.ranks, self.run.step_s, (self.run.error**2 + RUN_NOISE**2) ** 0.5)


@dataclass(frozen=True)
class MeasuredCurve:
    """Points by number of ranks, fewest first. failed: a sentence for each number that did not train."""

    points: tuple[MeasuredPoint, ...]
    failed: tuple[str, ...]
    serial: SerialShare | None


@dataclass(frozen=True)
class MeasuredScaling:
    """Strong scaling with one batch, and weak scaling with `each` samples per rank."""

    batch: int
    each: Fraction
    strong: MeasuredCurve
    weak: MeasuredCurve

    @property
    def runs(self) -> list[MeasuredPoint]:
        """All short trainings, each once."""
        return list({id(point.run): point for point in (*self.strong.points, *self.weak.points)}.values())


def measure_scaling(
    request: ShortRequest, counts: Sequence[int], plan: str | None, show: Callable[[str], None]
) -> MeasuredScaling:
    """Train shortly on each number of ranks, with the batch of the request and with one batch per rank.

    plan: for all numbers of ranks [default: of each, the fastest predicted that can train the task].
    show: called with what is trained now. Raises PlanError if no number of ranks could train.
    """
    known: dict[tuple[int, int], MeasuredPoint | str] = {}

    def measure(ranks: int, samples: Fraction) -> MeasuredPoint | str:
        if samples.denominator > 1:
            return f"{ranks} ranks: a batch of {float(samples):g} is not a whole number of samples"
        key = ranks, int(samples)
        if key not in known:
            known[key] = _measure(request.with_batch(int(samples)), ranks, plan, show)
        return known[key]

    batch = request.spec.batch
    strong = [measure(ranks, Fraction(batch)) for ranks in counts]
    trained = [point for point in strong if isinstance(point, MeasuredPoint)]
    if not trained:
        raise PlanError(f"no number of ranks could train: {strong[0]}")
    each = Fraction(batch, trained[0].run.ranks)
    weak = [measure(ranks, each * ranks) for ranks in counts]
    return MeasuredScaling(batch, each, _build_curve(strong, is_weak=False), _build_curve(weak, is_weak=True))


def _measure(
    request: ShortRequest, ranks: int, plan: str | None, show: Callable[[str], None]
) -> MeasuredPoint | str:
    """Return the result of a short training, or why there is none."""
    name = f"{ranks} ranks, batch {request.spec.batch}"
    try:
        chosen, cost = request.find_plan(ranks, plan)
        show(f"{name}, plan {chosen}")
        run = train_shortly(
            request.spec,
            request.launch_on(ranks),
            chosen,
            count_steps(cost.step_s),
            lambda state: show(f"{name}, plan {chosen}: {state}"),
        )
    except (PlanError, LaunchError, RankError, RunError, DivergedError) as error:
        return f"{name}: {error}"
    return MeasuredPoint(run, cost)


def _build_curve(results: Sequence[MeasuredPoint | str], is_weak: bool) -> MeasuredCurve:
    points = [point for point in results if isinstance(point, MeasuredPoint)]
    failed = tuple(result for result in results if isinstance(result, str))
    first = points[0].run
    rated = []
    for point in points:
        run = point.run
        speedup = (run.batch / run.step_s) / (first.batch / first.step_s)
        rated.append(MeasuredPoint(run, point.predicted, speedup, speedup * first.ranks / run.ranks))
    fit = fit_gustafson if is_weak else fit_amdahl
    return MeasuredCurve(tuple(rated), failed, fit([point.sample for point in points]))


@dataclass(frozen=True)
class ScalingVerdict:
    """Whether more ranks pay. ranks: the number that is recommended."""

    ranks: int
    pays: bool
    sentence: str


def judge(points: Sequence[MeasuredPoint], efficiency: float) -> ScalingVerdict:
    """Return whether the most ranks of strong scaling pay, compared with fewer ranks for the same work.

    efficiency: the least efficiency at which ranks are recommended.
    """
    last = points[-1].run
    good = [point.run.ranks for point in points if point.efficiency >= efficiency]
    if len(points) == 1:
        return ScalingVerdict(last.ranks, False, "one number of ranks does not show whether more ranks pay")
    best = min((point for point in points[:-1]), key=lambda point: point.run.step_s)
    pair = f"{_describe_step(last)}, {_describe_step(best.run)}"
    margin = (points[-1].sample.error ** 2 + best.sample.error**2) ** 0.5
    gain = best.run.step_s / last.step_s
    if gain <= 1 + margin:
        why = "" if gain < 1 - margin else ", which is equal within the error"
        fewest = next(p.run for p in points if p.run.step_s <= best.run.step_s * (1 + margin))
        return ScalingVerdict(
            max((count for count in good if count <= fewest.ranks), default=fewest.ranks),
            False,
            f"more ranks do not pay: for the same work, {pair}{why}",
        )
    paid = last.ranks / best.run.ranks
    share = gain / paid
    if share >= efficiency:
        return ScalingVerdict(
            max(good, default=last.ranks),
            True,
            f"more ranks pay: for the same work, {pair}: {gain:.2f} times as fast with {paid:g} times "
            "the ranks",
        )
    return ScalingVerdict(
        max(good, default=points[0].run.ranks),
        False,
        f"more ranks are faster and cost more: for the same work, {pair}: {gain:.2f} times as fast with "
        f"{paid:g} times the ranks, {1 / share - 1:.0%} more device time",
    )


def _describe_step(run: ShortRun) -> str:
    verb = "takes" if run.ranks == 1 else "take"
    return f"{several(run.ranks, 'rank')} {verb} {format_seconds(run.step_s)} a step"
