"""Ctrl-C during a call that waits for ranks: a sentence in a notebook instead of a traceback."""

import contextlib
from collections.abc import Iterator

ENDED = "interrupted: the ranks have ended"


@contextlib.contextmanager
def shorten_interrupt() -> Iterator[None]:
    """Give a KeyboardInterrupt a sentence, which notebooks show instead of the frames of this package.

    The context must enclose what ends the ranks.
    """
    try:
        yield
    except KeyboardInterrupt as error:
        error.args = (ENDED,)
        # IPython calls this method. A subclass would change the exit status of a script.
        vars(error)["_render_traceback_"] = lambda: [f"KeyboardInterrupt: {ENDED}"]
        raise
