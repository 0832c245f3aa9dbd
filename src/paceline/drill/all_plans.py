"""Run the drills of one plan that a file of results lacks."""

import shutil
from collections.abc import Callable, Sequence

from paceline.drill.faults import FaultMoment
from paceline.drill.matrix import DrillTrial, TrialFile, TrialResult, Verdict
from paceline.drill.run import Drill, FaultOutcome
from paceline.units import several


def identify(drill: Drill, plan: str, moment: FaultMoment) -> DrillTrial:
    """Return the identity of a drill. plan: in the words of the table."""
    return DrillTrial(
        task=drill.spec.task,
        batch=drill.spec.batch,
        steps=drill.steps,
        seed=drill.spec.seed,
        plan=plan,
        ranks=drill.ranks,
        fault=moment.fault.name,
        moment=moment.seed,
    )


def run_trials(
    drill: Drill,
    trials: Sequence[tuple[DrillTrial, FaultMoment]],
    file: TrialFile,
    show: Callable[[str], None],
) -> None:
    """Run drills of one plan, and append their results. The folder is deleted unless a drill fails.

    show: called with what runs now."""
    if not trials:
        return
    plan = f"{trials[0][0].plan} on {several(drill.ranks, 'rank')}"
    show(f"{plan}: undisturbed")
    has_failed = False
    try:
        reference = drill.run_reference()
        for at, (trial, moment) in enumerate(trials, 1):
            show(f"{plan}, {at} of {len(trials)}: {moment.fault.name} at step {moment.step}")
            outcome = drill.run_fault(moment, reference, f"{at}-{moment.fault.name}")
            has_failed = has_failed or bool(outcome.wrong)
            file.add(_build_result(trial, outcome))
    finally:
        if not has_failed:
            shutil.rmtree(drill.folder, ignore_errors=True)


def _build_result(trial: DrillTrial, outcome: FaultOutcome) -> TrialResult:
    verdict: Verdict = "holds"
    if outcome.untried is not None:
        verdict = "not tried"
    elif outcome.wrong:
        verdict = "fails"
    elif outcome.escaped is not None:
        verdict = "not found"
    return TrialResult(
        trial=trial,
        verdict=verdict,
        step=outcome.moment.step,
        rank=outcome.moment.rank,
        done=outcome.done,
        why=outcome.untried or outcome.escaped or "; ".join(outcome.wrong.values()),
        samples="samples" not in outcome.wrong,
    )
