"""`paceline doctor` finds faults that were planted in real trainings, and nothing without them."""

import json
from pathlib import Path

import pytest

from command import paceline, succeed

pytestmark = [pytest.mark.processes, pytest.mark.slow]
TASK = f"{Path(__file__).parents[2] / 'benchmarks/findings_tasks.py'}:Planted"
TWO = ("--ranks", "2")
SLEEPS = ("--set", "forward_s=0.03", "--set", "slow_in=forward")


def find_rules(folder: Path, *options: str, steps: int = 60) -> set[str]:
    """Train and return the rules that find something."""
    words = (TASK, "--batch", "32", "--steps", str(steps), "--run-dir", "run", *options)
    succeed("train", *words, at=folder)
    assert paceline("doctor", "run", "--json", "found.json", at=folder).status == 0
    return {finding["rule"] for finding in json.loads((folder / "found.json").read_text())["findings"]}


@pytest.mark.parametrize(
    ("rule", "steps", "fault", "healthy"),
    [
        ("slow-input", 60, ("--set", "sleep_s=0.003"), ("--set", "sleep_s=0")),
        ("straggler", 60, (*TWO, *SLEEPS, "--set", "slow_rank=1"), (*TWO, *SLEEPS)),
        ("evaluation", 60, ("--set", "spec.evaluate_every=1"), ("--set", "spec.evaluate_every=30")),
        ("threads", 60, ("--set", "spec.threads=512"), ("--set", "spec.threads=1")),
        ("plateau", 300, ("--lr", "1e-9"), ("--lr", "1e-3")),
        ("loss-spike", 220, ("--set", "spike_at=160"), ()),
    ],
)
def test_a_fault_is_found(
    rule: str, steps: int, fault: tuple[str, ...], healthy: tuple[str, ...], tmp_path: Path
) -> None:
    for name, options, is_expected in (("faulty", fault, True), ("healthy", healthy, False)):
        (tmp_path / name).mkdir()
        assert (rule in find_rules(tmp_path / name, *options, steps=steps)) == is_expected, name


def test_a_leak_is_found_in_the_samples(tmp_path: Path) -> None:
    for leak_MB, expected in ((2.0, True), (0.0, False)):
        folder = tmp_path / str(leak_MB)
        folder.mkdir()
        options = (*SLEEPS, "--set", f"leak_MB={leak_MB}", "--monitor", "0.2")
        assert ("memory-growth" in find_rules(folder, *options, steps=250)) == expected, leak_MB
