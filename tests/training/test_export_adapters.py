"""Adapters exported alone, in the format of peft, merged by hand and compared with the run."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from command import paceline, succeed
from hf_folders import write_folder, write_text
from paceline import Spec
from paceline.errors import RunError, TaskError
from paceline.hf import export
from paceline.hf.task import build_model
from paceline.training.export import adapters
from paceline.training.export.adapters import find_base, write_adapters

transformers = pytest.importorskip("transformers")

TOKENS = torch.arange(3, 19).reshape(2, 8)
RANK, ALPHA = 4, 6.0
AUTO = {"causal-lm": "AutoModelForCausalLM", "classification": "AutoModelForSequenceClassification"}


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hf")
    write_folder(folder / "llama", shard_bytes=20_000)
    write_folder(folder / "gpt2", "gpt2")
    write_folder(folder / "bert", "bert", AUTO["classification"])
    return folder


def request(folder: Path, objective: str = "causal-lm", **fields: Any) -> Spec:
    values = {"data": "", "objective": objective, "lora": {"rank": RANK, "alpha": ALPHA}, **fields}
    return Spec(task=f"hf:{folder}", set=values)


def change_adapters(spec: Spec) -> dict[str, Tensor]:
    """Return the weights of a model after a training, in which only trained tensors changed."""
    trained, base = export.find_model(spec), find_base(spec)
    model = build_model(base, trained.objective, trained.labels, trained.lora)
    plain = getattr(transformers, AUTO[spec.set["objective"]]).from_pretrained(base.path, dtype=torch.float32)
    model.load_state_dict(plain.state_dict(), strict=False)
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn(parameter.shape, generator=draw) / 5)
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def merge_by_hand(folder: Path) -> tuple[Any, dict[str, Any]]:
    """Return the model of a folder with adapters, as peft describes the format, and the configuration."""
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    kind = {"CAUSAL_LM": "causal-lm", "SEQ_CLS": "classification"}[config["task_type"]]
    model = getattr(transformers, AUTO[kind]).from_pretrained(
        config["base_model_name_or_path"], dtype=torch.float32
    )
    targets, used = config["target_modules"], set()
    with torch.no_grad():
        for name, module in model.named_modules():
            if not any(name == target or name.endswith(f".{target}") for target in targets):
                continue
            keys = [f"base_model.model.{name}.lora_{part}.weight" for part in "AB"]
            first, second = (tensors[key] for key in keys)
            used |= {*keys}
            change = config["lora_alpha"] / config["r"] * (second @ first)
            module.weight += change.T if config["fan_in_fan_out"] else change
        for key in tensors.keys() - used:
            name = key.removeprefix("base_model.model.")
            assert name.partition(".")[0] in config["modules_to_save"]
            model.get_parameter(name).copy_(tensors[key])
    return model.eval(), config


def write_both(spec: Spec, tmp_path: Path) -> tuple[dict[str, Tensor], Any, dict[str, Any]]:
    """Return the weights of the run, and the model and configuration that its adapters give."""
    weights = change_adapters(spec)
    write_adapters(weights, export.find_model(spec), find_base(spec), tmp_path / "adapters")
    assert sorted(path.name for path in (tmp_path / "adapters").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    return weights, *merge_by_hand(tmp_path / "adapters")


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_adapters_merged_by_hand_give_the_logits_of_the_run(here: Path, tmp_path: Path, kind: str) -> None:
    spec = request(here / kind)
    weights, merged, config = write_both(spec, tmp_path)
    model = build_model(find_base(spec), "causal-lm", None, export.find_model(spec).lora)
    model.load_state_dict(weights)
    with torch.no_grad():
        expected = model.eval()(TOKENS).logits
        torch.testing.assert_close(merged(TOKENS).logits, expected, rtol=1e-5, atol=1e-5)
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", RANK, ALPHA)
    assert config["fan_in_fan_out"] == (kind == "gpt2")
    names = {"llama": 7, "gpt2": 3}[kind]
    assert len(config["target_modules"]) == names
    assert config["modules_to_save"] is None


def test_classifier_is_exported_with_its_adapters(here: Path, tmp_path: Path) -> None:
    spec = request(
        here / "bert", "classification", lora={"rank": RANK, "alpha": ALPHA, "targets": ["query", "dense"]}
    )
    weights, merged, config = write_both(spec, tmp_path)
    assert config["modules_to_save"] == ["classifier"]
    assert torch.equal(merged.classifier.weight, weights["classifier.weight"])
    model = build_model(find_base(spec), "classification", None, export.find_model(spec).lora)
    model.load_state_dict(weights)
    with torch.no_grad():
        expected = model.eval()(TOKENS).logits
        torch.testing.assert_close(merged(TOKENS).logits, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")  # peft asks for it
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_peft_loads_the_folder(here: Path, tmp_path: Path, kind: str) -> None:
    peft = pytest.importorskip("peft")
    spec = request(here / kind)
    _, merged, config = write_both(spec, tmp_path)
    base = transformers.AutoModelForCausalLM.from_pretrained(config["base_model_name_or_path"])
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "adapters")
    with torch.no_grad():
        torch.testing.assert_close(loaded(TOKENS).logits, merged(TOKENS).logits, rtol=1e-5, atol=1e-5)


def test_whole_names_are_written_if_last_parts_select_other_layers() -> None:
    from torch import nn

    from paceline.hf.lora import LoraLinear

    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dense = nn.Linear(4, 4)

    with torch.device("meta"):
        model = nn.ModuleDict({"body": Head(), "head": Head()})
        model["body"].dense = LoraLinear(nn.Linear(4, 4), 2, 2.0)
    layers = {name: module for name, module in model.named_modules() if isinstance(module, LoraLinear)}
    assert adapters._choose_targets(model, layers) == ["body.dense"]
    del model["head"]
    assert adapters._choose_targets(model, layers) == ["dense"]


def test_changed_base_is_refused(here: Path, tmp_path: Path) -> None:
    base = write_folder(tmp_path / "base")
    spec = request(base)
    weights = change_adapters(spec)
    values = load_file(base / "model.safetensors")
    values["model.norm.weight"][3] += 1e-6
    save_file(values, base / "model.safetensors", {"format": "pt"})
    with pytest.raises(TaskError, match=r"model\.norm\.weight in .* differs from the weights that the run"):
        write_adapters(weights, export.find_model(spec), find_base(spec), tmp_path / "out")
    del values["model.norm.weight"]
    save_file(values, base / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        TaskError, match=r"has no weights for model\.norm\.weight, which stayed at its random"
    ):
        write_adapters(weights, export.find_model(spec), find_base(spec), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_file_with_other_values_is_refused(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import safetensors.torch

    def save_wrongly(tensors: dict[str, Tensor], file: Path, metadata: dict[str, str]) -> None:
        key = next(iter(tensors))
        save_file({**tensors, key: tensors[key] + 1e-6}, file, metadata)

    monkeypatch.setattr(safetensors.torch, "save_file", save_wrongly)
    spec = request(here / "llama")
    with pytest.raises(RunError, match=r"adapter_model\.safetensors has other values than were written"):
        write_adapters(change_adapters(spec), export.find_model(spec), find_base(spec), tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_runs_without_adapters_are_refused(here: Path) -> None:
    with pytest.raises(RunError, match=r"--adapters requires a run of hf:FOLDER with .*, got task digits"):
        find_base(Spec(task="digits"))
    with pytest.raises(RunError, match="HuggingFace without adapters; use --format safetensors"):
        find_base(Spec(task=f"hf:{here}/llama", set={"data": ""}))
    with pytest.raises(RunError, match=r"the run started from random weights .* use --format hf"):
        find_base(request(here / "llama/config.json"))


@pytest.mark.processes
@pytest.mark.slow
def test_adapters_of_a_run_under_zero3(here: Path, tmp_path: Path) -> None:
    write_text(tmp_path / "text.txt")
    words = "--set data=text.txt --set length=8 --set lora.rank=2 --steps 3 --batch 4 --ranks 2 --plan zero3"
    succeed("train", f"hf:{here}/llama", *words.split(), "--lr", "0.01", "--run-dir", "r", at=tmp_path)
    output = succeed("export", "r", "--adapters", "-o", "out", at=tmp_path).out
    assert output == f"out: adapters of 14 layers of {here}/llama, of r/ckpt/step_3; checked\n"
    succeed("export", "r", "--format", "hf", "-o", "whole", at=tmp_path)
    whole = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    merged, _ = merge_by_hand(tmp_path / "out")
    with torch.no_grad():
        torch.testing.assert_close(merged(TOKENS).logits, whole(TOKENS).logits, rtol=1e-5, atol=1e-5)
    again = paceline("export", "r", "--adapters", "-o", "out", at=tmp_path)
    assert (again.status, again.err) == (2, "paceline: out exists already; name another folder\n")
