"""An event as a line of JSON, and back with a check of the type of each field."""

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING
from dataclasses import fields as dataclass_fields
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

from paceline.events.kinds import KINDS, Evaluated, Event, Step
from paceline.units import without_controls

MAX_TIME = 253e9  # the latest date, in seconds since the epoch
ENCODER = json.JSONEncoder(allow_nan=False)


def nan_to_null(value: Any) -> Any:
    """Return a tree of dicts, lists and tuples with None in place of NaN and infinity, which JSON lacks."""
    if isinstance(value, Mapping):
        return {key: nan_to_null(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [nan_to_null(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class UnknownEventError(ValueError):
    """The line is valid, but its event is of a kind that this version does not know."""

    def __init__(self, kind: str):
        super().__init__(f"unknown kind of event: {kind}")
        self.kind = kind


def dumps(event: Event) -> str:
    """Return an event as a line of JSON, without the newline."""
    fields = dict(vars(event))
    if isinstance(event, Evaluated):
        fields["metrics"] = nan_to_null(event.metrics)
    if isinstance(event, Step) and not event.losses:
        del fields["losses"]
    return ENCODER.encode({"time": fields.pop("time"), "event": type(event).__name__.lower(), **fields})


def loads(line: str | bytes) -> Event:
    """Return the event of a line. Fields that this version does not know are ignored.

    Raises ValueError for a damaged line: not a JSON object, or a field that is missing or has another type.
    Raises UnknownEventError for another kind of event.
    """
    try:
        fields = json.loads(line.decode() if isinstance(line, bytes) else line)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(fields, dict):
        raise ValueError(f"a line of events must be an object, got {type(fields).__name__}")
    name = fields.get("event")
    if not isinstance(name, str) or not re.fullmatch(r"\w{1,40}", name):
        raise ValueError("the line must name a kind of event")
    if name not in KINDS:
        raise UnknownEventError(name)
    values = {}
    for key, (convert, is_required) in _FIELDS[name].items():
        if key in fields:
            values[key] = convert(fields[key])
        elif is_required:
            raise ValueError(f"event {name} lacks {key}")
    return KINDS[name](**values)


def _number(value: Any) -> float:
    """Return a finite number: a duration that is infinite or NaN would spoil every sum."""
    if not math.isfinite(number := _any_number(value)):
        raise ValueError(f"expected a finite number, got {number}")
    return number


def _any_number(value: Any) -> float:
    if type(value) is float:
        return value
    if type(value) is not int:
        raise ValueError(f"expected a number, got {value!r:.40}")
    try:
        return float(value)
    except OverflowError:
        raise ValueError("expected a number of at most 1.8e308") from None


def _time(value: Any) -> float:
    seconds = _number(value)
    if not 0 <= seconds < MAX_TIME:
        raise ValueError(f"expected seconds since the epoch, got {seconds}")
    return seconds


def _integer(value: Any) -> int:
    if type(value) is not int or abs(value) >= 2**63:
        raise ValueError(f"expected an integer of at most 64 bits, got {value!r:.40}")
    return value


def _exactly(kind: type) -> Callable[[Any], Any]:
    def convert(value: Any) -> Any:
        if type(value) is not kind:
            raise ValueError(f"expected {kind.__name__}, got {value!r:.40}")
        return value

    return convert


def _text(value: Any) -> str:
    """Return a text without control characters: a terminal may show it, and another user may own the run."""
    if type(value) is not str:
        raise ValueError(f"expected str, got {value!r:.40}")
    return without_controls(value)


def _converter(hint: Any) -> Callable[[Any], Any]:
    """Return a function that converts JSON to the type of a field. It raises ValueError for another type."""
    if hint in (int, float):
        return _integer if hint is int else _number
    if hint is bool:
        return _exactly(bool)
    if hint is str:
        return _text
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType) and len(inner) == 2 and NoneType in inner:
        convert = _converter(next(kind for kind in inner if kind is not NoneType))
        return lambda value: None if value is None else convert(value)
    if origin is Mapping and inner[0] is str:
        convert, of_object = _converter(inner[1]), _exactly(dict)
        return lambda value: {without_controls(key): convert(item) for key, item in of_object(value).items()}
    if origin is tuple and inner[1:] == (...,):
        convert, of_list = _converter(inner[0]), _exactly(list)
        return lambda value: tuple(convert(item) for item in of_list(value))
    raise TypeError(f"a field of an event has type {hint}, which _converter does not know")


def _metric(value: Any) -> float:
    return math.nan if value is None else _number(value)


def _fields(kind: type[Event]) -> dict[str, tuple[Callable[[Any], Any], bool]]:
    """Return the converter of each field, by name, and whether the field is required."""
    converters = {}
    for entry in dataclass_fields(kind):
        is_required = entry.name == "time" or (entry.default is MISSING and entry.default_factory is MISSING)
        converters[entry.name] = (_time if entry.name == "time" else _converter(entry.type), is_required)
    if kind is Step:  # of a training that diverges
        converters["loss"] = (_any_number, True)
    if kind is Evaluated:
        of_object = _exactly(dict)
        converters["metrics"] = (
            lambda value: {without_controls(name): _metric(item) for name, item in of_object(value).items()},
            True,
        )
    return converters


_FIELDS = {name: _fields(kind) for name, kind in KINDS.items()}
