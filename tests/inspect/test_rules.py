"""All rules together: the order of findings, what was checked, and facts without anything."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.inspect import device_rules
from paceline.inspect.facts import RunFacts
from paceline.inspect.find import find
from paceline.inspect.finding import Missing, NotApplicable
from paceline.inspect.needs import needs_gpu
from paceline.inspect.rules import RULES
from paceline.spec import Spec
from run_facts import BY_NAME, make_beats, make_evaluations, make_facts, make_steps


def test_a_healthy_run_has_no_findings_and_names_what_was_checked() -> None:
    result = find(make_facts(beats=make_beats({"forward": 0.02}, {"forward": 0.02})))
    assert result.findings == ()
    assert "waiting for input" in result.checked
    assert "growing memory of ranks" in result.missing
    assert not {*result.checked} & {*result.missing}


def test_findings_are_ordered_by_cost_which_continues_to_the_end() -> None:
    facts = make_facts(
        steps=make_steps(step_s=0.05, data_s=0.02),
        evaluated=make_evaluations(2.0, every=10),
        spec=Spec(tf32=True),
        remaining_s=7200.0,
    )
    result = find(facts)
    assert [finding.rule for finding in result.findings] == ["evaluation", "slow-input", "ineffective-option"]
    second = result.findings[1]
    assert second.to_end_s == pytest.approx(0.4 * 7200.0)
    assert second.lost_s == pytest.approx(0.4 * facts.run_s)


def test_names_of_rules_are_unique() -> None:
    assert len(BY_NAME) == len(RULES) == len({rule.checks for rule in RULES})


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_rules_accept_facts_without_anything(rule: Any) -> None:
    for facts in (
        RunFacts(path=Path("a")),
        make_facts(steps=()),
        replace(make_facts(), spec=None, plan=None, facts={}),
    ):
        outcome = rule.apply(facts)
        assert isinstance(outcome, (Missing, NotApplicable)) or list(outcome) == []


def test_a_recording_is_checked_by_rules_about_samples_only() -> None:
    """Facts of a run next to it show that each of the other rules applies somewhere."""
    recording = find(RunFacts(path=Path("gpu.csv"), is_recording=True))
    mentioned = {*recording.checked, *recording.missing}
    of_samples = {
        "device-idle", "tensor-cores", "throttling", "gpu-memory", "batch-size", "shared-gpu", "gpu-errors",
        "gpu-memory-growth",
        "memory-growth", "memory", "swapping",
    }  # fmt: skip
    assert mentioned == {BY_NAME[name].checks for name in of_samples}
    on_gpus = find(make_facts(device="NVIDIA H100", precision="fp16", plan="pp=2"))
    on_cpus = find(make_facts(precision="bf16"))
    applied = {name for found in (on_gpus, on_cpus) for name in (*found.checked, *found.missing)}
    assert applied == {rule.checks for rule in RULES}


def test_the_loop_of_a_user_is_checked_by_rules_about_samples() -> None:
    found = find(RunFacts(path=Path("runs/a"), is_own_loop=True))
    assert not found.findings
    assert not any("has not started" in reason for reason in found.missing.values())
    assert BY_NAME["memory-growth"].checks in found.missing


def test_findings_about_gpus_are_marked_as_simulated() -> None:
    """No device has shown them yet. Of two rules, only the findings about GPUs are marked."""
    for rule in RULES:
        if rule.check.__module__ == device_rules.__name__ or needs_gpu in rule.needs:
            assert rule.is_simulated, rule.name
    lacks = {"cores": 4.0, "local_ranks": 1.0, "native_precision": 0.0, "capability": 70.0}
    for device, expected in (("Tesla V100-SXM2-32GB", True), ("cpu", False)):
        spec = Spec(precision="bf16", tf32=True)
        facts = make_facts(device=device, precision="bf16", spec=spec, facts=lacks)
        marks = {finding.rule: finding.simulated for finding in find(facts).findings}
        assert marks["precision"] == marks["ineffective-option"] == expected, device
