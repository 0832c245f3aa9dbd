"""Lessons that run on real processes. A lesson is a Python file of text and code, in `lesson/course`.

    from paceline.lesson import ask, check, column, num_ranks, picture, rows, run, say, table

    num_ranks()                       the number of ranks of this lesson
    run(function, *args)              call a function on every rank; the results by rank
    table("title", results)           show results by rank: each is a dict of a name and a value
    column(results, key)              the values of one key, by rank
    rows("title", headers, lines)     show any other table
    check("claim", got, expected)     compare, and show the claim; AssertionError if it is false
    say("text")                       show a sentence that contains results
    ask("question", "answer")         ask the reader
    @picture("title")                 draw by matplotlib, where pictures can be shown

They print in a script, show tables and pictures in a notebook, and become a page with
`paceline lesson --html`.
"""

from paceline.lesson.outputs import ask as ask
from paceline.lesson.outputs import check as check
from paceline.lesson.outputs import column as column
from paceline.lesson.outputs import picture as picture
from paceline.lesson.outputs import rows as rows
from paceline.lesson.outputs import say as say
from paceline.lesson.outputs import table as table
from paceline.lesson.ranks import num_ranks as num_ranks
from paceline.lesson.ranks import run as run
from paceline.lesson.ranks import set_ranks as set_ranks
