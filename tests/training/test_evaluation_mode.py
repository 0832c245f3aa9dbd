"""Evaluations change no mode: parts of a model that a task keeps in evaluation mode stay so."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

from paceline import Spec, Step, Task, train
from paceline.evaluation_mode import evaluation_mode


class Frozen(Task):
    """A model with dropout that is switched off, and statistics that are fixed."""

    is_fixed: bool = True

    def model(self):
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))
        return (
            model
            if not self.is_fixed
            else nn.Sequential(model[0], model[1].eval(), model[2].eval(), model[3])
        )

    def dataset(self, split):
        x = torch.randn(32, 4, generator=torch.Generator().manual_seed(1))
        return TensorDataset(x, x.sum(1, keepdim=True))

    def loss(self, output, batch):
        return (output - batch[1]).square().mean(1)


def losses_of(task: Task, every: int | None) -> list[float]:
    spec = Spec(steps=6, batch=8, evaluate_every=every)
    return [event.loss for event in train(spec, task=task) if isinstance(event, Step)]


def test_an_evaluation_changes_no_training():
    assert losses_of(Frozen(), 1) == losses_of(Frozen(), None)
    assert losses_of(Frozen(), 1) != losses_of(Frozen(is_fixed=False), 1)


def test_each_module_gets_its_mode_again():
    model = nn.Sequential(nn.Dropout(), nn.Sequential(nn.Dropout()).eval())
    with evaluation_mode(model):
        assert not any(module.training for module in model.modules())
    assert [module.training for module in model.modules()] == [True, True, False, False]
