"""paceline.tune: ask and tell from a loop of the user's own."""

import re
from pathlib import Path

import pytest

import paceline
from paceline import RunError, SpecError
from paceline.tuning.journal import read_state

SPACE = {"x": "float:-4:4", "shape": ["a", "b"], "depth": "int:1:3 if shape==b"}
PAGE = (Path(__file__).parents[2] / "docs" / "tune.md").read_text()


def loss_of(trial) -> float:
    return (trial["x"] - 1) ** 2 + (0.0 if trial["shape"] == "b" else 1.0)


def test_best_is_the_least_reported_loss():
    search = paceline.tune(SPACE, trials=12, sampler="quasi-random")
    losses = {}
    for trial in search:
        losses[trial.number] = loss_of(trial)
        assert ("depth" in trial.values) == (trial["shape"] == "b")
        trial.report(loss=losses[trial.number])
    assert list(losses) == list(range(12))
    assert search.best.number == min(losses, key=losses.get)
    assert [trial.metrics["loss"] for trial in search.trials] == list(losses.values())


def test_interrupted_loop_continues_with_the_same_trials(tmp_path):
    expected = [trial.values for trial in paceline.tune(SPACE, trials=6, seed=3)]
    journal = tmp_path / "new" / "study.jsonl"
    seen = []
    for stop in (0, 2, 6):
        for trial in paceline.tune(SPACE, trials=6, seed=3, journal=journal):
            if trial.number == stop:
                break
            seen.append(trial.values)
            trial.report(loss=loss_of(trial))
    assert seen == expected
    assert [trial.state for trial in read_state(journal).trials.values()] == ["complete"] * 6


def test_trial_with_a_recorded_result_is_not_repeated(tmp_path):
    journal = tmp_path / "study.jsonl"
    for trial in paceline.tune(SPACE, trials=2, journal=journal):
        trial.report(loss=loss_of(trial))
    lines = journal.read_text().splitlines(keepends=True)
    journal.write_text("".join(lines[:-1]))
    search = paceline.tune(SPACE, trials=2, journal=journal)
    assert list(search) == []
    assert [trial.number for trial in search.trials] == [0, 1]


def test_journal_of_another_process_or_search_is_refused(tmp_path):
    journal = tmp_path / "study.jsonl"
    for trial in paceline.tune(SPACE, trials=2, journal=journal):
        trial.report(loss=loss_of(trial))
        with pytest.raises(RunError, match="is used by another process"):
            next(iter(paceline.tune(SPACE, trials=2, journal=journal)))
    with pytest.raises(RunError, match=r"values outside of the space of paceline.tune\(\)"):
        paceline.tune({"x": "float:90:91"}, journal=journal)
    with pytest.raises(RunError, match="has no accuracy; use another journal"):
        paceline.tune(SPACE, "max accuracy", journal=journal)


def test_trials_without_a_finite_result_fail():
    search = paceline.tune({"x": [1, 2, 3]}, sampler="grid")
    for trial in search:
        if trial["x"] == 2:
            trial.report(loss=float("nan"))
        elif trial["x"] == 3:
            trial.report(loss=0.5)
    assert [trial["x"] for trial in search.trials] == [3]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"space": {}}, "space must be a dict of ranges"),
        ({"space": {"x": "lgo:1:2"}}, "did you mean log?"),
        ({"space": {"x": "1,2"}, "metric": "loss"}, "must be 'min NAME' or 'max NAME'"),
        ({"space": {"x": "1,2"}, "sampler": "best"}, "sampler must be 'random', 'grid'"),
        ({"space": {"x": "1,2"}, "sampler": "grid", "trials": 3}, "the grid has 2 combinations"),
        ({"space": {"x": "1,2"}, "trials": 0}, "trials must be greater than or equal to 1"),
    ],
    ids=["empty", "kind", "metric", "sampler", "grid", "trials"],
)
def test_wrong_arguments_are_one_sentence(arguments, sentence):
    with pytest.raises(SpecError) as error:
        paceline.tune(**arguments)
    assert sentence in str(error.value)


def test_wrong_reports_are_one_sentence(tmp_path):
    trials = iter(paceline.tune({"x": "1,2"}))
    next(trials).report(los=1.0)
    with pytest.raises(SpecError, match=r"not given loss; did you mean los\?"):
        next(trials)
    with pytest.raises(SpecError, match=r"must be a number, got str"):
        next(iter(paceline.tune({"x": "1,2"}))).report(loss="low")
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match="cannot create"):
        paceline.tune({"x": "1,2"}, journal=tmp_path / "file" / "journal")


def test_example_of_the_page_runs():
    [example] = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    namespace: dict = {}
    exec(example, namespace)
    assert abs(namespace["search"].best["lr"] / 0.01 - 1) < 1
