"""The errors that a user can meet. The command line prints the message (one sentence) and exits with 2.

Error
├── SpecError         the request is wrong: an unknown key, a wrong type, a contradiction
├── TaskError         the user's task: missing file or class, missing method, wrong return value, exception
├── DataError         the data: an empty dataset, a sample that raises, lengths that differ between ranks
├── PlanError         the plan is invalid, or impossible for this batch, model or number of ranks
├── ClusterError      unknown hardware: no such device, an unreadable cluster.json
├── LaunchError       the ranks could not be started, or the environment contradicts the request
├── RunError          the run folder exists already, is not a run folder, or is in use
├── CheckpointError   the checkpoint is unreadable, or belongs to another model
├── DivergedError     a loss or gradient is not finite
├── CorruptionError   a rank holds other bits than its replicas, or than it wrote
├── RankError         a rank died
└── BenchError        a measurement is impossible here, or its result cannot be read or drawn
"""


class Error(Exception):
    """Base class of all errors that Paceline raises on purpose.

    `str(error)` is one sentence: what is wrong, the value, and the fix. Any other exception is a bug.

        try:
            run = open_run(Path("runs/a"))
        except paceline.Error as error:
            print(error)
    """


class SpecError(Error):
    """The request is wrong: an unknown key, a wrong type, or two values that contradict each other."""


class TaskError(Error):
    """The user's task is unusable: missing file, class or method, wrong return value, or exception."""


class DataError(Error):
    """The data is unusable: an empty dataset, a sample that raises, or lengths that differ between ranks."""


class PlanError(Error):
    """The plan is invalid, or impossible for this batch, this model or this number of ranks."""


class ClusterError(Error):
    """The hardware is unknown: no such device, or a `cluster.json` that cannot be read."""


class LaunchError(Error):
    """The ranks could not be started, or the environment contradicts the request."""


class RunError(Error):
    """The run folder exists already, is not a run folder, or is in use."""


class CheckpointError(Error):
    """The checkpoint cannot be read, or belongs to another model."""


class DivergedError(Error):
    """A loss or a gradient is not finite (NaN or infinity)."""


class CorruptionError(Error):
    """A rank holds other bits than its replicas, or than it wrote: its memory or processor corrupts data."""


class RankError(Error):
    """A rank died."""


class BenchError(Error):
    """The measurement is impossible on this machine, or its result cannot be read or drawn."""
