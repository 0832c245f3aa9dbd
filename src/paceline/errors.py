"""Every error that a user can meet; the command line prints its one sentence and exits with status 2.

Error
├── SpecError         the request is wrong: an unknown key, a wrong type, a contradiction
├── TaskError         the user's task cannot be used: no such file or class, a method missing or answering nonsense
├── DataError         the data: an empty dataset, a sample that raises, lengths that differ between ranks
├── PlanError         a plan that cannot be, for this batch, this model or these ranks
├── ClusterError      a machine that is not known: no such device, a cluster.json that cannot be read
├── LaunchError       ranks that could not be started, or a contradictory environment
├── RunError          a run folder that exists already, that is none, or that is in use
├── CheckpointError   a checkpoint that cannot be read, or that belongs to another model
├── DivergedError     a loss or gradient that is not finite
├── RankError         a rank that died
└── BenchError        what cannot be measured here, a result that cannot be read or drawn
"""


class Error(Exception):
    """Base of all errors raised on purpose; anything else that surfaces is a bug of Paceline or of the task."""


class SpecError(Error):
    pass


class TaskError(Error):
    pass


class DataError(Error):
    pass


class PlanError(Error):
    pass


class ClusterError(Error):
    pass


class LaunchError(Error):
    pass


class RunError(Error):
    pass


class CheckpointError(Error):
    pass


class DivergedError(Error):
    pass


class RankError(Error):
    pass


class BenchError(Error):
    pass
