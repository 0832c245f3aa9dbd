"""What is said of plans whose update is another one."""

import pytest

from paceline.plan.plan import WORDS, parse
from paceline.training.holds import same_update, what_must_hold


@pytest.mark.parametrize("word", WORDS)
def test_only_asynchronous_plans_have_something_else_to_hold(word: str) -> None:
    plan = parse(word)
    assert bool(what_must_hold(plan)) == plan.is_asynchronous
    assert all(sentence.endswith(".") and "\n" not in sentence for sentence in what_must_hold(plan))


def test_the_nearest_plans_that_compute_the_same() -> None:
    assert str(same_update(parse("parameter-server,servers=2"))) == "parameter-server,servers=2,staleness=0"
    assert same_update(parse("parameter-server,staleness=0")) is None
    assert same_update(parse("local-sgd,period=4")) == parse("local-sgd,period=1")
    assert same_update(parse("ddp")) is None
    assert "more than 4 steps ahead" in what_must_hold(parse("parameter-server"))[0]
    assert "until step 100" in what_must_hold(parse("post-local-sgd"))[0].lower()
