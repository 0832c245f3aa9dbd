"""Runs exported as folders that transformers loads."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from command import paceline, succeed
from hf_folders import write_folder, write_text
from paceline import Spec
from paceline.errors import Error, RunError, TaskError
from paceline.hf import export
from paceline.hf.folder import open_folder

pytest.importorskip("transformers")

TOKENS = torch.arange(3, 19).reshape(2, 8)


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hf")
    for kind in ("llama", "gpt2", "mixtral"):
        write_folder(folder / kind, kind, shard_bytes=20_000)
    write_folder(folder / "tied", tie_word_embeddings=True)
    return folder


def trained(folder: Path) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return the model of a folder with other weights than in the folder, and its weights."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5).add_(0.01)
    return model, {name: value.clone() for name, value in model.state_dict().items()}


def model_of(folder: Path) -> export.TrainedModel:
    return export.TrainedModel(open_folder(str(folder / "config.json")))


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mixtral", "tied"])
def test_an_exported_folder_gives_the_logits_of_the_run(here: Path, tmp_path: Path, kind: str) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, weights = trained(here / kind)
    out = tmp_path / "out"
    export.write_folder(weights, model_of(here / kind), out)
    loaded = AutoModelForCausalLM.from_pretrained(out)
    assert loaded.dtype == torch.float32
    with torch.no_grad():
        torch.testing.assert_close(loaded(TOKENS).logits, model(TOKENS).logits, rtol=1e-6, atol=1e-6)
    config, original = (json.loads((path / "config.json").read_text()) for path in (out, here / kind))
    assert {key for key in original if config.get(key) != original[key]} <= {"dtype", "transformers_version"}
    for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (out / file).read_bytes() == (here / kind / file).read_bytes()
    assert AutoTokenizer.from_pretrained(out).eos_token_id == 1
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_mixtral_is_exported_with_a_tensor_for_each_expert(here: Path, tmp_path: Path) -> None:
    _, weights = trained(here / "mixtral")
    export.write_folder(weights, model_of(here / "mixtral"), tmp_path / "out")
    names = {name for file in (here / "mixtral").glob("*.safetensors") for name in load_file(file)}
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == names


def test_a_folder_with_other_values_is_refused(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = export._write

    def write_wrongly(weights: Any, model: Any, folder: Path) -> None:
        write(weights, model, folder)
        values = load_file(folder / "model.safetensors")
        values["model.norm.weight"][3] += 1e-6
        save_file(values, folder / "model.safetensors", {"format": "pt"})

    monkeypatch.setattr(export, "_write", write_wrongly)
    with pytest.raises(RunError, match=r"from_pretrained reports changes model\.norm\.weight"):
        export.write_folder(trained(here / "llama")[1], model_of(here / "llama"), tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_weights_of_another_model_are_refused(here: Path, tmp_path: Path) -> None:
    _, weights = trained(here / "llama")
    with pytest.raises(TaskError, match=r"the checkpoint lacks transformer\.h\.0\.attn\.c_attn\.bias"):
        export.write_folder(weights, model_of(here / "gpt2"), tmp_path / "out")
    weights["model.norm.weight"] = torch.ones(3)
    with pytest.raises(TaskError, match="the checkpoint does not fit the model of"):
        export.write_folder(weights, model_of(here / "llama"), tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    export.check_out(tmp_path / "empty")
    export.check_out(tmp_path / "new")
    for name in (".", "file", "link"):
        with pytest.raises(RunError, match="exists already; name another folder"):
            export.check_out(tmp_path / name)
    with pytest.raises(RunError, match=r"no such folder: \S+/none; create it first"):
        export.check_out(tmp_path / "none" / "out")


def test_only_runs_of_folders_have_a_model() -> None:
    with pytest.raises(Error, match="--format hf requires a run of hf:FOLDER, got task digits"):
        export.find_model(Spec(task="digits"))


@pytest.mark.processes
@pytest.mark.slow
def test_a_run_under_zero3_is_exported(here: Path, tmp_path: Path) -> None:
    """The weights of the folder are gone, and the exported model has those of the checkpoint."""
    from transformers import AutoModelForCausalLM

    folder = write_folder(tmp_path / "llama", shard_bytes=20_000)
    write_text(tmp_path / "text.txt")
    words = "--set data=text.txt --set length=8 --steps 3 --batch 4 --ranks 2 --plan zero3 --run-dir r"
    succeed("train", "hf:llama", *words.split(), at=tmp_path)
    for file in (*folder.glob("model*"), tmp_path / "text.txt"):
        file.unlink()
    output = succeed("export", "r", "--format", "hf", "-o", "out", at=tmp_path).out
    assert "out: a LlamaForCausalLM of " in output
    succeed("export", "r", "weights.safetensors", at=tmp_path)
    expected = load_file(tmp_path / "weights.safetensors")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in loaded.items())
    again = paceline("export", "r", "--format", "hf", "-o", "out", at=tmp_path)
    assert again.status == 2
    assert again.err == "paceline: out exists already; name another folder\n"
