"""Distributed PyTorch training: one task, any number of processes and any layout, the same result.

A task says what to train and never mentions ranks:

    import torch
    from torch import nn
    from torch.utils.data import TensorDataset
    import paceline

    class Mine(paceline.Task):
        width: int = 64  # a hyper-parameter, set by --set width=128

        def model(self):
            return nn.Sequential(nn.Linear(6, self.width), nn.Tanh(), nn.Linear(self.width, 3))

        def dataset(self, split):
            return TensorDataset(torch.randn(1000, 6), torch.randn(1000, 3)) if split == "train" else None

        def loss(self, output, batch):
            return (output - batch[1]).square()

The command line starts the processes: `paceline train mine.py:Mine --ranks 4 --plan zero3`. From Python:

    train          train on one or more processes, as a generator of events
    find_plans     the plans that fit, fastest first
    verify_plan    check that a plan computes the same training as one process
    tune           suggest hyper-parameters for a loop of your own
    setup          distribute a model and its optimizer for a loop of your own, as a Trainer
    spawn          call a function on connected processes
    evaluate       the metrics of a checkpoint of a run on any split
    predict        what a checkpoint predicts for each sample of a split or of files
    generate       the texts that the language model of a run writes
    describe       what planning knows of a model
    Task, Layout   what to train, and how its model may be split; BufferSum: how a buffer changes
    Update         one of several optimizers of a task, with its parameters and loss
    Ragged         tensors of different lengths in a batch, to be padded
    SampleRng      random numbers that belong to the samples of a batch
    Spec, Plan     length, batch and optimizer; the layout over ranks
    Cluster        facts of the machines; World: which rank this process is; RunFolder: files of a run
    Event          base of Started, Step, Noted, Profiled, NoiseMeasured, Evaluated, Saved, Failed,
                   Stalled, Ended
    Error          base of SpecError, TaskError, DataError, PlanError, ClusterError, LaunchError, RunError,
                   CheckpointError, DivergedError, RankError, BenchError
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from paceline.version import __version__ as __version__

if TYPE_CHECKING:
    from paceline.cluster.facts import Cluster as Cluster
    from paceline.data.ragged import Ragged as Ragged
    from paceline.distributed.world import World as World
    from paceline.errors import BenchError as BenchError
    from paceline.errors import CheckpointError as CheckpointError
    from paceline.errors import ClusterError as ClusterError
    from paceline.errors import CorruptionError as CorruptionError
    from paceline.errors import DataError as DataError
    from paceline.errors import DivergedError as DivergedError
    from paceline.errors import Error as Error
    from paceline.errors import LaunchError as LaunchError
    from paceline.errors import PlanError as PlanError
    from paceline.errors import RankError as RankError
    from paceline.errors import RunError as RunError
    from paceline.errors import SpecError as SpecError
    from paceline.errors import TaskError as TaskError
    from paceline.events import Ended as Ended
    from paceline.events import Evaluated as Evaluated
    from paceline.events import Event as Event
    from paceline.events import Failed as Failed
    from paceline.events import NoiseMeasured as NoiseMeasured
    from paceline.events import Noted as Noted
    from paceline.events import Profiled as Profiled
    from paceline.events import Saved as Saved
    from paceline.events import Stalled as Stalled
    from paceline.events import Started as Started
    from paceline.events import Step as Step
    from paceline.launch.call_on_ranks import spawn as spawn
    from paceline.launch.evaluate_run import evaluate as evaluate
    from paceline.launch.generate_run import generate as generate
    from paceline.launch.predict_run import predict as predict
    from paceline.launch.train_run import train as train
    from paceline.plan.plan import Plan as Plan
    from paceline.run import RunFolder as RunFolder
    from paceline.sample_rng import SampleRng as SampleRng
    from paceline.spec import Spec as Spec
    from paceline.task import BufferSum as BufferSum
    from paceline.task import Layout as Layout
    from paceline.task import Task as Task
    from paceline.training.model_facts.describe import describe as describe
    from paceline.training.own_loop.setup import setup as setup
    from paceline.training.own_loop.trainer import Trainer as Trainer
    from paceline.training.planning.find_plans import find_plans as find_plans
    from paceline.tuning.ask_tell import tune as tune
    from paceline.updates import Update as Update
    from paceline.verify.verify_plan import verify_plan as verify_plan

# Imported on first use: `train` needs torch, whose import takes a second.
_PLACES = {
    "BenchError": "errors",
    "BufferSum": "task",
    "CheckpointError": "errors",
    "Cluster": "cluster.facts",
    "ClusterError": "errors",
    "DataError": "errors",
    "CorruptionError": "errors",
    "DivergedError": "errors",
    "Ended": "events",
    "Error": "errors",
    "Evaluated": "events",
    "Event": "events",
    "Failed": "events",
    "LaunchError": "errors",
    "Layout": "task",
    "NoiseMeasured": "events",
    "Noted": "events",
    "Plan": "plan.plan",
    "PlanError": "errors",
    "Profiled": "events",
    "Ragged": "data.ragged",
    "RankError": "errors",
    "RunError": "errors",
    "RunFolder": "run",
    "SampleRng": "sample_rng",
    "Saved": "events",
    "Spec": "spec",
    "SpecError": "errors",
    "Stalled": "events",
    "Started": "events",
    "Step": "events",
    "Task": "task",
    "TaskError": "errors",
    "Trainer": "training.own_loop.trainer",
    "Update": "updates",
    "World": "distributed.world",
    "describe": "training.model_facts.describe",
    "evaluate": "launch.evaluate_run",
    "find_plans": "training.planning.find_plans",
    "generate": "launch.generate_run",
    "predict": "launch.predict_run",
    "setup": "training.own_loop.setup",
    "spawn": "launch.call_on_ranks",
    "train": "launch.train_run",
    "tune": "tuning.ask_tell",
    "verify_plan": "verify.verify_plan",
}
__all__ = [
    "BenchError",
    "BufferSum",
    "CheckpointError",
    "Cluster",
    "ClusterError",
    "CorruptionError",
    "DataError",
    "DivergedError",
    "Ended",
    "Error",
    "Evaluated",
    "Event",
    "Failed",
    "LaunchError",
    "Layout",
    "NoiseMeasured",
    "Noted",
    "Plan",
    "PlanError",
    "Profiled",
    "Ragged",
    "RankError",
    "RunError",
    "RunFolder",
    "SampleRng",
    "Saved",
    "Spec",
    "SpecError",
    "Stalled",
    "Started",
    "Step",
    "Task",
    "TaskError",
    "Trainer",
    "Update",
    "World",
    "__version__",
    "describe",
    "evaluate",
    "find_plans",
    "generate",
    "predict",
    "setup",
    "spawn",
    "train",
    "tune",
    "verify_plan",
]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'paceline' has no attribute {name!r}")
    return getattr(import_module(f"paceline.{_PLACES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
