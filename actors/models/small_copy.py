"""Tries a folder's model without its weights: on a small copy of random weights, by its config.

The copy has the same class, layers of every kind and the same heads' widths, but fewer layers,
heads, experts and ids. It shows what depends on the class and on its lengths, such as layers that
count along a row; a run's processes try the weights themselves when they start.
"""

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch

from composer_mesh.actors.models.attention_calls import (
    IMPLEMENTATIONS,
    PACKED,
    UNTRIED,
    attention_calls,
)
from composer_mesh.actors.models.expert_routing import EXPERTS, PER_TOKEN
from composer_mesh.actors.models.language_model import LanguageModel, layer_kinds
from composer_mesh.actors.models.packed_attention import computes_by_sequences
from composer_mesh.actors.models.policy import class_for, config_of
from composer_mesh.actors.models.probes import SPECIAL, WINDOW, probe_sequences
from composer_mesh.planning.model_facts import ATTENTION_KINDS, INDEXED, SHARED_KINDS, AttentionCall
from composer_mesh.planning.model_refusals import ModelNotServed, UnfitModel

WORDS, INNER, WIDEST, MOST_KINDS, SEED = 512, 64, 256, 6, 0
MOST: dict[tuple[str, ...], int] = {
    EXPERTS: 8,
    (*PER_TOKEN, "n_group", "key_value_heads"): 2,
    ("topk_group",): 1,
    ("q_lora_rank", "kv_lora_rank", "hidden_size_per_layer_input"): 32,
    ("vocab_size",): WORDS,
    ("intermediate_size",): INNER,
}
"""The most of what configs say under names that hold these words."""
DEPTHS = ("num_hidden_layers", "depth", "num_layers")
MOST_WEIGHTS = 50_000_000
"""A copy that would have more is not made: it would take seconds, and much of `check`'s memory."""

UNBUILT = (*UNTRIED, ArithmeticError, AssertionError, ImportError, MemoryError)
"""What transformers raises for a config that it cannot build, or whose sizes do not fit."""


def made_copy(folder: Path, implementations: tuple[str, ...]) -> Any | None:
    """Return a small copy of a folder's model that computes; None where no copy can be made.

    Then the trainer and the engine try the model when they start.
    """
    config = config_of(folder)
    if set(layer_kinds(config)) - ATTENTION_KINDS - {INDEXED}:
        return None
    try:
        model = small_copy(config, "sdpa" if "sdpa" in implementations else "eager")
        LanguageModel(model).hidden(probe_sequences(model.config)[:1])
    except UNBUILT:
        return None
    return model


def copy_calls(model: Any, layers: int) -> tuple[AttentionCall, ...] | None:
    """Return the attention calls of so many layers, of which the last are like the copy's last."""
    own = model.config._attn_implementation
    calls = attention_calls(model, "cpu")
    model.set_attn_implementation(own)
    if not calls or len(calls) != model.config.get_text_config().num_hidden_layers:
        return calls
    return calls + calls[-1:] * (layers - len(calls))


def tried(
    model: Any, calls: tuple[AttentionCall, ...] | None, implementations: tuple[str, ...]
) -> dict[str, str]:
    """Return why a small copy of a model is refused: for each use that is not exact, its error.

    Uses are "rows" (any training), "long rows" (of sequences longer than a scale), "packing" by
    implementation, "sharing", and "engine", whose attention is that of packed rows.
    """
    found: dict[str, str] = {}
    language, kinds = LanguageModel(model), layer_kinds(model.config)

    def note(use: str, option: str, check: Callable[[], object]) -> None:
        try:
            check()
        except UnfitModel as error:
            found[use] = str(error)
        except UNBUILT as error:
            why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            found[use] = f"{type(model).__name__} fails with {option} ({why}): set it to false"

    note("rows", "rows of several lengths", language.check_rows)
    note("long rows", "rows of several lengths", partial(language.check_rows, short=True))
    if set(kinds) - ATTENTION_KINDS:
        return found
    if "sdpa" in implementations:
        note("sharing", "trainer.prefix_sharing", language.check_sharing)
    for name in sorted({"sdpa", "eager"} & set(implementations)):
        by_sequences = name == "sdpa" and computes_by_sequences(_first(calls, model), kinds)
        attention = PACKED if by_sequences else IMPLEMENTATIONS[name]
        note(f"packing {name}", "trainer.packing", partial(_check_packing, language, attention))
    if set(kinds) <= SHARED_KINDS:
        note("engine", "packed rows", partial(_check_packing, language, PACKED, (WINDOW,)))
    if "engine" in found:
        why = "attention to keys in rows, without masks, is not all that its layers compute"
        found["engine"] = str(ModelNotServed(type(model).__name__, why))
    return found


def _check_packing(language: LanguageModel, attention: str, kept: tuple[str, ...] = ()) -> None:
    language.model.set_attn_implementation(attention)
    language.check_packing(kept)


def small_copy(config: Any, attention: str) -> Any:
    """Return a model of a config's class with random weights; raises `UNBUILT` where it cannot."""
    config = small_config(config)
    with torch.device("meta"):
        weights = sum(one.numel() for one in class_for(config).from_config(config).parameters())
    if weights > MOST_WEIGHTS:
        raise ValueError(f"it has {weights} weights, and at most {MOST_WEIGHTS} are tried")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model = class_for(config).from_config(
            config, dtype=torch.float64, attn_implementation=IMPLEMENTATIONS[attention]
        )
        with torch.no_grad():
            for weights in model.parameters():
                if weights.dim() > 1:
                    weights.normal_(std=weights.shape[-1] ** -0.5)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # grouped matrix products know no float64
    return model.eval()


def small_config(config: Any) -> Any:
    """Return a config of the same architecture, as small as its kinds of layers allow."""
    config = deepcopy(config)
    text = config.get_text_config()
    for other in _configs(config):
        for name, value in list(vars(other).items()):
            if name.endswith(SPECIAL) and type(value) is int:
                setattr(other, name, value % WORDS)
        if other not in (config, text):
            for name in {*DEPTHS} & set(vars(other)):
                setattr(other, name, 1)
    _narrow(text)
    for other in _configs(config):
        if "out_hidden_size" in vars(other):
            other.out_hidden_size = text.hidden_size
    _shorten(text)
    return config


def _configs(config: Any) -> list[Any]:
    found = [config]
    for value in vars(config).values():
        if hasattr(value, "to_dict"):
            found += _configs(value)
    return found


def _narrow(text: Any) -> None:
    heads, groups = text.num_attention_heads, getattr(text, "num_key_value_heads", None)
    own = vars(text).get("head_dim")
    width = own or text.hidden_size // heads
    few = min(groups or heads, 2) * min(heads // (groups or heads), 2)
    for name, value in list(vars(text).items()):
        most = next((most for names, most in MOST.items() if _named(name, names)), None)
        if most is not None and type(value) is int:
            setattr(text, name, min(value, most))
        elif most is not None and isinstance(value, list):
            setattr(text, name, [min(one, most) for one in value])
        elif name.endswith("attention_heads"):
            setattr(text, name, few)
    text.num_attention_heads = few
    text.hidden_size = min(few * width, WIDEST) if own else few * width
    if groups is None and "num_key_value_heads" in vars(text):
        text.num_key_value_heads = few
    if own is None and "head_dim" in vars(text):
        text.head_dim = width


def _named(name: str, words: tuple[str, ...]) -> bool:
    return any(word in name for word in words)


def _shorten(text: Any) -> None:
    """Keep the first layers, of each kind at least one, and as many that use earlier keys."""
    layers = text.num_hidden_layers
    by_layer = {
        name: value
        for name, value in vars(text).items()
        if isinstance(value, list)
        and len(value) == layers
        and len({*map(str, value)}) <= MOST_KINDS
    }
    kept = 2 + (getattr(text, "first_k_dense_replace", None) or 0)
    for value in by_layer.values():
        kept = max(kept, *(value.index(one) + 1 for one in value))
    kept = min(kept, layers)
    if getattr(text, "num_kv_shared_layers", None):
        text.num_kv_shared_layers = kept = layers // 2 if 2 * kept > layers else kept
        kept = min(2 * kept, layers)
    text.num_hidden_layers = kept
    for name, value in by_layer.items():
        setattr(text, name, value[:kept])


def _first(calls: tuple[AttentionCall, ...] | None, model: Any) -> tuple[AttentionCall, ...] | None:
    """Return the calls of the copy's layers."""
    return calls and calls[: model.config.get_text_config().num_hidden_layers]
