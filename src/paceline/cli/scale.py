"""paceline scale: how many ranks should I ask for?"""

from typing import TYPE_CHECKING, Annotated

from typer import Option

from paceline.cli.plan_options import (
    Batch,
    Json,
    Model,
    Peak,
    Plot,
    Precision,
    Price,
    Seq,
    Set,
    Target,
    Tokens,
    Where,
)
from paceline.errors import SpecError

if TYPE_CHECKING:
    from paceline.plan.model.facts import ModelFacts


def scale(
    target: Target = None,
    ranks: Annotated[
        str | None, Option(metavar="1,2,4,…,64", help="Numbers of ranks; 1:64 is the same.")
    ] = None,
    model: Model = None,
    cluster: Where = None,
    batch: Batch = None,
    seq: Seq = None,
    set: Set = None,
    precision: Precision = None,
    peak: Peak = None,
    efficiency: Annotated[
        float, Option(help="Of a rank, against one among the fewest, that makes more of them worth it.")
    ] = 0.8,
    tokens: Tokens = None,
    epochs: Annotated[float | None, Option(help="Of a task: its whole training, if it says another.")] = None,
    steps: Annotated[int | None, Option(help="Of a task: its whole training, with its batch.")] = None,
    price: Price = None,
    json: Json = None,
    plot: Plot = None,
) -> None:
    """Predict how a training scales: the best plan for each number of ranks, for one batch and for one batch a rank. Nothing is run."""
    from paceline.cli.plan_inputs import cluster_of, with_peak
    from paceline.cli.plan_options import asked, check_above_zero, check_outputs, show
    from paceline.plan.search.rank_counts import WAY_OUT, parse_counts

    check_above_zero(tokens=tokens, price=price, peak=peak, epochs=epochs, steps=steps)
    check_outputs(json, plot)
    if not 0 < efficiency <= 1:
        raise SpecError(f"--efficiency must be above 0 and at most 1, got {efficiency:g}")
    if ranks is None:
        raise SpecError(f"on how many ranks? Say --ranks: {WAY_OUT}")
    if target is None and (epochs or steps):
        raise SpecError("--epochs and --steps are of a task; of a --model say --tokens")
    counts = parse_counts(ranks)
    what = asked(target, model, batch, seq, precision, set)
    if target is not None and tokens is None:
        tokens = _whole(target, what.batch, epochs, steps, set or [], what.facts)

    from paceline.plan.report.scale import as_json, heading, sentences, tables
    from paceline.plan.search.scaling import scaling

    found = scaling(
        what.facts, with_peak(cluster_of(cluster), peak), counts, what.batch, what.recipe, tokens, price
    )
    if json is not None:
        from paceline.files import write_whole

        write_whole(json, as_json(found, efficiency))
    if plot is not None:
        from paceline.plan.report.curves import draw

        draw(found, efficiency, plot)
    show(heading(found), *tables(found), *sentences(found, efficiency))


def _whole(
    target: str, batch: int, epochs: float | None, steps: int | None, set: list[str], facts: "ModelFacts"
) -> float:
    """Tokens of the training that a task and its request say."""
    from paceline.cli.launching import read
    from paceline.data.loader import open_dataset
    from paceline.task import load_task

    spec, _ = read(target, {"batch": batch, "epochs": epochs, "steps": steps}, set)
    dataset = open_dataset(load_task(spec.task, spec.set), "train")
    assert dataset is not None
    return float(spec.total_steps(len(dataset)) * batch * facts.tokens)
