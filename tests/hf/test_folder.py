"""The task hf:FOLDER: what it reads of a folder and of the data, and what it refuses."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from command import paceline
from hf_folders import write_folder, write_text
from paceline import Spec
from paceline.errors import Error, TaskError
from paceline.hf.folder import ModelFolder
from paceline.hf.objectives import choose_objective
from paceline.hf.samples import TokenWindows
from paceline.spec import build
from paceline.task import load_task
from paceline.training.init.deferred_init import fill_, record
from paceline.training.init.named_tensors import named_tensors
from paceline.training.init.pretrained import PretrainedWeights

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hf")
    for kind in ("llama", "gpt2", "mixtral"):
        write_folder(folder / kind, kind, shard_bytes=20_000)
    write_text(folder / "text.txt")
    write_text(folder / "lines.jsonl")
    return folder


def load(path: Path, **fields: Any) -> Any:
    folder = path.parent if path.name == "config.json" else path
    spec = Spec(task=f"hf:{path}", set={"data": str(folder.parent / "text.txt"), "length": 8, **fields})
    return load_task(spec.task, spec.set)


def fill(task: Any) -> tuple[dict[str, torch.Tensor], tuple[str, ...]]:
    """Return the initial values of a task's model, and the notes of its weights."""
    model, weights, is_recorded = record(task.model, 0)
    assert is_recorded, "each rank would build the whole model"
    source = task.pretrained()
    loaded = PretrainedWeights(source, model) if source is not None else None
    fill_(model, weights, torch.device("cpu"), loaded)
    values = {name: tensor.detach() for name, tensor in named_tensors(model).items()}
    return values, loaded.notes if loaded is not None else ()


def read_plainly(folder: Path) -> dict[str, torch.Tensor]:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mixtral"])
def test_weights_are_those_of_from_pretrained(here: Path, kind: str) -> None:
    """The files of mixtral have a tensor for each expert, its model has one for all."""
    values, notes = fill(load(here / kind))
    expected = {name: tensor for name, tensor in read_plainly(here / kind).items() if name in values}
    assert len(expected) > 15
    assert all(torch.equal(values[name], tensor) for name, tensor in expected.items())
    assert not notes


def test_weights_of_a_base_model(here: Path, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "base", auto="AutoModel", architectures=["LlamaModel"])
    shutil.copy(here / "text.txt", tmp_path)
    values, [note] = fill(load(folder, objective="causal-lm"))
    assert "1 of 21 parameters are not in the pretrained weights" in note
    assert note.endswith("keep their initialization: lm_head.weight")
    stored = load_file(folder / "model.safetensors")
    assert torch.equal(values["model.norm.weight"], stored["norm.weight"])
    assert torch.equal(values["model.layers.1.mlp.up_proj.weight"], stored["layers.1.mlp.up_proj.weight"])


def test_adapters_are_not_missing_in_the_weights(here: Path, tmp_path: Path) -> None:
    lora = {"rank": 2, "alpha": 4.0}
    _, notes = fill(load(here / "llama", lora=lora))
    assert not notes
    folder = write_folder(tmp_path / "base", auto="AutoModel", architectures=["LlamaModel"])
    shutil.copy(here / "text.txt", tmp_path)
    _, [note] = fill(load(folder, objective="causal-lm", lora=lora))
    assert note.startswith("1 of 21 parameters are not in")
    assert note.endswith("keep their initialization: lm_head.weight")


def test_a_config_alone_gives_random_weights(here: Path) -> None:
    values, notes = fill(load(here / "llama" / "config.json"))
    expected = read_plainly(here / "llama")
    assert not notes
    assert not torch.equal(values["lm_head.weight"], expected["lm_head.weight"])
    assert float(values["lm_head.weight"].std()) == pytest.approx(0.02, rel=0.2)


def test_weights_of_another_type_become_float32(here: Path, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "half", dtype=torch.bfloat16)
    shutil.copy(here / "text.txt", tmp_path)
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert file.get_tensor("lm_head.weight").dtype == torch.bfloat16
    values, _ = fill(load(folder))
    assert {value.dtype for value in values.values()} == {torch.float32}


@pytest.mark.parametrize("file", ["text.txt", "lines.jsonl"])
def test_samples_are_windows_of_all_tokens(here: Path, file: str) -> None:
    from transformers import AutoTokenizer

    samples = load(here / "gpt2", data=str(here / file)).dataset("train")
    tokenizer = AutoTokenizer.from_pretrained(here / "gpt2")
    texts = (
        [json.loads(line)["text"] for line in (here / file).read_text().splitlines()]
        if file.endswith("jsonl")
        else [(here / file).read_text()]
    )
    tokens = [number for text in texts for number in [*tokenizer.encode(text), tokenizer.eos_token_id]]
    assert len(samples) == (len(tokens) - 1) // 8
    for index in (0, 1, len(samples) - 1):
        sample = samples[index]
        assert sample["input_ids"].tolist() == tokens[8 * index : 8 * index + 8]
        assert sample["labels"].tolist() == tokens[8 * index + 1 : 8 * index + 9]


def test_the_last_window_is_whole() -> None:
    assert [len(TokenWindows(torch.arange(count), 4)) for count in (0, 1, 4, 5, 8, 9)] == [0, 0, 0, 1, 1, 2]


def test_splits(here: Path) -> None:
    task = load(here / "llama", validation=str(here / "lines.jsonl"))
    assert len(task.dataset("validation")) > 0
    assert task.dataset("test") is None
    assert load(here / "llama").dataset("validation") is None


def test_the_default_length_is_that_of_the_model(here: Path) -> None:
    assert load(here / "llama", length=None).dataset("train").length == 32  # max_position_embeddings


def edit(folder: Path, file: str = "config.json", **changes: Any) -> None:
    tree = json.loads((folder / file).read_text()) | changes
    (folder / file).write_text(json.dumps({key: value for key, value in tree.items() if value is not None}))


def save_others(folder: Path) -> None:
    for file in folder.glob("model*"):
        file.unlink()
    save_file({"weight": torch.ones(2)}, folder / "model.safetensors")


BAD: dict[str, tuple[Callable[[Path], object], dict[str, Any], str]] = {
    "no folder": (shutil.rmtree, {}, r"no such folder: \S+/llama; expected a folder with config.json"),
    "no config": (
        lambda folder: (folder / "config.json").unlink(),
        {},
        "is not a Hugging Face model: it has no config.json",
    ),
    "no JSON": (lambda folder: (folder / "config.json").write_text("{"), {}, "cannot read .*config.json"),
    "a list": (
        lambda folder: (folder / "config.json").write_text("[]"),
        {},
        "must contain an object, got list",
    ),
    "remote code": (
        lambda folder: edit(folder, model_type="mine", auto_map={"AutoConfig": "mine.Config"}),
        {},
        "has auto_map: the model needs code of its folder, which Paceline never runs; use a model that",
    ),
    "code of a known model": (
        lambda folder: edit(folder, auto_map={"AutoConfig": "mine.Config"}),
        {},
        "transformers has model_type 'llama' itself: delete auto_map to use that",
    ),
    "unknown model": (
        lambda folder: edit(folder, model_type="lama"),
        {},
        r"transformers has no model_type 'lama'; did you mean llama\?",
    ),
    "no type": (lambda folder: edit(folder, model_type=None), {}, "has no model_type"),
    "a wrong value": (
        lambda folder: edit(folder, hidden_size="many"),
        {},
        "transformers cannot read .*config.json",
    ),
    "quantized": (
        lambda folder: edit(folder, quantization_config={"bits": 4}),
        {},
        "quantized weights cannot be trained",
    ),
    "no causal model": (
        lambda folder: edit(folder, architectures=["LlamaForTokenClassification"]),
        {},
        "is LlamaForTokenClassification, which has none of the objectives; choose one with --set",
    ),
    "an encoder": (
        lambda folder: edit(folder, model_type="vit"),
        {"objective": "causal-lm"},
        "transformers has no causal language model of model_type 'vit'",
    ),
    "an encoder that sees what it predicts": (
        lambda folder: edit(folder, model_type="bert"),
        {"objective": "causal-lm"},
        "reads the tokens that causal-lm predicts: it is an encoder of model_type 'bert'; use --set "
        "objective=masked-lm, or set is_decoder to true in its config.json",
    ),
    "no weights": (
        lambda folder: [file.unlink() for file in folder.glob("model*")],
        {},
        "has no weights: neither model.safetensors nor .*; .* random weights with hf:.*/config.json",
    ),
    "pickled weights": (
        lambda folder: [
            *(file.unlink() for file in folder.glob("model*")),
            (folder / "pytorch_model.bin").touch(),
        ],
        {},
        "only pytorch_model.bin, whose reading could run code; save the model with transformers again",
    ),
    "a missing file": (
        lambda folder: (folder / "model-00002-of-00005.safetensors").unlink(),
        {},
        "lacks model-00002-of-00005.safetensors of the 5 files that model.safetensors.index.json lists",
    ),
    "weights of another model": (save_others, {}, "none of its 1 tensors belongs to LlamaForCausalLM"),
    "another size": (
        lambda folder: edit(folder, intermediate_size=64),
        {},
        r"has shape \(32, 48\), the model's has \(32, 64\)",
    ),
    "a larger tokenizer": (
        lambda folder: edit(folder, vocab_size=20),
        {},
        r"the tokenizer of \S+ has 64 tokens, but the model has 20 \(vocab_size in config.json\)",
    ),
    "no tokenizer": (
        lambda folder: [file.unlink() for file in folder.glob("tokenizer*")],
        {},
        "transformers cannot load the tokenizer of .*; copy the files of the tokenizer there",
    ),
    "code of a tokenizer": (
        lambda folder: edit(folder, "tokenizer_config.json", auto_map={"AutoTokenizer": ["mine.T", None]}),
        {},
        "the tokenizer needs code of its folder, which Paceline never runs",
    ),
    "no data": (lambda folder: None, {"data": "none.txt"}, "no such data file: none.txt"),
    "no text": (
        lambda folder: (folder / "a.txt").write_text(""),
        {"data": "a.txt"},
        "a.txt has 1 tokens, but a sample takes 9",
    ),
    "no UTF-8": (
        lambda folder: (folder / "a.txt").write_bytes(b"\xff\xfe"),
        {"data": "a.txt"},
        "it is not UTF-8 text",
    ),
    "no object": (
        lambda folder: (folder / "a.jsonl").write_text('{"text": "a"}\n{"text"'),
        {"data": "a.jsonl"},
        "a.jsonl, line 2: each line must be a JSON object",
    ),
    "another key": (
        lambda folder: (folder / "a.jsonl").write_text('\n{"content": "a"}'),
        {"data": "a.jsonl"},
        "a.jsonl, line 2: no text in 'text'; it has content; name the key with --set text=KEY",
    ),
    "too long": (
        lambda folder: None,
        {"length": 33},
        "length=33 exceeds the 32 positions of the model; use --set length=32",
    ),
    "no length": (lambda folder: None, {"length": 0}, "length must be at least 1 token, got 0"),
}


def use(folder: Path, fields: dict[str, Any]) -> None:
    """Do with a folder what a training does before its first step."""
    task = load(folder, **fields)
    task.dataset("train")
    fill(task)


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused(case: str, here: Path, tmp_path: Path, monkeypatch: Any) -> None:
    change, fields, message = BAD[case]
    folder = tmp_path / "llama"
    shutil.copytree(here / "llama", folder)
    shutil.copy(here / "text.txt", tmp_path)
    change(folder)
    monkeypatch.chdir(folder if folder.exists() else tmp_path)
    with pytest.raises(Error, match=message) as raised:
        use(folder, fields)
    assert "\n" not in str(raised.value)


def test_a_name_of_a_task_without_a_folder() -> None:
    with pytest.raises(Error, match="task 'hf:' names no folder; write hf:FOLDER"):
        build({"task": "hf:"})
    with pytest.raises(Error, match="folder is '/a' by the task and '/b' by --set; specify it once"):
        build({"task": "hf:/a", "set": {"folder": "/b"}})


def test_missing_transformers_is_reported(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(TaskError, match=r"requires transformers, .*; run: pip install 'paceline\[hf\]'"):
        load(here / "llama")


@pytest.mark.processes
def test_a_bad_folder_ends_a_command(tmp_path: Path) -> None:
    for command in ("train", "verify"):
        words = ("--set", "data=a.txt", "--ranks", "2", "--plan", "zero3")
        result = paceline(command, "hf:none", *words, at=tmp_path)
        assert (result.status, result.err.count("\n")) == (2, 1), result.all
        assert "no such folder: " in result.err
        assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("tree", "is_causal"),
    [
        ({"model_type": "bert", "is_decoder": True}, True),
        ({"model_type": "bert"}, False),
        ({"model_type": "xlm", "causal": True}, True),
        ({"model_type": "xlm", "is_decoder": True}, False),
        ({"model_type": "bart"}, True),
        ({"model_type": "llama"}, True),
    ],
    ids=str,
)
def test_encoders_are_causal_by_a_key_of_their_configuration(tree: dict[str, Any], is_causal: bool) -> None:
    folder = ModelFolder(Path("a"), True, tree)
    if is_causal:
        assert choose_objective("causal-lm", folder).name == "causal-lm"
    else:
        with pytest.raises(TaskError, match="reads the tokens that causal-lm predicts"):
            choose_objective("causal-lm", folder)


def test_errors_in_fields_name_the_folder(here: Path) -> None:
    for fields, message in (
        ({"lora": {"rank": 0}}, r"hf:\S*llama: lora.rank must be greater than or equal to 1, got 0"),
        ({"lora.rank": 2}, r"hf:\S*llama has no field lora.rank; write \{'lora': \{'rank': …\}\}"),
    ):
        with pytest.raises(TaskError, match=message):
            load(here / "llama", **fields)
