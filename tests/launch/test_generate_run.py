"""`paceline.generate` and `paceline generate`: texts of a checkpoint under any ranks and plan.

The reference is a loop in float64 that computes the whole text again for each token, without a cache, and
takes the token with the largest logit.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import paceline as package
from command import checkpoint_weights, paceline, succeed
from faults import replaced
from harness import ranks
from hf_folders import build_config, write_folder, write_text
from paceline import DataError, PlanError, Spec, TaskError, World, train
from paceline.errors import SpecError
from paceline.hf.generate import TextWriter
from paceline.run import create
from paceline.spec import Launch, Save

pytest.importorskip("transformers")
pytestmark = pytest.mark.processes

PROMPTS = ("the small", "a few words and", "predicts", "next word of the text again", "reads")
NEW = 9
AUTO = {"t5": "AutoModelForSeq2SeqLM", "bert": "AutoModelForMaskedLM"}


def make_run(folder: Path, kind: str) -> Path:
    """Train a model in this process, and return the folder of the run."""
    model = write_folder(folder / kind, kind, AUTO.get(kind, "AutoModelForCausalLM"))
    data = write_text(folder / "text.txt", repeats=6)
    values: dict[str, Any] = {"data": str(data), "length": 8}
    if kind == "t5":
        rows = [{"text": word, "target": word[::-1]} for prompt in PROMPTS for word in prompt.split()]
        data = folder / "rows.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        values = {"data": str(data), "length": 16}
    spec = Spec(
        task=f"hf:{model}",
        set=values,
        batch=4,
        steps=3,
        seed=3,
        precision="fp64",
        threads=1,
        save=Save(every=1, keep=9, minutes=float("inf")),
    )
    run = create(folder / f"run-{kind}", spec, Launch(plan="single", ranks=1, device="cpu"))
    list(train(spec, "single", World(), run=run, device="cpu"))
    end = choose_end(expected_tokens(run.path, PROMPTS, set()))
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [end], "pad_token_id": 0}))
    (folder / f"{kind}.end").write_text(str(end))
    return run.path


def choose_end(texts: list[tuple[int, ...]]) -> int:
    """Return a token at which the texts end at different lengths."""

    def lengths(token: int) -> set[int]:
        return {text.index(token) if token in text else NEW for text in texts}

    return max({token for text in texts for token in text}, key=lambda token: (len(lengths(token)), -token))


def expected_tokens(run: Path, prompts: tuple[str, ...], ends: set[int]) -> list[tuple[int, ...]]:
    import transformers

    kind = run.name.removeprefix("run-")
    folder = run.parent / kind
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    auto = getattr(transformers, AUTO.get(kind, "AutoModelForCausalLM"))
    model = auto.from_config(build_config(kind)).double().eval()
    weights = {name: torch.from_numpy(array) for name, array in checkpoint_weights(run).items()}
    model.load_state_dict(weights, strict=False)
    texts = []
    for prompt in prompts:
        tokens = tokenizer.encode(prompt)
        new: list[int] = []
        while len(new) < NEW:
            with torch.no_grad():
                if kind == "t5":
                    output = model(
                        input_ids=torch.tensor([tokens]), decoder_input_ids=torch.tensor([[0, *new]])
                    )
                else:
                    output = model(input_ids=torch.tensor([[*tokens, *new]]), use_cache=False)
            token = int(output.logits[0, -1].argmax())
            if token in ends:
                break
            new.append(token)
        texts.append(tuple(new))
    return texts


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory):
    folder, made = tmp_path_factory.mktemp("runs"), {}

    def get(kind: str) -> Path:
        if kind not in made:
            made[kind] = make_run(folder, kind)
        return made[kind]

    return get


@pytest.fixture(scope="module")
def expected(runs):
    found = {}

    def get(kind: str) -> list[tuple[int, ...]]:
        if kind not in found:
            run = runs(kind)
            found[kind] = expected_tokens(run, PROMPTS, {int((run.parent / f"{kind}.end").read_text())})
            assert len({len(text) for text in found[kind]}) > 1, "texts must end at different lengths"
        return found[kind]

    return get


def generate_on_this_rank(run: Path, options: dict):
    return package.generate(run, PROMPTS, max_new_tokens=NEW, **options)


def tokens_of(result) -> list[tuple[int, ...]]:
    return [text.tokens for text in result.texts]


CASES = [("llama", 2, "tp=2", 1), ("gpt2", 2, "zero3", 2), ("t5", 2, "zero3", 1)]
SLOW_CASES = [
    (kind, size, plan, batch)
    for kind in ("llama", "gpt2", "t5")
    for size, plan in [
        *((2, plan) for plan in ("ddp", "zero1", "zero2", "zero3", "tp=2")),
        *((4, plan) for plan in ("hsdp", "zero3", "local-sgd,period=2", "dp=2,tp=2", "zero3,dp=2,tp=2")),
    ]
    for batch in (1, 2, 8)
]


@pytest.mark.parametrize(
    ("kind", "size", "plan", "batch"),
    [*CASES, *[pytest.param(*case, marks=pytest.mark.slow) for case in SLOW_CASES if case not in CASES]],
)
def test_texts_equal_those_of_a_plain_loop(kind, size, plan, batch, runs, expected) -> None:
    results = ranks(size)(generate_on_this_rank, runs(kind), {"plan": plan, "batch": batch})
    for result in results:
        assert tokens_of(result) == expected(kind)
    assert [text.prompt for text in results[0].texts] == [*PROMPTS]
    assert (results[0].step, results[0].ranks, results[0].notes) == (3, size, ())


@pytest.mark.parametrize(
    "kind", ["llama", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("gpt2", "t5"))]
)
def test_one_process(kind, runs, expected) -> None:
    run = runs(kind)
    files = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    for batch in (1, 3):
        result = package.generate(run, PROMPTS, max_new_tokens=NEW, batch=batch)
        assert tokens_of(result) == expected(kind)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == files


def test_the_check_finds_padding_that_is_read(runs, expected) -> None:
    def without_mask(arguments):
        def changed(self, prompts, device):
            tokens = arguments(self, prompts, device)
            return tokens | {"attention_mask": torch.ones_like(tokens["attention_mask"])}

        return changed

    with replaced(TextWriter, "arguments", without_mask):
        result = package.generate(runs("gpt2"), PROMPTS, max_new_tokens=NEW, batch=5)
    assert tokens_of(result) != expected("gpt2")


def test_draws_do_not_depend_on_ranks_and_plans(runs) -> None:
    options = {"temperature": 1.5, "top_k": 20, "seed": 7}
    single = tokens_of(package.generate(runs("llama"), PROMPTS, max_new_tokens=NEW, **options))
    for plan in ("ddp", "zero3", "tp=2"):
        found = ranks(2)(generate_on_this_rank, runs("llama"), {"plan": plan, **options})
        assert all(tokens_of(result) == single for result in found), plan
    other = package.generate(runs("llama"), PROMPTS, max_new_tokens=NEW, temperature=1.5, seed=8)
    assert tokens_of(other) != single


def test_beam_search_is_that_of_transformers(runs) -> None:
    import transformers

    run = runs("llama")
    folder = run.parent / "llama"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.LlamaForCausalLM(build_config("llama")).double().eval()
    model.load_state_dict({name: torch.from_numpy(array) for name, array in checkpoint_weights(run).items()})
    end = int((run.parent / "llama.end").read_text())
    for prompt, text in zip(
        PROMPTS, package.generate(run, PROMPTS, max_new_tokens=NEW, beams=3).texts, strict=True
    ):
        tokens = tokenizer(prompt, return_tensors="pt")["input_ids"]
        whole = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            num_beams=3,
            max_new_tokens=NEW,
            eos_token_id=end,
            pad_token_id=0,
            do_sample=False,
        )[0, tokens.shape[1] :].tolist()
        assert text.tokens == tuple(whole[: whole.index(end)] if end in whole else whole)


def test_text_continues_the_prompt(runs, expected) -> None:
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(runs("llama").parent / "llama")
    for text in package.generate(runs("llama"), PROMPTS, max_new_tokens=NEW).texts:
        whole = tokenizer.decode([*tokenizer.encode(text.prompt), *text.tokens], skip_special_tokens=True)
        assert text.prompt + text.text == whole


@pytest.mark.parametrize(
    ("error", "words", "options"),
    [
        (SpecError, "--max-new-tokens must be at least 1, got 0", {"max_new_tokens": 0}),
        (SpecError, "--temperature must be a number of at least 0, got -1", {"temperature": -1.0}),
        (SpecError, "--temperature must be a number of at least 0, got nan", {"temperature": float("nan")}),
        (SpecError, "--top-p must be above 0 and at most 1, got 2", {"top_p": 2.0}),
        (SpecError, "--temperature 0 draws none", {"temperature": 0.0, "top_k": 3}),
        (SpecError, "--batch must be at least 1, got 0", {"batch": 0}),
        (SpecError, "--seed must be at least 0, got -1", {"seed": -1}),
        (
            PlanError,
            "with pp, no rank calls the whole model; use single, ddp, zero1",
            {"plan": "pp=2", "ranks": 2},
        ),
        (PlanError, "with cp, no rank calls the whole model; use single, ddp", {"plan": "cp=2", "ranks": 2}),
        (PlanError, "zero3", {"plan": "zerro3"}),
        (DataError, "use at most --max-new-tokens 29$", {"max_new_tokens": 40}),
    ],
)
def test_bad_values(error, words, options, runs) -> None:
    with pytest.raises(error, match=words):
        package.generate(runs("llama"), "the small", **options)


@pytest.mark.parametrize(
    ("words", "prompts"),
    [
        ("the prompt '' has no tokens", ""),
        ("there are no prompts", ()),
        ("each prompt must be a text, got int", [3]),
        (r"the prompt 'a\\udcff' is not UTF-8 text \(surrogates not allowed\); correct it", "a\udcff"),
        ("but the model has 32 positions; shorten the prompt", "small " * 40),
    ],
)
def test_bad_prompts(words, prompts, runs) -> None:
    with pytest.raises(DataError, match=words):
        package.generate(runs("llama"), prompts)


def test_models_that_write_no_text(runs) -> None:
    run = runs("llama")
    spec = (run / "spec.toml").read_text()
    with (
        replaced(
            package.hf.generate, "choose_objective", lambda _: lambda *_: package.hf.objectives.MASKED_LM
        ),
        pytest.raises(TaskError, match="a masked language model writes no text"),
    ):
        package.generate(run, "the small")
    assert (run / "spec.toml").read_text() == spec


def test_settings_of_the_folder_that_cannot_be_read(runs, tmp_path) -> None:
    settings = runs("llama").parent / "llama/generation_config.json"
    before = settings.read_text()
    settings.write_text("{")
    try:
        with pytest.raises(
            TaskError, match=r"cannot read .*generation_config.json: .*; correct it or delete it"
        ):
            package.generate(runs("llama"), "the small")
    finally:
        settings.write_text(before)


def test_command(runs, expected, tmp_path) -> None:
    run = runs("llama")
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in PROMPTS))
    words = ("generate", run, "--max-new-tokens", str(NEW), "--prompts", "prompts.jsonl")
    succeed(*words, "-o", "out.jsonl", "--ranks", "2", "--plan", "zero3", at=tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [tuple(line["tokens"]) for line in lines] == expected("llama")
    assert [line["prompt"] for line in lines] == [*PROMPTS]
    result = succeed("generate", run, PROMPTS[0], "--max-new-tokens", str(NEW), at=tmp_path)
    assert result.out == lines[0]["text"] + "\n"


@pytest.mark.parametrize(
    ("words", "content", "message"),
    [
        ((), None, "specify either a prompt"),
        (("hello", "--prompts", "p.txt"), "a\n", "specify either a prompt"),
        (("--prompts", "p.txt"), None, "no such file of prompts: p.txt"),
        (("--prompts", "p.txt"), "\n", "p.txt has no prompts; write one in each line"),
        (("--prompts", "p.jsonl"), '{"text": 3}\n', "p.jsonl, line 1: no text in 'text'"),
        (("--prompts", "p.jsonl"), "word\n", "p.jsonl, line 1: each line must be a JSON object"),
        (("a", "-o", "nowhere/out.jsonl"), None, "no such folder: nowhere"),
    ],
)
def test_bad_input_of_the_command(words, content, message, runs, tmp_path) -> None:
    if content is not None:
        (tmp_path / words[-1]).write_text(content)
    result = paceline("generate", runs("llama"), *words, at=tmp_path)
    assert result.status == 2
    assert message in result.err
    assert result.err.count("\n") == 1
