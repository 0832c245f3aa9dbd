"""A page that applies the messages of a stream has the whole state after each of them."""

import json
import random
from typing import Any

import pytest

from paceline.web.app import choose_pause_s
from paceline.web.delta import SentState


def apply(state: dict[str, Any], message: dict[str, Any]) -> None:
    """Do what page/src/store.ts does."""
    state["panels"] |= message.get("panels", {})
    for name, update in message.get("tables", {}).items():
        before = state["tables"].get(name, {})
        state["tables"][name] = {
            column: before.get(column, [])[update["drop"] :][: update["keep"]] + values
            for column, values in update["columns"].items()
        }
    for name in message.get("removed", []):
        del state["tables"][name]
    for name, change in message.get("lists", {}).items():
        old = [row["id"] for row in state["lists"].get(name, [])]
        known = {row["id"]: row for row in [*state["lists"].get(name, []), *change.get("rows", [])]}
        order: list[str] = []
        for part in change.get("order", [[0, len(old)]]):
            order += [part] if isinstance(part, str) else old[part[0] : part[0] + part[1]]
        state["lists"][name] = [known[key] for key in order]


def change(draw: random.Random, table: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Append, remove rows at either end, change the last row, or replace everything."""
    columns = {name: [*values] for name, values in table.items()}
    size = len(columns["x"])
    match draw.randrange(6):
        case 0 | 1:
            new = draw.randrange(4)
        case 2:
            new, columns = 1, {name: values[draw.randrange(size + 1) :] for name, values in columns.items()}
            size = min(map(len, columns.values()))
            columns = {name: values[len(values) - size :] for name, values in columns.items()}
        case 3:
            new, columns = 1, {name: values[:-1] for name, values in columns.items()}
        case 4:
            new, columns = 2, {"x": [], "y": [], **({"z": []} if draw.randrange(2) else {})}
        case _:
            new = 0
    begin = columns["x"][-1] if columns["x"] else draw.randrange(9)
    for at in range(new):
        for name, values in columns.items():
            values.append(begin + at + 1 if name == "x" else draw.choice([0.5, None, "text", draw.random()]))
    return columns


def test_messages_add_up_to_the_state():
    for seed in range(200):
        draw = random.Random(seed)
        sent, page = SentState(), {"panels": {}, "tables": {}, "lists": {}}
        tables: dict[str, Any] = {}
        for _ in range(30):
            for name in "ab":
                if draw.randrange(8) == 0:
                    tables.pop(name, None)
                else:
                    tables[name] = change(draw, tables.get(name, {"x": [], "y": []}))
            panels = {"p": draw.randrange(3), "q": [draw.randrange(2)]}
            rows = [{"id": key, "value": draw.randrange(2)} for key in draw.sample("abcd", draw.randrange(5))]
            apply(page, json.loads(json.dumps(sent.advance(panels, tables, {"l": rows}))))
            assert page == {"panels": panels, "tables": tables, "lists": {"l": rows}}


def test_unchanged_state_is_not_sent():
    sent = SentState()
    assert sent.advance({"p": 1}, {"a": {"x": [1], "y": [2]}})
    assert sent.advance({"p": 1}, {"a": {"x": [1], "y": [2]}}) == {}


def test_list_sends_only_changed_rows():
    sent = SentState()
    rows = [{"id": str(at), "step": 0} for at in range(500)]
    assert len(sent.advance({}, {}, {"runs": rows})["lists"]["runs"]["rows"]) == 500
    rows[7] = {"id": "7", "step": 1}
    assert sent.advance({}, {}, {"runs": rows}) == {"lists": {"runs": {"rows": [rows[7]]}}}
    assert sent.advance({}, {}, {"runs": rows}) == {}
    assert sent.advance({}, {}, {"runs": rows[1:]})["lists"]["runs"]["order"] == [[1, 499]]
    front = [rows[400], *rows[1:400], *rows[401:]]
    order = sent.advance({}, {}, {"runs": front})["lists"]["runs"]["order"]
    assert order == [[399, 1], [0, 399], [400, 99]]


def test_traffic_is_proportional_to_new_rows():
    """Also if the oldest rows are dropped."""
    sent = SentState()
    for first in range(3):
        rows = range(100 * first, 100 * first + 1000 + 5 * first)
        message = sent.advance({}, {"a": {"x": [*rows], "y": [0.1] * len(rows)}})
    update = message["tables"]["a"]
    assert (update["drop"], update["keep"]) == (100, 905)
    assert len(update["columns"]["x"]) == 105


@pytest.mark.parametrize(
    ("spent_s", "is_busy", "pause_s"),
    [
        (0.0, False, 0.25),  # nothing was sent
        (0.004, False, 0.4),  # 1 % of a core
        (0.014, False, 0.7),  # shown within a second
        (0.014, True, 1.4),  # 1 % of a core, which a training would use
        (0.1, True, 2.0),
        (1.0, True, 4.0),  # a quarter of a core
    ],
)
def test_pause_between_messages(spent_s, is_busy, pause_s):
    assert choose_pause_s(spent_s, is_busy) == pytest.approx(pause_s)
