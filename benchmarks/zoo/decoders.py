"""Causal language models of transformers, by name.

paceline verify benchmarks/zoo/decoders.py:Decoder --set kind=gemma3 --plan zero3 --ranks 2
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from from_config import SPECIAL, build
from paceline.hf.lora import Lora, add_adapters_
from samples import LENGTH, VOCABULARY, Tokens, read_logits

SIZES: dict[str, Any] = {
    **SPECIAL,
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 2 * LENGTH,
}
GROUPED: dict[str, Any] = {**SIZES, "num_key_value_heads": 2, "head_dim": 8}
GPT: dict[str, Any] = {
    **SPECIAL,
    "vocab_size": VOCABULARY,
    "n_positions": 2 * LENGTH,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
}
EXPERTS: dict[str, Any] = {**GROUPED, "num_experts_per_tok": 2}
STATE_SPACE: dict[str, Any] = {
    **SPECIAL,
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "state_size": 8,
}
SLIDING: dict[str, Any] = {"sliding_window": 8}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bloom": (
        "BloomForCausalLM",
        "bloom",
        {k: GPT[k] for k in (*SPECIAL, "vocab_size", "n_layer", "n_head")} | {"hidden_size": 32},
    ),
    "codegen": ("CodeGenForCausalLM", "codegen", GPT | {"rotary_dim": 4}),
    "cohere": ("CohereForCausalLM", "cohere", GROUPED),
    "deepseek-v3": (
        "DeepseekV3ForCausalLM",
        "deepseek_v3",
        SIZES
        | {
            "num_key_value_heads": 4,
            "kv_lora_rank": 8,
            "q_lora_rank": 8,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 4,
            "v_head_dim": 8,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 16,
        },
    ),
    "falcon": (
        "FalconForCausalLM",
        "falcon",
        SPECIAL
        | {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
    ),
    "gemma": ("GemmaForCausalLM", "gemma", GROUPED),
    "gemma2": ("Gemma2ForCausalLM", "gemma2", GROUPED | SLIDING),
    "gemma3": (
        "Gemma3ForCausalLM",
        "gemma3_text",
        GROUPED | SLIDING | {"layer_types": ["sliding_attention", "full_attention"]},
    ),
    "gpt-neo": (
        "GPTNeoForCausalLM",
        "gpt_neo",
        SPECIAL
        | {
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 8,
            "max_position_embeddings": 2 * LENGTH,
        },
    ),
    "gpt-neox": ("GPTNeoXForCausalLM", "gpt_neox", SIZES),
    "gpt-oss": ("GptOssForCausalLM", "gpt_oss", EXPERTS | SLIDING | {"num_local_experts": 4}),
    "gptj": ("GPTJForCausalLM", "gptj", GPT | {"rotary_dim": 4}),
    "granite": ("GraniteForCausalLM", "granite", SIZES | {"num_key_value_heads": 2}),
    "mamba": ("MambaForCausalLM", "mamba", STATE_SPACE),
    "mamba2": (
        "Mamba2ForCausalLM",
        "mamba2",
        STATE_SPACE | {"num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 4},
    ),
    "mistral": ("MistralForCausalLM", "mistral", GROUPED | SLIDING),
    "mixtral": (
        "MixtralForCausalLM",
        "mixtral",
        EXPERTS | {"num_local_experts": 4, "output_router_logits": True},
    ),
    "mpt": (
        "MptForCausalLM",
        "mpt",
        SPECIAL
        | {"vocab_size": VOCABULARY, "d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 2 * LENGTH},
    ),
    "olmo": ("OlmoForCausalLM", "olmo", SIZES),
    "olmo2": ("Olmo2ForCausalLM", "olmo2", SIZES),
    "olmoe": ("OlmoeForCausalLM", "olmoe", EXPERTS | {"num_experts": 4}),
    "opt": (
        "OPTForCausalLM",
        "opt",
        {k: v for k, v in SIZES.items() if k != "intermediate_size"}
        | {"ffn_dim": 64, "word_embed_proj_dim": 32},
    ),
    "phi": ("PhiForCausalLM", "phi", SIZES),
    "phi3": ("Phi3ForCausalLM", "phi3", SIZES),
    "qwen2": ("Qwen2ForCausalLM", "qwen2", SIZES | {"num_key_value_heads": 2}),
    "qwen3": ("Qwen3ForCausalLM", "qwen3", GROUPED),
    "qwen3-moe": (
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        EXPERTS | {"num_experts": 4, "moe_intermediate_size": 16, "output_router_logits": True},
    ),
    "qwen3-next": (
        "Qwen3NextForCausalLM",
        "qwen3_next",
        EXPERTS
        | {
            "num_experts": 4,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
        },
    ),
    "recurrent-gemma": (
        "RecurrentGemmaForCausalLM",
        "recurrent_gemma",
        SIZES
        | {"num_hidden_layers": 3, "lru_width": 32, "attention_window_size": 8, "num_key_value_heads": 2},
    ),
    "rwkv": (
        "RwkvForCausalLM",
        "rwkv",
        {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "attention_hidden_size": 32},
    ),
    "stablelm": ("StableLmForCausalLM", "stablelm", SIZES | {"num_key_value_heads": 2}),
    "starcoder2": ("Starcoder2ForCausalLM", "starcoder2", SIZES | {"num_key_value_heads": 2}),
    "xlstm": (
        "xLSTMForCausalLM",
        "xlstm",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_blocks": 2,
            "num_heads": 4,
            "chunk_size": 8,
        },
    ),
}


class Decoder(Tokens):
    """The model `kind` of MODELS."""

    kind: str = "qwen3"

    def model(self) -> nn.Module:
        model, kind, keys = MODELS[self.kind]
        return build(model, kind, **keys)

    def inputs(self, batch: tuple[Tensor, Tensor]) -> dict[str, Any]:
        return {"input_ids": batch[0], "use_cache": False}


class Llama(Decoder):
    """Rotary positions, grouped queries, gated MLP."""

    depth: int = 8
    heads: int = 8
    tied: bool = False

    def model(self) -> nn.Module:
        return build(
            "LlamaForCausalLM",
            "llama",
            vocab_size=VOCABULARY,
            hidden_size=self.width,
            intermediate_size=3 * self.width,
            num_hidden_layers=self.depth,
            num_attention_heads=self.heads,
            num_key_value_heads=self.heads // 2,
            max_position_embeddings=LENGTH,
            tie_word_embeddings=self.tied,
        )


class LlamaLora(Llama):
    """The same Llama, frozen, with adapters of low rank."""

    depth: int = 2

    def model(self) -> nn.Module:
        model = super().model()
        add_adapters_(model, Lora(rank=4))
        return model


class Gpt2(Decoder):
    """Learned positions, Conv1D instead of Linear, tied embeddings, dropout, and a prime vocabulary size."""

    depth: int = 8
    heads: int = 8

    def model(self) -> nn.Module:
        return build(
            "GPT2LMHeadModel",
            "gpt2",
            vocab_size=VOCABULARY + 5,
            n_positions=LENGTH,
            n_embd=self.width,
            n_layer=self.depth,
            n_head=self.heads,
            bos_token_id=0,
            eos_token_id=0,
        )


class Mixture(Decoder):
    """A mixture of experts, with the loss that balances them over the global batch.

    Fedus, Zoph and Shazeer, Switch Transformers, 2022, equations 4 to 6.
    """

    kind: str = "mixtral"
    weight: float = 0.01
    chosen: int = 2  # experts by token

    def loss(self, output: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        # Unlike the default, without flatten(): a pipeline computes the loss of parts of the batch.
        logits = read_logits(output)
        return nn.functional.cross_entropy(logits.mT, batch[1], reduction="none")

    def batch_sums(self, output: Any, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        probabilities = torch.stack([logits.softmax(-1) for logits in output.router_logits]).flatten(0, -2)
        best = probabilities.topk(self.chosen).indices
        counts = nn.functional.one_hot(best, probabilities.shape[-1]).sum((0, 1))
        return {
            "counts": counts.to(probabilities.dtype),
            "probabilities": probabilities.sum(0),
            "tokens": probabilities.new_tensor(len(probabilities)),
        }

    def auxiliary_loss(self, sums: Mapping[str, Tensor]) -> Tensor:
        tokens = sums["tokens"]
        return len(sums["counts"]) * (sums["counts"] / tokens * sums["probabilities"] / tokens).sum()

    def loss_weights(self) -> dict[str, float]:
        return {"auxiliary": self.weight}
