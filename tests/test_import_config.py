"""paceline import-config: configurations of DeepSpeed as requests."""

import json
import tomllib

import pytest

from command import last_step, paceline, succeed
from paceline.errors import SpecError
from paceline.spec.deepspeed import translate
from pages import read_blocks

FULL = json.loads(read_blocks("docs/from-deepspeed.md")["ds.json"])


def translated(folder, config: dict) -> dict:
    path = folder / "ds.json"
    path.write_text(json.dumps(config))
    return translate(path).tree


def test_whole_configuration(tmp_path):
    (tmp_path / "ds.json").write_text(json.dumps(FULL))
    result = succeed("import-config", "ds.json", "--task", "digits", at=tmp_path)
    tree = tomllib.loads(result.out)
    assert tree == {
        "task": "digits",
        "plan": "zero2,microbatches=4",
        "batch": 64,
        "ranks": 2,
        "precision": "bf16",
        "steps": 1000,
        "optimizer": {
            "name": "adamw",
            "lr": 3e-4,
            "betas": [0.9, 0.95],
            "eps": 1e-8,
            "weight_decay": 0.1,
            "clip": 1.0,
        },
        "schedule": {"name": "linear", "warmup": "100 steps", "start": 0.0},
    }
    assert result.err == (
        "note: the first two updates of DeepSpeed have the first rate: its schedule is a step later\n"
        "note: steps_per_print is not needed: paceline train shows the progress by itself\n"
    )
    shown = read_blocks("docs/from-deepspeed.md")["run.toml"]
    assert tomllib.loads(shown) == tree


@pytest.mark.processes
def test_translated_configuration_trains(tmp_path):
    small = FULL | {"bf16": {"enabled": False}}
    (tmp_path / "ds.json").write_text(json.dumps(small))
    words = ("--set", "schedule.warmup=1 step")
    succeed("import-config", "ds.json", "--task", "digits", "-o", "run.toml", at=tmp_path)
    succeed("train", "run.toml", "--steps", "2", *words, "--run-dir", "run", at=tmp_path)
    assert last_step(tmp_path / "run") == 2


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, {"plan": "ddp"}),
        ({"zero_optimization": {"stage": 3}}, {"plan": "zero3"}),
        ({"gradient_accumulation_steps": 2}, {"plan": "ddp,microbatches=2"}),
        ({"fp16": {"enabled": True}, "gradient_clipping": 0}, {"plan": "ddp", "precision": "fp16"}),
        (
            {"optimizer": {"type": "Adam", "params": {"lr": 0.1, "adam_w_mode": False}}},
            {"plan": "ddp", "optimizer": {"name": "adam", "lr": 0.1}},
        ),
        (
            {
                "scheduler": {
                    "type": "WarmupCosineLR",
                    "params": {"total_num_steps": 9, "warmup_num_steps": 3},
                }
            },
            {
                "plan": "ddp",
                "steps": 9,
                "schedule": {"name": "cosine", "warmup": "3 steps", "start": 0.0, "floor": 0.0001},
            },
        ),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto", "warmup_max_lr": 0.1}}},
            {"plan": "ddp", "optimizer": {"lr": 0.1}, "schedule": {"name": "constant", "start": 0.0}},
        ),
        (
            {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}, "optimizer": {"type": "adamw"}},
            {"plan": "ddp", "precision": "bf16", "optimizer": {"name": "adamw", "weight_decay": 0.0}},
        ),
        (
            {"train_batch_size": 24, "gradient_accumulation_steps": 3, "activation_checkpointing": {"x": 1}},
            {"plan": "ddp,microbatches=3", "batch": 24},
        ),
    ],
    ids=["empty", "zero3", "accumulation", "fp16", "adam", "cosine", "auto", "autocast", "batch"],
)
def test_parts(config, expected, tmp_path):
    assert translated(tmp_path, config) == expected


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ([1], "contains list; expected a JSON object"),
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage must be 0, 1, 2 or 3, got 4"),
        ({"zero_optimization": 2}, "zero_optimization must be a JSON object, got 2"),
        (
            {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
            "zero_optimization.offload_optimizer is set",
        ),
        ({"sparse_attention": {"mode": "fixed"}}, "sparse_attention has no counterpart"),
        ({"train_batch_size": 0}, "train_batch_size must be an integer of at least 1, got 0"),
        (
            {"train_batch_size": 10, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1},
            "train_batch_size 10 is not divisible by",
        ),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "bf16 and fp16 are both enabled"),
        ({"optimizer": {"type": "OneBitAdam"}}, "no such optimizer in Paceline: 'OneBitAdam'"),
        ({"optimizer": {"type": "SGD", "params": {"lr": -1}}}, "optimizer.lr"),
        ({"scheduler": {"type": "LRRangeTest"}}, "no such schedule in Paceline: 'LRRangeTest'"),
        ({"scheduler": {"type": "OneCycle"}}, "no such schedule in Paceline: 'OneCycle'"),
        ({"zero_optimization": {"stag": 2}}, "no such key: zero_optimization.stag; correct or remove it"),
        ({"zero_optimization": {"stage": 2, "cpu_offload": True}}, "zero_optimization.cpu_offload is set"),
        ({"zero_optimization": {"stage": 3, "mics_shard_size": 8}}, "use the plan hsdp"),
        ({"train_batch_size": 10, "gradient_accumulation_steps": 4}, "train_batch_size 10 is not divisible"),
        ({"train_batch_size": 10, "train_micro_batch_size_per_gpu": 4}, "is not divisible by train_micro"),
        ({"gradient_clipping": "one"}, "gradient_clipping must be a number of at least 0, got 'one'"),
        ({"fp16": {"enabled": True, "loss_scale": 128}}, "fp16.loss_scale=128 is fixed"),
        ({"fp16": {"enabled": "yes"}}, "fp16.enabled must be true, false or auto, got 'yes'"),
        ({"bf16": {"enabled": True, "master_weights": False, "other": 1}}, "bf16.other has no counterpart"),
        ({"tensor_parallel": {"autotp_size": 4}}, "the plan key tp splits layers"),
        ({"scheduler": {"type": "WarmupCosineLR", "params": {"warmup_type": "cubic"}}}, "log or linear"),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "",
)
def test_what_cannot_be_translated_is_refused(config, message, tmp_path):
    with pytest.raises(SpecError) as refused:
        translated(tmp_path, config)
    assert message in str(refused.value)


def test_auto_values_are_reported(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(
        json.dumps(
            {
                "train_batch_size": "auto",
                "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
                "gradient_clipping": "auto",
            }
        )
    )
    result = translate(path)
    assert result.tree == {"plan": "ddp", "optimizer": {"name": "adamw", "weight_decay": 0.0}}
    assert len(result.notes) == 3
    assert all("auto" in note for note in result.notes)


def test_clipping_that_depends_on_the_release_is_reported(tmp_path):
    path = tmp_path / "ds.json"
    for config, count in (({}, 1), ({"gradient_clipping": 0}, 0), ({"gradient_clipping": 0.5}, 0)):
        path.write_text(json.dumps(config))
        assert len([note for note in translate(path).notes if "gradient_clipping" in note]) == count


def test_comments_are_read_and_keys_are_unique(tmp_path):
    path = tmp_path / "ds.json"
    text = """{  // as DeepSpeed accepts them
      # the batch
      "train_batch_size": 8, /* of all
      ranks */ "wandb": {"group": "a // b # c, ]"},
      "gradient_clipping": 0,
    }"""
    path.write_text(text)
    assert translate(path).tree == {"plan": "ddp", "batch": 8}
    path.write_text(text.replace('"wandb"', '"train_batch_size"').replace('{"group"', '[{"group"'))
    with pytest.raises(SpecError, match=r"cannot read .*ds.json: Expecting ',' delimiter: line 5"):
        translate(path)
    path.write_text('{"fp16": {"enabled": true, "enabled": false}}')
    with pytest.raises(SpecError, match="the key 'enabled' occurs twice"):
        translate(path)


def test_bad_files(tmp_path):
    (tmp_path / "ds.json").write_text("{")
    for name in ("ds.json", "absent.json"):
        refused = paceline("import-config", name, at=tmp_path)
        assert (refused.status, refused.err.count("\n")) == (2, 1)
        assert refused.err.startswith(f"paceline: cannot read {name}: ")
