"""Search spaces: ranges as text, values at positions, conditions, grids and quasi-random points."""

import itertools
import math

import pytest

from paceline.errors import SpecError
from paceline.tuning.parameter import Parameter, parse_parameter
from paceline.tuning.samplers.table import scrambled_radical_inverse
from paceline.tuning.space import Space, build_space


def parse(text, annotation=float, name="x") -> Parameter:
    return parse_parameter(name, f"set.{name}", annotation, text)


def spread(parameter: Parameter, count: int = 3000) -> list:
    return [parameter.from_unit((index + 0.5) / count) for index in range(count)]


def test_choices_of_a_text_field_are_texts():
    assert parse("relu,1,nan,true,'2'", str).choices == ("relu", "1", "nan", "true", "2")
    assert parse("relu,1,true", int).choices == ("relu", 1, True)


def test_float_covers_its_range_evenly():
    values = spread(parse("float:2:6"))
    assert 2 < min(values) < 2.01
    assert 5.99 < max(values) < 6
    assert sum(values) / len(values) == pytest.approx(4)


def test_log_covers_each_decade_equally():
    values = spread(parse("log:1e-4:1e-1"))
    shares = [sum(low <= value < 10 * low for value in values) for low in (1e-4, 1e-3, 1e-2)]
    assert shares == pytest.approx([1000] * 3, abs=1)


def test_integers_are_equally_frequent():
    values = spread(parse("int:32:512:32", int))
    counts = {value: values.count(value) for value in values}
    assert sorted(counts) == list(range(32, 513, 32))
    assert all(type(value) is int for value in counts)
    assert max(counts.values()) - min(counts.values()) <= 1


def test_log_of_an_integer_field_gives_integers_to_both_ends():
    values = spread(parse("log:1:64", int))
    assert {*values} == set(range(1, 65))
    at_one = sum(value == 1 for value in values) / len(values)
    assert at_one == pytest.approx(math.log(1.5 / 0.5) / math.log(64.5 / 0.5), abs=1e-3)


@pytest.mark.parametrize(
    ("text", "choices"),
    [
        ("lamb,adamw", ("lamb", "adamw")),
        ("64, 128", (64, 128)),
        ("true,false", (True, False)),
        ('["tp=2,dp=2", "zero3"]', ("tp=2,dp=2", "zero3")),
        (["a", 1, 2.5], ("a", 1, 2.5)),
        ("gelu", ("gelu",)),
        (7, (7,)),
    ],
    ids=str,
)
def test_choices(text, choices):
    parameter = parse(text, None)
    assert parameter.choices == choices
    assert {*spread(parameter)} == {*choices}


@pytest.mark.parametrize(
    ("text", "annotation", "sentence"),
    [
        ("int:9:3", int, "begin with its smaller end; write 3:9"),
        ("log:0:1", float, "begin above 0"),
        ("lgo:1e-3:1", float, "did you mean log?"),
        ("float:0:1", int, "is an integer; write int:0:1"),
        ("int:0:1.5", int, "write whole numbers"),
        ("float:0:1:2", float, "the step 2 is impossible"),
        ("log:1:8:2", float, "the step 2 is impossible; leave it out"),
        ("a,,b", str, "a choice is empty"),
        ("a,b,a", str, "has the value 'a' twice"),
        ("log:a:b", float, "must be int:LOW:HIGH"),
        ("int:8", int, "must be int:LOW:HIGH"),
        ("float:1e999:2", float, "begin with its smaller end"),
        ([], str, "has no values"),
        ([[1]], str, "a choice must be a number or a text"),
        ("1,inf", float, "a choice must be finite, got inf"),
        ("int:0:1e30", int, "integers must be from -2^53 to 2^53"),
    ],
    ids=str,
)
def test_wrong_ranges_are_refused(text, annotation, sentence):
    with pytest.raises(SpecError) as error:
        parse(text, annotation)
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "annotation", "values"),
    [
        ("int:1:10:4", int, [1, 5, 9]),
        ("float:0:1:0.3", float, [0, 0.3, 0.6, 0.9]),
        ("float:0:0.3:0.1", float, [0, 0.1, 0.2, 0.3]),
    ],
)
def test_range_ends_at_the_last_value_that_its_step_reaches(text, annotation, values):
    parameter = parse(text, annotation)
    assert list(parameter.iterate_values()) == values
    assert parameter.extremes() == [values[0], values[-1]]
    assert {*spread(parameter)} == {*values}
    assert all(map(parameter.contains, values))
    assert not any(map(parameter.contains, (values[-1] + 0.05, values[1] - 0.05, True, "0")))


def test_wide_range_of_integers_is_not_listed():
    parameter = parse("int:0:2147483647", int)
    assert parameter.count_values() == 2**31
    assert (parameter.from_unit(0.0), parameter.from_unit(1 - 2**-53)) == (0, 2**31 - 1)
    with pytest.raises(SpecError, match="more than 1,000,000 combinations"):
        build_space([parameter]).count_grid()


def conditional_space() -> Space:
    return build_space(
        [
            parse("int:1:3 if width>16", int, "depth"),
            parse("8,16,32", int, "width"),
            parse("a,b if depth>=2", str, "shape"),
        ]
    )


def test_conditions_follow_the_values_of_other_parameters():
    space = conditional_space()
    names = [parameter.name for parameter in space.parameters]
    assert names.index("width") < names.index("depth") < names.index("shape")
    for shares in itertools.product((0.0, 0.4, 0.9), repeat=3):
        values = space.decode(dict(zip(names, shares, strict=True)))
        assert ("depth" in values) == (values["width"] == 32)
        assert ("shape" in values) == (values.get("depth", 0) >= 2)


def test_values_with_which_a_parameter_applies():
    space = conditional_space()
    for parameter in space.parameters:
        values = space.find_condition_values(parameter)
        assert parameter.condition is None or parameter.condition.holds(values)
    assert space.find_condition_values(space.parameters[-1]) == {"width": 32, "depth": 3}


def test_grid_has_each_combination_once():
    found = list(conditional_space().list_grid())
    expected = [{"width": 8}, {"width": 16}, {"width": 32, "depth": 1}]
    expected += [{"width": 32, "depth": depth, "shape": shape} for depth in (2, 3) for shape in "ab"]
    assert found == expected
    assert conditional_space().count_grid() == 7


def test_grid_needs_steps():
    space = build_space([parse("float:0:1")])
    with pytest.raises(SpecError, match="has no step"):
        space.count_grid()


@pytest.mark.parametrize(
    ("parameters", "sentence"),
    [
        ([("x", "1,2 if y>1")], "names no parameter of the space; available: x"),
        ([("x", "1,2 if y>1"), ("y", "1,2 if x>1")], "refers to itself"),
        ([("x", "1,2 if y>8"), ("y", "int:1:8")], "its condition y>8 never holds, since y is int:1:8:1"),
        ([("x", "1,2 if y==2"), ("y", "int:1:8:2")], "its condition y==2 never holds, since y is int:1:7:2"),
        (
            [("x", "1,2 if y>>2"), ("y", "int:1:8")],
            "a condition must be PARAMETER, one of <=, >=, ==, !=, <, >, and",
        ),
        ([("x", "int:1:3 if y>"), ("y", "int:1:8")], "and a value, such as x=int:1:8 if width>64"),
    ],
    ids=["unknown", "circle", "never", "step", "shift", "no value"],
)
def test_wrong_conditions_are_refused(parameters, sentence):
    with pytest.raises(SpecError, match=sentence):
        build_space([parse(text, int, name) for name, text in parameters])


@pytest.mark.parametrize("base", [2, 3, 5])
def test_quasi_random_points_fill_intervals_equally(base):
    """base^k consecutive points from a multiple of base^k on: one in each of base^k intervals."""
    count = base**3
    for begin in (0, count, 7 * count):
        points = [scrambled_radical_inverse(index, base, "key") for index in range(begin, begin + count)]
        assert sorted(int(point * count) for point in points) == list(range(count))
    first = [scrambled_radical_inverse(index, base, "key") for index in range(count)]
    assert first != [scrambled_radical_inverse(index, base, "other") for index in range(count)]
