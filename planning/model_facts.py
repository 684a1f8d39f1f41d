"""What is known of a model without its weights, and what a run may therefore not ask of it.

`actors.models.model_facts` collects the facts in a process with limits; they are compared with the
config here. Knows neither torch nor transformers.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
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
    def of(cls, fields: dict[str, Any]) -> Self:
        """Return facts from a dict, as JSON has them."""
        calls = fields["attention"]
        attention = None if calls is None else tuple(_call(one) for one in calls)
        plain = {key: tuple(fields[key]) for key in LISTS}
        return cls(**{**fields, **plain, "attention": attention})


def _call(fields: dict[str, Any]) -> AttentionCall:
    return AttentionCall(**{**fields, "more": tuple(fields["more"])})


def check_model_fits(facts: ModelFacts, config: Config) -> None:
    """Raise `UnfitModel` where the policy's model cannot do what the config asks for."""
    check_model_trains(facts, config)
    embedded = config.generator.engine == "embedded"
    _refuse(_embedded(facts, config.policy.max_context) if embedded else _vllm(facts, config))


def check_model_trains(facts: ModelFacts, config: Config) -> None:
    """Raise `UnfitModel` where the trainer cannot train the model as configured."""
    _refuse(_reading(facts, config.policy.max_context))
    _refuse(_training(facts, config))


def check_model_teaches(facts: ModelFacts, config: Config) -> None:
    """Raise `UnfitModel` where another model cannot read what the policy writes, or be compared."""
    _refuse(_reading(facts, config.policy.max_context))
    if config.sdpo.placement == "inline":
        _refuse(_dividing(facts, config.trainer.context_parallel))


def _refuse(problems: Iterable[UnfitModel]) -> None:
    for problem in problems:
        raise problem


def _tried(facts: ModelFacts, use: str) -> Iterator[UnfitModel]:
    """Yield the error of a use that a small copy of the model is refused for."""
    if use in facts.tried:
        yield UnfitModel(facts.tried[use])


def _reading(facts: ModelFacts, context: int) -> Iterator[UnfitModel]:
    """Yield why a model cannot read rows of so many tokens, or has other logits than its head's."""
    if facts.head is not None:
        yield UnsupportedHead(facts.name, facts.head)
    yield from _tried(facts, "rows")
    if facts.scale is not None and context > facts.scale and "long rows" in facts.tried:
        yield UnfitModel(
            f"{facts.tried['long rows']}, or lower policy.max_context from {context} to "
            f"{facts.scale}, beyond which it is so"
        )
    if facts.positions is not None and context > facts.positions:
        yield UnfitModel(
            f"policy.max_context is {context} but {facts.name} has positions up to "
            f"{facts.positions}: lower policy.max_context to {facts.positions}"
        )
    if facts.all_keys is not None and context > facts.all_keys:
        yield UnfitModel(
            f"policy.max_context is {context} but {facts.name} reads only keys of high scores "
            f"beyond {facts.all_keys} positions, whose choice among equal scores depends on a "
            f"row's padding: lower policy.max_context to {facts.all_keys}"
        )


def _training(facts: ModelFacts, config: Config) -> Iterator[UnfitModel]:
    """Yield why a model that reads such rows cannot be trained as configured."""
    trainer = config.trainer
    if trainer.attention not in facts.implementations:
        yield _other_attention(facts, trainer.attention)
    yield from _dividing(facts, trainer.context_parallel)
    if trainer.expert_parallel > 1 and not facts.experts:
        yield NoExperts(facts.name, trainer.expert_parallel)
    for count in facts.experts if trainer.expert_parallel > 1 else ():
        if count % trainer.ranks:
            yield UndividedExperts(facts.name, count, trainer.ranks)
    yield from _layer_by_layer(facts, trainer)
    if trainer.lora is not None:
        yield from _adapters(facts, trainer.lora.targets)
    if config.sdpo.on and config.sdpo.teacher == "trust_region" and facts.softcap:
        yield CappedInterpolation(facts.name, facts.softcap)


def _other_attention(facts: ModelFacts, attention: str) -> UnfitModel:
    features = sorted({name for call in facts.attention or () for name in call.more})
    why = f"which computes no {' and '.join(MEANT[name] for name in features)}"
    found = " or ".join(repr(name) for name in facts.implementations)
    return UnfitModel(
        f"{facts.name} cannot have trainer.attention = {attention!r}, "
        f"{why if features else 'which it does not support'}: set it to {found}"
    )


def _dividing(facts: ModelFacts, size: int) -> Iterator[UnfitModel]:
    """Yield why so many ranks cannot divide the positions of a context."""
    if size == 1 or facts.attention is None:
        return  # without facts, the trainer looks when it starts
    plain = all(call.replaceable and not call.more for call in facts.attention)
    if _others(facts, SHARED_KINDS) or len(facts.attention) != facts.layers or not plain:
        yield UndividedContext(facts.name, size)
    for call in facts.attention:
        check_heads(facts.name, size, call.heads, call.key_heads)


def check_heads(name: str, size: int, heads: int, key_heads: int) -> None:
    """Raise `UnfitModel` unless so many ranks can divide heads, and divide or repeat keys'."""
    if heads % size or (key_heads % size and size % key_heads):
        every = range(1, heads + 1)
        fitting = [n for n in every if not heads % n and not (key_heads % n and n % key_heads)]
        raise UnfitModel(
            f"trainer.context_parallel is {size} but {name} has {heads} heads of queries and "
            f"{key_heads} of keys, which so many ranks cannot divide: set it to one of "
            f"{', '.join(map(str, fitting))}"
        )


def _layer_by_layer(facts: ModelFacts, trainer: TrainerConfig) -> Iterator[UnfitModel]:
    if (trainer.sharded or trainer.checkpoints_layers or trainer.compile) and not facts.listed:
        yield UnknownLayers(facts.name, facts.layers)
    if trainer.packing and (states := _others(facts, ATTENTION_KINDS)):
        yield UnfitModel(
            f"{facts.name} has layers of {states}, which carry a state from one packed sequence "
            "into the next: set trainer.packing to false"
        )
    if trainer.packing:
        yield from _tried(facts, f"packing {trainer.attention}")
    if trainer.prefix_sharing and (others := _others(facts, SHARED_KINDS)):
        yield UnsupportedSharing(facts.name, not_shared(others))
    if trainer.prefix_sharing:
        yield from _tried(facts, "sharing")


def not_shared(others: str) -> str:
    """Say why prefixes are not shared in a model with other kinds of layers."""
    return (
        f"it has layers of {others}, but prefixes are shared only across attention to all "
        "positions or to a window: their keys and values pass from a prefix to what follows it"
    )


def _adapters(facts: ModelFacts, targets: Sequence[str] | None) -> Iterator[UnfitModel]:
    """Yield why layers of these names, or all linear ones, cannot have adapters."""
    if targets is None and not facts.linear:
        yield NoSuchLayers((), f"{facts.name} has no linear layers in its decoder")
    for name in targets or ():
        if name not in facts.linear:
            why = f"{facts.name} has no layer {name} that can have an adapter"
            yield NoSuchLayers(tuple(targets or ()), why, facts.linear)


def _embedded(facts: ModelFacts, context: int) -> Iterator[UnfitModel]:
    """Yield the layers whose attention the embedded engine cannot compute."""
    if others := _others(facts, frozenset({FULL, SLIDING})):
        yield ModelNotServed(facts.name, f"it has layers of {others}")
    for number, call in enumerate(facts.attention or ()):
        if not call.replaceable:
            yield ModelNotServed(facts.name, f"its layer {number} computes attention of its own")
        if call.more:
            more = " and ".join(MEANT[name] for name in call.more)
            yield ModelNotServed(facts.name, f"it has attention with {more}")
        if call.window is not None and call.window < context:
            why = f"attention looks back {call.window} tokens but policy.max_context is {context}"
            yield ModelNotServed(facts.name, why)
    if facts.attention is not None and len(facts.attention) != facts.layers:
        why = f"{len(facts.attention)} of its {facts.layers} layers call an attention function"
        yield ModelNotServed(facts.name, why)
    if len({(call.key_heads, call.width) for call in facts.attention or ()}) > 1:
        yield ModelNotServed(facts.name, "its layers have keys of different shapes")
    yield from _tried(facts, "engine")


def _vllm(facts: ModelFacts, config: Config) -> Iterator[UnfitModel]:
    """Yield what vLLM cannot serve as configured."""
    if facts.name in NOT_UPDATED_BY_VLLM and not config.syncs_adapters:
        yield UnfitModel(
            f"{facts.name} cannot have generator.engine = 'vllm' with weights that change: vLLM "
            "0.32 keeps the experts and sinks that it has loaded when new ones come: train "
            "adapters, with [trainer.lora] and sync = 'adapters'"
        )
    on_cpu = not config.placement.gpus("generator")
    if on_cpu and config.syncs_adapters and facts.experts:
        others = "" if facts.name in NOT_UPDATED_BY_VLLM else ", or set it to 'merged'"
        yield UnfitModel(
            f"{facts.name} cannot have trainer.lora.sync = 'adapters' without GPUs: vLLM's kernels "
            f"for experts with adapters need Triton: give placement.generator GPUs{others}"
        )
    if on_cpu and config.generator.dtype == "float32" and facts.name.startswith(DELTA_NETS):
        yield UnfitModel(
            f"{facts.name} cannot have generator.dtype = 'float32' without GPUs: vLLM's kernels "
            "of its linear attention for CPUs compute in bfloat16: set it to 'bfloat16'"
        )


def _others(facts: ModelFacts, kinds: frozenset[str]) -> str:
    return ", ".join(sorted(set(facts.kinds) - kinds))
