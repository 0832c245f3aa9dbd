"""Small folders of Hugging Face models with random weights, and texts for them. Nothing is downloaded."""

import json
from pathlib import Path
from typing import Any

VOCABULARY = 64
TEXT = "the small model reads a few words and predicts the next word of the text again and again\n"
SIZES: dict[str, dict[str, Any]] = {
    "llama": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32,
    },
    "gpt2": {
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 32,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    },
    "mixtral": {
        "hidden_size": 32,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_local_experts": 4,
        "max_position_embeddings": 32,
    },
    "qwen3_moe": {
        "hidden_size": 32,
        "intermediate_size": 16,
        "moe_intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 32,
    },
    "t5": {
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 48,
        "num_layers": 2,
        "num_heads": 4,
        "decoder_start_token_id": 0,
        "dropout_rate": 0.0,
    },
    "bert": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 32,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    },
}


def write_tokenizer(folder: Path, vocabulary: int = VOCABULARY) -> None:
    """Write a tokenizer of bytes and some pairs of bytes, with at most `vocabulary` tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=["<pad>", "<eos>", "<unk>", "<mask>"], show_progress=False
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        mask_token="<mask>",
    ).save_pretrained(folder)


def build_config(kind: str, **changes: Any) -> Any:
    import transformers

    return transformers.AutoConfig.for_model(
        kind, vocab_size=VOCABULARY, pad_token_id=0, bos_token_id=1, eos_token_id=1, **SIZES[kind] | changes
    )


def write_folder(
    folder: Path,
    kind: str = "llama",
    auto: str = "AutoModelForCausalLM",
    shard_bytes: int = 2**40,
    **changes: Any,
) -> Path:
    """Write a folder of a model with random weights and a tokenizer, and return it."""
    import torch
    import transformers

    torch.manual_seed(len(kind))
    model = getattr(transformers, auto).from_config(build_config(kind, **changes))
    model.save_pretrained(folder, max_shard_size=shard_bytes)
    write_tokenizer(folder)
    return folder


def write_text(file: Path, repeats: int = 40) -> Path:
    """Write a text file, or JSON lines if its name ends with .jsonl, and return it."""
    lines = [f"{TEXT.strip()} {number % 7}\n" for number in range(repeats)]
    if file.suffix == ".jsonl":
        lines = [json.dumps({"text": line}) + "\n" for line in lines]
    file.write_text("".join(lines))
    return file
