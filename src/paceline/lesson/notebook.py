"""A lesson as a Jupyter notebook."""

from importlib.util import find_spec

from paceline.errors import SpecError
from paceline.lesson.catalogue import find_exercise
from paceline.lesson.cells import LessonFile
from paceline.lesson.exercise import read_cell
from paceline.lesson.play import check_ranks


def build_notebook(lesson: LessonFile, ranks: int) -> str:
    """Return the text of a notebook. Raises SpecError without nbformat, and for a wrong number of ranks."""
    check_ranks(ranks)
    if find_spec("nbformat") is None:
        raise SpecError(
            "cannot write notebooks: nbformat is not installed; run: pip install 'paceline[notebook]'"
        )
    import nbformat
    from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

    cells = [
        new_markdown_cell(f"# {lesson.title}\n\n{lesson.text}"),
        new_code_cell(
            f"from paceline.lesson import set_ranks\n\nset_ranks({ranks})  # each call of run() starts them"
        ),
    ]
    for cell in lesson.cells:
        if cell.text:
            cells.append(new_markdown_cell(cell.text))
        if cell.notebook_code:
            cells.append(new_code_cell(cell.notebook_code))
        for question, answer in cell.questions:
            hidden = f"<details><summary>Answer</summary>\n\n{answer}\n\n</details>"
            cells.append(new_markdown_cell(f"**Question.** {question}\n\n{hidden}"))
    if (exercise := find_exercise(lesson.name)) is not None:
        task = read_cell(exercise, "exercise")
        cells += [
            new_markdown_cell(f"## Exercise\n\n{task.text}"),
            new_code_cell(task.code),
            new_markdown_cell(
                "Write the cell to a file with `%%writefile my.py`, then check it with "
                f"`!paceline lesson {lesson.name} --check my.py`."
            ),
        ]
    for number, cell in enumerate(cells):
        cell["id"] = f"cell-{number}"  # equal lessons give equal files
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    notebook = new_notebook(cells=cells, metadata=kernel)
    nbformat.validate(notebook)
    return nbformat.writes(notebook) + "\n"
