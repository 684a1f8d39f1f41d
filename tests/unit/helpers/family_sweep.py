"""Random combinations of families, options and lengths, against transformers' own forwards.

A case is a number: the family, the lengths at which its layers compute otherwise, the options and
the sequences follow from it. What `check` accepts must give the log-probs and the gradients of each
sequence alone.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from family_runs import CONTEXT, VOCABULARY, engine_of, own_logprobs, sampled
from model_families import FAMILIES, family_config, family_folder
from pydantic import ValidationError
from torch import Tensor

from composer_mesh.actors.learning.learner import Learner
from composer_mesh.actors.models.language_model import LanguageModel, padded
from composer_mesh.actors.models.policy import load_model
from composer_mesh.actors.models.ranks import Ranks
from composer_mesh.actors.models.template_program import describe_model
from composer_mesh.configs.errors import ConfigError
from composer_mesh.configs.schema import Config
from composer_mesh.losses.policy import token_logprobs
from composer_mesh.planning.model_facts import ModelFacts, check_model_fits
from composer_mesh.planning.model_folder import check_model_folder

LONGEST, SHARED, PROMPTS = 44, 20, 3
SIZES: dict[str, Sequence[Any]] = {
    "sliding_window": (3, 8, 13, CONTEXT),
    "attention_chunk_size": (4, 8, 13),
    "floor_scale": (3, 8, 8192),
    "attn_temperature_tuning": (True, False),
    "index_topk": (8, 2048),
    "keep_window_size": (8, 2048),
}
OPTIONS: dict[str, Sequence[Any]] = {
    "packing": (True, False),
    "prefix_sharing": (True, False),
    "attention": ("sdpa", "sdpa", "eager"),
    "activation_checkpointing": (True, False),
    "lora": (None, None, {"rank": 2}),
}


@dataclass(frozen=True)
class Case:
    """What a number stands for."""

    family: str
    sizes: dict[str, Any]
    trainer: dict[str, Any]
    engine: str
    sequences: list[list[int]]


def case_of(number: int, tokenizer: Any) -> Case:
    rng = random.Random(number)
    family = rng.choice(sorted(FAMILIES))
    config = family_config(family, tokenizer)
    nested = config.get_text_config() is not config
    sizes = {
        name: rng.choice(values)
        for name, values in SIZES.items()
        if not nested and getattr(config, name, None) is not None
    }
    if family == "llama4_text":
        sizes["no_rope_layers"] = rng.choices((0, 1), k=2)
    if family == "ministral3":
        ropes = {**config.rope_parameters, "original_max_position_embeddings": rng.choice((3, 8))}
        sizes["rope_parameters"] = ropes
    trainer = {name: rng.choice(values) for name, values in OPTIONS.items()}
    begin = _ids(rng, SHARED)
    ends = [_ids(rng, rng.randint(1, LONGEST - SHARED)) for _ in range(PROMPTS)]
    apart = [_ids(rng, rng.randint(2, LONGEST)) for _ in range(PROMPTS)]
    sequences = [*([*begin, *end] for end in ends), *apart]
    rng.shuffle(sequences)
    engine = rng.choice(("vllm", "embedded"))
    return Case(family, sizes, trainer, engine, sequences)


def _ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(3, VOCABULARY) for _ in range(count)]


def difference_of(
    case: Case, build_config: Callable[..., Config], tokenizer: Any, place: Path
) -> float | str:
    """Return the largest difference of what a run would compute from transformers' own, or why the
    combination is refused."""
    folder = family_folder(case.family, tokenizer, place, **case.sizes)
    check_model_folder(folder)
    told = describe_model(folder, len(tokenizer))
    if "error" in told:
        return str(told["error"])
    try:
        config = build_config(
            policy={"max_context": CONTEXT},
            generator={"engine": case.engine, "max_new_tokens": 8},
            trainer={"lr": 1e-3, **case.trainer},
        )
        check_model_fits(ModelFacts.of(told["facts"]), config)
    except (ConfigError, ValidationError) as error:
        return str(error)
    plain = load_model(folder)
    found = trained_difference(config, folder, plain, case.sequences)
    if case.engine == "embedded":
        found = max(found, sampled_difference(folder, plain, case.sequences))
    return found


def trained_difference(
    config: Config, folder: Path, plain: Any, sequences: list[list[int]]
) -> float:
    """Return by how much log-probs differ in training, or gradients relative to the largest."""
    model = Learner(config, folder, Ranks()).model.eval()
    language = LanguageModel(model, config.trainer.packing, config.trainer.sharing)
    ids, mask = padded(sequences), padded([[True] * (len(one) - 1) for one in sequences])
    found = language.logprobs(language.hidden(sequences), ids, mask)[mask]
    own = torch.cat([_logprobs(plain, one) for one in sequences])
    largest = float((found - own).detach().abs().max())
    if config.trainer.lora is not None:
        return largest
    weights = torch.randn(len(own), generator=torch.Generator().manual_seed(0))
    wanted, given = (
        _gradients(one, (logprobs * weights).sum())
        for one, logprobs in ((plain, own), (model, found))
    )
    scale = max(float(one.abs().max()) for one in wanted.values())
    assert wanted.keys() == given.keys()
    return max(largest, *(float((wanted[one] - given[one]).abs().max()) / scale for one in wanted))


def _logprobs(plain: Any, ids: list[int]) -> Tensor:
    row = torch.tensor([ids])
    return token_logprobs(plain(input_ids=row, use_cache=False).logits[:, :-1], row[:, 1:], 1.0)[0]


def _gradients(model: Any, loss: Tensor) -> dict[str, Tensor]:
    loss.backward()
    return {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


def sampled_difference(folder: Path, plain: Any, prompts: list[list[int]]) -> float:
    """Return by how much log-probs of sampled tokens differ."""
    largest = 0.0
    for prompt, found in zip(prompts, sampled(engine_of(folder), prompts), strict=True):
        own = own_logprobs(plain, [*prompt, *found.token_ids])[len(prompt) - 1 :]
        largest = max(largest, *(abs(a - b) for a, b in zip(own, found.logprobs, strict=True)))
    return largest
