"""Write your own loop over events: record the loss curve, and stop when the accuracy stops improving.

python own_loop.py
torchrun --nproc-per-node 2 own_loop.py
"""

import csv
import os
from pathlib import Path

from paceline import Spec, train
from paceline.events import Ended, Evaluated, Started, Step
from paceline.spec import Optimizer

PATIENCE = 2  # evaluations without a better accuracy


def main() -> None:
    losses: list[tuple[int, float]] = []
    accuracies: list[float] = []

    def is_over() -> bool:
        return len(accuracies) > PATIENCE and max(accuracies[-PATIENCE:]) <= max(accuracies[:-PATIENCE])

    # "digits" is built in; "image_classification.py:Digits" would name a task in a file.
    spec = Spec(
        task="digits",
        set={"width": 16},
        epochs=10,
        evaluate_every=10,
        optimizer=Optimizer(lr=5e-3),
        threads=1,
    )
    is_first = os.environ.get("RANK", "0") == "0"  # under torchrun each rank runs this file
    # Do not break out of the loop, because all ranks must iterate together: `stop` ends all ranks.
    for event in train(spec, stop=is_over):
        report = ""
        match event:
            case Started():
                report = f"{event.parameters:,} parameters, plan {event.plan} on {event.ranks} ranks"
            case Step():
                losses.append((event.step, event.loss))
            case Evaluated():
                accuracies.append(event.metrics["accuracy"])
                report = f"step {event.step}: accuracy {accuracies[-1]:.3f}"
            case Ended():
                report = f"step {event.step}: {event.reason}, best accuracy {max(accuracies):.3f}"
        if is_first and report:
            print(report)
    if is_first:
        with Path("losses.csv").open("w", newline="") as file:
            csv.writer(file).writerows([("step", "loss"), *losses])


if __name__ == "__main__":
    main()
