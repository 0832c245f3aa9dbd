"""Prices of cloud instances by name and terms: NC24rs_v3:3y."""

import tomllib
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

from paceline.errors import SpecError
from paceline.spec import suggest

ON_DEMAND = "on demand"


class Instance(NamedTuple):
    """A cloud instance under some terms. price_per_hour: of the whole instance, in `currency`."""

    name: str
    terms: str
    device: str
    devices: int
    price_per_hour: float
    currency: str

    @property
    def price_per_device_hour(self) -> float:
        return self.price_per_hour / self.devices


def find_instance(text: str) -> Instance:
    """Return the instance `NAME` or `NAME:TERMS`; without terms, on demand. Raises SpecError."""
    name, _, terms = text.partition(":")
    rows = _instances()
    found = next((known for known in rows if known.lower() == name.lower()), None)
    if found is None:
        raise SpecError(
            f"there is no price of the instance {name}{suggest(name, rows)}; give one with --price, or "
            f"choose one of {', '.join(rows)}"
        )
    row = rows[found]
    wanted = terms or ON_DEMAND
    if wanted not in row["terms"]:
        raise SpecError(f"{found} has no terms {wanted!r}; choose one of {', '.join(row['terms'])}")
    return Instance(found, wanted, row["device"], row["devices"], row["terms"][wanted], row["currency"])


@cache
def _instances() -> dict[str, Any]:
    return tomllib.loads((files("paceline.plan") / "prices.toml").read_text("utf-8"))
