"""LightningTask computes the losses of Lightning's own Trainer, and refuses what needs that Trainer."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from command import clean_environment, events_of_kind, paceline, succeed
from paceline.adapters.lr_schedulers import SchedulerFactors
from paceline.errors import TaskError
from paceline.events import Evaluated, Step

pytestmark = pytest.mark.slow  # Lightning imports for seconds
STEPS = 20

MODULE = """
import lightning as L
import torch
from torch import nn

class Lit(L.LightningModule):
    def __init__(self, width, scheduler="none"):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 1))
        self.frozen = nn.Linear(1, 1).requires_grad_(False)

    def forward(self, x):
        return self.frozen(self.net(x))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.mse_loss(self(x), y)
        self.log("train_loss", loss)
        return {"loss": loss, "extra": 1}

    def validation_step(self, batch, batch_idx):
        x, y = batch
        error = (self(x) - y).abs()
        self.log("val/error", error.mean(), prog_bar=True)
        self.log_dict({"small": (error < 0.5).float().mean()})

    def configure_optimizers(self):
        groups = [{"params": self.net[0].parameters()}, {"params": self.net[2].parameters(), "lr": 0.03}]
        optimizer = torch.optim.AdamW(groups, lr=0.02)
        sched = torch.optim.lr_scheduler
        if self.hparams.scheduler == "none":
            return optimizer
        if self.hparams.scheduler == "epoch":
            return [optimizer], [sched.StepLR(optimizer, 1, 0.3)]
        lr = sched.SequentialLR(
            optimizer,
            [sched.LinearLR(optimizer, 0.1, total_iters=5), sched.CosineAnnealingLR(optimizer, 20)],
            [5],
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": lr, "interval": "step"}}

def samples(count, seed):
    x = torch.randn(count, 6, generator=torch.Generator().manual_seed(seed))
    data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True).sin())
    order = torch.randperm(count, generator=torch.Generator().manual_seed(9)).tolist()
    return torch.utils.data.Subset(data, order)
"""
TASK = """
from module import Lit, samples
from paceline.adapters.lightning import LightningTask

class Net(LightningTask):
    scheduler: str = "none"
    def module(self):
        return Lit(16, self.scheduler)
    def dataset(self, split):
        return {"train": samples(256, 1), "validation": samples(50, 2)}.get(split)
    def pretrained(self):
        return "start.safetensors"
"""
NATIVE = """
import json, sys, warnings
import lightning as L
import torch
from safetensors.torch import load_file
from module import Lit, samples
warnings.simplefilter("ignore")

class Record(L.Callback):
    losses, metrics = [], []
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.losses.append(outputs["loss"].item())
    def on_validation_epoch_end(self, trainer, module):
        self.metrics.append({name: value.item() for name, value in trainer.callback_metrics.items()})

module = Lit(16, sys.argv[1])
module.load_state_dict(load_file("start.safetensors"))
loaders = [torch.utils.data.DataLoader(samples(count, seed), 32) for count, seed in ((256, 1), (50, 2))]
record = Record()
trainer = L.Trainer(
    max_steps=20, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0, callbacks=[record],
)
trainer.fit(module, *loaders)
json.dump([record.losses, record.metrics], open("native.json", "w"))
"""


@pytest.fixture(scope="module", autouse=True)
def _lightning():
    pytest.importorskip("lightning.pytorch")


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "module.py").write_text(MODULE)
    (tmp_path / "task.py").write_text(TASK)
    (tmp_path / "native.py").write_text(NATIVE)
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
    state = {f"net.{name}": value for name, value in net.state_dict().items()}
    save_file(
        state | {"frozen.weight": torch.ones(1, 1), "frozen.bias": torch.zeros(1)},
        tmp_path / "start.safetensors",
    )
    return tmp_path


def run_native(folder: Path, scheduler: str):
    result = subprocess.run(
        [sys.executable, "native.py", scheduler],
        cwd=folder,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    return json.loads((folder / "native.json").read_text())


def train(folder: Path, scheduler: str, *options: str, steps: int = STEPS):
    run = f"run-{scheduler}-{len(list(folder.glob('run-*')))}"
    schedule = () if scheduler == "none" else ("--schedule", "task")
    succeed(
        *("train", "task.py:Net", "--steps", str(steps), "--batch", "32", "--set", "data.shuffle=none"),
        *("--set", f"scheduler={scheduler}", *schedule, *options, "--run-dir", run),
        at=folder,
    )
    losses = [step.loss for step in events_of_kind(folder / run, Step)]
    return losses, [event.metrics for event in events_of_kind(folder / run, Evaluated)]


@pytest.mark.processes
def test_losses_and_metrics_equal_those_of_lightning(folder):
    natives = {}
    for scheduler in ("none", "epoch", "step"):
        natives[scheduler], native_metrics = run_native(folder, scheduler)
        losses, metrics = train(
            folder, scheduler, "--ranks", "2", "--plan", "zero3" if scheduler == "step" else "ddp"
        )
        assert len(losses) == STEPS
        assert losses == pytest.approx(natives[scheduler], rel=1e-6)
        for ours, theirs in zip(metrics[:2], native_metrics, strict=False):
            for name in ("val/error", "small"):
                assert ours[name] == pytest.approx(theirs[name], rel=1e-5)
    assert natives["none"] != pytest.approx(natives["epoch"], rel=1e-3)
    assert natives["none"] != pytest.approx(natives["step"], rel=1e-3)


@pytest.mark.processes
def test_a_resumed_training_continues_the_scheduler(folder):
    whole, _ = train(folder, "step")
    train(folder, "step", "--set", "save.every=9", steps=9)
    run = folder / "run-step-1"
    succeed("resume", "run-step-1", "--steps", str(STEPS), at=folder)
    assert [step.loss for step in events_of_kind(run, Step)] == whole
    lrs = [step.lr for step in events_of_kind(run, Step)]
    assert lrs[:2] == pytest.approx([0.002, 0.002 + 0.0036])


@pytest.mark.processes
def test_a_scheduler_without_its_schedule_is_refused(folder):
    common = ("train", "task.py:Net", "--steps", "2", "--batch", "32", "--run-dir", "run")
    for options, words in (
        (("--set", "scheduler=epoch"), "StepLR of configure_optimizers, and the request has constant"),
        (("--schedule", "task"), "returns no scheduler; leave out --schedule task"),
    ):
        result = paceline(*common, *options, at=folder)
        assert result.status == 2
        assert words in result.err
        assert "Traceback" not in result.all


REFUSED = {
    "hook": ("def on_train_epoch_end(self): pass", "on_train_epoch_end, which the Trainer"),
    "clipping": ("def configure_gradient_clipping(self, *a, **k): pass", "--set optimizer.clip=1"),
    "backward": ("def backward(self, loss): loss.backward()", "defines backward"),
    "setup": ("def setup(self, stage): pass", "the samples in dataset()"),
    "manual": ("automatic_optimization = False", "automatic_optimization=False"),
    "plateau": (
        "def configure_optimizers(self):\n        o = torch.optim.SGD(self.parameters(), lr=1.0)\n"
        "        s = torch.optim.lr_scheduler.ReduceLROnPlateau(o)\n"
        "        return {'optimizer': o, 'lr_scheduler': s, 'monitor': 'x'}",
        "use --schedule plateau",
    ),
    "two": (
        "def configure_optimizers(self):\n"
        "        return [torch.optim.SGD(m.parameters(), lr=1.0) for m in (self.net[0], self.net[2])]",
        "returns 2 optimizers",
    ),
    "momentum": (
        "def configure_optimizers(self):\n"
        "        o = torch.optim.SGD(self.parameters(), lr=1.0, momentum=0.9)\n"
        "        return [o], [torch.optim.lr_scheduler.OneCycleLR(o, 1.0, 100)]",
        "cycle_momentum=False",
    ),
    "trainer": (
        "def configure_optimizers(self):\n"
        "        return torch.optim.SGD(self.parameters(), lr=self.trainer.estimated_stepping_batches)",
        "uses trainer.estimated_stepping_batches",
    ),
    "epoch": (
        "def training_step(self, batch, batch_idx):\n"
        "        return self(batch[0]).mean() * self.current_epoch",
        "uses trainer.current_epoch",
    ),
    "index": (
        "def training_step(self, batch, batch_idx):\n        return self(batch[0]).mean() * (batch_idx % 2)",
        "uses batch_idx",
    ),
    "maximum": (
        "def validation_step(self, batch, batch_idx):\n"
        "        self.log('worst', self(batch[0]).max(), reduce_fx='max')",
        "log('worst', reduce_fx=max): Paceline averages",
    ),
    "several": (
        "def validation_step(self, batch, batch_idx, dataloader_idx):\n        return None",
        "validation_step takes dataloader_idx",
    ),
    "model": ("def configure_model(self): pass", "build the layers in __init__"),
    "loaders": (
        "def training_step(self, batch, batch_idx, optimizer_idx):\n        return self(batch[0]).mean()",
        "training_step takes optimizer_idx",
    ),
    "nothing": ("def training_step(self, batch, batch_idx):\n        return None", "returned no loss"),
    "last": (
        "def validation_step(self, batch, batch_idx):\n"
        "        self.log('last', self(batch[0]).mean(), False, None, True, False)",
        "log('last', on_epoch=False) in validation_step keeps the value of a single batch",
    ),
    "table": (
        "def validation_step(self, batch, batch_idx):\n"
        "        self.log_dict({'worst': self(batch[0]).max()}, False, None, None, None, 'max')",
        "log('worst', reduce_fx=max): Paceline averages",
    ),
    "weight": (
        "def training_step(self, batch, batch_idx):\n"
        "        loss = self(batch[0]).mean()\n"
        "        self.log('a', loss, batch_size=3)\n"
        "        return loss",
        "log('a', batch_size=3) weighs a value by another number than the 4 samples",
    ),
    "shape": (
        "def validation_step(self, batch, batch_idx):\n        self.log('a', self(batch[0]))",
        "log('a') of a tensor of shape (4, 1)",
    ),
    "kept": (
        "def validation_step(self, batch, batch_idx):\n        import torchmetrics\n"
        "        self.log('a', torchmetrics.MeanMetric())",
        "log('a') of the metric MeanMetric",
    ),
    "iterator": (
        "def training_step(self, dataloader_iter):\n        return self(next(dataloader_iter)[0]).mean()",
        "training_step takes dataloader_iter",
    ),
    "instance": (
        "def __init__(self, *a):\n        super().__init__(*a)\n        self.on_train_start = print",
        "defines on_train_start",
    ),
    "first version": ("def validation_epoch_end(self, outputs): pass", "defines validation_epoch_end"),
    "state": ("def on_save_checkpoint(self, checkpoint): pass", "keep the state in a buffer"),
    "logger": (
        "def training_step(self, batch, batch_idx):\n        self.logger.log_metrics({})",
        "uses trainer.logger",
    ),
    "print": (
        "def training_step(self, batch, batch_idx):\n        self.print('here')",
        "uses trainer.",
    ),
    "optimizers": (
        "def training_step(self, batch, batch_idx):\n        self.optimizers().step()",
        "uses trainer.",
    ),
    "text": (
        "def training_step(self, batch, batch_idx):\n        return 'loss'",
        "returned str as its loss; return a tensor",
    ),
    "no step": ("training_step = L.LightningModule.training_step", "has no training_step"),
    "no optimizer": (
        "configure_optimizers = L.LightningModule.configure_optimizers",
        "has no configure_optimizers",
    ),
    "other optimizer": (
        "def configure_optimizers(self):\n        return 'sgd'",
        "must return an optimizer of torch, got str",
    ),
    "buffer": (
        "validation_step = L.LightningModule.validation_step\n"
        "    def training_step(self, batch, batch_idx):\n"
        "        self.frozen.bias.add_(1)\n"
        "        return self(batch[0]).square()",
        "training_step changes 'frozen.bias', also in an evaluation",
    ),
    **{
        name: (
            "def configure_optimizers(self):\n"
            "        groups = [{'params': [p], 'lr': 1} for p in self.net.parameters()]\n"
            "        groups[3]['lr'] = RATE\n"
            "        o, s = torch.optim.SGD(groups), torch.optim.lr_scheduler\n"
            "        return {'optimizer': o, 'lr_scheduler': {'scheduler': SCHEDULER, TABLE}}".replace(
                "RATE", rate
            )
            .replace("SCHEDULER", scheduler)
            .replace("TABLE", table),
            words,
        )
        for name, rate, scheduler, table, words in (
            ("interval", "1", "s.StepLR(o, 1)", "'interval': 'batch'", "interval must be 'step' or 'epoch'"),
            ("frequency", "1", "s.StepLR(o, 1)", "'interval': 'step', 'frequency': 2", "frequency=2 with"),
            ("zero", "0.0", "s.StepLR(o, 1)", "'interval': 'step'", "for a learning rate of 0"),
            (
                "groups",
                "1",
                "s.LambdaLR(o, [lambda n: 1 / (n + 1)] * 3 + [lambda n: 1])",
                "'interval': 'step'",
                "a LambdaLR with different factors for parameter groups",
            ),
        )
    },
    "metric": (
        "def __init__(self, *a):\n        super().__init__(*a)\n        import torchmetrics\n"
        "        self.acc = torchmetrics.MeanMetric()",
        "the metric 'acc' of torchmetrics",
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", REFUSED)
def test_what_needs_the_trainer_is_refused_by_name(case, tmp_path, monkeypatch):
    from paceline.adapters.lightning import LightningTask

    method, words = REFUSED[case]
    names: dict = {"__name__": "lit"}
    exec(MODULE, names)
    exec(f"class Mine(Lit):\n    {method}\n", names)

    class Net(LightningTask):
        def module(self):
            return names["Mine"](4)

        def dataset(self, split):
            return names["samples"](8, 1) if split in ("train", "validation") else None

    from paceline import Spec, train

    spec = Spec(task="lit:Net", steps=2, batch=4)
    with pytest.raises(TaskError, match=re.escape(words)):
        list(train(spec, task=Net))


def test_all_hooks_of_a_training_are_refused():
    import lightning.pytorch as pl
    from lightning.pytorch.core import hooks

    from paceline.adapters.lightning_module import UNUSED_HOOKS, check_module

    names: dict = {"__name__": "lit"}
    exec(MODULE, names)
    found = {
        name for kind in (hooks.ModelHooks, hooks.DataHooks, hooks.CheckpointHooks) for name in vars(kind)
    }
    used = {name for name in found if not name.startswith(("_", "on_test_", "on_predict_"))} - UNUSED_HOOKS
    assert {"on_fit_start", "on_before_zero_grad", "on_train_batch_end", "on_validation_end"} <= used
    for name in used:
        kind = type("Mine", (names["Lit"],), {name: lambda self, *given: None})
        with pytest.raises(TaskError, match=f"Mine defines {name}, which the Trainer of Lightning calls"):
            check_module(kind(4), pl.LightningModule)
    check_module(names["Lit"](4), pl.LightningModule)


@pytest.mark.filterwarnings("ignore")
def test_a_step_without_an_index_and_a_module_without_validation_are_accepted():
    from paceline import Evaluated, Spec, train
    from paceline.adapters.lightning import LightningTask

    names: dict = {"__name__": "lit"}
    exec(MODULE, names)
    exec(
        "class Mine(L.LightningModule):\n"
        "    def __init__(self):\n        super().__init__()\n        self.net = nn.Linear(6, 1)\n"
        "    def training_step(self, batch):\n        return (self.net(batch[0]) - batch[1]).square()\n"
        "    def configure_optimizers(self):\n        return [torch.optim.SGD(self.parameters(), lr=0.1)]\n",
        names,
    )

    class Net(LightningTask):
        def module(self):
            return names["Mine"]()

        def dataset(self, split):
            return names["samples"](16, 1) if split in ("train", "validation") else None

    events = list(train(Spec(task="lit:Net", epochs=4, batch=4), task=Net))
    losses = [event.metrics["loss"] for event in events if isinstance(event, Evaluated)]
    assert len(losses) == 4
    assert losses[-1] < losses[0]


def test_only_a_lightning_module_is_accepted():
    from paceline.adapters.lightning_module import adapt

    with pytest.raises(TaskError, match=r"must return a LightningModule, got Linear"):
        adapt(nn.Linear(1, 1))


def test_factors_are_those_of_a_stepped_scheduler():
    def build():
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.5)
        return optimizer, torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3)

    optimizer, scheduler = build()
    expected = []
    for _ in range(8):
        expected.append(optimizer.param_groups[0]["lr"] / 0.5)
        optimizer.step()
        scheduler.step()
    factors = SchedulerFactors(build()[1], "configure_optimizers of Mine")
    assert factors.after(7) == pytest.approx(expected[7])
    assert [factors.after(steps) for steps in range(8)] == pytest.approx(expected)


DATA = """
class Points(L.LightningDataModule):
    def __init__(self, **options):
        super().__init__()
        self.options, self.stages = options, []

    def setup(self, stage):
        self.stages.append(stage)
        self.points = samples(16, 1)

    def train_dataloader(self):
        return torch.utils.data.DataLoader(self.points, **({"batch_size": 4, "shuffle": True} | self.options))

    def val_dataloader(self):
        return [torch.utils.data.DataLoader(self.points)] * 2
"""


@pytest.mark.filterwarnings("ignore")
def test_samples_of_a_data_module():
    from paceline.adapters.lightning_data import read_split

    names: dict = {"__name__": "lit"}
    exec(MODULE + DATA, names)
    points = names["Points"]
    data = points()
    assert read_split(data, "train") is data.points
    assert data.stages == ["fit"]
    assert [read_split(points(), split) for split in ("test", "other")] == [None, None]

    def flip(samples):
        return torch.utils.data.default_collate(samples[::-1])

    assert len(read_split(points(collate_fn=flip), "train", collate_fn=flip)) == 16
    whole = names["L"].LightningDataModule.from_datasets(names["samples"](8, 1))
    assert len(read_split(whole, "train")) == 8
    assert read_split(whole, "validation") is None
    sampler = torch.utils.data.WeightedRandomSampler([1.0] * 16, 16)
    hooked = type("Hooked", (points,), {"on_after_batch_transfer": lambda self, batch, index: batch})
    for data, split, words in (
        (points(collate_fn=flip), "train", "has a collate_fn, which the task does not call"),
        (points(sampler=sampler, shuffle=None), "train", "has the sampler WeightedRandomSampler"),
        (points(batch_size=None, shuffle=None), "train", "makes its own batches"),
        (points(), "validation", "returns list, not a DataLoader"),
        (hooked(), "train", "Hooked defines on_after_batch_transfer"),
        (object(), "train", "needs a LightningDataModule, got object"),
    ):
        with pytest.raises(TaskError, match=re.escape(words)):
            read_split(data, split)
