"""Exercise: a loader that reads ahead and loses no error."""

# %% exercise
# The loader of the lesson has a weakness: if reading a sample fails, its thread ends, and the training waits
# for a batch that never comes. Write `prefetch(source, depth)`, a generator with the items of `source` in
# their order, which a thread reads. At most `depth` items may wait to be used, besides one that is being
# read or handed over. If `source` raises an exception, raise it after the items before it. None is an item
# like any other.


def prefetch(source, depth):
    raise NotImplementedError
    yield


# %% solution
import queue
import threading


def prefetch(source, depth):
    ready = queue.Queue(depth)

    def fill():
        try:
            for item in source:
                ready.put(("item", item))
            ready.put(("end", None))
        except Exception as error:
            ready.put(("error", error))

    threading.Thread(target=fill, daemon=True).start()
    while True:
        kind, item = ready.get()
        if kind == "end":
            return
        if kind == "error":
            raise item
        yield item


# %% grade
import queue
import threading
import time

from paceline.lesson import check


def take(source, depth):
    """Return the items and the error of a loader, or "it waits forever" after a second without an item."""
    found, done, unwritten = [], threading.Event(), []

    def use():
        try:
            for item in prefetch(source, depth):
                found.append(item)
                if len(found) > 100:  # more than any source has
                    break
        except NotImplementedError as error:
            unwritten.append(error)
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
        done.set()

    threading.Thread(target=use, daemon=True).start()
    is_done = done.wait(5.0)
    if unwritten:
        raise unwritten[0]
    return found if is_done else [*found, "it waits forever"]


def failing(good):
    yield from range(good)
    raise OSError("disk full")


read = []


def count():
    for number in range(20):
        read.append(number)
        yield number


check("no item", take([], 2), [])
check("the items in their order", take(iter(range(50)), 2), list(range(50)))
check("None is an item", take([1, None, 2], 2), [1, None, 2])
check("an error after 3 items", take(failing(3), 2), [0, 1, 2, "OSError: disk full"])
check("an error at once", take(failing(0), 1), ["OSError: disk full"])
ahead = []
for number in prefetch(count(), 3):
    time.sleep(0.01)  # the thread reads as much as it may
    ahead.append(len(read) - number - 1)
check("it reads ahead", max(ahead) >= 3)
check("at most 3 items wait, besides one that is being read", max(ahead) <= 4)
