"""Spec and Launch: round trip through TOML, overrides, and refused values."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from paceline import spec as specs
from paceline.cli.options.keys import type_name
from paceline.errors import SpecError
from paceline.optimizer_options import OPTIMIZERS
from paceline.spec import (
    SCHEDULE_OWNERS,
    TOO_LARGE,
    Launch,
    Loading,
    Optimizer,
    Save,
    Schedule,
    Spec,
    Stop,
    build,
    load,
    parse_overrides,
    parse_value,
    replace_length,
)

FULL = Spec(
    task="my.py:Regression",
    set={"width": 64, "name": "relu", "rate": 1e-3, "flag": True, "sizes": [1, 2], "deep": {"a": 1}},
    batch=24,
    steps=7,
    seed=2**62,
    precision="bf16",
    tf32=True,
    compile=True,
    evaluate_every=3,
    threads=2,
    timeout_s=5.5,
    max_time="1h30m",
    trace="20:25",
    optimizer=Optimizer(
        name="sgd",
        lr=0.1 + 0.2,
        momentum=0.5,
        nesterov=True,
        dampening=0.0,
        clip=0.5,
        weight_decay=0.01,
    ),
    schedule=Schedule(name="step", warmup=10, every=100, factor=0.5, floor=0.1),
    save=Save(every=5, minutes=0.5, keep=3, best="max accuracy"),
    stop=Stop(metric="max accuracy", patience=3, min_delta=0.1, target=0.9),
    data=Loading(workers=2, prefetch=4),
)


@pytest.mark.parametrize(
    ("spec", "launch"),
    [
        (Spec(), Launch()),
        (
            Spec(epochs=2.5, set={"path": 'a "quoted" \\ path\n'}),
            Launch(plan="zero3,microbatches=2", ranks=4),
        ),
        (FULL, Launch(plan="hsdp", ranks=4, restarts=2, run="runs/a", device="cpu")),
    ],
    ids=["defaults", "few", "all"],
)
def test_toml_round_trip(spec, launch, tmp_path):
    specs.save(tmp_path / "spec.toml", spec, launch)
    assert load(tmp_path / "spec.toml", {}) == (spec, launch)


def test_infinite_minutes_round_trip(tmp_path):
    spec = Spec(save=Save(minutes=float("inf")))
    specs.save(tmp_path / "spec.toml", spec, Launch())
    assert load(tmp_path / "spec.toml", {})[0] == spec


def test_values_are_frozen():
    with pytest.raises(ValueError, match="frozen"):
        FULL.batch = 3


def test_flags_override_the_file(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text("batch = 32\nranks = 2\n[optimizer]\nlr = 0.5\nclip = 1.0\n[set]\nwidth = 8\ndepth = 2\n")
    spec, launch = load(file, {"batch": 64, "optimizer.lr": 0.25, "set.width": 16, "ranks": 4})
    assert (spec.batch, spec.optimizer.lr, spec.optimizer.clip, spec.set, launch.ranks) == (
        64,
        0.25,
        1.0,
        {"width": 16, "depth": 2},
        4,
    )


def test_none_removes_a_key(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text("steps = 10\n")
    assert load(file, replace_length({"epochs": 2.0})) == (Spec(epochs=2.0), Launch())


def test_a_length_replaces_the_other_length():
    assert replace_length({"epochs": 2.0, "batch": 8}) == {"epochs": 2.0, "steps": None, "batch": 8}
    assert replace_length({"steps": 5}) == {"epochs": None, "steps": 5}
    assert replace_length({"batch": 8}) == {"batch": 8}
    both = {"steps": 5, "epochs": 1.0}
    assert replace_length(both) == both, "the Spec refuses this"


def test_an_integer_is_accepted_for_a_float():
    spec, _ = build({"epochs": 3, "optimizer": {"lr": 1}})
    assert (spec.epochs, spec.optimizer.lr) == (3.0, 1.0)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("64", 64),
        ("1e-3", 1e-3),
        ("-5", -5),
        ("true", True),
        ("[1, 2]", [1, 2]),
        ("relu", "relu"),
        ("'64'", "64"),
        ("", ""),
        ("a=b", "a=b"),
        ("True", "True"),
        ("{a = 1}", {"a": 1}),
        ("data/my file.txt", "data/my file.txt"),
        ("2024-01-01", "2024-01-01"),
        ("1\ny = 2", "1\ny = 2"),
        (".1", 0.1),
        ("-.5e-3", -0.0005),
        ("5.", 5.0),
        ("1.e-3", 1e-3),
        (".", "."),
        ("1.2.3", "1.2.3"),
    ],
)
def test_values_on_the_command_line(text, value):
    assert parse_value(text) == value


def test_names_on_the_command_line():
    found = parse_overrides(
        [
            "width=64",
            "optimizer.eps=1e-6",
            "set.depth=2",
            "text=a=b",
            "spec.threads=1",
            "threads=2",
            "spec.save.keep=3",
            "lora.rank=16",
        ]
    )
    expected = {
        "set.width": 64,
        "optimizer.eps": 1e-6,
        "set.depth": 2,
        "set.text": "a=b",
        "threads": 1,
        "set.threads": 2,
        "save.keep": 3,
        "set.lora.rank": 16,
    }
    assert found == expected
    assert load(None, {"task": "digits", **found})[0].set["lora"] == {"rank": 16}


def test_set_reaches_every_key(tmp_path):
    """The keys come from the models. --set can set each of them, and the request then has that value."""
    values = {
        "optimizer.betas": "[0.8, 0.9]",
        "save.best": "max f1",
        "stop.metric": "max f1",
        "spec.max_time": "90m",
        "spec.trace": "3:4",
        "spec.evaluate_splits": '["test"]',
        "spec.least_nodes": 1,
        "schedule.every": 7,
        "spec.mlflow": "http://127.0.0.1:5000",
        "schedule.metric": "max f1",
        "schedule.milestones": "[7, 9]",
        "schedule.decay_shape": "1-sqrt",
        "schedule.length": 7,
        "schedule.decay": 7,
        "spec.seed": 7,
        "optimizer.momentum": 0.5,
        "data.weights": "[]",
        "optimizer.name": "lamb",
        "optimizer.beta2_decay": -0.5,
        "optimizer.etas": "[0.5, 1.1]",
        "optimizer.step_sizes": "[0.1, 1.0]",
        "optimizer.convention": "timm",
        "optimizer.no_decay": "bias",
        "optimizer.no_trust": "bias",
        "optimizer.no_agc": "bias",
        "optimizer.on_nan": "skip",
        "optimizer.ema": 0.9,
        "optimizer.ns_coefficients": "[3.0, -4.0, 2.0]",
        "optimizer.ns_precision": "full",
        "optimizer.adjust_lr": "original",
        "spec.batch_schedule": "8:100",
        "spec.batch_warmup": "8:100",
    }
    values |= {f"optimizer.{key}": 0.5 for key in ("momentum", "rho")}
    owners = {
        f"optimizer.{key}": [f"optimizer.name={owner}"]
        for owner, options in reversed(OPTIMIZERS.items())
        for key in options
    }
    owners |= {
        "optimizer.no_decay": ["optimizer.weight_decay=0.1"],
        "optimizer.no_trust": ["optimizer.name=lars"],
        "optimizer.no_agc": ["optimizer.agc=0.1"],
        "optimizer.swa_every": ["optimizer.swa=10"],
    }
    names = dict(specs.keys())
    del names["optimizer.groups"]  # a table of tables
    assert {"spec.threads", "spec.evaluate_every", "spec.restarts", "optimizer.clip"} <= names.keys()
    for name, field in names.items():
        assert field.description, name
        kind = type_name(field.annotation)
        text = values.get(name) or {"bool": "true", "str": "runs/x"}.get(
            kind, "1" if "float" in kind or "int" in kind else kind.split()[-1]
        )
        more = {
            "schedule.every": ["schedule.name=step"],
            **{f"schedule.{key}": [f"schedule.name={name}"] for key, name in SCHEDULE_OWNERS.items()},
            **{
                f"schedule.{key}": ["schedule.base_batch=8"]
                for key in ("lr_scale", "scale_betas", "scale_decay")
            },
            "schedule.growth": ["schedule.name=cosine-restarts", "schedule.every=3"],
            "stop.metric": ["stop.target=1"],
            "stop.min_delta": ["stop.patience=1"],
            "guard.locate": ["guard.every=9"],
            "guard.recompute": ["guard.every=9"],
            "data.window": ["data.shuffle=window"],
            "data.cache_folder": ["data.cache=scratch"],
            **{f"data.{key}": ["data.cache=memory"] for key in ("cache_content", "cache_gib", "stage")},
            "optimizer.nesterov": ["optimizer.name=sgd"],
        }.get(name, owners.get(name, []))
        request = load(None, parse_overrides([f"{name}={text}", *more]))
        held = {**request[1].model_dump(), **request[0].model_dump()}
        for part in name.removeprefix("spec.").split("."):
            held = held[part]
        expected = parse_value(str(text))
        assert held == (tuple(expected) if isinstance(expected, list) else expected), name


@pytest.mark.parametrize("item", ["width", "=3", "", ".=1", "optimizer.=1", ".lr=1", "spec.=1", "a..b=1"])
def test_malformed_overrides_are_refused(item):
    with pytest.raises(SpecError) as caught:
        parse_overrides([item])
    assert str(caught.value) == f"--set must be NAME=VALUE, got {item!r}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("bach = 3", "unknown key bach; did you mean batch?"),
        ("rank = 3", "unknown key rank; did you mean ranks?"),
        ("lr = 0.1", "unknown key lr; did you mean optimizer.lr?"),
        ("momentum = 0.1", "unknown key momentum; did you mean optimizer.momentum?"),
        ("[optimiser]\nlr = 0.1", "unknown key optimiser; did you mean optimizer?"),
        ("[save]\nevry = 5", "unknown key save.evry; did you mean save.every?"),
        ("[optimizer]\nmomentun = 0.1", "unknown key optimizer.momentun; did you mean optimizer.momentum?"),
        ('batch = "64"', "batch must be an integer, got '64'"),
        ("batch = 6.5", "batch must be an integer, got 6.5"),
        ("batch = 0", "batch must be greater than or equal to 1, got 0"),
        ("batch = -4", "batch must be greater than or equal to 1, got -4"),
        ("batch = true", "batch must be an integer, got True"),
        ("ranks = 0", "ranks must be greater than or equal to 1, got 0"),
        ("ranks = 1.5", "ranks must be an integer, got 1.5"),
        ("restarts = -1", "restarts must be greater than or equal to 0, got -1"),
        ("epochs = 0.0", "epochs must be greater than 0, got 0.0"),
        ("epochs = -1.0", "epochs must be greater than 0, got -1.0"),
        ("steps = 0", "steps must be greater than or equal to 1, got 0"),
        ("seed = -1", "seed must be greater than or equal to 0, got -1"),
        (
            'precision = "fp8"',
            "precision must be 'auto', 'fp64', 'fp32', 'tf32', 'bf16' or 'fp16', got 'fp8'",
        ),
        ('device = "gpu"', "device must be 'cpu' or 'cuda', got 'gpu'"),
        ("plan = 3", "plan must be a string, got 3"),
        ('compile = "yes"', "compile must be a boolean, got 'yes'"),
        ("[optimizer]\nlr = 0.0", "optimizer.lr must be greater than 0, got 0.0"),
        ("[optimizer]\nlr = -1e-3", "optimizer.lr must be greater than 0, got -0.001"),
        ("[optimizer]\nlr = nan", "optimizer.lr must be a finite number, got nan"),
        ("[optimizer]\nlr = inf", "optimizer.lr must be a finite number, got inf"),
        ("epochs = inf", "epochs must be a finite number, got inf"),
        ('[optimizer]\nlr = "fast"', "optimizer.lr must be a number, got 'fast'"),
        ("[optimizer]\nclip = 0", "optimizer.clip must be greater than 0, got 0"),
        ("[optimizer]\nmomentum = 1.0", "optimizer.momentum must be less than 1, got 1.0"),
        ('[optimizer]\nname = "adamq"', "unknown optimizer 'adamq'; did you mean adam?"),
        ('[optimizer]\nname = "shampoo"', f"unknown optimizer 'shampoo'; available: {', '.join(OPTIMIZERS)}"),
        (
            "[optimizer]\nmomentum = 0.5",
            "adamw has no option momentum, got optimizer.momentum=0.5; leave it out, or use sgd, rmsprop, "
            "lars, muon; options of adamw: betas, eps, amsgrad",
        ),
        (
            "[optimizer]\nname = 'rprop'\nweight_decay = 0.1",
            "rprop has no weight decay, got optimizer.weight_decay=0.1; leave it out",
        ),
        (
            "[optimizer]\nname = 'lamb'\nconvention = 'you2017'",
            "optimizer.convention of lamb must be you2020 or timm, got 'you2017'",
        ),
        ("[optimizer]\nbetas = [0.9, 1.5]", "optimizer.betas.1 must be less than 1, got 1.5"),
        (
            "[optimizer]\nbetas = 0.9",
            "optimizer.betas must be a list of 2 numbers, such as [0.9,0.999], got 0.9",
        ),
        (
            "[optimizer]\nbetas = [0.9]",
            "optimizer.betas must be a list of 2 numbers, such as [0.9,0.999], got [0.9]",
        ),
        (
            "[optimizer]\nname = 'muon'\nns_coefficients = [3.4, 'x', 2.0]",
            "optimizer.ns_coefficients must be a list of 3 numbers, such as [3.4445,-4.775,2.0315], got "
            "[3.4, 'x', 2.0]",
        ),
        (
            "[optimizer]\nname = 'rprop'\netas = [0.5, 0.9]",
            "optimizer.etas must be a factor between 0 and 1 and one above 1, such as [0.5,1.2], got "
            "[0.5,0.9]",
        ),
        (
            "[optimizer]\nname = 'rprop'\nstep_sizes = [50.0, 1e-6]",
            "optimizer.step_sizes must be the smallest step, above 0, and the largest, such as [1e-06,50], "
            "got [50,1e-06]",
        ),
        (
            "[optimizer]\nname = 'rprop'\nstep_sizes = [1.0, 1e300]",
            "optimizer.step_sizes must be at most 3.4e+38, the largest number of float32, got (1.0, 1e+300)",
        ),
        (
            "[optimizer]\nweight_decay = 1e300",
            "optimizer.weight_decay must be at most 3.4e+38, the largest number of float32, got 1e+300",
        ),
        ("[optimizer]\nname = ['adamw']", "unknown optimizer ['adamw']; did you mean adamw?"),
        (
            "[optimizer]\nweight_decay = 0.1\nno_decay = ' , '",
            "optimizer.no_decay=' , ' names no parameter; write norm, bias, embedding or patterns of names, "
            "separated by commas, or leave it out",
        ),
        (
            "[optimizer.groups]",
            "optimizer.groups is empty; give it a pattern with options, such as {'head.*'={lr=0.01}}, or "
            "leave it out",
        ),
        (
            "[optimizer.groups]\n'' = {lr = 0.1}",
            "optimizer.groups has the pattern '', which names no parameter; write norm, bias, embedding or "
            "patterns of names, separated by commas",
        ),
        (
            "[optimizer]\nname = 'sgd'\nnesterov = true\ndampening = 0.5",
            "optimizer.nesterov requires no dampening, got optimizer.dampening=0.5; leave one out",
        ),
        (
            "[schedule]\nname = 'onecycle'",
            "schedule.name must be 'constant', 'cosine', 'linear', 'step', 'polynomial', 'cosine-restarts', "
            "'milestones', 'one-cycle', 'wsd', 'inverse-sqrt', 'plateau' or 'task', got 'onecycle'; did you "
            "mean one-cycle?",
        ),
        (
            "[schedule]\nname = 'milestones'\nmilestones = '5 epochs'",
            'schedule.milestones must be a list, such as ["30 epochs","60 epochs"], got \'5 epochs\'',
        ),
        ("[schedule]\nlength = '0.0 epochs'", "schedule.length must be longer than 0, got '0.0 epochs'"),
        (
            "[optimizer]\nname = 'sgd'\nnesterov = true\nmomentum = 0.0",
            "optimizer.nesterov requires momentum above 0, got optimizer.momentum=0; set "
            "optimizer.nesterov=false",
        ),
        (
            '[schedule]\nname = "step"',
            "schedule.every is required by step (samples between two decays) and cosine-restarts (samples of "
            "the first cycle), and only by them; got name='step', every=None",
        ),
        (
            "[schedule]\nevery = 3",
            "schedule.every is required by step (samples between two decays) and cosine-restarts (samples of "
            "the first cycle), and only by them; got name='constant', every=3",
        ),
        ("[schedule]\nfloor = 1.5", "schedule.floor must be less than or equal to 1, got 1.5"),
        ('[save]\nbest = "accuracy"', "save.best must be 'min NAME' or 'max NAME', got 'accuracy'"),
        ('[stop]\nmetric = "loss"\npatience = 3', "stop.metric must be 'min NAME' or 'max NAME', got 'loss'"),
        (
            '[stop]\nmetric = "min loss"',
            "stop.metric='min loss' requires stop.patience (evaluations without a better metric) or "
            "stop.target (a value of the metric)",
        ),
        (
            "[stop]\nmin_delta = 0.5",
            "stop.min_delta=0.5 requires stop.patience, the number of evaluations without such a change",
        ),
        ("[stop]\npatience = 0", "stop.patience must be greater than or equal to 1, got 0"),
        ("max_time = 90", "max_time must be a duration such as '90m', '1h30m' or '2d', got 90"),
        ('max_time = "0s"', "max_time must be a duration such as '90m', '1h30m' or '2d', got '0s'"),
        ("[save]\nkeep = 0", "save.keep must be greater than or equal to 1, got 0"),
        ("[data]\nworkers = -1", "data.workers must be greater than or equal to 0, got -1"),
        ("epochs = 1.0\nsteps = 5", "epochs=1 and steps=5 contradict each other; specify either of them"),
        ("set = 3", "set must be a table, got 3"),
        ("optimizer = 3", "optimizer must be a table, got 3"),
    ],
)
def test_invalid_files_are_refused(text, message, tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(text)
    with pytest.raises(SpecError) as caught:
        load(file, {})
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"optimizer.momentun": 0.5}, "unknown key optimizer.momentun; did you mean optimizer.momentum?"),
        ({"optimiser.lr": 0.5}, "unknown key optimiser; did you mean optimizer?"),
        ({"optimizer.lr": "fast"}, "optimizer.lr must be a number, got 'fast'"),
        ({"batch.size": 3}, "batch=64 has no keys below it, got batch.size"),
        (
            {'optimizer.groups."1.*".lr_scale': 10},
            'unknown key optimizer.groups."1.*".lr_scale; specify all groups at once: '
            """--set 'optimizer.groups={"PATTERN"={lr_scale=10}}'""",
        ),
        ({"optimizer.lr.start": 3}, "unknown key optimizer.lr.start; did you mean optimizer.lr?"),
    ],
)
def test_invalid_flags_are_refused(overrides, message, tmp_path):
    file = tmp_path / "run.toml"
    file.write_text("batch = 64\n")
    with pytest.raises(SpecError) as caught:
        load(file, overrides)
    assert str(caught.value) == message


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(SpecError, match=r"cannot read .*nowhere.toml: No such file or directory"):
        load(tmp_path / "nowhere.toml", {})


def test_a_folder_is_refused(tmp_path):
    with pytest.raises(SpecError, match=r"cannot read .*: Is a directory"):
        load(tmp_path, {})


@pytest.mark.parametrize("content", [b"batch = ", b"batch 3", b"\xff\xfe", b"[a]\n[a]\n", b"{}"])
def test_invalid_toml_is_refused(content, tmp_path):
    file = tmp_path / "run.toml"
    file.write_bytes(content)
    with pytest.raises(SpecError, match=r"run.toml is not TOML: "):
        load(file, {})


@pytest.mark.parametrize(
    ("spec", "samples", "steps"),
    [
        (Spec(steps=7), 100, 7),
        (Spec(epochs=1.0, batch=10), 100, 10),
        (Spec(epochs=1.0, batch=30), 100, 4),  # the last step exceeds the end
        (Spec(epochs=3.0, batch=30), 100, 10),  # only the last step exceeds the end
        (Spec(epochs=0.5, batch=10), 100, 5),
        (Spec(epochs=0.001, batch=10), 100, 1),  # at least one step
        (Spec(batch=64), 64, 20),
    ],
)
def test_total_steps(spec, samples, steps):
    assert spec.total_steps(samples) == steps


HUGE = [
    ("batch", "999999999999999", "batch must be less than or equal to 1000000000, got 999999999999999"),
    ("epochs", "1e308", "epochs must be less than or equal to 1000000000, got 1e+308"),
    ("steps", str(10**18), f"steps must be less than or equal to 1000000000000, got {10**18}"),
    ("timeout_s", "1e30", "timeout_s must be less than or equal to 1000000, got 1e+30"),
    ("timeout_s", "inf", "timeout_s must be a finite number, got inf"),
    ("epochs", "nan", "epochs must be a finite number, got nan"),
    ("ranks", "99999999999", "ranks must be less than or equal to 1000000, got 99999999999"),
    ("threads", "-1", "threads must be greater than or equal to 1, got -1"),
    ("data.workers", "1000000", "data.workers must be less than or equal to 1024, got 1000000"),
    ("seed", "9" * 30, TOO_LARGE),
    ("width", "1" * 5000, TOO_LARGE),
    ("width", "-" + "1" * 5000, TOO_LARGE),
    ("width", "0x" + "f" * 5000, TOO_LARGE),
    ("width", "[" * 5000 + "]" * 5000, TOO_LARGE),
    ("width", "[" * 60 + "]" * 60, TOO_LARGE),
    ("width", "{a = " * 5000 + "1" + "}" * 5000, TOO_LARGE),
    ("width", f"{{{'a.' * 5000}a = 1}}", TOO_LARGE),
    ("." * 5000, "1", "--set must be NAME=VALUE, got "),
    ("a." * 5000 + "a", "1", TOO_LARGE),
]


def test_huge_values_are_refused_in_one_short_sentence(tmp_path):
    for name, text, message in HUGE:
        key = name if "." in name or name == "width" else f"spec.{name}"
        with pytest.raises(SpecError) as caught:
            load(None, parse_overrides([f"{key}={text}"]))
        assert message in str(caught.value), (name[:20], text[:20])
        assert len(str(caught.value)) < 300
        assert "\n" not in str(caught.value)
        if "a." not in name and "." * 9 not in name:
            (tmp_path / "run.toml").write_text(f"{'optimizer' if name == 'width' else name} = {text}\n")
            with pytest.raises(SpecError) as caught:
                load(tmp_path / "run.toml", {})
            assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("keys", "warmup", "every"),
    [
        ({"warmup": 50}, 50, None),
        ({"warmup": "50 steps"}, 400, None),
        ({"warmup": "1 step"}, 8, None),
        ({"warmup": "0.5 epochs"}, 50, None),
        ({"warmup": "1 epoch", "name": "step", "every": "2 epochs"}, 100, 200),
        ({"warmup": "30 samples", "name": "step", "every": "0.001 epochs"}, 30, 1),
    ],
)
def test_schedule_lengths_in_samples(keys, warmup, every):
    schedule = Schedule(**keys).in_samples(8, 100)
    assert (schedule.warmup, schedule.every) == (warmup, every)
    assert load(None, {f"schedule.{key}": value for key, value in keys.items()})[0].schedule == Schedule(
        **keys
    )


@pytest.mark.parametrize(
    "length",
    [
        -1,
        1.5,
        True,
        "",
        "50",
        "5 parsecs",
        "-5 steps",
        "1e3 steps",
        "nan epochs",
        "steps",
        "٣ steps",
        2**64,
        [],
    ],
)
def test_invalid_schedule_lengths_are_refused(length):
    with pytest.raises(
        SpecError, match=r"^schedule.warmup must be samples .*, '50 steps' or '5 epochs', got "
    ):
        load(None, {"schedule.warmup": length})


class Mine:
    def dataset(self, split): ...


def test_a_task_must_be_a_name():
    class Local(Mine): ...

    for task, message in (
        (Mine, "task must be a name, got the class Mine; write task='test_spec:Mine'"),
        (
            Mine(),
            "task must be a name, got the object Mine; write task='test_spec:Mine', set={'field': value}",
        ),
        (Local, "move it to the top of a module"),
    ):
        with pytest.raises(SpecError) as caught:
            Spec(task=task)
        assert message in str(caught.value)
        assert "\n" not in str(caught.value)


def test_plain_type_checkers_see_the_defaults():
    """PEP 681: type checkers see a default only as a keyword argument."""
    calls = [
        node
        for path in Path(specs.__file__).parent.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
    ]
    fields = [call for call in calls if getattr(call.func, "id", "") == "Field"]
    assert len(fields) > 40
    assert not [call.lineno for call in fields if call.args]


@pytest.mark.slow
def test_mypy_without_plugins(tmp_path):
    (tmp_path / "mine.py").write_text(
        'from paceline.spec import Launch, Optimizer, Spec\n\nSpec(task="digits")\nSpec(task="a", '
        "batch=8, optimizer=Optimizer(lr=0.1))\n"
        "Launch(ranks=2)\nSpec(bach=3)\n"
    )
    (tmp_path / "mypy.ini").write_text("[mypy]\nstrict = true\n")
    words = [
        sys.executable,
        "-m",
        "mypy",
        "--follow-imports=silent",
        "--cache-dir",
        str(tmp_path / "cache"),
        "mine.py",
    ]
    found = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    errors = [line for line in found.stdout.splitlines() if ": error:" in line]
    assert errors == [
        'mine.py:6: error: Unexpected keyword argument "bach" for "Spec"; did you mean "batch"?  [call-arg]'
    ], found.stdout


def test_dissimilar_names_are_not_suggested():
    for name, message in (
        (
            "optimizer.xyz",
            "unknown key optimizer.xyz; available: name, lr, weight_decay, momentum, nesterov, dampening, "
            "betas, eps, amsgrad, momentum_decay, decoupled_weight_decay, lr_decay, "
            "initial_accumulator_value, rho, alpha, centered, etas, step_sizes, lambd, t0 and 28 more",
        ),
        ("spec.xyz", "unknown key xyz; paceline train --keys lists them"),
        ("optimizer.beta", "unknown key optimizer.beta; did you mean optimizer.betas?"),
        ("spec.lr", "unknown key lr; did you mean optimizer.lr?"),
        ("save.seed", "unknown key save.seed; available: every, minutes, keep, best"),
    ):
        with pytest.raises(SpecError) as caught:
            load(None, parse_overrides([f"{name}=1"]))
        assert str(caught.value) == message


def test_suggested_names():
    assert specs.suggest("bach", ["batch", "seed"]) == "; did you mean batch?"
    assert specs.suggest("qqqq", ["batch", "seed"]) == "; available: batch, seed"
    assert specs.suggest("LAMB", ["adamw", "lamb"]) == "; did you mean lamb?"
    assert specs.suggest("pipeline_Rank", ["PIPELINE_RANK", "seed"]) == "; did you mean PIPELINE_RANK?"
    assert specs.suggest("qqqq", []) == ""
    assert specs.suggest("lr", ["batch", "optimizer.lr"]) == "; did you mean optimizer.lr?"


def test_requests_of_earlier_versions_are_read(tmp_path):
    """They stored the options of all optimizers. A value that somebody chose is still an error."""
    specs.save(tmp_path / "run.toml", Spec(), Launch())
    text = (tmp_path / "run.toml").read_text()
    [line] = [line for line in text.splitlines() if line.startswith("[optimizer]")]
    for momentum, fits in ((0.9, True), (0.5, False)):
        old = text.replace(line, f"{line}\nmomentum = {momentum}\nnesterov = false")
        (tmp_path / "old.toml").write_text(old)
        if fits:
            assert specs.load_own(tmp_path / "old.toml", {}, edited=True)[0] == Spec()
        else:
            with pytest.raises(
                SpecError, match=r"adamw has no option momentum, got optimizer\.momentum=0\.5"
            ):
                specs.load_own(tmp_path / "old.toml", {}, edited=True)


def test_the_documented_defaults():
    assert Spec().task == "digits"
    assert Launch().plan is None
    assert Path(specs.__file__).parent.name == "spec"
