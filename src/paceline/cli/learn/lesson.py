"""paceline lesson: lessons that run on real processes."""

from pathlib import Path
from typing import Annotated

import typer


def lesson(
    name: Annotated[
        str | None, typer.Argument(help="Name of a lesson [default: print the list of lessons]")
    ] = None,
    ranks: Annotated[int, typer.Option(help="Number of processes: 1, 2, 3, 4 or 8")] = 4,
    html: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Run the lesson, and write it with pictures as an HTML file"),
    ] = None,
    notebook: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the lesson as a Jupyter notebook")
    ] = None,
    exercise: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the exercise of the lesson, to be completed")
    ] = None,
    check: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Check a completed exercise on real processes")
    ] = None,
) -> None:
    """Teach a technique by a lesson that runs on real processes.

    Prints text, code, and what each rank has before and after. Without a name, prints the list of lessons.

    Exit status: 0, 1 if a checked exercise is wrong, 2 bad input.
    """
    from paceline.errors import SpecError
    from paceline.lesson.catalogue import find_lesson, format_list
    from paceline.lesson.exercise import check_exercise, write_exercise
    from paceline.lesson.write import print_lesson, write_html, write_notebook

    actions = {"--html": html, "--notebook": notebook, "--exercise": exercise, "--check": check}
    given = [option for option, path in actions.items() if path is not None]
    if len(given) > 1:
        raise SpecError(f"{' and '.join(given)} do different things; give only one")
    if ranks < 1:
        raise SpecError(f"--ranks must be at least 1, got {ranks}")
    if name is None:
        if given:
            raise SpecError(f"{given[0]} needs the name of a lesson; run: paceline lesson")
        print(format_list())
        return
    found = find_lesson(name)
    if html is not None:
        print(write_html(found, ranks, html))
    elif notebook is not None:
        print(write_notebook(found, ranks, notebook))
    elif exercise is not None:
        write_exercise(name, exercise)
        print(f"{exercise}: complete it, then run: paceline lesson {name} --check {exercise}")
    elif check is not None:
        claims, mistake = check_exercise(name, check, ranks)
        for claim in claims:
            print(f"✓ {claim}")
        if mistake is not None:
            print(f"✗ {mistake}")
            raise typer.Exit(1)
        print(f"{check} is right.")
    else:
        print_lesson(found, ranks)
