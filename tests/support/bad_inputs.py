"""Bad inputs of every command, as data: files, damaged runs, and commands with the words of their messages.

The commands run in a folder with the files of FILES, a finished run `run` of bad.py:Small, and a copy of it
for each row of DAMAGED. The row replaces files of the copy (None: deleted; FOLDER: a folder instead of the
file; * matches any name). The folder also has a named pipe `pipe`, which no command may replace.
"""

FOLDER = object()

TASKS = """
import torch
from torch import nn

from paceline import Layout, Task, Update


class Points:
    def __init__(self, count):
        draw = torch.Generator().manual_seed(count)
        self.x, self.y = torch.randn(count, 6, generator=draw), torch.randn(count, 3, generator=draw)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.y[index]


class Small(Task):
    width: int = 4
    rate: float = 0.1
    flag: bool = False
    sizes: tuple[int, ...] = (1, 2)
    note: str = ""

    def model(self):
        return nn.Sequential(nn.Linear(6, self.width), nn.Tanh(), nn.Linear(self.width, 3))

    def dataset(self, split):
        return Points(24) if split == "train" else None

    def loss(self, output, batch):
        return (output - batch[1]).square()


class NoLoss(Task):
    def model(self):
        return nn.Linear(6, 3)

    def dataset(self, split):
        return Points(5)


class Whole(Task):
    def model(self):
        return nn.Linear(6, 3)

    def dataset(self, split):
        return Points(24) if split == "train" else None

    def global_loss(self, output, batch):
        return (output - batch[1]).square().mean()


class Updates(Small):
    params: str = "0.*,2.*"
    second: str = "second"

    def updates(self):
        first, other = self.params.split(",")
        return [Update("first", first), Update(self.second, other)]


class BothLosses(Small):
    def global_loss(self, output, batch):
        return super().loss(output, batch).mean()


class WeighedWhole(Whole):
    def loss_weights(self):
        return {"error": 0.5}


class SumsOnly(Small):
    def batch_sums(self, output, batch):
        return {"total": output.sum()}


class Balanced(SumsOnly):
    def auxiliary_loss(self, sums):
        return sums["total"]


class BalancedWhole(Whole):
    def auxiliary_loss(self, sums):
        return sums["total"]


class Must(Small):
    depth: int


class Layered(Small):
    where: str = "0"

    def layout(self):
        return Layout(blocks=(self.where,))


class Declared(Small):
    buffer: str = "0.mean"
    value: str = "mean"

    def layout(self):
        return Layout(buffers={self.buffer: self.value})

    def model(self):
        model = super().model()
        model.append(nn.BatchNorm1d(3))
        model[1].register_buffer("mean", torch.zeros(self.width))
        return model


class Fails(Small):
    at: str = ""

    def fail(self, at):
        if at == self.at:
            raise ValueError(f"the {at} is broken")

    def model(self):
        self.fail("model")
        return super().model()

    def dataset(self, split):
        self.fail("dataset")
        points = super().dataset(split)
        if self.at == "batch_of" and points is not None:
            points.batch_of = points.__getitem__
        return points

    def collate(self, samples):
        return super().collate(samples)

    def loss(self, output, batch):
        self.fail("loss")
        return super().loss(output, batch)

    def layout(self):
        self.fail("layout")
        return super().layout()

    def optimizer(self, params):
        self.fail("optimizer")
        return None


class Plain:
    pass
"""

FILES: dict[str, bytes] = {
    "bad.py": TASKS.encode(),
    "one.py": TASKS.partition("class NoLoss")[0].encode(),
    "syntax.py": b"def model(:\n",
    "raises.py": b"import os\n\n1 / 0\n",
    "imports.py": b"import torhc\n",
    "empty.py": b"",
    "bytes.py": b"\xff\xfe\x00\x01",
    "exits.py": b"raise SystemExit(0)\n",
    "request.toml": b'task = "bad.py:Small"\nsteps = 2\n',
    "many.toml": b'task = "bad.py:Small"\nbatch = "many"\n',
    "unknown.toml": b'task = "bad.py:Small"\n[optimizer]\nlr = 0.1\nmomentun = 0.9\n',
    "torn.toml": b"batch = \n",
    "twice.toml": b"batch = 3\nbatch = 4\n",
    "latin.toml": b'task = "b\xe4d.py:Small"\n',
    "table.toml": b'task = "bad.py:Small"\noptimizer = 3\n',
    "list.toml": b'task = ["bad.py:Small"]\n',
    "deep.toml": b"x = " + b"[" * 3000 + b"]" * 3000 + b"\n",
    "empty.toml": b"",
    "site-torn.toml": b"partition = \n",
    "site-key.toml": b'partitoin = "gpu"\n',
    "site-type.toml": b"partition = 3\n",
    "site-line.toml": b'partition = "gpu\\ntouch pwned"\n',
    "site-array.toml": b'sbatch = ["--array=1-4"]\n',
    "site-array-short.toml": b'sbatch = ["-a 1-4"]\n',
    "site-option.toml": b'sbatch = ["exclusive"]\n',
    "site-two.toml": b'conda = "a"\nvenv = "b"\n',
    "site-stage.toml": b'stage_in = "data.tar"\n',
    "site-variable.toml": b'[environment]\n"A B" = "1"\n',
    "site-cpus.toml": b"cpus_per_rank = 0\n",
    "cluster-torn.json": b'{"name": ',
    "cluster-empty.json": b"",
    "cluster-list.json": b"[]",
    "cluster-null.json": b"null",
    "cluster-keys.json": b'{"nodse": 3}',
    "model-torn.toml": b"layers = \n",
    "model-key.toml": b"layres = 3\n",
    "model-zero.toml": b"layers = 0\nhidden = 8\nheads = 2\nvocabulary = 10\nsequence = 4\n",
    "result-torn.json": b'{"command": ',
    "result-list.json": b"[1, 2]",
    "result-empty.json": b"",
    "words.txt": b"these are words\n",
    "short.txt": b"ab",
    "images/train-images-idx3-ubyte": b"\x00\x00\x08\x03\x00\x00",
    "images/train-labels-idx1-ubyte": b"nonsense",
}

DAMAGED: dict[str, dict[str, bytes | object | None]] = {
    "no-spec": {"spec.toml": None},
    "empty-spec": {"spec.toml": b""},
    "torn-spec": {"spec.toml": b'task = "bad.py:Sm'},
    "binary-spec": {"spec.toml": b"\x00\xff\x00\xff"},
    "folder-spec": {"spec.toml": FOLDER},
    "other-task": {"spec.toml": b'task = "gone.py:Gone"\nsteps = 4\n'},
    "no-events": {"events.jsonl": None},
    "empty-events": {"events.jsonl": b""},
    "folder-events": {"events.jsonl": FOLDER},
    "no-ckpt": {"ckpt": None},
    "file-ckpt": {"ckpt": b"nothing"},
    "no-metadata": {"ckpt/*/.metadata": None},
    "empty-metadata": {"ckpt/*/.metadata": b""},
    "evil-metadata": {"ckpt/*/.metadata": b"cos\nsystem\n(S'touch pwned'\ntR."},
    "empty-tensors": {"ckpt/*/__0_0.distcp": b""},
    "no-checkpoint-json": {"ckpt/*/checkpoint.json": None},
    "torn-checkpoint-json": {"ckpt/*/checkpoint.json": b'{"step": '},
    "list-checkpoint-json": {"ckpt/*/checkpoint.json": b"[]"},
    "odd-step": {"ckpt/step_٣": FOLDER},
}

# Command as in a shell; parts that its message must contain, separated by |; exit status (default 2).
CASES: list[tuple[str, str] | tuple[str, str, int]] = [
    # train: the task
    ("train nowhere.py:Task", "no such file: nowhere.py"),
    ("train bed.py:Small", "did you mean bad.py"),
    ("train bad.py:Smal", "did you mean Small"),
    ("train bad.py:Points", "Points"),
    ("train bad.py:Plain", "Plain"),
    ("train bad.py:NoLoss", "loss"),
    ("train bad.py:BothLosses", "global_loss"),
    ("train bad.py:WeighedWhole", "global_loss|loss_weights"),
    ("train bad.py:SumsOnly", "batch_sums without auxiliary_loss"),
    ("train bad.py:BalancedWhole", "global_loss and auxiliary_loss"),
    ("train bad.py:Balanced --batch 24 --ranks 2 --plan pp=2,microbatches=2", "auxiliary_loss|gpipe"),
    ("train bad.py:Balanced --batch 24 --ranks 2 --plan local-sgd,period=2", "auxiliary_loss"),
    ("train bad.py:Updates --set params=0.*,1.*", "2.weight|no update"),
    ("train bad.py:Updates --set params=*,5.*", "5.*|second"),
    ("train bad.py:Updates --set params=*,2.*", "2.weight|first and second"),
    ("train bad.py:Updates --set second=first", "first|rename"),
    ("train bad.py:Updates --precision fp16", "fp16|updates"),
    ("train bad.py:Updates --ranks 2 --plan tp=2 --batch 24", "tp=2|updates"),
    ("train bad.py:Updates --ranks 2 --plan local-sgd,period=2 --batch 24", "local-sgd|updates"),
    (
        "train bad.py:Updates --ranks 2 --plan parameter-server,servers=1 --batch 24",
        "parameter-server|updates",
    ),
    ("preflight bad.py:Updates --ranks 2 --plan pp=2 --batch 24", "pp=2|updates"),
    ("plan bad.py:Updates --ranks 2 --plan tp=2 --batch 24", "tp=2|updates"),
    ("train bad.py:Updates --set second=lr", "lr|rename"),
    ("train bad.py:Whole --batch 24 --ranks 2 --plan pp=2", "global_loss"),
    ("train bad.py:Whole --batch 24 --ranks 2 --plan local-sgd,period=2", "global_loss"),
    ("train bad.py:Whole --batch 24 --ranks 2 --plan parameter-server,servers=1", "global_loss"),
    ("preflight bad.py:Whole --batch 24 --ranks 2 --plan pp=2", "global_loss"),
    ("train bad.py", "specify the class"),
    ("train bad.py:", "specify the class"),
    ("train digit", "did you mean digits"),
    ("train no.such:Thing", "no.such"),
    ("train json:JSONDecoder", "JSONDecoder"),
    ("train json:Nothing", "Nothing"),
    ("train :Small", "''"),
    ("train ''", "''"),
    ("train ' '", "' '"),
    ("train syntax.py:Small", "syntax.py, line 1"),
    ("train raises.py:Small", "ZeroDivisionError"),
    ("train imports.py:Small", "torhc"),
    ("train empty.py:Small", "Small"),
    ("train bytes.py:Small", "bytes.py"),
    ("train exits.py:Small", "exits.py"),
    ("train .", "."),
    ("train bad.py:Small:More", "Small:More"),
    ("train bad.py:Must --steps 1", "depth|--set depth=VALUE"),
    ("train bad.py:Small --set width=wide", "wide"),
    ("train bad.py:Small --set width=1.5", "1.5"),
    ("train bad.py:Small --set width=true", "width"),
    ("train bad.py:Small --set rate=fast", "fast"),
    ("train bad.py:Small --set flag=3", "flag"),
    ("train bad.py:Small --set sizes=3", "sizes"),
    ("train bad.py:Small --set 'sizes=[1,\"two\"]'", "two"),
    ("train bad.py:Small --set widht=3", "did you mean width"),
    ("train bad.py:Small --set optimiser.lr=3", "optimiser|did you mean optimizer.lr"),
    ("train bad.py:Small --set width.height=3", "width|3"),
    ("train bad.py:Small --set width=3 --set width.height=3", "width=3|width.height"),
    ("train bad.py:Small --set width", "NAME=VALUE"),
    ("train bad.py:Small --set =3", "=3"),
    ("train bad.py:Small --set width=", "width"),
    ("train bad.py:Small --set width=3 --set width=3 --steps 1 --plan nonsense", "nonsense"),
    ("train bad.py:Small --set width=3 --set width=4", "width is 3|4"),
    ("train bad.py:Small --set spec.lr=3", "did you mean optimizer.lr"),
    ("train bad.py:Small --batch 8 --set spec.batch=16", "spec.batch is 8|16"),
    ("train bad.py:Small --lr 0.1 --set optimizer.lr=0.2", "optimizer.lr is 0.1|0.2"),
    ("train bad.py:Small --optimizer sgd --set optimizer.name=adamw", "optimizer.name is 'sgd'|'adamw'"),
    ("train bad.py:Small --set spec.task=digits", "spec.task is 'bad.py:Small'|'digits'"),
    ("verify bad.py:Small --plan ddp --steps 2 --set spec.steps=3", "spec.steps is 2|3"),
    ("verify bad.py:Small --plan ddp --set spec.epochs=1", "epochs=1 and steps=3"),
    ("drill bad.py:Small --set spec.epochs=1", "epochs=1 and steps=24"),
    ("train bad.py:Small --set width=" + "9" * 5000, "width"),
    ("train bad.py:Small --set sizes=" + "[" * 5000, "sizes"),
    ("train bad.py:Small --set " + "n" * 5000 + "=3", "nnn"),
    ("train bad.py:Small --set width=-3 --steps 1 --batch 8", "negative dimension -3"),
    ("train bad.py:Layered --set where=nowhere --plan zero3 --ranks 2 --batch 8", "nowhere"),
    ("train bad.py:Declared --batch 8", "no buffer|'0.mean'|did you mean 1.mean"),
    (
        "train bad.py:Declared --batch 8 --set buffer=1.* --set value=average",
        "'average'|'sum', 'mean', 'none'",
    ),
    ("train bad.py:Declared --batch 8 --set buffer=*", "3.running_mean|BatchNorm"),
    (
        "train bad.py:Declared --batch 8 --set buffer=1.* --ranks 2 --plan local-sgd,period=2",
        "plan local-sgd|period=2|'1.mean'|zero3",
    ),
    ("train bad.py:Fails --set at=model --batch 8", "the model is broken"),
    ("train bad.py:Fails --set at=dataset --batch 8", "the dataset is broken"),
    ("train bad.py:Fails --set at=batch_of --batch 8", "Fails.collate() would not be called|remove collate"),
    ("train bad.py:Fails --set at=layout --batch 8 --plan zero3 --ranks 2", "the layout is broken"),
    ("train bad.py:Fails --set at=optimizer --batch 8", "the optimizer is broken"),
    # train: the request
    ("train bad.py:Small --batch 0", "batch|0"),
    ("train bad.py:Small --batch -4", "batch|-4"),
    ("train bad.py:Small --batch 3.5", "--batch"),
    ("train bad.py:Small --batch many", "--batch"),
    ("train bad.py:Small --batch 999999999999999 --steps 1", "batch|999"),
    ("train bad.py:Small --batch 1000000000 --steps 1", "batch 1,000,000,000|24 training samples|--batch 24"),
    (
        "train bad.py:Small --batch 1000000000 --steps 1 --ranks 2 --plan tp=2",
        "batch 1,000,000,000|--batch 24",
    ),
    ("verify bad.py:Small --batch 1000000000 --plan ddp", "batch 1,000,000,000|--batch 24"),
    ("comms bad.py:Small --batch 1000000000 --ranks 2", "batch 1,000,000,000|--batch 24"),
    ("bench data bad.py:Small --batch 1000000000 --seconds 1", "batch 1,000,000,000|--batch 24"),
    ("plan bad.py:Small --batch 1000000000", "batch 1,000,000,000", 0),
    ("train bad.py:Small --batch 8 --ranks 100000", "--ranks must be at most |got 100000"),
    ("verify bad.py:Small --all --ranks 100000", "--ranks must be at most |got 100000"),
    ("bench collectives --ranks 100000", "--ranks must be at most |got 100000"),
    ("bench overlap --ranks 100000", "--ranks must be at most |got 100000"),
    ("bench host --ranks 100000", "--ranks must be at most |got 100000"),
    ("bench --ranks 100000", "--ranks must be at most |got 100000"),
    ("train bad.py:Small --batch 8 --set data.workers=100000", "data.workers|1024|100000"),
    ("train bad.py:Small --batch 8 --set spec.evaluate_every=0", "evaluate_every|0"),
    (
        "train bad.py:Small --batch 8 --set 'spec.evaluate_splits=[\"test\"]'",
        "evaluate_splits has 'test'|returned None",
    ),
    ("train bad.py:Small --batch 8 --set 'spec.evaluate_splits=[\"a/b\"]'", "evaluate_splits|a/b"),
    ("train bad.py:Small --batch 8 --set spec.evaluate_splits=test", "must be a list, such as|test"),
    ("train bad.py:Small --batch 8 --plan ddp,microbatches=16", "microbatches=16"),
    (
        "train bad.py:Small --batch " + "9" * 400,
        "batch|999",
    ),
    ("train bad.py:Small --ranks 0", "ranks|0"),
    ("train bad.py:Small --ranks -1", "ranks|-1"),
    ("train bad.py:Small --ranks two", "--ranks"),
    ("train bad.py:Small --ranks 3 --batch 8", "divisible"),
    ("train bad.py:Small --ranks 4 --batch 10", "divisible"),
    ("train bad.py:Small --epochs 0", "epochs|0"),
    ("train bad.py:Small --epochs -1", "epochs|-1"),
    ("train bad.py:Small --epochs inf", "epochs|inf"),
    ("train bad.py:Small --epochs nan", "epochs|nan"),
    ("train bad.py:Small --epochs 1e308", "epochs"),
    ("train bad.py:Small --epochs 2 --steps 5", "epochs|steps"),
    ("train bad.py:Small --steps 0", "steps|0"),
    ("train bad.py:Small --steps -1", "steps|-1"),
    ("train bad.py:Small --steps 1e3", "--steps"),
    ("train bad.py:Small --lr 0", "lr|0"),
    ("train bad.py:Small --lr -0.1", "lr|-0.1"),
    ("train bad.py:Small --lr nan", "lr|nan"),
    ("train bad.py:Small --lr inf", "lr|inf"),
    ("train bad.py:Small --lr", "--lr"),
    ("train bad.py:Small --lr fast", "--lr"),
    ("train bad.py:Small --seed -1", "seed|-1"),
    ("train bad.py:Small --optimizer adamq", "adamq|did you mean adam"),
    ("train bad.py:Small --optimizer lamb --set optimizer.momentum=0.5", "lamb has no option momentum|0.5"),
    ("train bad.py:Small --optimizer ''", "optimizer"),
    ("train bad.py:Small --schedule step", "schedule.every"),
    ("train bad.py:Small --schedule wobble", "wobble"),
    ("train bad.py:Small --schedule constant --set schedule.every=5", "schedule.every"),
    ("train bad.py:Small --clip 0", "clip|0"),
    ("train bad.py:Small --clip -1", "clip|-1"),
    ("train bad.py:Small --clip nan", "clip|nan"),
    ("train bad.py:Small --precision fp8", "fp8"),
    ("train bad.py:Small --batch-norm all", "all"),
    ("train bad.py:Small --save-every 0", "save.every|0"),
    ("train bad.py:Small --keep 0", "save.keep|0"),
    ("train bad.py:Small --workers -1", "data.workers|-1"),
    ("train bad.py:Small --device gpu", "gpu"),
    ("train bad.py:Small --device cuda", "cuda"),
    ("train bad.py:Small --device mps", "mps"),
    ("train bad.py:Small --restarts -1", "restarts|-1"),
    ("train bad.py:Small --restarts many", "--restarts"),
    ("train bad.py:Small --timeout 0", "timeout|0"),
    ("train bad.py:Small --timeout -5", "timeout|-5"),
    ("train bad.py:Small --timeout 1e30", "timeout"),
    ("train bad.py:Small --timeout inf", "timeout|inf"),
    ("train bad.py:Small --timeout nan", "timeout|nan"),
    ("train bad.py:Small --set optimizer.momentun=0.5", "did you mean optimizer.momentum"),
    ("train bad.py:Small --set optimizer.momentum=1", "momentum"),
    ("train bad.py:Small --set optimizer.betas=[0.9]", "betas"),
    ("train bad.py:Small --set optimizer.betas=[0.9,1.5]", "betas"),
    ("train bad.py:Small --set optimizer.eps=0", "eps"),
    ("train bad.py:Small --set optimizer=sgd", "optimizer"),
    (
        "train bad.py:Small --set optimizer.nesterov=true --set optimizer.momentum=0.0 --optimizer sgd",
        "nesterov",
    ),
    ("train bad.py:Small --set schedule.warmup=-1", "warmup"),
    ("train bad.py:Small --set schedule.warmup=1000000 --steps 2 --batch 8", "warmup"),
    ("train bad.py:Small --set schedule.floor=2", "floor"),
    ("train bad.py:Small --set save.best=loss", "save.best"),
    ("train bad.py:Small --set save.minutes=0", "save.minutes"),
    ("train bad.py:Small --max-time 90", "max_time|'90m'|90"),
    ("train bad.py:Small --max-time 1h90", "max_time|'1h90'"),
    ("train bad.py:Small --patience 0", "stop.patience|0"),
    ("train bad.py:Small --set stop.metric=loss --patience 2", "stop.metric|'loss'"),
    ("train bad.py:Small --set stop.target=nan", "stop.target"),
    ("train bad.py:Small --set data.prefetch=0", "prefetch"),
    ("train bad.py:Small --set data.nothing=0", "data.nothing"),
    ("train bad.py:Small --set .lr=3", ".lr"),
    ("train bad.py:Small --set a.b.c.d=3", "no field a"),
    ("train bad.py:Small --nodes 0", "nodes"),
    ("train bad.py:Small --nodes two", "two"),
    ("train bad.py:Small --nodes 4:2", "4:2"),
    ("train bad.py:Small --nodes 2:4", "2:4"),
    ("train bad.py:Small --nodes 2", "nodes|Slurm"),
    ("train bad.py:Small --ranks-per-node 0", "ranks-per-node"),
    ("train bad.py:Small --ranks 3 --ranks-per-node 2", "--ranks must be|got 3"),
    ("train bad.py:Small --launcher mpi", "mpi"),
    ("train bad.py:Small --launcher slurm", "Slurm|submit"),
    ("train request.toml --batch many", "--batch"),
    ("train many.toml", "'many'"),
    ("train unknown.toml", "did you mean optimizer.momentum"),
    ("train torn.toml", "torn.toml"),
    ("train twice.toml", "twice.toml"),
    ("train latin.toml", "latin.toml"),
    ("train table.toml", "optimizer"),
    ("train list.toml", "task"),
    ("train deep.toml", "deep.toml"),
    ("train gone.toml", "gone.toml"),
    ("train bad.toml/x.toml", "x.toml"),
    ("train --rnaks 2", "--ranks"),
    ("train digits more", "more"),
    ("trian digits", "train"),
    # train: the plan
    ("train bad.py:Small --batch 24 --ranks 2 --plan zerro3", "zero3"),
    ("train bad.py:Small --batch 24 --ranks 2 --plan ''", "plan"),
    ("train bad.py:Small --batch 24 --ranks 2 --plan single", "single"),
    ("train bad.py:Small --batch 24 --ranks 2 --plan hsdp,replicate=3", "replicate"),
    ("train bad.py:Small --batch 24 --ranks 2 --plan ddp,microbatches=0", "microbatches"),
    ("train bad.py:Small --batch 24 --ranks 2 --plan ddp,microbatches=5", "microbatches"),
    ("train bad.py:Small --batch 24 --ranks 2 --plan ddp,microbatches=two", "two"),
    ("train bad.py:Small --batch 24 --ranks 2 --plan ddp,microbatches", "microbatches"),
    ("train bad.py:Small --batch 24 --ranks 2 --plan ddp,microbatches=1,microbatches=2", "microbatches"),
    ("train bad.py:Small --batch 24 --ranks 2 --plan tp=0", "tp"),
    ("train bad.py:Small --batch 24 --ranks 2 --plan tp=3", "tp"),
    ("train bad.py:Small --batch 24 --ranks 2 --plan tp=-1", "tp"),
    ("train bad.py:Small --batch 24 --ranks 2 --plan tp=2,pp=2", "4"),
    ("train bad.py:Small --batch 24 --ranks 2 --plan pp=3", "pp"),
    ("train bad.py:Small --batch 24 --ranks 2 --plan pp=2,pp_schedule=zigzag", "zigzag"),
    (
        "train bad.py:Small --batch 24 --ranks 2 --plan pp=2,pp_schedule=interleaved,microbatches=1",
        "pp_schedule=interleaved|microbatches=1",
    ),
    ("train bad.py:Small --batch 24 --ranks 2 --plan cp=2", "cp"),
    ("train bad.py:Small --batch 24 --ranks 2 --plan dp=4", "dp"),
    ("train bad.py:Small --batch 24 --ranks 2 --plan dp=2,tp=1,zero=4", "zero"),
    ("train bad.py:Small --batch 24 --ranks 2 --plan dp=2,zero=-1", "zero"),
    ("train bad.py:Small --batch 24 --ranks 2 --plan local-sgd,period=0", "period"),
    ("train bad.py:Small --batch 24 --ranks 2 --plan parameter-server,servers=2", "server"),
    ("train bad.py:Small --batch 24 --ranks 2 --plan parameter-server,servers=0", "servers"),
    ("train bad.py:Small --batch 24 --ranks 2 --plan parameter-server,staleness=-1", "staleness"),
    ("train bad.py:Small --batch 24 --ranks 2 --plan ddp,recompute=some", "some"),
    ("train bad.py:Small --batch 24 --ranks 2 --plan ddp,uneven=3", "uneven"),
    ("train bad.py:Small --batch 24 --ranks 2 --plan zero3,zero=2", "zero"),
    ("train bad.py:Small --batch 24 --ranks 2 --plan ddp+tp", "ddp+tp"),
    ("train bad.py:Small --batch 24 --ranks 2 --plan 'ddp tp'", "ddp tp"),
    ("train bad.py:Small --batch 24 --ranks 2 --plan ddp,", "ddp"),
    ("train bad.py:Small --batch 24 --ranks 2 --plan ,ddp", "ddp"),
    ("train bad.py:Small --batch 24 --ranks 2 --plan =", "="),
    ("train bad.py:Small --batch 24 --ranks 2 --plan ddp=2", "ddp"),
    ("train bad.py:Small --batch 24 --ranks 2 --plan tp=9999999999999999999", "tp"),
    ("train bad.py:Small --batch 24 --ranks 2 --plan nothing=3", "nothing"),
    ("train bad.py:Small --batch 24 --ranks 2 --plan auto,microbatches=2", "auto"),
    ("train bad.py:Small --batch 24 --ranks 2 --plan pp=2,stages=9", "stages"),
    ("train bad.py:Small --batch 24 --ranks 2 --plan ep=2", "ep"),
    # train: the run folder
    ("train bad.py:Small --run-dir run", "run"),
    ("train bad.py:Small --run-dir /dev/null", "/dev/null"),
    ("train bad.py:Small --run-dir /dev/null/r", "/dev/null/r"),
    ("train bad.py:Small --run-dir bad.py", "bad.py"),
    ("train bad.py:Small --run-dir bad.py/r", "bad.py/r"),
    ("train bad.py:Small --run-dir ''", "run"),
    ("train bad.py:Small --run-dir .", "."),
    ("train bad.py:Small --run-dir --x", "must not begin with a dash"),
    (
        "train bad.py:Small --run-dir " + "r" * 300,
        "rrr",
    ),
    ("train bad.py:Small --run-dir " + "d/" * 3000 + "r", "d/d"),
    ("train bad.py:Small --run-dir 'a\nb'", "a\\nb"),
    ("train bad.py:Small --run-dir 'a\tb'", "a\\tb"),
    ("train bad.py:Small --run-dir 'a\x1b[31mb'", "\\x1b"),
    ("train bad.py:Small --run-dir 'a\x7fb'", "\\x7f"),
    ("train bad.py:Small --run-dir /proc/r", "/proc/r"),
    # resume
    ("resume nowhere", "no such run: nowhere"),
    ("resume .", "not a run folder|spec.toml"),
    ("resume bad.py", "bad.py"),
    ("resume ''", "run"),
    ("resume", "run"),
    ("resume run --steps 0", "steps"),
    ("resume run --steps 2 --epochs 2", "steps|epochs"),
    ("resume run --epochs nan", "epochs"),
    ("resume run --plan zerro3", "zero3"),
    ("resume run --steps 6 --plan tp=3 --ranks 3", "tp|3"),
    ("resume run --ranks 0", "ranks"),
    ("resume run --lr 0", "lr"),
    ("resume run --lr nan", "lr"),
    ("resume run --device gpu", "gpu"),
    ("resume run --device cuda --steps 6", "cuda"),
    ("resume run --timeout 0", "timeout"),
    ("resume run --restarts -1", "restarts"),
    ("resume run --launcher mpi", "mpi"),
    ("resume run --nodes two", "two"),
    ("resume run --batch 4", "--batch"),
    ("resume no-spec", "spec.toml"),
    ("resume empty-spec", "spec.toml"),
    ("resume torn-spec", "spec.toml"),
    ("resume binary-spec", "spec.toml"),
    ("resume folder-spec", "spec.toml"),
    ("resume other-task", "checksum"),
    ("resume other-task --edited", "spec.toml"),
    ("resume file-ckpt --steps 6", "ckpt"),
    # show
    ("show nowhere", "no such run: nowhere"),
    ("show .", "spec.toml|run"),
    ("show bad.py", "bad.py"),
    ("show ''", "run"),
    ("show no-spec", "spec.toml"),
    ("show run --nonsense", "--nonsense"),
    ("show", "run"),
    # report
    ("report nowhere", "no such run: nowhere"),
    ("report .", "must be a folder in a run folder"),
    ("report bad.py", "no such run: bad.py"),
    ("report ''", "must be a folder in a run folder"),
    ("report no-spec", "spec.toml"),
    ("report folder-events", "events.jsonl must be a file"),
    ("report run --nonsense", "--nonsense"),
    ("report", "runs"),
    ("report run no-ckpt", "2 runs requires a file; add -o report.html"),
    ("report run -o pipe", "cannot write pipe: it is a pipe"),
    ("report run -o nowhere/r.html", "no such folder: nowhere"),
    ("report run --figures bad.py", "cannot create bad.py"),
    ("report run --json nowhere/x.json", "nowhere"),
    ("report run --cluster cluster.json", "--predict"),
    ("report run --predict --cluster nowhere.json -o x.html", "nowhere.json"),
    # diff
    ("diff nowhere run", "no such run: nowhere"),
    ("diff run nowhere", "no such run: nowhere"),
    ("diff run .", "spec.toml|run"),
    ("diff run bad.py", "bad.py"),
    ("diff '' run", "run"),
    ("diff run", "run_b"),
    ("diff run no-spec", "spec.toml"),
    ("diff run torn-spec", "spec.toml"),
    ("diff run empty-spec", "spec.toml"),
    ("diff run other-task", "spec.toml|checksum"),
    ("diff run folder-events", "events.jsonl"),
    ("diff run no-metadata", ".metadata"),
    ("diff run empty-metadata", "damaged"),
    ("diff run evil-metadata", "damaged"),
    ("diff evil-metadata run", "damaged"),
    ("diff run empty-tensors", "__0_0.distcp has 0 bytes"),
    ("diff run no-checkpoint-json", "checkpoint.json"),
    ("diff torn-checkpoint-json run", "checkpoint.json"),
    ("diff run list-checkpoint-json", "checkpoint.json"),
    ("diff run file-ckpt", "ckpt"),
    ("diff run run --tolerance -1", "--tolerance must be a number of at least 0, got -1.0"),
    ("diff run run --tolerance nan", "--tolerance must be a number of at least 0, got nan"),
    ("diff run run --tolerance small", "--tolerance"),
    ("diff run run --json nowhere/x.json", "nowhere"),
    ("diff run run --json pipe", "pipe"),
    ("diff run no-events", "the runs are equal", 0),
    ("diff run no-ckpt", "the runs are equal", 0),
    ("diff run odd-step", "the runs are equal", 0),
    # replay
    ("replay nowhere --step 1", "no such run: nowhere"),
    ("replay . --step 1", "spec.toml|run"),
    ("replay run", "--step"),
    ("replay run --step 0", "run has steps 1 to 4, got --step 0; specify one of them"),
    ("replay run --step 5", "run has steps 1 to 4, got --step 5"),
    ("replay run --step -1", "--step -1"),
    ("replay run --step two", "--step"),
    ("replay no-spec --step 1", "spec.toml"),
    ("replay torn-spec --step 1", "spec.toml"),
    ("replay other-task --step 1", "spec.toml|checksum"),
    ("replay folder-events --step 1", "events.jsonl"),
    ("replay file-ckpt --step 1", "ckpt"),
    ("replay evil-metadata --step 3", "damaged", 0),
    ("replay torn-checkpoint-json --step 3 --anomaly", "damaged and was skipped", 0),
    ("replay no-events --step 1", "from the initial weights", 0),
    # doctor
    ("doctor nowhere", "no such run: nowhere"),
    ("doctor .", "spec.toml|run"),
    ("doctor bad.py", "bad.py"),
    ("doctor ''", "run"),
    ("doctor no-spec", "spec.toml"),
    ("doctor run --nonsense", "--nonsense"),
    # logs
    ("logs nowhere", "no such run: nowhere"),
    ("logs .", "spec.toml|run"),
    ("logs bad.py", "bad.py"),
    ("logs ''", "run"),
    ("logs no-spec", "spec.toml"),
    ("logs run --nonsense", "--nonsense"),
    ("logs", "run"),
    # cancel
    ("cancel nowhere", "no such run: nowhere"),
    ("cancel .", "spec.toml|run"),
    ("cancel bad.py", "bad.py"),
    ("cancel ''", "run"),
    ("cancel no-spec", "spec.toml"),
    ("cancel run --nonsense", "--nonsense"),
    ("cancel", "run"),
    # profile
    ("profile nowhere", "no such run: nowhere"),
    ("profile .", "spec.toml|run"),
    ("profile bad.py", "bad.py"),
    ("profile ''", "run"),
    ("profile no-spec", "spec.toml"),
    ("profile run --nonsense", "--nonsense"),
    ("profile", "run"),
    # evaluate
    ("evaluate nowhere", "no such run: nowhere"),
    ("evaluate .", "spec.toml"),
    ("evaluate", "run"),
    ("evaluate run", "dataset('validation') returned None|--split"),
    ("evaluate run --split ''", "dataset('') returned None"),
    ("evaluate run --split train --checkpoint best", "no best checkpoint|'min loss'|--checkpoint last|2, 4"),
    ("evaluate run --split train --checkpoint 3", "no checkpoint of step 3|2, 4"),
    ("evaluate run --split train --checkpoint -1", "best, last or a step|-1"),
    ("evaluate run --split train --batch 0", "batch|0"),
    ("evaluate run --split train --ranks 0", "ranks|0"),
    ("evaluate run --split train --device gpu", "gpu"),
    ("evaluate run --split train --plan zerro3", "zero3"),
    ("evaluate run --split train --plan parameter-server", "servers|--plan single"),
    ("evaluate run --split train --json nowhere/x.json", "nowhere"),
    ("evaluate no-ckpt --split train", "no complete checkpoint|paceline resume no-ckpt"),
    ("evaluate evil-metadata --split train", "step_"),
    ("evaluate torn-checkpoint-json --split train", "step_"),
    # predict
    ("predict nowhere", "no such run: nowhere"),
    ("predict", "run"),
    ("predict run", "dataset('validation') returned None|--split"),
    ("predict run words.txt", "reads no files|read_files"),
    ("predict run words.txt --split train", "either files or a split"),
    ("predict run --split train -o nowhere/x.jsonl", "nowhere"),
    ("predict run --split train --batch 0", "batch|0"),
    # generate
    ("generate nowhere hello", "no such run: nowhere"),
    ("generate", "run"),
    ("generate run", "specify either a prompt"),
    ("generate run hello", "requires a run of hf:FOLDER, got task|bad.py:Small|paceline evaluate"),
    ("generate run hello --prompts words.txt", "specify either a prompt"),
    ("generate run --prompts nowhere.txt", "no such file of prompts: nowhere.txt"),
    ("generate run hello -o nowhere/x.jsonl", "nowhere"),
    ("generate run hello --top-k 0", "--top-k must be at least 1, got 0"),
    ("generate run hello --temperature warm", "--temperature|number"),
    # export
    ("export nowhere out.safetensors", "no such run: nowhere"),
    ("export . out.safetensors", "spec.toml|run"),
    ("export bad.py out.safetensors", "bad.py"),
    ("export '' out.safetensors", "run"),
    ("export no-spec out.safetensors", "spec.toml"),
    ("export run out.safetensors --nonsense", "--nonsense"),
    ("export", "run"),
    # show, status, logs of damaged runs
    ("status nowhere", "nowhere"),
    ("status bad.py", "bad.py"),
    ("status run nowhere", "nowhere"),
    ("status --nonsense", "--nonsense"),
    ("show folder-events", "events"),
    ("status folder-events", "events"),
    ("logs run --rank 7", "7"),
    ("logs run --rank -1", "-1"),
    ("logs run --rank two", "--rank"),
    ("profile no-events", "profil|event"),
    ("profile run --cluster nowhere.json", "nowhere.json"),
    ("profile run --plot picture.pdf", "picture.pdf|svg"),
    ("profile run --json nowhere/x.json", "nowhere"),
    ("doctor run --json nowhere/x.json", "nowhere"),
    ("doctor run --json .", "."),
    # export
    ("export run", "file"),
    ("export run bad.py", "bad.py"),
    ("export run out.safetensors --output out", "once, got both out.safetensors and --output out"),
    ("export run --format hf -o out", "requires a run of hf:FOLDER, got task|bad.py:Small"),
    ("export run out --format hf --force", "--force"),
    ("export run bad.py --format hf", "bad.py exists already"),
    ("export run out --format zip", "--format zip is unknown; available: safetensors, hf|onnx"),
    ("export run out --format onxx", "--format onxx is unknown; did you mean onnx?"),
    ("export run out.zip --format torch-export", "writes a .pt2 file|out.zip"),
    ("export run bad.py --format onnx", "writes a .onnx file|bad.py"),
    ("export run nowhere/out.pt2 --format torch-export", "nowhere"),
    ("export run out.pt2 --format torch-export --step 3", "3"),
    ("export run out.pt2 --format torch-export --ema", "moving averages"),
    ("export no-ckpt out.pt2 --format torch-export", "checkpoint"),
    ("export evil-metadata out.pt2 --format torch-export", "checkpoint|step_"),
    ("export run out --adapters", "--adapters requires a run of hf:FOLDER|bad.py:Small"),
    ("export run out --adapters --force", "--force"),
    ("export run out --adapters --format hf", "specify one"),
    ("train hf:", "task 'hf:' names no folder; write hf:FOLDER"),
    ("train hf:nowhere --set data=words.txt", "no such folder|nowhere"),
    ("train hf:words.txt --set data=words.txt", "is not a Hugging Face model: it is a file"),
    ("train hf:images --set data=words.txt", "it has no config.json"),
    ("train hf:images", "field data has no value; specify it with --set data=VALUE"),
    (
        "train hf:images --set folder=run --set data=words.txt",
        "by the task and 'run' by --set; specify it once",
    ),
    ("export run . --force", "."),
    ("export run pipe --force", "pipe"),
    ("export run nowhere/out.safetensors", "nowhere"),
    ("export run out.safetensors --step 3", "3"),
    ("export run out.safetensors --step -1", "-1"),
    ("export run out.safetensors --step two", "--step"),
    ("export run /proc/out.safetensors", "/proc"),
    (
        "export run " + "o" * 300 + ".safetensors",
        "ooo",
    ),
    ("export no-ckpt out.safetensors", "checkpoint"),
    ("export file-ckpt out.safetensors", "file-ckpt/ckpt"),
    ("export no-metadata out.safetensors", "checkpoint|step_"),
    ("export empty-metadata out.safetensors", "checkpoint|step_"),
    ("export evil-metadata out.safetensors", "checkpoint|step_"),
    ("export empty-tensors out.safetensors", "checkpoint|step_"),
    ("export torn-checkpoint-json out.safetensors", "checkpoint|step_"),
    ("export odd-step out.safetensors --step 9", "9"),
    # submit and preflight
    ("submit bad.py:Small --dry-run --time tomorrow", "tomorrow"),
    ("submit bad.py:Small --dry-run --time -1", "-1"),
    ("submit bad.py:Small --dry-run --time ''", "time"),
    ("submit bad.py:Small --dry-run --time 1:2:3:4:5", "1:2:3:4:5"),
    ("submit bad.py:Small --dry-run --nodes 0", "nodes"),
    ("submit bad.py:Small --dry-run --site nowhere.toml", "nowhere.toml"),
    ("submit bad.py:Small --dry-run --site site-torn.toml", "site-torn.toml"),
    ("submit bad.py:Small --dry-run --site site-key.toml", "did you mean partition"),
    ("submit bad.py:Small --dry-run --site site-type.toml", "partition"),
    ("submit bad.py:Small --dry-run --site site-line.toml", "partition"),
    ("submit bad.py:Small --dry-run --site site-array.toml", "array"),
    ("submit bad.py:Small --dry-run --site site-array-short.toml", "array|-a"),
    ("submit bad.py:Small --dry-run --site site-option.toml", "exclusive"),
    ("submit bad.py:Small --dry-run --site site-two.toml", "conda|venv"),
    ("submit bad.py:Small --dry-run --site site-stage.toml", "scratch"),
    ("submit bad.py:Small --dry-run --site site-variable.toml", "A B"),
    ("submit bad.py:Small --dry-run --site site-cpus.toml", "cpus_per_rank"),
    ("submit bad.py:Small --dry-run --run-dir 'd/x\ntouch pwned\n#'", "\\n"),
    ("submit bad.py:Small --dry-run --run-dir run", "run"),
    ("submit bad.py:Small --dry-run --batch 0", "batch"),
    ("submit bad.py:Smal --dry-run", "did you mean Small"),
    ("submit syntax.py:Small --dry-run", "syntax.py, line 1"),
    ("submit nowhere.py:Small --dry-run", "nowhere.py"),
    ("submit bad.py:Small --dry-run --plan zerro3", "zero3"),
    ("preflight nowhere.py:Small --device cpu", "nowhere.py"),
    ("preflight bad.py:Small --batch 0", "batch"),
    ("preflight bad.py:Small --time tomorrow --device cpu", "tomorrow"),
    ("preflight bad.py:Small --site nowhere.toml --device cpu", "nowhere.toml"),
    ("preflight bad.py:Small --plan zerro3 --device cpu", "zero3"),
    ("preflight bad.py:Small --json nowhere/x.json --device cpu --batch 8", "nowhere"),
    ("preflight bad.py:Small --cluster nonsense:3 --device cpu --batch 8", "nonsense"),
    ("preflight bad.py:Fails --set at=model --device cpu --batch 8", "the model is broken"),
    ("preflight exits.py:Small --device cpu", "exits.py"),
    # verify, drill, comms
    ("verify nowhere.py:Small --plan ddp --ranks 2", "nowhere.py"),
    ("verify bad.py:Small --plan zerro3", "zero3"),
    ("verify bad.py:Small --plan zero3 --ranks 0", "ranks|0"),
    ("verify bad.py:Small --plan zero3 --ranks 2 --batch 3", "3"),
    ("verify bad.py:Small --plan zero3 --ranks 2 --timeout 0", "--timeout"),
    ("verify bad.py:Small --json nowhere/x.json --plan ddp --ranks 2", "nowhere"),
    ("verify bad.py:Small --set widht=3 --plan ddp --ranks 2", "did you mean width"),
    ("verify bad.py:Small --steps 0 --plan ddp --ranks 2", "steps|--steps"),
    ("drill nowhere.py:Small", "nowhere.py"),
    ("drill bad.py:Small --faults flood", "flood"),
    ("drill bad.py:Small --faults ''", "fault ''"),
    ("drill bad.py:Small --rounds 0", "--rounds"),
    ("drill bad.py:Small --keep run --faults kill", "run"),
    ("drill bad.py:Small --plan zerro3", "zero3"),
    ("comms nowhere.py:Small --ranks 2", "nowhere.py"),
    ("comms bad.py:Small --plan zerro3 --ranks 2", "zero3"),
    ("comms bad.py:Small --plan zero3 --ranks 0", "ranks|0"),
    ("comms bad.py:Small --plan zero3 --ranks 7 --batch 24", "divisible|7"),
    ("comms bad.py:Small --plan tp=5 --ranks 5 --batch 5", "5"),
    ("comms bad.py:Fails --set at=model --plan ddp --ranks 2 --batch 8", "the model is broken"),
    ("comms bad.py:Small --json nowhere/x.json --plan ddp --ranks 2 --batch 8", "nowhere"),
    # plan and scale
    ("plan --model nonsense --cluster a100-80g:8", "nonsense"),
    ("plan --model gpt2 --cluster nonsense", "nonsense"),
    ("plan --model gpt2 --cluster a100-80g:0", "a100-80g:0|0"),
    ("plan --model gpt2 --cluster a100-80g:8x0", "0"),
    ("plan --model gpt2 --cluster a100-80g:x", "a100-80g:x"),
    ("plan --model gpt2 --cluster a100-80g:8x2@0", "0"),
    ("plan --model gpt2 --cluster a100-80g:8x2@fast", "fast"),
    ("plan --model gpt2 --cluster ''", "cluster"),
    ("plan --model gpt2 --cluster nowhere.json", "nowhere.json"),
    ("plan --model gpt2 --cluster cluster-torn.json", "cluster-torn.json"),
    ("plan --model gpt2 --cluster cluster-empty.json", "cluster-empty.json"),
    ("plan --model gpt2 --cluster cluster-list.json", "cluster-list.json"),
    ("plan --model gpt2 --cluster cluster-null.json", "cluster-null.json"),
    ("plan --model gpt2 --cluster cluster-keys.json", "cluster-keys.json"),
    ("plan --model gpt2 --cluster a100-80g:8 --batch 0", "batch|0"),
    ("plan --model gpt2 --cluster a100-80g:8 --seq 0", "seq|0"),
    ("plan --model gpt2 --cluster a100-80g:8 --batch 8 --plan zerro3", "zero3"),
    ("plan --model gpt2 --cluster a100-80g:8 --batch 8 --plan tp=7", "7"),
    ("plan --model gpt2 --cluster a100-80g:8 --top 0", "top"),
    ("plan --model gpt2 --cluster a100-80g:8 --tokens -1", "tokens|-1"),
    ("plan --model gpt2 --cluster a100-80g:8 --tokens nan", "tokens|nan"),
    ("plan --model gpt2 --cluster a100-80g:8 --price -1 --tokens 1e9", "price|-1"),
    ("plan --model gpt2 --cluster a100-80g:8 --peak 0", "peak|0"),
    ("plan --model gpt2 --cluster a100-80g:8 --batch 8 --precision fp8", "fp8"),
    ("plan --model gpt2 --cluster a100-80g:8 --json nowhere/x.json --batch 8", "nowhere"),
    ("plan --model gpt2 --cluster a100-80g:8 --plot picture.txt --batch 8", "picture.txt"),
    ("plan --model gpt2 bad.py:Small --cluster a100-80g:8", "gpt2|--model"),
    ("plan --model model-torn.toml --cluster a100-80g:8", "model-torn.toml"),
    ("plan --model model-key.toml --cluster a100-80g:8", "model-key|layers"),
    ("plan --model model-zero.toml --cluster a100-80g:8", "model-zero|vocab"),
    ("plan --model words.txt --cluster a100-80g:8", "words.txt"),
    ("plan nowhere.py:Small --peak 0.1", "nowhere.py"),
    ("plan bad.py:Small --ranks 0 --peak 0.1", "ranks|0"),
    ("plan bad.py:Small --ranks 2 --batch 0 --peak 0.1", "batch|0"),
    ("plan bad.py:Small --ranks 2 --peak nan --batch 8", "peak|nan"),
    ("plan bad.py:Fails --set at=model --ranks 2 --batch 8 --peak 0.1", "the model is broken"),
    ("scale --model gpt2 --cluster a100-80g:8 --ranks 0", "0"),
    ("scale --model gpt2 --cluster a100-80g:8 --ranks two", "two"),
    ("scale --model gpt2 --cluster a100-80g:8 --ranks 8:1", "8:1"),
    ("scale --model gpt2 --cluster a100-80g:8 --ranks 1,,2", "1,,2"),
    ("scale --model gpt2 --cluster a100-80g:8 --ranks 1,3,…,64", "64"),
    ("scale --model gpt2 --cluster a100-80g:8 --ranks -4", "--ranks|-4"),
    ("scale --model gpt2 --cluster a100-80g:8 --ranks 1:8 --efficiency 2", "efficiency|2"),
    ("scale --model gpt2 --cluster a100-80g:8 --ranks 1:8 --efficiency nan", "efficiency|nan"),
    ("scale --model nonsense --ranks 1:8", "nonsense"),
    ("scale --ranks 1:8 --model gpt2 --cluster a100-80g:8 --plot picture.gif --batch 8", "picture.gif"),
    ("scale bad.py:Small", "ranks"),
    ("probe nowhere", "nowhere"),
    ("probe --json nowhere/x.json", "nowhere"),
    ("probe --json pipe", "pipe"),
    # bench
    ("bench --ranks 1", "--ranks"),
    ("bench --seconds 0", "--seconds"),
    ("bench --device gpu", "gpu"),
    ("bench --task nowhere.py:Small", "nowhere.py"),
    ("bench --out bad.py", "bad.py"),
    ("bench --directory nowhere", "nowhere"),
    ("bench nonsense", "nonsense"),
    ("bench collectives --ranks 0", "--ranks"),
    ("bench collectives --backends carrier-pigeon", "carrier-pigeon"),
    ("bench collectives --backends ''", "back end in ''"),
    ("bench collectives --sizes 64MiB:1KiB", "64MiB:1KiB"),
    ("bench collectives --sizes many", "many"),
    ("bench collectives --sizes 0:1KiB", "0"),
    ("bench collectives --sizes -1", "--sizes|-1"),
    ("bench collectives --sizes 1KiB:1MiB:1", "1KiB:1MiB:1"),
    ("bench collectives --operations all-redcue", "all-reduce"),
    ("bench collectives --dtypes fp7", "fp7"),
    ("bench collectives --place up", "up"),
    ("bench collectives --axes sideways", "sideways"),
    ("bench collectives --plan tp=3 --ranks 2", "3"),
    ("bench collectives --plan zerro3", "zero3"),
    ("bench collectives --seconds 0", "--seconds"),
    ("bench collectives --timeout 0", "--timeout"),
    ("bench collectives --json nowhere/x.json", "nowhere"),
    ("bench collectives --plot picture.txt", "picture.txt"),
    ("bench collectives --compare result-torn.json result-list.json", "result-torn.json"),
    ("bench collectives --compare result-list.json result-list.json", "result-list.json"),
    ("bench collectives --compare result-empty.json result-list.json", "result-empty.json"),
    ("bench collectives --compare nowhere.json result-list.json", "nowhere.json"),
    ("bench collectives --compare result-list.json", "--compare"),
    ("bench compute --task nowhere.py:Small", "nowhere.py"),
    ("bench compute --precision fp8", "--task"),
    ("bench compute --task bad.py:Small --precision fp8", "fp8"),
    ("bench compute --device gpu", "gpu"),
    ("bench compute --seconds 0", "--seconds"),
    ("bench compute --batch 0 --task bad.py:Small", "batch|0"),
    ("bench compute --json nowhere/x.json", "nowhere"),
    ("bench overlap --ranks 1", "--ranks"),
    ("bench overlap --device gpu", "gpu"),
    ("bench overlap --json .", "."),
    ("bench host --ranks 1", "--ranks"),
    ("bench host --json bad.py/x.json", "bad.py"),
    ("bench storage nowhere", "nowhere"),
    ("bench storage bad.py", "bad.py"),
    ("bench storage --writers 0", "--writers"),
    ("bench storage --seconds nan", "--seconds"),
    ("bench storage . --plot picture.txt", "picture.txt"),
    ("bench data nowhere.py:Small", "nowhere.py"),
    ("bench data bad.py:Small --workers -1", "-1"),
    ("bench data bad.py:Small --workers many", "many"),
    ("bench data bad.py:Small --prefetch 0", "0"),
    ("bench data bad.py:Small --batch 0", "batch|0"),
    ("bench data bad.py:Fails --set at=dataset", "the dataset is broken"),
    # built-in tasks
    ("train text --set file=nowhere.txt", "nowhere.txt"),
    ("train text --set file=short.txt", "empty"),
    ("train text --set file=.", "."),
    ("train mnist --set folder=nowhere", "nowhere"),
    ("train mnist --set folder=images", "images"),
    ("train mnist --set folder=bad.py", "bad.py"),
    ("train --set epochs=3 digits", "epochs"),
    # the command line
    ("", "Usage"),
    ("nonsense", "nonsense"),
    ("--nonsense", "--nonsense"),
    ("train --help --nonsense", "Usage"),
    ("rank", "rank|Missing"),
    ("agent", "agent|Missing"),
]
