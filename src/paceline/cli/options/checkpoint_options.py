"""Options of commands that load a checkpoint: evaluate, predict and generate."""

from typing import Annotated

from typer import Option

Checkpoint = Annotated[str, Option(help="Checkpoint to load: last (the last complete one), best or a step")]
Ranks = Annotated[int | None, Option(help="Number of processes [default: as the run]")]
Plan = Annotated[
    str | None,
    Option(help="Plan, as for train [default: as the run; with another number of ranks, the most similar]"),
]
Device = Annotated[str | None, Option(help="Device: cpu or cuda [default: as the run]")]
