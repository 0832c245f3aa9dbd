"""What works for which model: every plan on every model of the zoo, held against one process.

    python benchmarks/works.py [--ranks 2 4 8] [--write docs/works.md]

Takes minutes, on eight ranks hours where there are few cores. The page grows with each model. Without --write it is printed.
"""

import argparse
import sys
import time
from pathlib import Path

import torch

from paceline import Spec
from paceline.errors import Error
from paceline.launch.rank_pool import Ranks
from paceline.plan.plan import Plan
from paceline.plan.search.candidates import enumerate_candidates
from paceline.spec import parse_value
from paceline.verify.report import format_reason, format_verdict, max_difference
from paceline.verify.run import Verdict, Verification, choose_batch

MANY, FEW_STEPS = 8, 2
PATIENCE_S = 600.0  # for one plan
ZOO = Path(__file__).with_name("zoo.py").resolve()
MODELS = {
    "digits": "digits width=4",
    "text": "text width=32 depth=8 heads=8 context=16",
    "Encoder": f"{ZOO}:TransformerEncoder",
    "Llama": f"{ZOO}:Llama",
    "Llama, tied": f"{ZOO}:Llama tied=true",
    "GPT-2": f"{ZOO}:Gpt2",
    "ResNet": f"{ZOO}:ResNet",
    "uneven": f"{ZOO}:Uneven",
}
TOLD = {
    "digits": "the CNN of the built-in task",
    "text": "the byte-level GPT of the built-in task",
    "Encoder": "stock `nn.TransformerEncoder`",
    "Llama": "Hugging Face's, rotary positions and grouped queries",
    "Llama, tied": "with one matrix for both embeddings",
    "GPT-2": "Hugging Face's, with a vocabulary that is a prime",
    "ResNet": "ResNet-18's blocks, BatchNorm",
    "uneven": "an MLP, none of whose sizes divides by two",
}
HEAD = """# What works for which model

`python benchmarks/works.py --ranks 2 4 8 --write docs/works.md` makes this page with [verify](verify.md): each plan beside one process,
{steps} steps in float64 on gloo, models as tiny as they can be.

* ✓ loss, norm, every gradient, every parameter and every buffer are those of one process to 1e-10; the furthest of all is {furthest:.0e}
* a number: the plan is refused, for the reason below the table
* ✗ another result

On eight ranks two steps, one micro-batch or what the schedule needs, and mixtures of `tp` and `pp` with `zero3` or without `zero`.

{models}

torch {torch}.
"""


def plans(ranks: int) -> list[Plan]:
    """From MANY ranks on not each with two micro-batches, too, nor mixtures of tp and pp with each stage of ZeRO."""
    return [
        plan
        for plan in enumerate_candidates(ranks)
        if ranks < MANY or (plan.microbatches is None and (plan.zero in (0, 3) or not plan.splits_model))
    ]


def spec_of(words: str, ranks: int, steps: int) -> Spec:
    task, *fields = words.split()
    settings = {key: parse_value(value) for key, _, value in (field.partition("=") for field in fields)}
    return Spec(task=task, set=settings, batch=choose_batch(16, plans(ranks), ranks), steps=steps)


def verdicts(words: str, ranks: Ranks, steps: int) -> list[Verdict] | str:
    """Of every plan, or why the model is not here."""
    began = time.perf_counter()
    try:
        with Verification(spec_of(words, ranks.size, steps), ranks, PATIENCE_S) as verification:
            verification.reference()
            found = [verification.try_verify(plan) for plan in plans(ranks.size)]
    except Error as error:
        return str(error)
    for verdict in found:
        if not verdict.same and verdict.cannot_be is None:
            print(f"{words} {verdict.plan}: {format_verdict(verdict)}", file=sys.stderr)
    print(f"{words} on {ranks.size} ranks: {time.perf_counter() - began:.0f} s", file=sys.stderr)
    return found


def page(ranks: int, found: dict[str, list[Verdict] | str]) -> list[str]:
    """The table of so many ranks, and the reasons."""
    reasons: dict[str, int] = {}
    lines = [
        f"## {ranks} ranks",
        "",
        "| plan | " + " | ".join(found) + " |",
        "| -- |" + " :-: |" * len(found),
    ]

    def mark(verdict: Verdict) -> str:
        if verdict.same:
            return "✓"
        if verdict.cannot_be is not None:
            return str(reasons.setdefault(format_reason(verdict), len(reasons) + 1))
        return "✗"

    for at, plan in enumerate(plans(ranks)):
        marks = [mark(of[at]) if isinstance(of, list) else "" for of in found.values()]
        lines.append(f"| `{plan}` | {' | '.join(marks)} |")
    lines += ["", *(f"{number}. {text}" for text, number in reasons.items()), ""]
    lines += [f"{name}: {of}\n" for name, of in found.items() if isinstance(of, str)]
    for name, of in found.items():
        wrong = (
            [verdict for verdict in of if not verdict.same and verdict.cannot_be is None]
            if isinstance(of, list)
            else []
        )
        lines += [f"✗ {name}, `{verdict.plan}`: {format_verdict(verdict)}\n" for verdict in wrong]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--write", type=Path)
    asked = parser.parse_args()
    found: dict[int, dict[str, list[Verdict] | str]] = {}
    for size in asked.ranks:
        found[size] = {}
        with Ranks(size) as ranks:
            for name in asked.models:
                found[size][name] = verdicts(MODELS[name], ranks, asked.steps if size < MANY else FEW_STEPS)
                if asked.write is not None:
                    asked.write.write_text(whole(found, asked.steps))
    if asked.write is None:
        print(whole(found, asked.steps))
    if not all(verdict.same or verdict.cannot_be for verdict in everything(found)):
        sys.exit(1)


def everything(found: dict[int, dict[str, list[Verdict] | str]]) -> list[Verdict]:
    return [
        verdict
        for of_size in found.values()
        for of in of_size.values()
        if isinstance(of, list)
        for verdict in of
    ]


def whole(found: dict[int, dict[str, list[Verdict] | str]], steps: int) -> str:
    head = HEAD.format(
        steps=steps,
        models="\n".join(
            f"* *{name}*: {TOLD[name]}"
            for name in dict.fromkeys(name for of_size in found.values() for name in of_size)
        ),
        furthest=max((max_difference(verdict) for verdict in everything(found) if verdict.same), default=0.0),
        torch=torch.__version__.partition("+")[0],
    )
    lines = [line for size, of_size in found.items() for line in page(size, of_size)]
    return "\n".join([head, *lines]).rstrip() + "\n"


if __name__ == "__main__":
    main()
