"""What is known of a model without its weights, and what a run may therefore not ask of it.

`actors.models.model_facts` collects the facts in a process with limits; they are compared with the
config here. Knows neither torch nor transformers.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from composer_mesh.configs.schema import Config
from composer_mesh.configs.trainer import TrainerConfig
from composer_mesh.planning.model_refusals import (
    CappedInterpolation,
    ModelNotServed,
    NoExperts,
    NoSuchLayers,
    UndividedContext,
    UndividedExperts,
    UndividedHeads,
    UnfitModel,
    UnknownLayers,
    UnsupportedHead,
    UnsupportedSharing,
)

LISTS = ("kinds", "linear", "implementations", "experts")
FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
INDEXED = "indexed_attention"
ATTENTION_KINDS = frozenset({FULL, SLIDING, CHUNKED})
SHARED_KINDS = frozenset({FULL, SLIDING})
"""Kinds of layers across which prefixes are shared."""
NOT_UPDATED_BY_VLLM = frozenset({"GptOssForCausalLM"})
DELTA_NETS = ("Qwen3Next", "Qwen3_5", "OlmoHybrid", "KimiLinear")
"""How the names of classes begin whose linear attention is a gated delta rule."""
MEANT = {"softcap": "caps", "s_aux": "sinks", "position_bias": "position biases"}
"""What the arguments of attention mean that not every implementation knows."""


@dataclass(frozen=True)
class AttentionCall:
    """How a layer calls its attention: in the embedded engine's way, with a window, with more.

    With so many heads of queries, and of keys, which are `width` wide.
    """

    replaceable: bool
    window: int | None
    more: tuple[str, ...]
    heads: int = 1
    key_heads: int = 1
    width: int = 1


@dataclass(frozen=True)
class ModelFacts:
    """Facts of a model: its class, token ids, layers and their kinds, and what its parts can do.

    `head` is the difference between its logits and those of a head that the losses know; it and
    `attention` are None where only a model with weights shows them. `implementations` are the
    values of `trainer.attention` that compute all of its attention; `experts` are the numbers of
    experts, each kind once, of layers that hold them as one tensor; `tried` are the uses that a
    small copy with random weights is refused for, with the errors, "long rows" only where sequences
    are longer than `scale`; `chat` says in words where conversations have tools, calls and results;
    `softcap` is the cap of its logits.
    Up to `all_keys` positions attention reads all keys, and beyond some of the highest scores;
    None without such a choice.
    """

    name: str
    rows: int
    layers: int
    kinds: tuple[str, ...]
    listed: bool
    linear: tuple[str, ...]
    positions: int | None
    head: float | None
    attention: tuple[AttentionCall, ...] | None
    implementations: tuple[str, ...]
    experts: tuple[int, ...] = ()
    tried: Mapping[str, str] = field(default_factory=dict)
    scale: int | None = None
    chat: str = ""
    softcap: float | None = None
    all_keys: int | None = None

    @classmethod
    def of(cls, told: dict[str, Any]) -> Self:
        """Return facts from a dict, as JSON has them."""
        calls = told["attention"]
        attention = None if calls is None else tuple(_call(one) for one in calls)
        plain = {key: tuple(told[key]) for key in LISTS}
        return cls(**{**told, **plain, "attention": attention})


def _call(told: dict[str, Any]) -> AttentionCall:
    return AttentionCall(**{**told, "more": tuple(told["more"])})


def check_model_fits(facts: ModelFacts, config: Config) -> None:
    """Raise `UnfitModel` where the policy's model cannot do what the config asks for."""
    check_model_trains(facts, config)
    if config.generator.engine == "embedded":
        check_embedded_serves(facts, config.policy.max_context)
    else:
        _check_vllm_serves(facts, config)


def check_model_trains(facts: ModelFacts, config: Config) -> None:
    """Raise `UnfitModel` where the trainer cannot train the model as configured."""
    _check_head(facts)
    _check_rows(facts, config.policy.max_context)
    _check_positions(facts, config.policy.max_context)
    _check_chosen_keys(facts, config.policy.max_context)
    _check_attention(facts, config.trainer.attention)
    _check_context(facts, config.trainer.context_parallel)
    _check_experts(facts, config.trainer)
    _check_layers(facts, config)
    _check_adapters(facts, config)
    if config.sdpo.on and config.sdpo.teacher == "trust_region" and facts.softcap:
        raise CappedInterpolation(facts.name, facts.softcap)


def check_model_teaches(facts: ModelFacts, config: Config) -> None:
    """Raise `UnfitModel` where another model cannot read what the policy writes, or be compared."""
    _check_head(facts)
    _check_rows(facts, config.policy.max_context)
    _check_positions(facts, config.policy.max_context)
    _check_chosen_keys(facts, config.policy.max_context)
    if config.sdpo.placement == "inline":
        _check_context(facts, config.trainer.context_parallel)


def _check_head(facts: ModelFacts) -> None:
    if facts.head is not None:
        raise UnsupportedHead(facts.name, facts.head)


def _check_tried(facts: ModelFacts, use: str) -> None:
    if use in facts.tried:
        raise UnfitModel(facts.tried[use])


def _check_rows(facts: ModelFacts, context: int) -> None:
    _check_tried(facts, "rows")
    if facts.scale is None or context <= facts.scale or "long rows" not in facts.tried:
        return
    raise UnfitModel(
        f"{facts.tried['long rows']}, or lower policy.max_context from {context} to "
        f"{facts.scale}, beyond which it is so"
    )


def _check_positions(facts: ModelFacts, context: int) -> None:
    if facts.positions is not None and context > facts.positions:
        raise UnfitModel(
            f"policy.max_context is {context} but {facts.name} has positions up to "
            f"{facts.positions}: lower policy.max_context to {facts.positions}"
        )


def _check_chosen_keys(facts: ModelFacts, context: int) -> None:
    if facts.all_keys is not None and context > facts.all_keys:
        raise UnfitModel(
            f"policy.max_context is {context} but {facts.name} reads only keys of high scores "
            f"beyond {facts.all_keys} positions, and which of equal ones depends on the padding of "
            f"a row: lower policy.max_context to {facts.all_keys}"
        )


def _check_attention(facts: ModelFacts, attention: str) -> None:
    if attention in facts.implementations:
        return
    asked = sorted({name for call in facts.attention or () for name in call.more})
    why = f"which computes no {' and '.join(MEANT[name] for name in asked)}"
    found = " or ".join(repr(name) for name in facts.implementations)
    raise UnfitModel(
        f"{facts.name} cannot have trainer.attention = {attention!r}, "
        f"{why if asked else 'which it does not support'}: set it to {found}"
    )


def _check_context(facts: ModelFacts, size: int) -> None:
    if size == 1 or facts.attention is None:
        return  # without facts, the trainer looks when it starts
    plain = all(call.replaceable and not call.more for call in facts.attention)
    if _others(facts, SHARED_KINDS) or len(facts.attention) != facts.layers or not plain:
        raise UndividedContext(facts.name, size)
    for call in facts.attention:
        check_heads(facts.name, size, call.heads, call.key_heads)


def _check_experts(facts: ModelFacts, trainer: TrainerConfig) -> None:
    if trainer.expert_parallel == 1:
        return
    if not facts.experts:
        raise NoExperts(facts.name, trainer.expert_parallel)
    for count in facts.experts:
        if count % trainer.ranks:
            raise UndividedExperts(facts.name, count, trainer.ranks)


def check_heads(name: str, size: int, heads: int, key_heads: int) -> None:
    """Raise `UndividedHeads` unless so many ranks can divide heads, and divide or repeat keys'."""
    if heads % size or (key_heads % size and size % key_heads):
        raise UndividedHeads(name, size, heads, key_heads)


def _check_layers(facts: ModelFacts, config: Config) -> None:
    trainer = config.trainer
    if (trainer.sharded or trainer.checkpoints_layers or trainer.compile) and not (facts.listed):
        raise UnknownLayers(facts.name, facts.layers)
    if trainer.packing and (states := _others(facts, ATTENTION_KINDS)):
        raise UnfitModel(
            f"{facts.name} has layers of {states}, which carry a state from one packed sequence "
            "into the next: set trainer.packing to false"
        )
    if trainer.packing:
        _check_tried(facts, f"packing {trainer.attention}")
    if trainer.prefix_sharing and (others := _others(facts, SHARED_KINDS)):
        raise UnsupportedSharing(facts.name, not_shared(others))
    if trainer.prefix_sharing:
        _check_tried(facts, "sharing")


def not_shared(others: str) -> str:
    """Say why prefixes are not shared in a model with other kinds of layers."""
    return (
        f"it has layers of {others}, but prefixes are shared only across attention to all "
        "positions or to a window, whose keys and values go from a prefix to what follows it"
    )


def _check_adapters(facts: ModelFacts, config: Config) -> None:
    lora = config.trainer.lora
    if lora is None:
        return
    if lora.targets is None:
        if not facts.linear:
            raise NoSuchLayers((), f"{facts.name} has no linear layers in its decoder")
        return
    for name in lora.targets:
        if name not in facts.linear:
            why = f"{facts.name} has no layer {name} that can have an adapter"
            raise NoSuchLayers(lora.targets, why, facts.linear)


def check_embedded_serves(facts: ModelFacts, context: int) -> None:
    """Raise `ModelNotServed` for layers whose attention the embedded engine cannot compute."""
    if others := _others(facts, frozenset({FULL, SLIDING})):
        raise ModelNotServed(facts.name, f"it has layers of {others}")
    for number, call in enumerate(facts.attention or ()):
        if not call.replaceable:
            raise ModelNotServed(facts.name, f"its layer {number} computes attention of its own")
        if call.more:
            more = " and ".join(MEANT[name] for name in call.more)
            raise ModelNotServed(facts.name, f"it has attention with {more}")
        if call.window is not None and call.window < context:
            why = f"attention looks back {call.window} tokens but policy.max_context is {context}"
            raise ModelNotServed(facts.name, why)
    if facts.attention is not None and len(facts.attention) != facts.layers:
        why = f"{len(facts.attention)} of its {facts.layers} layers call an attention function"
        raise ModelNotServed(facts.name, why)
    if len({(call.key_heads, call.width) for call in facts.attention or ()}) > 1:
        raise ModelNotServed(facts.name, "its layers have keys of different shapes")
    _check_tried(facts, "engine")


def _check_vllm_serves(facts: ModelFacts, config: Config) -> None:
    if facts.name in NOT_UPDATED_BY_VLLM and not config.syncs_adapters:
        raise UnfitModel(
            f"{facts.name} cannot have generator.engine = 'vllm' with weights that change: vLLM "
            "0.32 keeps the experts and sinks that it has loaded when new ones come: train "
            "adapters, with [trainer.lora] and sync = 'adapters'"
        )
    on_cpu = not config.placement.gpus("generator")
    if on_cpu and config.syncs_adapters and facts.experts:
        others = "" if facts.name in NOT_UPDATED_BY_VLLM else ", or set it to 'merged'"
        raise UnfitModel(
            f"{facts.name} cannot have trainer.lora.sync = 'adapters' without GPUs: vLLM's kernels "
            f"for experts beside adapters need Triton: give placement.generator GPUs{others}"
        )
    if on_cpu and config.generator.dtype == "float32" and facts.name.startswith(DELTA_NETS):
        raise UnfitModel(
            f"{facts.name} cannot have generator.dtype = 'float32' without GPUs: vLLM's kernels "
            "of its linear attention for CPUs compute in bfloat16: set it to 'bfloat16'"
        )


def _others(facts: ModelFacts, kinds: frozenset[str]) -> str:
    return ", ".join(sorted(set(facts.kinds) - kinds))
