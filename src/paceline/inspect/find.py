"""Apply the rules to the facts of a run."""

from paceline.inspect.facts import RunFacts
from paceline.inspect.finding import Evidence, Finding, Findings, Missing, NotApplicable, Rule
from paceline.inspect.rules import RULES


def find(facts: RunFacts) -> Findings:
    """Return what the rules find, most costly first, and what was and could not be checked."""
    findings: list[Finding] = []
    checked: list[str] = []
    missing: dict[str, str] = {}
    for rule in RULES:
        outcome = rule.apply(facts)
        if isinstance(outcome, Missing):
            missing[rule.checks] = outcome.reason
        elif not isinstance(outcome, NotApplicable):
            checked.append(rule.checks)
            findings += [_build_finding(rule, evidence, facts) for evidence in outcome]
    findings.sort(key=lambda finding: -(finding.cost_share or 0.0))  # stable: the table decides ties
    return Findings(tuple(findings), tuple(checked), missing, facts.notes)


def _build_finding(rule: Rule, evidence: Evidence, facts: RunFacts) -> Finding:
    share = evidence.share
    if share is not None:
        share = min(1.0, max(0.0, share))
    total_s = facts.run_s or max((window.duration_s for window in facts.windows), default=0.0)
    return Finding(
        rule=rule.name,
        sentence=evidence.sentence,
        evidence=dict(evidence.values),
        cost_share=share,
        lost_s=share * total_s if share is not None else None,
        to_end_s=share * facts.remaining_s if share is not None and facts.remaining_s is not None else None,
        fix=evidence.fix,
        simulated=rule.is_simulated or evidence.is_simulated,
    )
