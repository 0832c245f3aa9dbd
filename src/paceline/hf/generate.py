"""Texts that a language model of a folder writes, by the `generate` of transformers."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.errors import DataError, SpecError, TaskError
from paceline.hf.folder import describe_briefly, import_transformers, load_tokenizer, open_folder
from paceline.hf.objectives import CAUSAL_LM, SEQ2SEQ, choose_objective
from paceline.hf.samples import JSON_LINES, allow_forks, read_file
from paceline.hf.task import HuggingFace, find_start
from paceline.spec import abbreviate

SETTINGS = "generation_config.json"
DEFAULT_NEW_TOKENS = 64
EXAMPLE_LENGTH = 12  # tokens of a sample from which a plan learns the model


@dataclass(frozen=True)
class GenerationOptions:
    """How a model writes. None: as generation_config.json of the folder says.

    max_new_tokens  maximum number of new tokens [default: of the folder, or 64, or all that fit]
    temperature     0: the most likely token each time. Above 0: draw tokens, with the logits divided by it
    top_k, top_p    draw from the k most likely tokens, or from those whose probabilities add up to p
    beams           number of beams of beam search
    batch           prompts that a rank completes at a time
    seed            of the draws

    Raises SpecError for values out of range.
    """

    max_new_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    beams: int | None = None
    batch: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "top_k", "beams", "batch"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise SpecError(f"{_option(name)} must be at least 1, got {value}")
        if self.seed < 0:
            raise SpecError(f"--seed must be at least 0, got {self.seed}")
        if self.temperature is not None and not 0 <= self.temperature < math.inf:
            raise SpecError(f"--temperature must be a number of at least 0, got {self.temperature}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise SpecError(f"--top-p must be above 0 and at most 1, got {self.top_p}")
        if self.temperature == 0 and (self.top_k is not None or self.top_p is not None):
            raise SpecError(
                "--top-k and --top-p draw tokens, but --temperature 0 draws none; leave --temperature out"
            )


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


class TextWriter:
    """Completes prompts with the model of a task, one batch at a time.

    A text depends on the model, the options and the prompts of its batch, not on ranks. Raises TaskError for
    a model that writes no text.
    """

    def __init__(self, task: HuggingFace, options: GenerationOptions):
        self.task, self.options = task, options
        self.folder = open_folder(task.folder)
        objective = choose_objective(task.objective, self.folder)
        if objective not in (CAUSAL_LM, SEQ2SEQ):
            raise TaskError(
                f"a {objective.what} writes no text; generate requires a run of causal-lm or seq2seq, "
                "and paceline evaluate computes the metrics of this run"
            )
        self.has_encoder = objective is SEQ2SEQ
        allow_forks()
        self.tokenizer = load_tokenizer(self.folder.path)
        self.config = self.folder.read_config()
        self.settings = self._read_settings()
        self._folder_new_tokens = self.settings.max_new_tokens
        end = self.settings.eos_token_id
        self.ends = set(end if isinstance(end, (list, tuple)) else [end])

    def _read_settings(self) -> Any:
        """Return the settings of generation: those of the folder, changed by the options."""
        generation = import_transformers().GenerationConfig
        file = self.folder.path / SETTINGS
        try:
            settings = (
                generation.from_pretrained(self.folder.path, local_files_only=True)
                if file.is_file()
                else generation.from_model_config(self.config)
            )
        except Exception as error:
            raise TaskError(
                f"transformers cannot read {file}: {describe_briefly(error)}; correct it or delete it"
            ) from error
        options, tokenizer = self.options, self.tokenizer
        settings.update(use_cache=True, num_return_sequences=1, cache_implementation=None, max_length=None)
        settings.update(return_dict_in_generate=False, output_scores=False, output_logits=False)
        settings.update(output_attentions=False, output_hidden_states=False)
        settings._from_model_config = False
        if settings.eos_token_id is None:
            settings.eos_token_id = tokenizer.eos_token_id
        padding = (tokenizer.pad_token_id, settings.pad_token_id, tokenizer.eos_token_id, 0)
        settings.pad_token_id = next(number for number in padding if number is not None)
        if self.has_encoder:
            settings.decoder_start_token_id = find_start(self.folder, self.config)
        if options.temperature == 0:
            settings.update(do_sample=False, temperature=None, top_k=None, top_p=None)
        elif any(value is not None for value in (options.temperature, options.top_k, options.top_p)):
            settings.do_sample = True
        for name in ("temperature", "top_k", "top_p"):
            if value := getattr(options, name):
                setattr(settings, name, value)
        if options.beams is not None:
            settings.num_beams = options.beams
        return settings

    def encode(self, prompt: str) -> list[int]:
        """Return the tokens of a prompt. Raises DataError if there are none, or no room for others."""
        tokens: list[int] = list(self.tokenizer(prompt, verbose=False)["input_ids"])
        if not self.has_encoder and tokens and tokens[-1] == self.tokenizer.eos_token_id:
            tokens.pop()  # which ends a text
        if not tokens:
            raise DataError(
                f"the prompt {abbreviate(prompt)} has no tokens; write at least one word to continue"
            )
        positions, new = self._count_positions(), self.options.max_new_tokens
        if positions is None:
            return tokens
        most = positions - (1 if self.has_encoder else len(tokens))  # a decoder starts with one token
        if (self.has_encoder and len(tokens) > positions) or most < 1:
            raise DataError(
                f"the prompt {abbreviate(prompt)} has {len(tokens):,} tokens, but the model has "
                f"{positions:,} positions; shorten the prompt"
            )
        if new is not None and new > most:
            raise DataError(
                f"--max-new-tokens {new:,} does not fit: the model has {positions:,} positions and the "
                f"prompt {abbreviate(prompt)} has {len(tokens):,} tokens; use at most --max-new-tokens {most}"
            )
        return tokens

    def _count_positions(self) -> int | None:
        positions = getattr(self.config.get_text_config(), "max_position_embeddings", None)
        return positions if isinstance(positions, int) and positions > 0 else None

    def example_sample(self) -> dict[str, Tensor]:
        """Return a sample as those of a training, for the analysis of the model."""
        tokens = torch.zeros(EXAMPLE_LENGTH, dtype=torch.int64)
        sample = {"input_ids": tokens, "labels": tokens}
        if not self.has_encoder:
            return sample
        return {**sample, "attention_mask": torch.ones_like(tokens), "decoder_input_ids": tokens}

    def arguments(self, prompts: Sequence[Sequence[int]], device: torch.device) -> dict[str, Tensor]:
        """Return tokens and mask of prompts, each of shape (prompts, longest).

        Shorter prompts of a decoder are padded at the beginning, so that all continue at the same position.
        """
        longest = max(map(len, prompts))
        tokens = torch.full((len(prompts), longest), self.settings.pad_token_id, device=device)
        mask = torch.zeros_like(tokens)
        for row, prompt in enumerate(prompts):
            place = slice(0, len(prompt)) if self.has_encoder else slice(longest - len(prompt), longest)
            tokens[row, place] = torch.tensor(prompt, device=device)
            mask[row, place] = 1
        return {"input_ids": tokens, "attention_mask": mask}

    def write(
        self, model: Any, prompts: Sequence[Sequence[int]], device: torch.device
    ) -> list[tuple[int, ...]]:
        """Return the new tokens for each prompt, without the token that ends a text."""
        arguments = self.arguments(prompts, device)
        length = arguments["input_ids"].shape[1]
        settings = self.settings
        settings.max_new_tokens = self._choose_new_tokens(length)
        # What its configuration leaves open, transformers would take from here.
        model.generation_config = settings
        texts = model.generate(**arguments, generation_config=settings, synced_gpus=False)
        start = 1 if self.has_encoder else length
        return [self._cut(row) for row in texts[:, start:].tolist()]

    def _choose_new_tokens(self, length: int) -> int:
        if self.options.max_new_tokens is not None:
            return self.options.max_new_tokens
        wanted: int = self._folder_new_tokens or DEFAULT_NEW_TOKENS
        positions = self._count_positions()
        if positions is None:
            return wanted
        return min(wanted, positions - (1 if self.has_encoder else length))

    def _cut(self, tokens: list[int]) -> tuple[int, ...]:
        end = next((index for index, token in enumerate(tokens) if token in self.ends), len(tokens))
        return tuple(tokens[:end])

    def decode(self, prompt: Sequence[int], new: Sequence[int]) -> str:
        """Return the text of new tokens. That of a decoder continues the prompt, with its space before it."""

        def to_text(tokens: Sequence[int]) -> str:
            text: str = self.tokenizer.decode(
                list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
            return text

        if self.has_encoder:
            return to_text(new)
        before, whole = to_text(prompt), to_text([*prompt, *new])
        return whole[len(before) :] if whole.startswith(before) else to_text(new)


def shorten_arguments(last: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments of a model for a short pass that runs the same modules as a pass with `last`."""
    encoded = last.get("encoder_outputs")
    if encoded is None:
        return {"input_ids": last["input_ids"][:1, :1], "use_cache": False}
    return {
        "encoder_outputs": encoded,
        "attention_mask": last.get("attention_mask"),
        "decoder_input_ids": last["decoder_input_ids"][:, :1],
        "use_cache": False,
    }


def read_prompts(file: Path, key: str) -> tuple[str, ...]:
    """Return the prompts of a file: `key` of each object of JSON lines, or else each line that is not blank.

    Raises DataError.
    """
    if not file.is_file():
        raise DataError(f"no such file of prompts: {file}")
    lines = [
        (number, line)
        for number, line in enumerate(read_file(file, "specify --prompts FILE").split("\n"), 1)
        if line.strip()
    ]
    if not lines:
        raise DataError(f"{file} has no prompts; write one in each line")
    if file.suffix not in JSON_LINES:
        return tuple(line.rstrip("\r") for _, line in lines)
    return tuple(_read_prompt(line, key, f"{file}, line {number}") for number, line in lines)


def _read_prompt(line: str, key: str, place: str) -> str:
    try:
        tree = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{place}: each line must be a JSON object; name a file of plain lines .txt"
        ) from error
    prompt = tree.get(key) if isinstance(tree, dict) else None
    if not isinstance(prompt, str):
        raise DataError(f'{place}: no text in {key!r}; write each line as {{"{key}": "the prompt"}}')
    return prompt


def format_line(values: Mapping[str, Any]) -> str:
    """Return a line of JSON, with letters of all languages as they are."""
    return json.dumps(values, ensure_ascii=False) + "\n"
