"""Hugging Face models start from the weights of their constructors."""

import importlib.util
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness import train_on_ranks
from models import Points
from paceline import Spec
from paceline.training.init.deferred_init import fill_, record
from paceline.training.init.named_tensors import named_tensors

pytestmark = pytest.mark.processes

LIBRARY = importlib.util.find_spec(
    "transformers"
)  # which takes seconds to import, also where only other tests run
if LIBRARY is None:
    pytest.skip("transformers is not installed", allow_module_level=True)
FOLDERS = [Path(folder) / "models" for folder in LIBRARY.submodule_search_locations or ()]

SMALL = {  # values of configuration keys that make a model small
    **dict.fromkeys(
        (
            "hidden_size",
            "d_model",
            "n_embd",
            "embed_dim",
            "dim",
            "embedding_size",
            "word_embed_proj_dim",
            "projection_dim",
        ),
        32,
    ),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "n_group", "topk_group", "n_shared_experts"), 1),
    **dict.fromkeys(
        (
            "num_attention_heads",
            "n_head",
            "n_heads",
            "num_heads",
            "encoder_attention_heads",
            "decoder_attention_heads",
        ),
        4,
    ),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_experts_per_tok", "type_vocab_size"), 2),
    **dict.fromkeys(
        (
            "intermediate_size",
            "d_ff",
            "ffn_dim",
            "encoder_ffn_dim",
            "decoder_ffn_dim",
            "n_inner",
            "hidden_dim",
        ),
        64,
    ),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 64),
    **dict.fromkeys(
        (
            "head_dim",
            "d_kv",
            "attention_head_size",
            "kv_lora_rank",
            "qk_nope_head_dim",
            "qk_rope_head_dim",
            "v_head_dim",
        ),
        8,
    ),
    **dict.fromkeys(("state_size", "n_mels", "num_mel_bins", "patch_size", "hidden_size_per_layer_input"), 8),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 99),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "image_size"), 32),
    **dict.fromkeys(("q_lora_rank", "d_state", "mamba_d_state"), 16),
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}


def small(kind: str, **changes: Any) -> Any:
    """Return the configuration of a model type, as small as its keys allow."""
    import transformers

    config = transformers.AutoConfig.for_model(kind)
    shrink_(config)
    for key, value in changes.items():
        setattr(config, key, value)
    return config


def shrink_(config: Any) -> None:
    from transformers import PretrainedConfig

    for key, value in list(vars(config).items()):
        if isinstance(value, PretrainedConfig):
            shrink_(value)
        elif key in SMALL and isinstance(value, int):
            setattr(config, key, SMALL[key])
    if isinstance(vars(config).get("layer_types"), list):
        config.layer_types = config.layer_types[: config.num_hidden_layers]


def build_plainly(build: Callable[[], nn.Module], seed: int) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    return {name: tensor.detach() for name, tensor in named_tensors(build()).items()}


def differences(build: Callable[[], nn.Module]) -> Iterator[str]:
    """Yield how tensors filled by Paceline differ from those of two plain constructions.

    Shares no code with Paceline's check.
    """
    model, weights, _ = record(build, 0)
    fill_(model, weights, torch.device("cpu"))
    own = {name: tensor.detach() for name, tensor in named_tensors(model).items()}
    first, second = build_plainly(build, 0), build_plainly(build, 1)
    if own.keys() != first.keys():
        yield f"names: {own.keys() ^ first.keys()}"
    for name, expected in first.items():
        tensor = own[name]
        if (tensor.shape, tensor.dtype) != (expected.shape, expected.dtype):
            yield f"{name}: {tensor.shape}, {tensor.dtype}"
        elif torch.equal(expected, second[name]):
            if not torch.equal(tensor, expected):
                yield f"{name}: {tensor.flatten()[:4].tolist()}, not {expected.flatten()[:4].tolist()}"
        elif expected.numel() >= 256:
            values, plain_values = tensor.double(), expected.double()
            error = math.sqrt((values.var() + plain_values.var()) / values.numel())
            if (
                abs(float(values.mean() - plain_values.mean())) > 6 * error
                or not 0.8 < float(values.std() / plain_values.std()) < 1.25
            ):
                yield (
                    f"{name}: {values.mean():.4g} ± {values.std():.4g}, not {plain_values.mean():.4g} ± "
                    f"{plain_values.std():.4g}"
                )


def build_small(class_name: str, kind: str, **changes: Any) -> Any:
    import transformers

    model_class = getattr(transformers, class_name)
    return (
        model_class.from_config(small(kind, **changes))
        if class_name.startswith("Auto")
        else model_class(small(kind, **changes))
    )


class Within(nn.Module):
    """A Hugging Face model among a user's own modules, changed after its construction."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(4, 32)
        self.body = build_small("AutoModel", "bert")
        self.after = nn.ModuleList([nn.Linear(32, 32) for _ in range(2)])
        nn.init.orthogonal_(self.after[0].weight)
        with torch.no_grad():
            self.body.embeddings.position_embeddings.weight.mul_(3.0)


FAST: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: build_small("LlamaForCausalLM", "llama"),
    "gpt2": lambda: build_small("GPT2LMHeadModel", "gpt2"),
    "bert": lambda: build_small("AutoModelForMaskedLM", "bert"),
    "mamba": lambda: build_small("MambaForCausalLM", "mamba"),
    "mixtral": lambda: build_small("MixtralForCausalLM", "mixtral"),
    "gemma3": lambda: build_small("Gemma3ForCausalLM", "gemma3_text"),
    "t5": lambda: build_small("T5ForConditionalGeneration", "t5"),
    "within": Within,
}


@pytest.mark.parametrize("build", FAST.values(), ids=FAST)
def test_weights_are_those_of_a_plain_construction(build: Callable[[], nn.Module]) -> None:
    assert record(build, 0)[2], "not recorded"
    assert not list(differences(build))


WORDS = 99


class Masked(Points):
    """Random labels: nothing can be learnt, so the first loss depends on the initial weights alone."""

    kind: str = "bert"

    def model(self) -> nn.Module:
        return build_small(
            "AutoModelForMaskedLM" if self.kind == "bert" else "AutoModelForCausalLM",
            self.kind,
            tie_word_embeddings=True,
        )

    def dataset(self, split: str) -> Any:
        words = torch.randint(0, WORDS, (2, 64, 12), generator=torch.Generator().manual_seed(0))
        return list(zip(*words, strict=True))

    def inputs(self, batch: Any) -> Any:
        return {"input_ids": batch[0]}

    def loss(self, output: Any, batch: Any) -> Tensor:
        logits = output.logits.transpose(1, 2)
        return nn.functional.cross_entropy(logits, batch[1], reduction="none").mean(1)

    def metrics(self, output: Any, batch: Any) -> dict[str, Tensor]:
        return {}


def compute_plain_losses(task: Masked) -> Tensor:
    """Return the loss of all samples before the first step, for plain constructions with several seeds."""
    words, labels = map(torch.stack, zip(*task.dataset("train"), strict=True))
    losses = []
    for seed in range(8):
        torch.manual_seed(seed)
        with torch.no_grad():
            losses.append(task.loss(task.model()(input_ids=words), (words, labels)).mean())
    return torch.stack(losses)


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["ddp", "zero3"])
@pytest.mark.parametrize("kind", ["bert", "gemma3_text", "mamba", "mixtral"])
def test_a_training_starts_at_the_loss_of_a_plain_model(kind: str, plan: str) -> None:
    task = Masked(kind=kind)
    losses, expected = (
        train_on_ranks(2, task, Spec(steps=2, batch=64), plan).losses,
        compute_plain_losses(task),
    )
    assert losses[0] == pytest.approx(float(expected.mean()), abs=6 * float(expected.std()) + 0.01)
    assert expected.std() < 0.1
    assert losses[0] == pytest.approx(math.log(WORDS), rel=0.1)
    assert all(math.isfinite(loss) for loss in losses)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", sorted(path.parent.name for folder in FOLDERS for path in folder.glob("*/modeling_*.py"))
)
def test_any_small_model(kind: str) -> None:
    """Skips models that cannot be built small from their configuration alone, or need missing libraries."""
    import transformers

    transformers.logging.set_verbosity_error()
    try:
        config = small(kind)
        with torch.device("meta"):
            values = sum(
                parameter.numel() for parameter in transformers.AutoModel.from_config(config).parameters()
            )
    except Exception as error:
        pytest.skip(f"{kind} is not built: {type(error).__name__}")
    if values > 5_000_000:
        pytest.skip(f"{kind} has {values:,} parameters")
    assert not list(differences(lambda: transformers.AutoModel.from_config(config)))


@pytest.mark.slow
@pytest.mark.parametrize("library", ["torchvision", "timm"])
def test_models_of_other_libraries(library: str) -> None:
    try:
        module = __import__(library)
    except Exception as error:
        pytest.skip(f"{library} cannot be imported: {error}")
    if library == "timm":
        builds = [
            lambda name=name: module.create_model(name, num_classes=10)
            for name in ("resnet18", "vit_tiny_patch16_224", "convnext_atto")
        ]
    else:
        builds = [
            lambda name=name: getattr(module.models, name)(num_classes=10)
            for name in ("resnet18", "mobilenet_v3_small", "swin_t")
        ]
    for build in builds:
        assert not list(differences(build))
