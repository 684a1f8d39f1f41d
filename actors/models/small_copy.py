"""Tries a folder's model without its weights: on a small copy of random weights, by its config.

The copy has the same class, layers of every kind and the same heads' widths, but fewer layers,
heads, experts and ids. It shows what depends on the class and on its lengths, such as layers that
count along a row; a run's processes try the weights themselves when they start.
"""

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch

from composer_mesh.actors.models.attention_calls import IMPLEMENTATIONS, PACKED, UNTRIED
from composer_mesh.actors.models.expert_routing import EXPERTS, PER_TOKEN
from composer_mesh.actors.models.language_model import LanguageModel, layer_kinds
from composer_mesh.actors.models.packed_attention import computes_by_sequences
from composer_mesh.actors.models.policy import class_for, config_of
from composer_mesh.actors.models.probes import SPECIAL
from composer_mesh.planning.model_facts import ATTENTION_KINDS, AttentionCall
from composer_mesh.planning.model_refusals import UnfitModel

WORDS, INNER, SEED = 512, 64, 0
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
UNBUILT = (*UNTRIED, ArithmeticError, AssertionError, ImportError)
ROWS = "rows"


def tried(
    folder: Path, calls: tuple[AttentionCall, ...] | None, implementations: tuple[str, ...]
) -> dict[str, str]:
    """Return why a small copy of the model is refused: for each use that is not exact, its error.

    Uses are "rows" (any training), "packing" by implementation, and "sharing". What a copy cannot
    be tried for is left out.
    """
    config = config_of(folder)
    kinds = layer_kinds(config)
    if set(kinds) - ATTENTION_KINDS:
        return {}
    found: dict[str, str] = {}
    plain = "sdpa" if "sdpa" in implementations else "eager"
    try:
        model = small_copy(config, plain)
    except UNBUILT:
        return {}
    language = LanguageModel(model)

    def note(use: str, check: Callable[[], object]) -> None:
        try:
            check()
        except UnfitModel as error:
            found[use] = str(error)
        except UNBUILT:  # the trainer tries when it starts
            return

    note(ROWS, language.check_rows)
    note("sharing", language.check_sharing)
    for name in {"sdpa", "eager"} & set(implementations):
        by_sequences = name == "sdpa" and computes_by_sequences(_first(calls, model), kinds)
        model.set_attn_implementation(PACKED if by_sequences else IMPLEMENTATIONS[name])
        note(f"packing {name}", language.check_packing)
    return found


def small_copy(config: Any, attention: str) -> Any:
    """Return a model of a config's class with random weights; raises `UNBUILT` where it cannot."""
    config = small_config(config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model = class_for(config).from_config(
            config, dtype=torch.float32, attn_implementation=IMPLEMENTATIONS[attention]
        )
        with torch.no_grad():
            for weights in model.parameters():
                if weights.dim() > 1:
                    weights.normal_(std=weights.shape[-1] ** -0.5)
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
    width = vars(text).get("head_dim") or text.hidden_size // heads
    few = min(groups or heads, 2) * min(heads // (groups or heads), 2)
    for name, value in list(vars(text).items()):
        most = next((most for names, most in MOST.items() if _named(name, names)), None)
        if most is not None and type(value) is int:
            setattr(text, name, min(value, most))
        elif most is not None and isinstance(value, list):
            setattr(text, name, [min(one, most) for one in value])
        elif name.endswith("attention_heads"):
            setattr(text, name, few)
    text.num_attention_heads, text.hidden_size = few, few * width


def _named(name: str, words: tuple[str, ...]) -> bool:
    return any(word in name for word in words)


def _shorten(text: Any) -> None:
    """Keep the first layers, of each kind at least one; all where later ones use earlier keys."""
    layers = text.num_hidden_layers
    if getattr(text, "num_kv_shared_layers", None):
        return
    by_layer = {
        name: value
        for name, value in vars(text).items()
        if isinstance(value, list) and len(value) == layers
    }
    kept = 2 + (getattr(text, "first_k_dense_replace", None) or 0)
    for value in by_layer.values():
        kept = max(kept, *(value.index(one) + 1 for one in value))
    kept = min(kept, layers)
    text.num_hidden_layers = kept
    for name, value in by_layer.items():
        setattr(text, name, value[:kept])


def _first(calls: tuple[AttentionCall, ...] | None, model: Any) -> tuple[AttentionCall, ...] | None:
    """Return the calls of the copy's layers."""
    return calls and calls[: model.config.get_text_config().num_hidden_layers]
