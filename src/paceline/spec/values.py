"""Value, the base class of tables of a request, and checks that they share."""

import inspect
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from paceline.spec.messages import abbreviate


class Value(BaseModel):
    """Base class of values: frozen, comparable and strict. An unknown key or a wrong type is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    @classmethod
    def __pydantic_init_subclass__(cls, **options: Any) -> None:
        """Append the descriptions of the fields to the docstring, for `help()`."""
        super().__pydantic_init_subclass__(**options)
        described = {name: field.description for name, field in cls.model_fields.items() if field.description}
        if described:
            width = max(map(len, described))
            table = "\n".join(f"{name:{width}}  {text}" for name, text in described.items())
            cls.__doc__ = f"{inspect.cleandoc(cls.__doc__ or cls.__name__)}\n\n{table}"


def check_printable(value: BaseModel, *names: str) -> None:
    """Raise ValueError if a field has control characters, which could add lines to a job script."""
    for name in names:
        for text in _find_texts(getattr(value, name)):
            if not text.isprintable():
                raise ValueError(f"{name} must be a single line of printable text, got {text!r}")


def _find_texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from (text for pair in value.items() for item in pair for text in _find_texts(item))
    elif isinstance(value, tuple):
        yield from (text for item in value for text in _find_texts(item))


def check_direction(key: str, metric: str) -> None:
    """Raise ValueError if the metric of this key is not such as "min loss"."""
    if not re.fullmatch(r"(min|max) \S+", metric):
        raise ValueError(f"{key} must be 'min NAME' or 'max NAME', got {abbreviate(metric)}")


Decay = Annotated[float, Field(ge=0, lt=1)]


Samples = int | str  # a number of samples, or "50 steps", "5 epochs"


MAX_INT = 2**63 - 1  # TOML and torch count in 64 bits


MAX_DEPTH = 50  # levels of nesting in a value


TOO_LARGE = f"a number beyond 64 bits, or more than {MAX_DEPTH} levels"


def is_too_large(value: Any, level: int = 0) -> bool:
    """Return whether an integer in the value exceeds 64 bits, or the value has too many levels."""
    if isinstance(value, (dict, list)):
        inner = value.values() if isinstance(value, dict) else value
        return level > MAX_DEPTH or any(is_too_large(item, level + 1) for item in inner)
    return isinstance(value, int) and not -MAX_INT - 1 <= value <= MAX_INT


def list_keys(kind: type[BaseModel]) -> list[str]:
    """Return the dotted keys of a model, tables included."""
    keys = []
    for name, field in kind.model_fields.items():
        keys.append(name)
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            keys += [f"{name}.{key}" for key in list_keys(field.annotation)]
    return keys
