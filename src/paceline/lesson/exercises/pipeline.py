"""Exercise: the order of passes in 1F1B."""

# %% exercise
# Write `order(rank, stages, microbatches)`: the passes of a rank under 1F1B, as a list of pairs such as
# ("F", 0) and ("B", 0). Rank 0 has the first stage. A forward pass needs that of the previous stage, and a
# backward pass that of the next stage. Rank r may keep at most stages - r micro-batches between their
# forward and backward passes, and it must not wait longer than necessary: if all passes take equally long,
# the whole takes 2 (microbatches + stages - 1) of them. The micro-batches may be fewer than the stages.


def order(rank, stages, microbatches):
    raise NotImplementedError


# %% solution
def order(rank, stages, microbatches):
    warmup = min(stages - rank - 1, microbatches)
    passes = [("F", m) for m in range(warmup)]
    for m in range(microbatches - warmup):
        passes += [("F", warmup + m), ("B", m)]
    return passes + [("B", m) for m in range(microbatches - warmup, microbatches)]


# %% grade
from paceline.lesson import check
from paceline.lesson.attempts import require


def read_order(rank, stages, microbatches):
    passes = order(rank, stages, microbatches)
    is_list = isinstance(passes, list | tuple) and all(
        isinstance(entry, list | tuple) and len(entry) == 2 for entry in passes
    )
    require(is_list, "order must return a list of pairs such as ('F', 0)", passes)
    return [tuple(entry) for entry in passes]


def play(orders, stages):
    """Return the number of ticks until all passes are done, or None if no rank can continue."""
    done, at, ticks = {}, [0] * stages, 0
    while any(at[rank] < len(orders[rank]) for rank in range(stages)):
        started = []
        for rank in range(stages):
            if at[rank] == len(orders[rank]):
                continue
            kind, m = orders[rank][at[rank]]
            needs = [("F", m, rank - 1)] if kind == "F" else [("F", m, rank), ("B", m, rank + 1)]
            if all(need in done or not 0 <= need[2] < stages for need in needs):
                started.append((kind, m, rank))
        if not started:
            return None
        ticks += 1
        for kind, m, rank in started:
            done[kind, m, rank] = ticks
            at[rank] += 1
    return ticks


def most_kept(passes):
    kept, most = 0, 0
    for kind, _ in passes:
        kept += 1 if kind == "F" else -1
        most = max(most, kept)
    return most


for stages, microbatches in ((1, 3), (2, 2), (4, 8), (4, 2), (3, 5)):
    orders = [read_order(rank, stages, microbatches) for rank in range(stages)]
    name = f"{stages} stages, {microbatches} micro-batches"
    expected = sorted((kind, m) for kind in "FB" for m in range(microbatches))
    check(f"{name}: every pass once", [sorted(passes) for passes in orders], [expected] * stages)
    ticks = play(orders, stages)
    check(f"{name}: no rank waits forever", ticks is not None)
    kept = [most_kept(passes) <= stages - rank for rank, passes in enumerate(orders)]
    check(f"{name}: rank r keeps at most {stages} - r", kept, [True] * stages)
    check(
        f"{name}: it takes as long as {2 * (microbatches + stages - 1)} passes",
        ticks,
        2 * (microbatches + stages - 1),
    )
