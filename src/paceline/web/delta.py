"""Differences between two states of a page, so that a stream sends only what is new."""

from collections.abc import Mapping, Sequence
from itertools import compress, count
from operator import ne
from typing import Any

Rows = Sequence[Mapping[str, Any]]
Table = Mapping[str, Sequence[Any]]  # columns of equal length; the first is ascending


class SentState:
    """What a page has received.

    A state has panels, which are sent whole if they changed; tables, of which the rows after the first change
    are sent; and lists of rows with an "id", of which changed rows are sent, and how their order changed."""

    def __init__(self) -> None:
        self._panels: dict[str, Any] = {}
        self._tables: dict[str, dict[str, list[Any]]] = {}
        self._lists: dict[str, dict[str, Any]] = {}

    def advance(
        self, panels: Mapping[str, Any], tables: Mapping[str, Table], lists: Mapping[str, Rows] | None = None
    ) -> dict[str, Any]:
        """Return the message that brings a page to this state; empty if there is no difference."""
        message: dict[str, Any] = {}
        changed = {name: value for name, value in panels.items() if self._panels.get(name, ...) != value}
        updates = {}
        for name, table in tables.items():
            columns = {column: list(values) for column, values in table.items()}
            update = _diff(self._tables.get(name), columns)
            if update is not None:
                updates[name] = update
            self._tables[name] = columns
        removed = [name for name in self._tables if name not in tables]
        for name in removed:
            del self._tables[name]
        self._panels |= changed
        if renewed := self._renew_lists(lists or {}):
            message["lists"] = renewed
        if changed:
            message["panels"] = changed
        if updates:
            message["tables"] = updates
        if removed:
            message["removed"] = removed
        return message

    def _renew_lists(self, lists: Mapping[str, Rows]) -> dict[str, Any]:
        renewed: dict[str, Any] = {}
        for name, rows in lists.items():
            old, new = self._lists.get(name), {row["id"]: dict(row) for row in rows}
            self._lists[name] = new
            change: dict[str, Any] = {}
            if old is None or [*old] != [*new]:
                change["order"] = _describe_order([*(old or ())], [*new])
            changed = [row for key, row in new.items() if old is None or old.get(key) != row]
            if changed:
                change["rows"] = changed
            if change:
                renewed[name] = change
        return renewed


def _describe_order(old: Sequence[str], new: Sequence[str]) -> list[Any]:
    """Return the new order as identifiers of new rows, and [first, count] of neighbours in the old order."""
    places = {key: at for at, key in enumerate(old)}
    order: list[Any] = []
    for key in new:
        at = places.get(key)
        if at is None:
            order.append(key)
        elif order and isinstance(order[-1], list) and sum(order[-1]) == at:
            order[-1][1] += 1
        else:
            order.append([at, 1])
    return order


def _diff(old: dict[str, list[Any]] | None, new: dict[str, list[Any]]) -> dict[str, Any] | None:
    """Return how a table changed: rows dropped at its begin, rows kept, and the new rows after them."""
    if old == new:
        return None
    if old is None or list(old) != list(new) or not new:
        return {"drop": 0, "keep": 0, "columns": new}
    columns = [*zip(old.values(), new.values(), strict=True)]
    drop = _find_first_row(columns)
    keep = min(_count_equal(before[drop:] if drop else before, after) for before, after in columns)
    drop = drop if keep else 0
    return {"drop": drop, "keep": keep, "columns": {name: values[keep:] for name, values in new.items()}}


def _find_first_row(columns: Sequence[tuple[list[Any], list[Any]]]) -> int:
    """Return the first row of the old columns that equals the first of the new columns; 0 if none does."""
    before, after = columns[0]
    at = -1
    while after and after[0] in before[at + 1 :]:
        at = before.index(after[0], at + 1)
        if all(old[at] == new[0] for old, new in columns):
            return at
    return 0


def _count_equal(before: list[Any], after: list[Any]) -> int:
    """Return the number of values with which both begin. No loop of the interpreter compares them."""
    if before == after[: len(before)]:
        return len(before)
    return next(compress(count(), map(ne, before, after)), min(len(before), len(after)))
