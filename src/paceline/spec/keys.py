"""The keys of a request, and their names for --set."""

from collections.abc import Iterator

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from paceline.spec.launch import Launch
from paceline.spec.messages import RequestKeys
from paceline.spec.training import Spec
from paceline.spec.values import list_keys


def leaves(kind: type[BaseModel]) -> Iterator[tuple[tuple[str, ...], FieldInfo]]:
    """Yield path and field of each key of a table and of the tables inside it."""
    for name, field in kind.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from (((name, *path), leaf) for path, leaf in leaves(field.annotation))
        else:
            yield (name,), field


def set_key(key: str) -> str:
    """Return the name by which `--set` reaches a key of the request: the inverse of `parse_overrides`."""
    return key if "." in key else f"spec.{key}"


def keys() -> Iterator[tuple[str, FieldInfo]]:
    """Yield each key of the request that has a value, under its name for `--set`."""
    for kind in (Spec, Launch):
        yield from ((set_key(".".join(path)), field) for path, field in leaves(kind) if path != ("set",))


KEYS = RequestKeys([*list_keys(Spec), *list_keys(Launch)])
TABLES = {key.partition(".")[0] for key in KEYS if "." in key} | {"set"}
