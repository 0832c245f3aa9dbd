"""Draw the pictures of docs/plans.md: python docs/draw_plans.py.

With --check, report the pictures that differ from their files, and write none.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from xml.sax.saxutils import escape

sys.path.insert(0, str(Path(__file__).parent))

from schedules import TIMES, Chart, chart

from paceline.plan.plan import parse
from paceline.plan.schedules import RUNNABLE_SCHEDULES

FOLDER = Path(__file__).parent / "plans"
GREY, INK = "#768390", "#14202b"  # text outside of boxes is readable on white and on black
COLOURS = {
    "batch": "#e3b341",
    "sequence": "#e3b341",
    "weights": "#58a6e6",
    "gradients": "#f0883e",
    "Adam": "#3fb06f",
    "activations": "#b48ee0",
}
KINDS = {
    "F": ("#8cc4f0", "#4f9bd9"),
    "B": ("#f4b183", "#e07b39"),
    "I": ("#f4b183", "#e07b39"),
    "W": ("#8ed6a8", "#43a868"),
}
MEANINGS = {"F": "forward", "B": "backward", "I": "backward, input", "W": "backward, weights"}
FONT = 'font-family="Helvetica, Arial, sans-serif"'


@dataclass(frozen=True)
class Sent:
    """A line under the boxes: a communication, and the groups of boxes that take part in it."""

    text: str
    groups: Sequence[Sequence[int]]
    kind: str = "weights"  # gives the colour
    arrows: bool = False  # from each box to the next, instead of among all


@dataclass(frozen=True)
class Picture:
    """`held`: by kind of data, a string per box with a letter per cell: # kept, + temporary, . not kept."""

    boxes: Sequence[str]
    held: Mapping[str, Sequence[str]]
    sent: Sequence[Sent] = ()


FOUR = tuple(f"rank {rank}" for rank in range(4))
WHOLE, OWN = ("####",) * 4, ("#...", ".#..", "..#.", "...#")
PASSING = ("#+++", "+#++", "++#+", "+++#")
ALL, PAIRS, ACROSS = ((0, 1, 2, 3),), ((0, 1), (2, 3)), ((0, 2), (1, 3))
AVERAGE = Sent("all-reduce of gradients, each step", ALL, "gradients")
SHARDED = {"gradients": OWN, "Adam": OWN}

PICTURES = {
    "single": Picture(
        ("rank 0",), {"batch": ("####",), "weights": ("####",), "gradients": ("####",), "Adam": ("####",)}
    ),
    "ddp": Picture(FOUR, {"batch": OWN, "weights": WHOLE, "gradients": WHOLE, "Adam": WHOLE}, (AVERAGE,)),
    "zero1": Picture(
        FOUR,
        {"batch": OWN, "weights": WHOLE, "gradients": WHOLE, "Adam": OWN},
        (AVERAGE, Sent("broadcasts of updated weights, each step", ALL)),
    ),
    "zero2": Picture(
        FOUR,
        {"batch": OWN, "weights": PASSING} | SHARDED,
        (
            Sent("all-gather of weights: forward", ALL),
            Sent("reduce-scatter of gradients: backward", ALL, "gradients"),
        ),
    ),
    "zero3": Picture(
        FOUR,
        {"batch": OWN, "weights": PASSING} | SHARDED,
        (
            Sent("all-gather of a block's weights: forward, and again backward", ALL),
            Sent("reduce-scatter of its gradients: backward", ALL, "gradients"),
        ),
    ),
    "hsdp": Picture(
        FOUR,
        {
            "batch": OWN,
            "weights": ("##++", "++##") * 2,
            "gradients": ("##..", "..##") * 2,
            "Adam": ("##..", "..##") * 2,
        },
        (
            Sent("in each copy as zero3: all-gather, reduce-scatter", PAIRS),
            Sent("between copies: all-reduce of the shards of gradients", ACROSS, "gradients"),
        ),
    ),
    "tp": Picture(
        FOUR[:2],
        {"batch": ("####",) * 2}
        | dict.fromkeys(("weights", "gradients", "Adam", "activations"), ("##..", "..##")),
        (
            Sent(
                "all-gather and reduce-scatter of activations, for each pair of layers",
                ((0, 1),),
                "activations",
            ),
        ),
    ),
    "cp": Picture(
        FOUR[:2],
        {
            "sequence": ("#..#", ".##."),
            "weights": ("####",) * 2,
            "gradients": ("####",) * 2,
            "Adam": ("####",) * 2,
        },
        (
            Sent("keys and values, in each attention", ((0, 1),), "activations"),
            Sent("all-reduce of gradients, each step", ((0, 1),), "gradients"),
        ),
    ),
    "pp": Picture(
        FOUR,
        {"batch": WHOLE} | dict.fromkeys(("weights", "gradients", "Adam"), OWN),
        (
            Sent("activations of each micro-batch: forward", ALL, "activations", arrows=True),
            Sent("their gradients: backward", ((3, 2, 1, 0),), "gradients", arrows=True),
        ),
    ),
    "mixture": Picture(
        tuple(f"rank {rank}" for rank in range(8)),
        {
            "batch": ("##..", "##..", "..##", "..##") * 2,
            "weights": (
                "#+......",
                "..#+....",
                "+#......",
                "..+#....",
                "....#+..",
                "......#+",
                "....+#..",
                "......+#",
            ),
        }
        | dict.fromkeys(
            ("gradients", "Adam"),
            ("#.......", "..#.....", ".#......", "...#....", "....#...", "......#.", ".....#..", ".......#"),
        ),
        (
            Sent(
                "tp: all-gather, reduce-scatter of activations",
                ((0, 1), (2, 3), (4, 5), (6, 7)),
                "activations",
            ),
            Sent("dp: all-gather of weights, reduce-scatter of gradients", ((0, 2), (1, 3), (4, 6), (5, 7))),
            Sent(
                "pp: activations, and their gradients back",
                ((0, 4), (1, 5), (2, 6), (3, 7)),
                "activations",
                arrows=True,
            ),
        ),
    ),
    "recompute": Picture(
        ("none", "selective", "full"),
        {"activations": ("####" * 2, "#+##" * 2, "#+++" * 2)},
    ),
    "local-sgd": Picture(
        FOUR,
        {"batch": OWN, "weights": WHOLE, "gradients": WHOLE, "Adam": WHOLE},
        (Sent("all-reduce of weights, every 8 steps with period=8", ALL),),
    ),
    "parameter-server": Picture(
        ("rank 0: server", "rank 1: worker", "rank 2: worker", "rank 3: worker"),
        {
            "batch": ("...", "#..", ".#.", "..#"),
            "weights": ("####", *("++++",) * 3),
            "gradients": ("++++", *("####",) * 3),
            "Adam": ("####", *("....",) * 3),
        },
        (
            Sent("gradients of each worker, each step", ((1, 0), (2, 0), (3, 0)), "gradients", arrows=True),
            Sent("weights to each worker, each step", ((0, 1), (0, 2), (0, 3)), arrows=True),
        ),
    ),
}


def text(
    x: float, y: float, words: str, size: int = 12, colour: str = GREY, anchor: str = "start", more: str = ""
) -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" {FONT} font-size="{size}" fill="{colour}" '
        f'text-anchor="{anchor}"{more}>{escape(words)}</text>'
    )


def box(
    x: float,
    y: float,
    width: float,
    height: float,
    fill: str,
    stroke: str = "none",
    round_: float = 2,
    more: str = "",
) -> str:
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{round_:g}" fill="{fill}" '
        f'stroke="{stroke}"{more}/>'
    )


def line(
    x: float, y: float, to_x: float, to_y: float, colour: str, width: float = 1.5, more: str = ""
) -> str:
    return (
        f'<line x1="{x:g}" y1="{y:g}" x2="{to_x:g}" y2="{to_y:g}" stroke="{colour}" '
        f'stroke-width="{width:g}"{more}/>'
    )


def page(width: float, height: float, title: str, parts: Sequence[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
        f'height="{height:g}" role="img">'
    )
    return "\n".join([head, f"<title>{escape(title)}</title>", *parts, "</svg>"]) + "\n"


LEFT, GAP, ROW, PAD = 92, 14, 24, 10


def draw(name: str, picture: Picture) -> str:
    count = len(picture.boxes)
    wide = {1: 190, 2: 190}.get(count, 128 if count <= 4 else 88)
    bottom = 30 + len(picture.held) * ROW + PAD
    middles = [LEFT + at * (wide + GAP) + wide / 2 for at in range(count)]
    parts = []
    for at, head in enumerate(picture.boxes):
        x = middles[at] - wide / 2
        parts += [
            text(middles[at], 15, head, anchor="middle"),
            box(x, 22, wide, bottom - 22, GREY, GREY, 6, ' fill-opacity="0.08"'),
        ]
        for row, (what, cells_of) in enumerate(picture.held.items()):
            cells = cells_of[at]
            y, step = 32 + row * ROW, (wide - 2 * PAD) / len(cells)
            for cell, letter in enumerate(cells):
                fill = COLOURS[what] if letter != "." else "none"
                edge = COLOURS[what] if letter != "." else GREY
                more = (
                    ' fill-opacity="0.28"'
                    if letter == "+"
                    else ' stroke-dasharray="2 2" stroke-opacity="0.6"'
                    if letter == "."
                    else ""
                )
                parts.append(box(x + PAD + cell * step + 1, y, step - 2, ROW - 8, fill, edge, more=more))
    parts += [text(LEFT - 12, 44 + row * ROW, what, anchor="end") for row, what in enumerate(picture.held)]
    y = bottom + 16
    for sent in picture.sent:
        colour = COLOURS[sent.kind]
        lanes: list[list[Sequence[int]]] = []
        for group in sent.groups:
            lane = next((lane for lane in lanes if not any(_overlap(group, other) for other in lane)), None)
            if lane is None:
                lanes.append(lane := [])
            lane.append(group)
        for lane in lanes:
            for group in lane:
                parts += (
                    _arrows(group, middles, y, colour) if sent.arrows else _bus(group, middles, y, colour)
                )
            y += 12
        y -= 12
        parts.append(text((middles[0] + middles[-1]) / 2, y + 19, sent.text, anchor="middle"))
        y += 36
    return page(
        middles[-1] + wide / 2 + 8,
        y - 6 if picture.sent else bottom + 6,
        f"What each rank holds and sends: {name}",
        parts,
    )


def _overlap(one: Sequence[int], other: Sequence[int]) -> bool:
    return min(one) <= max(other) and min(other) <= max(one)


def _bus(group: Sequence[int], middles: Sequence[float], y: float, colour: str) -> list[str]:
    dots = [f'<circle cx="{middles[rank]:g}" cy="{y:g}" r="4" fill="{colour}"/>' for rank in group]
    return [line(middles[group[0]], y, middles[group[-1]], y, colour, 2), *dots]


def _arrows(group: Sequence[int], middles: Sequence[float], y: float, colour: str) -> list[str]:
    parts = []
    for here, there in pairwise(group):
        way = 1 if there > here else -1
        end = middles[there] - 6 * way
        parts += [
            f'<circle cx="{middles[here]:g}" cy="{y:g}" r="3" fill="{colour}"/>',
            line(middles[here], y, end - 6 * way, y, colour, 2),
            f'<path d="M{end:g} {y:g} l{-9 * way} -4 v8 z" fill="{colour}"/>',
        ]
    return parts


UNIT, LANE, SIDE = 20, 24, 52


def draw_chart(of: Chart) -> str:
    """Return a chart with time to the right and a lane per rank. Second stages of ranks are darker."""
    plan, length = of.plan, float(of.length) * UNIT
    lanes = plan.pp * LANE
    parts = [text(SIDE, 14, f"{plan.pp_schedule}: ranks wait {float(of.bubble):.1%} of the time")]
    parts += [text(SIDE - 8, 22 + rank * LANE + 16, f"rank {rank}", anchor="end") for rank in range(plan.pp)]
    parts += [
        box(SIDE, 22 + rank * LANE, length, LANE - 3, GREY, round_=0, more=' fill-opacity="0.2"')
        for rank in range(plan.pp)
    ]
    for slot in of.slots:
        x, wide = SIDE + float(slot.start) * UNIT, float(slot.end - slot.start) * UNIT
        y, fill = 22 + slot.rank * LANE, KINDS[slot.kind][slot.stage >= plan.pp]
        size = 11 if wide > 12 else 9
        parts += [
            box(x + 0.5, y, wide - 1, LANE - 3, fill, round_=1),
            text(x + wide / 2, y + 15, str(slot.microbatch), size, INK, "middle"),
        ]
    at: float = SIDE
    for kind in [kind for kind in KINDS if any(slot.kind == kind for slot in of.slots)]:
        parts += [box(at, lanes + 28, 11, 11, KINDS[kind][0]), text(at + 16, lanes + 38, MEANINGS[kind], 11)]
        at += 40 + 6 * len(MEANINGS[kind])
    return page(SIDE + 33 * UNIT + 8, lanes + 46, f"{plan} over time", parts)


def charts() -> list[Chart]:
    return [
        chart(parse(f"pp=4,pp_schedule={schedule},microbatches=8").resolve(4))
        for schedule in RUNNABLE_SCHEDULES
    ]


def draw_all() -> dict[str, str]:
    """Return the content of each picture by file name."""
    plans = {f"{name}.svg": draw(name, picture) for name, picture in PICTURES.items()}
    return plans | {f"schedule-{of.plan.pp_schedule}.svg": draw_chart(of) for of in charts()}


def report(of: Chart) -> str:
    plan = of.plan
    # With separate gradients of weights, ranks wait only for forward passes.
    is_split = any(slot.kind == "W" for slot in of.slots)
    ideal = (plan.pp - 1) / (plan.stages_per_rank * plan.microbatches * (3 if is_split else 1))
    formula = f"; by formula {ideal / (1 + ideal):.1%} and {ideal:.2%}"
    kept = " ".join(f"{float(of.kept(rank)):g}" for rank in range(plan.pp))
    bubble, more = float(of.bubble), float(of.length / of.ideal - 1)
    return (
        f"{plan.pp_schedule:12} bubble {bubble:.1%} of the time, {more:.2%} of the ideal time{formula}; "
        f"micro-batches kept by rank: {kept}"
    )


def main() -> None:
    files = draw_all()
    for of in charts():
        print(report(of))
    print(f"unit times: {', '.join(f'{MEANINGS[kind]} {time}' for kind, time in TIMES.items())}")
    if "--check" in sys.argv:
        stale = [
            name
            for name, svg in files.items()
            if not (FOLDER / name).exists() or (FOLDER / name).read_text() != svg
        ]
        sys.exit(f"others now: {', '.join(stale)}" if stale else 0)
    FOLDER.mkdir(exist_ok=True)
    for name, svg in files.items():
        (FOLDER / name).write_text(svg)


if __name__ == "__main__":
    main()
