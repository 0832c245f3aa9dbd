"""The model of a row of published measurements, from its numbers or else by its name."""

import re
from collections.abc import Mapping
from functools import cache

from paceline.plan.model.library import list_transformers, load_transformer
from paceline.plan.model.transformer import Transformer
from published_cells import NotPredictable, find_number, whole_number

# If a row has no vocabulary: n_params of the four zero-bubble models allow 28 to 34 thousand.
DEFAULT_VOCAB = 32000
ASPECT, HEAD_WIDTH = 100, 128  # of usual decoders: width over depth, and width of a head
LORA_RANK = 16  # of NVIDIA's recipes; the cost hardly depends on it
# NVIDIA's recipes for fine-tuning pack questions and answers of SQuAD, about 256 tokens each, into sequences.
FINE_TUNING_WINDOW = 128
GATED = ("llama", "qwen", "mistral", "mixtral", "deepseek", "gemma", "grok", "kimi", "gpt oss", "gpt-oss")
# Numbers that a row may give, with their names in Transformer.
COLUMNS = {
    "layers": "layers",
    "hidden": "hidden",
    "heads": "heads",
    "kv_heads": "kv_heads",
    "ffn": "ffn",
    "vocab": "vocab",
    "experts": "experts",
    "top_k": "active_experts",
    "expert_ffn": "expert_ffn",
}


def build_model(row: Mapping[str, str], fused: bool) -> Transformer:
    """Return the model of a row. Raises NotPredictable."""
    given = {name: number for key, name in COLUMNS.items() if (number := whole_number(row.get(key, "")))}
    lora = whole_number(row.get("lora_rank", "")) or (LORA_RANK if _trains_adapters(row) else 0)
    changes = {"lora_rank": lora} | ({"seq": seq} if (seq := whole_number(row["seq_len"])) else {})
    if _is_fine_tuning(row):
        changes["window"] = FINE_TUNING_WINDOW
    if known := find_known(row["model"]):
        # a row with fewer layers is a slice: what comes first in the model stays
        changes |= {key: value for key, value in given.items() if key != "expert_ffn" or given.get("experts")}
        base = load_transformer(known)
        if base.pattern and given.get("layers", base.layers) != base.layers:
            changes["pattern"] = _repeat(base.pattern, given["layers"])
        if base.dense_layers >= changes.get("layers", base.layers):
            changes["dense_layers"] = 0
        return load_transformer(known, **changes)
    given = _guess_sizes(row, given)
    if missing := [key for key in ("layers", "hidden", "heads") if key not in given] + ["seq_len"] * (
        not seq
    ):
        verb = "is" if len(missing) == 1 else "are"
        raise NotPredictable(f"{' and '.join(missing)} {verb} missing")
    if whole_number(row.get("ep", "")) > 1 and "experts" not in given:
        raise NotPredictable("the sizes of the experts are missing")
    return Transformer(
        **_guess_kind(row, given) | given | changes | _shared(row, given), dropout=_drops(row, given, fused)
    )


def _guess_sizes(row: Mapping[str, str], given: dict[str, int]) -> dict[str, int]:
    """Return the sizes with those of a usual decoder of as many parameters, if the row has only these.

    Usual decoders are about 100 times as wide as deep, and have 12 · layers · width² parameters.
    """
    sizes = dict(given)
    params = find_number(row["n_params"])
    if params is None and (match := re.search(r"(\d+(?:\.\d+)?)\s*([bm])\b", row["model"].lower())):
        params = float(match[1]) * {"b": 1e9, "m": 1e6}[match[2]]
    if params is None or ("layers" in sizes and "hidden" in sizes and "heads" in sizes):
        return sizes
    if "hidden" not in sizes:
        layers = sizes.get("layers") or max(1, round((params / (12 * ASPECT**2)) ** (1 / 3)))
        sizes["hidden"] = max(1, round((params / (12 * layers)) ** 0.5 / HEAD_WIDTH)) * HEAD_WIDTH
    sizes.setdefault("layers", max(1, round(params / (12 * sizes["hidden"] ** 2))))
    sizes.setdefault("heads", max(1, sizes["hidden"] // HEAD_WIDTH))
    return sizes


def _guess_kind(row: Mapping[str, str], given: Mapping[str, int]) -> dict[str, object]:
    """Return what a row does not say: a Llama-like model or a GPT."""
    gated = _is_gated(row, given)
    return {
        "name": row["model"],
        "vocab": DEFAULT_VOCAB,
        "gated": gated,
        "norm": "rms" if gated else "layer",
        "bias": not gated and "mpt" not in row["model"].lower(),
        "tied": not gated,
        "positions": 0 if gated else whole_number(row["seq_len"]),
    }


def _is_gated(row: Mapping[str, str], given: Mapping[str, int]) -> bool:
    name = row["model"].lower()
    return any(word in name for word in GATED) or given.get("ffn", 0) % given["hidden"] != 0


def _drops(row: Mapping[str, str], given: Mapping[str, int], fused: bool) -> bool:
    return not _is_gated(row, given) and not fused


def _shared(row: Mapping[str, str], given: Mapping[str, int]) -> dict[str, int]:
    shared = whole_number(row.get("shared_experts", ""))
    return {"shared_ffn": shared * given.get("expert_ffn", given.get("ffn", 0))} if shared else {}


def _is_fine_tuning(row: Mapping[str, str]) -> bool:
    return bool(re.search(r"\b(sft|lora|peft|fine-?tuning)\b", f"{row['source']} {row['notes']}".lower()))


def _trains_adapters(row: Mapping[str, str]) -> bool:
    return bool(re.search(r"\blora\b|\bpeft\b", f"{row['source']} {row['notes']}".lower()))


def find_known(name: str) -> str | None:
    """Return the longest name of a known model that is in the name of a row, whatever separates its words.

    `Qwen3_30B_a3B` is qwen3-30b-a3b, `Llama 3.1 8B` llama3-8b, and `GPT 20B` not gpt2.
    """
    plain = re.sub(r"(?<=llama)[-_ ]?3\.[123]", "3", name.lower())
    found = [known for known in list_transformers() if _name_pattern(known).search(plain)]
    return max(found, key=len, default=None)


@cache
def _name_pattern(known: str) -> re.Pattern[str]:
    words = re.findall(r"\d+(?:\.\d+)?|[a-z]+", known)
    return re.compile(r"(?<![a-z0-9.])" + "[-_ ]?".join(map(re.escape, words)) + r"(?![\d.])")


def _repeat(pattern: str, layers: int) -> str:
    return (pattern * (layers // len(pattern) + 1))[:layers]
