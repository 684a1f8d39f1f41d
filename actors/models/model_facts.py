"""Collects what a folder tells of its model without reading weights.

The model is built without memory (torch's meta device). Its head is called with a few small numbers
in place of hidden states; the rest is tried on a small copy with random weights.

Tries a folder's model without its weights: on a small copy of random weights, by its config.

The copy has the same class, layers of every kind and the same heads' widths, but fewer layers,
heads, experts and ids. It shows what depends on the class and on its lengths, such as layers that
count along a row; a run's processes try the weights themselves when they start.
"""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from composer_mesh.actors.models.attention_calls import (
    IMPLEMENTATIONS,
    PACKED,
    UNTRIED,
    attention_calls,
)
from composer_mesh.actors.models.expert_parallel import expert_modules
from composer_mesh.actors.models.expert_routing import EXPERTS, PER_TOKEN
from composer_mesh.actors.models.language_model import (
    PROBE_LOUDNESS,
    LanguageModel,
    decoder_of,
    is_plain,
    layer_kinds,
    logit_scale,
    logit_softcap,
)
from composer_mesh.actors.models.lora import linear_layers
from composer_mesh.actors.models.packed_attention import computes_by_sequences
from composer_mesh.actors.models.policy import (
    CheckpointNames,
    attention_of,
    class_for,
    config_of,
    empty_model,
)
from composer_mesh.actors.models.probes import SPECIAL, WINDOW, probe_sequences, smallest_scale
from composer_mesh.actors.models.sharding import decoder_layers
from composer_mesh.losses.blocks import softcapped
from composer_mesh.planning.model_facts import (
    ATTENTION_KINDS,
    INDEXED,
    SHARED_KINDS,
    AttentionCall,
    ModelFacts,
)
from composer_mesh.planning.model_folder import has_weights
from composer_mesh.planning.model_refusals import ModelNotServed, UnfitModel, UnknownLayers

COPY_WORDS, INNER, WIDEST, MOST_KINDS, SEED = 512, 64, 256, 6, 0
MOST: dict[tuple[str, ...], int] = {
    EXPERTS: 8,
    (*PER_TOKEN, "n_group", "key_value_heads"): 2,
    ("topk_group",): 1,
    ("q_lora_rank", "kv_lora_rank", "hidden_size_per_layer_input"): 32,
    ("vocab_size",): COPY_WORDS,
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
                setattr(other, name, value % COPY_WORDS)
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


WORDS, WIDTH, PROBE_IDS = 64, 8, 3
COMPRESSED = "compressed_sparse_attention"


def facts_of(folder: Path) -> dict[str, Any]:
    """Return the `ModelFacts` of a folder as a dict for JSON, or why its weights do not fit.

    Weights that are not downloaded yet are not compared.
    """
    if not has_weights(folder):
        return {"facts": asdict(_facts(empty_model(folder), folder))}
    names = CheckpointNames(folder)
    for difference in names.differences():
        return {"error": f"has weights that do not fit its config.json: {difference}"}
    return {"facts": asdict(_facts(names.model, folder))}


def _facts(model: Any, folder: Path) -> ModelFacts:
    text = model.config.get_text_config()
    calls, implementations = attention_of(folder)
    copy = made_copy(folder, implementations)
    if calls is None and copy is not None:
        calls = copy_calls(copy, text.num_hidden_layers)
    layers = [name.rpartition(".")[-1] for name in linear_layers(model)]
    return ModelFacts(
        name=type(model).__name__,
        rows=len(model.get_input_embeddings().weight),
        layers=text.num_hidden_layers,
        kinds=tuple(dict.fromkeys(layer_kinds(model.config))),
        listed=_listed(model),
        linear=tuple(sorted(set(layers))),
        positions=getattr(text, "max_position_embeddings", None),
        head=_head_difference(empty_model(folder)),
        attention=calls,
        implementations=implementations,
        tried={} if copy is None else tried(copy, calls, implementations),
        scale=smallest_scale(model),
        experts=tuple(sorted({len(next(one.parameters())) for one in expert_modules(model)})),
        softcap=logit_softcap(model.config),
        all_keys=_all_keys(text),
    )


def _all_keys(text: Any) -> int | None:
    """Return up to how many positions all keys are chosen; None without a choice.

    A choice by other means than an index is tried on the small copy.
    """
    kinds = layer_kinds(text)
    if COMPRESSED not in kinds and INDEXED not in kinds:
        return None
    found: int = text.index_topk
    return found if INDEXED in kinds else found * text.compress_rates[COMPRESSED]


def _listed(model: Any) -> bool:
    try:
        decoder_layers(model)
    except UnknownLayers:
        return False
    return True


class _States:
    """What a decoder returns, with nothing but hidden states."""

    def __init__(self, states: Tensor) -> None:
        self.last_hidden_state = states

    def __getitem__(self, place: int) -> Tensor:
        return (self.last_hidden_state,)[place]

    def __getattr__(self, name: str) -> None:
        return None


class _Decoder(nn.Module):
    """Stands for a decoder: whatever it is given, its hidden states are the same."""

    def __init__(self, states: Tensor) -> None:
        super().__init__()
        self._states = states

    def forward(self, *_: Any, **__: Any) -> _States:
        return _States(self._states)


@torch.no_grad()
def _head_difference(model: Any) -> float | None:
    """Return by how much logits differ from those of a linear head, None where they do not.

    Of a model that needs more than hidden states for its logits nothing is known.
    """
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(1, PROBE_IDS, WIDTH, generator=generator)
    head = nn.Linear(WIDTH, WORDS, bias=False)
    head.weight.normal_(std=PROBE_LOUDNESS, generator=generator)
    decoder = decoder_of(model)
    place = next(name for name, module in model.named_modules() if module is decoder)
    try:
        model.set_submodule(place, _Decoder(states))
        model.set_output_embeddings(head)
        own = model(input_ids=torch.zeros(1, PROBE_IDS, dtype=torch.long), use_cache=False).logits
    except UNTRIED:
        return None  # the trainer compares numbers when it starts
    plain = softcapped(head(states * logit_scale(model.config)), logit_softcap(model.config))
    difference = float((own - plain).abs().max())
    return None if is_plain(difference, own) else difference
