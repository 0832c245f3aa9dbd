"""The model of a row of published measurements, from its numbers or else by its name."""

import re
from collections.abc import Mapping
from functools import cache
from math import lcm, log

from paceline.plan.model.library import RELEASES, list_transformers, load_transformer
from paceline.plan.model.transformer import Transformer
from published_cells import NotPredictable, find_parameters, whole_number
from published_devices import is_recent

# If a row has no vocabulary: n_params of the four zero-bubble models allow 28 to 34 thousand.
DEFAULT_VOCAB = 32000
USUAL_SEQ, OLDER_SEQ = 4096, 2048  # sequence lengths of pre-training, on devices since H100 and before
ASPECT, HEAD_WIDTH = 100, 128  # of usual decoders: width over depth, and width of a head
LORA_RANK = 16  # of NVIDIA's recipes; the cost hardly depends on it
# NVIDIA's recipes for fine-tuning pack questions and answers of SQuAD, about 256 tokens each, into sequences.
FINE_TUNING_WINDOW = 128
GATED = (
    *("llama", "qwen", "mistral", "mixtral", "deepseek", "gemma", "grok", "kimi", "gpt oss", "gpt-oss"),
    *("olmo", "phi", "yi-", "internlm", "baichuan", "glm", "dbrx", "minimax", "ernie", "granite", "smollm"),
)
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
        changes |= _slice(row, given)
        if base.pattern and changes.get("layers", base.layers) != base.layers:
            changes["pattern"] = _repeat(base.pattern, changes["layers"])
        if base.dense_layers >= changes.get("layers", base.layers):
            changes["dense_layers"] = 0
        if changes.get("experts", base.experts) != base.experts:  # their groups are not known
            changes |= {"expert_groups": 1, "group_limit": 1}
        return load_transformer(known, **changes)
    changes.setdefault("seq", USUAL_SEQ if is_recent(row["gpu_type"]) else OLDER_SEQ)
    if similar := _find_similar_mixture(row, given):
        return load_transformer(similar[0], **similar[1] | given | changes)
    given = _guess_sizes(row, given)
    if missing := [key for key in ("layers", "hidden", "heads") if key not in given]:
        verb = "is" if len(missing) == 1 else "are"
        raise NotPredictable(f"{' and '.join(missing)} {verb} missing")
    if whole_number(row.get("ep", "")) > 1 and "experts" not in given:
        raise NotPredictable("the sizes of the experts are missing")
    return Transformer(
        **_guess_kind(row, given) | given | changes | _shared(row, given), dropout=_drops(row, given, fused)
    )


def _find_similar_mixture(
    row: Mapping[str, str], given: Mapping[str, int]
) -> tuple[str, dict[str, int]] | None:
    """Return the known model with experts that is closest in parameters, and as many layers as match them.

    Only for a row that names parameters of a model with experts, but not its sizes.
    """
    active = re.search(r"\ba(\d+(?:\.\d+)?)b", row["model"].lower().replace("_", " ").replace("-", " "))
    is_mixture = active or given.get("experts", 1) > 1 or re.search(r"moe|\dx\d", row["model"].lower())
    params = _count_parameters(row)
    if not is_mixture or params is None or {"layers", "hidden", "heads"} <= given.keys():
        return None

    def distance(known: str) -> float:
        facts = load_transformer(known).facts()
        away = abs(log(facts.params / params))
        return away + (abs(log(facts.active_params / 1e9 / float(active[1]))) if active else 0.0)

    mixtures = [
        known for known in list_transformers() if (m := load_transformer(known)).experts > 1 and not m.pattern
    ]
    closest = min(mixtures, key=distance)
    base = load_transformer(closest)
    blocks = sum(block.params * count for block, count in base.facts().runs)
    layers = max(base.dense_layers + 1, round(base.layers * params / blocks))
    return closest, {"layers": layers}


def _count_parameters(row: Mapping[str, str]) -> float | None:
    """Return the parameters that a row or the name of its model gives."""
    if params := find_parameters(row["n_params"]):
        return params
    match = re.search(r"(?<![a-z\d.])(\d+(?:\.\d+)?)[\s_-]?([bmt])(?![a-z])", row["model"].lower())
    return float(match[1]) * {"t": 1e12, "b": 1e9, "m": 1e6}[match[2]] if match else None


def _guess_sizes(row: Mapping[str, str], given: dict[str, int]) -> dict[str, int]:
    """Return the sizes with those of a usual decoder of as many parameters, if the row has only these.

    Usual decoders are about 100 times as wide as deep, and have 12 · layers · width² parameters.
    """
    sizes, tp = dict(given), max(1, whole_number(row["tp"]))  # tp divides the heads
    params = _count_parameters(row)
    if params is None or ("layers" in sizes and "hidden" in sizes and "heads" in sizes):
        return sizes
    if "hidden" not in sizes:
        layers = sizes.get("layers") or max(1, round((params / (12 * ASPECT**2)) ** (1 / 3)))
        step = lcm(HEAD_WIDTH * tp, sizes.get("heads") or sizes.get("kv_heads", 1))
        sizes["hidden"] = max(1, round((params / (12 * layers)) ** 0.5 / step)) * step
    sizes.setdefault("layers", max(1, round(params / (12 * sizes["hidden"] ** 2))))
    sizes.setdefault("heads", _guess_heads(sizes["hidden"], lcm(tp, sizes.get("kv_heads", 1))))
    return sizes


def _guess_heads(hidden: int, divisor: int) -> int:
    """Return the number of heads of about usual width that divides the width, a multiple of `divisor`."""
    fitting = [count for count in range(divisor, hidden + 1, divisor) if hidden % count == 0]
    return min(fitting, key=lambda count: abs(log(count * HEAD_WIDTH / hidden)), default=divisor)


def _slice(row: Mapping[str, str], given: Mapping[str, int]) -> dict[str, int]:
    """Return the layers of a slice of a model, which its name may give. Raises NotPredictable."""
    name = row["model"].lower()
    if "layers" in given:
        return {}
    if match := re.search(r"(\d+)[-_ ]?layers?", name):
        return {"layers": int(match[1])}
    if re.search("slice|reduced|proxy", name):
        raise NotPredictable("layers is missing, for a model with reduced layers")
    return {}


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
    """Return whether a row trains on SQuAD; MLPerf trains on long reports (GovReport)."""
    text = f"{row['dataset']} {row['source']} {row['notes']}".lower()
    return bool(re.search(r"\b(sft|lora|peft|fine-?tuning)\b", text)) and not re.search(
        "mlperf|govreport", text
    )


def _trains_adapters(row: Mapping[str, str]) -> bool:
    return bool(re.search(r"\blora\b|\bpeft\b", f"{row['source']} {row['notes']}".lower()))


def find_known(name: str) -> str | None:
    """Return the longest name of a known model that is in the name of a row, whatever separates its words.

    `Qwen3_30B_a3B` is qwen3-30b-a3b, `Llama 3.1 8B` llama3-8b, and `GPT 20B` not gpt2.
    """
    plain = re.sub(r"(?<=[a-z0-9])[-_ ]?(vl|omni|coder)(?=[-_ ]?\d)", "", name.lower())
    found = [
        known
        for text in (name.lower(), plain)
        for known in _known_names()
        if _name_pattern(known).search(text)
    ]
    longest = max(found, key=len, default=None)
    return RELEASES.get(longest, longest) if longest else None


def _known_names() -> tuple[str, ...]:
    return (*list_transformers(), *RELEASES)


@cache
def _name_pattern(known: str) -> re.Pattern[str]:
    words = re.findall(r"\d+(?:\.\d+)?|[a-z]+", known)
    return re.compile(r"(?<![a-z0-9.])" + "[-_ ]?".join(map(re.escape, words)) + r"(?![\d.])")


def _repeat(pattern: str, layers: int) -> str:
    return (pattern * (layers // len(pattern) + 1))[:layers]
