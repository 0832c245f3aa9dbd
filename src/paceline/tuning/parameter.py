"""A parameter of a search space, and its range as text."""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from paceline.errors import SpecError
from paceline.spec import abbreviate, parse_value, suggest

KINDS = ("int", "float", "log")
OPERATORS = {
    "<=": lambda left, right: left <= right,
    ">=": lambda left, right: left >= right,
    "==": lambda left, right: left == right,
    "!=": lambda left, right: left != right,
    "<": lambda left, right: left < right,
    ">": lambda left, right: left > right,
}
CONDITION = re.compile(r"(.+?)\s+if\s+([\w.]+)\s*(<=|>=|==|!=|<|>|=)\s*([^\s<>=!].*)", re.DOTALL)
BEGUN_CONDITION = re.compile(r"\s+if\s+[\w.]+\s*[<>=!]")
NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
RANGE = re.compile(rf"(?:([A-Za-z-]+):)?({NUMBER}):({NUMBER})(?::({NUMBER}))?")
FORMS = "int:LOW:HIGH[:STEP], float:LOW:HIGH[:STEP], log:LOW:HIGH or A,B,C"
MAX_INT = 2**53  # beyond it, a float does not represent every integer


@dataclass(frozen=True)
class ParameterCondition:
    """A parameter exists only in trials in which another parameter satisfies this."""

    name: str  # of the other parameter
    operator: str
    value: Any

    def __str__(self) -> str:
        return f"{self.name}{self.operator}{self.value}"

    def holds(self, values: Mapping[str, Any]) -> bool:
        """Return whether the values satisfy the condition. An absent parameter does not."""
        if self.name not in values:
            return False
        try:
            return bool(OPERATORS[self.operator](values[self.name], self.value))
        except TypeError:  # text and number have no order
            return False


@dataclass(frozen=True)
class Parameter:
    """A parameter of a search space.

    name: as the user wrote it. key: of the request, as in the overrides of `paceline.spec.load`.
    low, high, step: both ends belong to the range, and high is a multiple of the step from low; without a
    step, a float is continuous.
    """

    name: str
    key: str
    kind: Literal["int", "float", "choice"]
    low: float = 0.0
    high: float = 0.0
    step: float | None = None
    is_log: bool = False
    choices: tuple[Any, ...] = ()
    condition: ParameterCondition | None = None

    @property
    def is_constant(self) -> bool:
        return len(self.choices) == 1 if self.kind == "choice" else self.low == self.high

    def from_unit(self, share: float) -> Any:
        """Return the value at a position from 0 to 1 of the range. Equal shares give each grid value."""
        if self.kind == "choice":
            return self.choices[min(int(share * len(self.choices)), len(self.choices) - 1)]
        if self.step is not None and not self.is_log:
            count = self.count_values()
            return self._at(min(int(share * count), count - 1))
        if self.is_log:
            half = 0.5 if self.kind == "int" else 0.0  # so that both ends are as probable as the others
            low, high = math.log(self.low - half), math.log(self.high + half)
            value = math.exp(low + share * (high - low))
        else:
            value = self.low + share * (self.high - self.low)
        value = min(max(value, self.low), self.high)
        return round(value) if self.kind == "int" else value

    def _at(self, index: int) -> Any:
        assert self.step is not None
        return _take_steps(self.kind, self.low, self.step, index)

    def count_values(self) -> int:
        """Return the number of values. Raises SpecError for a continuous range."""
        if self.kind == "choice":
            return len(self.choices)
        if self.step is None or self.is_log:
            raise SpecError(
                f"sampler grid: {self.name}={self.describe_range()} has no step; add one, such as "
                f"int:{self.low:g}:{self.high:g}:8, or list the values: {self.low:g},{self.high:g}"
            )
        return _count_steps(self.low, self.high, self.step) + 1

    def iterate_values(self) -> Iterator[Any]:
        """Yield all values for a grid. Raises SpecError for a continuous range."""
        if self.kind == "choice":
            yield from self.choices
        else:
            yield from (self._at(index) for index in range(self.count_values()))

    def contains(self, value: Any) -> bool:
        """Return whether a value, which another user may have written, belongs to the range."""
        if self.kind == "choice":
            return any(type(value) is type(choice) and value == choice for choice in self.choices)
        is_number = isinstance(value, int if self.kind == "int" else (int, float))
        if not is_number or isinstance(value, bool) or not self.low <= value <= self.high:
            return False
        if self.step is None or self.is_log:
            return True
        return math.isclose(value, self._at(round((value - self.low) / self.step)), abs_tol=1e-9 * self.step)

    def extremes(self) -> list[Any]:
        """Return the values that a check of the space tries."""
        if self.kind == "choice":
            return list(self.choices)
        whole = self.kind == "int"
        return [round(value) if whole else value for value in dict.fromkeys((self.low, self.high))]

    def describe_range(self) -> str:
        """Return the range as text, without the condition."""
        if self.kind == "choice":
            return ",".join(map(str, self.choices))
        kind = "log" if self.is_log else self.kind
        step = f":{self.step:.12g}" if self.step is not None and not self.is_log else ""
        return f"{kind}:{self.low:.12g}:{self.high:.12g}{step}"


def parse_parameter(name: str, key: str, annotation: Any, text: Any) -> Parameter:
    """Return the parameter that a range stands for, such as `log:1e-4:1e-1` or `relu,gelu if width>64`.

    annotation: the type of the field, which decides between int, float and text.
    text: also a list of choices, or a single value. Raises SpecError.
    """
    if not isinstance(text, str):
        choices = tuple(text) if isinstance(text, list) else (text,)
        return _choice(name, key, choices, None)
    text, condition = _split_condition(name, text.strip())
    match = RANGE.fullmatch(text)
    if match is None:
        word, colon, rest = text.partition(":")
        if colon and word.isalpha() and (":" in rest or word in KINDS):
            kind = "" if word in KINDS else f"; {word!r} is no kind of range{suggest(word, KINDS)}"
            raise SpecError(f"--space {name}={abbreviate(text, str)} must be {FORMS}{kind}")
        value = parse_value(text, name) if text.startswith("[") else None
        choices = tuple(value) if isinstance(value, list) else tuple(_split_choices(name, text, annotation))
        return _choice(name, key, choices, condition)
    return _range(name, key, annotation, match, condition)


def _split_condition(name: str, text: str) -> tuple[str, ParameterCondition | None]:
    match = CONDITION.fullmatch(text)
    if match is None:
        if BEGUN_CONDITION.search(text):
            raise SpecError(
                f"--space {name}={abbreviate(text, str)}: a condition must be PARAMETER, one of "
                f"{', '.join(OPERATORS)}, and a value, such as {name}=int:1:8 if width>64"
            )
        return text, None
    operator = "==" if match[3] == "=" else match[3]
    return match[1], ParameterCondition(match[2], operator, parse_value(match[4].strip()))


def _split_choices(name: str, text: str, annotation: Any) -> Iterator[Any]:
    """Yield the choices; for a field of type str as texts, also `1` and `nan`."""
    for word in text.split(","):
        if not word.strip():
            raise SpecError(f"--space {name}={abbreviate(text, str)} must be {FORMS}; a choice is empty")
        value = parse_value(word.strip(), name)
        yield word.strip() if annotation is str and not isinstance(value, str) else value


def _choice(name: str, key: str, choices: tuple[Any, ...], condition: ParameterCondition | None) -> Parameter:
    if not choices:
        raise SpecError(f"--space {name} has no values; it must be {FORMS}")
    for number, choice in enumerate(choices):
        if not isinstance(choice, (bool, int, float, str)):
            raise SpecError(f"--space {name}: a choice must be a number or a text, got {abbreviate(choice)}")
        if isinstance(choice, float) and not math.isfinite(choice):
            raise SpecError(f"--space {name}: a choice must be finite, got {choice}; use a large number")
        if (type(choice), choice) in [(type(other), other) for other in choices[:number]]:
            raise SpecError(f"--space {name} has the value {abbreviate(choice)} twice; leave one out")
    return Parameter(name, key, "choice", choices=choices, condition=condition)


def _range(
    name: str, key: str, annotation: Any, match: re.Match[str], condition: ParameterCondition | None
) -> Parameter:
    text, word = match[0], match[1]
    low, high, step = (float(part) if part is not None else None for part in match.groups()[1:])
    assert low is not None
    assert high is not None
    if word is not None and word not in KINDS:
        raise SpecError(
            f"--space {name}={text}: {word!r} is no kind of range{suggest(word, KINDS)}; write {FORMS}"
        )
    whole_type = is_whole_type(annotation)
    if whole_type and word == "float":
        raise SpecError(f"--space {name}={text}: {name} is an integer; write int:{low:g}:{high:g}")
    kind: Literal["int", "float"] = "int" if word == "int" or whole_type else "float"
    if not (math.isfinite(low) and math.isfinite(high)) or low > high:
        raise SpecError(f"--space {name}={text} must begin with its smaller end; write {high:g}:{low:g}")
    if word == "log" and low <= 0:
        raise SpecError(f"--space {name}={text}: a log range must begin above 0, got {low:g}")
    if step is not None and (step <= 0 or word == "log" or step > high - low > 0):
        largest = f" and at most {high - low:g}" if high > low else ""
        fix = "leave it out" if word == "log" else f"it must be above 0{largest}"
        raise SpecError(f"--space {name}={text}: the step {step:g} is impossible; {fix}")
    if kind == "int" and any(part is not None and part != round(part) for part in (low, high, step)):
        raise SpecError(f"--space {name}={text}: {name} is an integer; write whole numbers")
    if kind == "int" and max(abs(low), abs(high)) > MAX_INT:
        raise SpecError(f"--space {name}={text}: integers must be from -2^53 to 2^53; use smaller ends")
    if kind == "int" and step is None and word != "log":
        step = 1.0
    if step is not None:  # the last value that the step reaches
        high = _take_steps(kind, low, step, _count_steps(low, high, step))
    return Parameter(name, key, kind, low, high, step, word == "log", condition=condition)


def _count_steps(low: float, high: float, step: float) -> int:
    return math.floor((high - low) / step + 1e-9)


def _take_steps(kind: str, low: float, step: float, count: int) -> Any:
    value = low + count * step
    return round(value) if kind == "int" else float(f"{value:.12g}")


def is_whole_type(annotation: Any) -> bool:
    """Return whether a field takes integers and no floats: `int`, `int | None`."""
    kinds = [kind for kind in (get_args(annotation) or (annotation,)) if kind is not type(None)]
    return int in kinds and float not in kinds
