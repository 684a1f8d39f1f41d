"""Memory needs of each kind of process, derived from a config with the sums of `memory`."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from composer_mesh.configs.losses import CustomLoss
from composer_mesh.configs.policy import ModelSizes
from composer_mesh.configs.schema import Config
from composer_mesh.configs.trainer import PROJECTIONS, LoraConfig, TrainerConfig
from composer_mesh.planning.memory import (
    CUDA_CONTEXT,
    CUDA_PROCESS,
    FLOAT,
    GB,
    HALF,
    LIGHT_PROCESS,
    MB,
    MODEL_PROCESS,
    SCORE_BYTES,
    VLLM_PROCESS,
    MemoryTerm,
    Parts,
    RankTraining,
    cache_bytes,
    forward_parts,
    offloaded_bytes,
    optimizer_of,
    total,
    training_parts,
    weight_parts,
)
from composer_mesh.planning.mesh_layout import plan_mesh
from composer_mesh.planning.model_sizes import adapter_parameters, parameter_count

LOGITS_COPIES = 4
"""Logits, their log-softmax, and the gradients of both, in a custom loss that reads logits."""
BOXED = ("code", "one_liners")
"""Tasks that ship and run code of agents in boxes."""
BATCH_CPU, BATCH_GPU = 512, 8192
"""Tokens of one pass after which engines admit no further prompt."""


@dataclass(frozen=True)
class Memory:
    """Memory needs of a process on its host and on each of its GPUs.

    `takes` is the fraction of each GPU's memory that it allocates in any case, or 0.
    """

    host: Parts
    gpu: Parts = ()
    takes: float = 0.0


@dataclass(frozen=True)
class _Model:
    """A kind of process with a model: memory on its device, and further memory on its host.

    `parked` is what of its device's memory is on the host while it sleeps, by name.
    """

    device: Parts
    host: Parts = ()
    takes: float = 0.0
    process: int = MODEL_PROCESS
    parked: tuple[str, ...] = ("weights",)


def memory_of(
    kind: str,
    config: Config,
    sizes: ModelSizes | None,
    number: int = 0,
    teacher: ModelSizes | None = None,
) -> Memory:
    """Return the memory needs of a process; without sizes, those without its model.

    `teacher` are the sizes of an SDPO teacher that is another model. Process number 0 of a kind may
    read or write for the others.
    """
    on_gpu = config.placement.gpus(kind) > 0
    if kind == "sdpo_teacher" and config.sdpo.teacher == "model":
        sizes = teacher
    if kind != "trainer" and kind not in _MODELS:
        tokenizes = kind == "rollouts"
        process = MemoryTerm("process", MODEL_PROCESS if tokenizes else LIGHT_PROCESS)
        return Memory((process, *_boxes(config)) if kind == "environment" else (process,))
    if sizes is None:
        base = MemoryTerm("process", CUDA_PROCESS if on_gpu else MODEL_PROCESS)
        return Memory((base,), (MemoryTerm("CUDA", CUDA_CONTEXT),) if on_gpu else ())
    if kind == "trainer":
        model = _trainer(config, sizes, number, teacher)
    else:
        model = _MODELS[kind](config, sizes)
    if not on_gpu:
        return Memory((MemoryTerm("process", model.process), *model.device, *model.host))
    host = (MemoryTerm("process", max(CUDA_PROCESS, model.process)), *model.host)
    gpu = (MemoryTerm("CUDA", CUDA_CONTEXT), *model.device)
    if not config.placement.colocate:
        return Memory(host, gpu, model.takes)
    parked = sum(one.bytes for one in model.device if one.what in model.parked)
    others = _asleep_on_a_gpu(kind, config)
    return Memory(
        (*host, MemoryTerm(PARKED, parked)),
        (*gpu, MemoryTerm("asleep on it", others * CUDA_CONTEXT)),
        model.takes,
    )


PARKED = "pinned while it sleeps"
"""What of a process's GPU memory is in its host's, in a colocated run."""
TURNS = {
    "trainer": "training",
    "sdpo_teacher": "training",
    "generator": "sampling",
    "reference": "sampling",
}
"""Kinds of a colocated run that share GPUs, and whose turn is theirs."""


def _asleep_on_a_gpu(kind: str, config: Config) -> int:
    """Return how many processes of the other turn sleep on each GPU of a process, rounded up."""
    gpus, rows = config.placement.gpus, plan_mesh(config).actors
    others = [row for row in rows if TURNS.get(row.kind, TURNS[kind]) != TURNS[kind]]
    others = [row for row in others if gpus(row.kind)]
    shared = sum(row.processes * gpus(row.kind) for row in others)
    return math.ceil(sum(row.processes for row in others) / max(1.0, shared))


def _boxes(config: Config) -> Parts:
    """Return what the boxes of an environment may take together, if the config says how many."""
    boxes = config.environment.sandbox.options.get("boxes")
    of_tasks = [
        one.options.get("memory_mib", 1024) for one in config.data.tasks if one.task in BOXED
    ]
    limits = [one for one in of_tasks if isinstance(one, int)]
    if not isinstance(boxes, int) or not limits:
        return ()
    return (MemoryTerm("boxes", boxes * max(limits) * MB),)


def number_of(dtype: str) -> int:
    """Return the bytes of a number of a dtype."""
    return HALF if dtype == "bfloat16" else FLOAT


def served_bytes(config: Config) -> int:
    """Return the bytes per number of the weights that generators serve."""
    return number_of(config.generator.dtype)


def _arriving(config: Config, sizes: ModelSizes, parts: int = 1) -> int:
    """Return the bytes of one version in transfer, or of a part: half precision if all use it."""
    number = HALF if config.publishes_half else FLOAT
    if not config.sdpo.pulls_weights:
        number = served_bytes(config)
    if config.syncs_adapters and config.trainer.lora is not None:
        return number * _adapters(sizes, config.trainer.lora)  # complete on every rank
    return number * parameter_count(sizes) // parts


def _adapters(sizes: ModelSizes, lora: LoraConfig) -> int:
    return adapter_parameters(sizes, lora.rank, lora.targets or PROJECTIONS)


def _trainer(config: Config, sizes: ModelSizes, rank: int, teacher: ModelSizes | None) -> _Model:
    trainer = config.trainer
    inline = config.sdpo.on and config.sdpo.placement == "inline"
    own_teacher = inline and config.sdpo.teacher not in ("live", "model")
    shared = trainer.shares_base
    copies = number_of(trainer.frozen_dtype) * int(config.loss.needs_reference and not shared)
    own_teacher = own_teacher and not (shared and config.sdpo.keeps_initial)
    copies += number_of(config.teacher_dtype) * int(own_teacher)
    lora = trainer.lora
    whole = parameter_count(sizes)
    how = RankTraining(
        ranks=trainer.ranks,
        tokens=-(-trainer.microbatch_tokens // trainer.context_parallel),
        trainable=_adapters(sizes, lora) if lora else whole,
        gradients=_gradient_sets(config),
        optimizers=1 + len(config.own_updates),
        number=number_of(trainer.compute_dtype),
        sharded=trainer.sharded,
        checkpointing=trainer.checkpoints_layers,
        offloaded=trainer.activation_offload,
        frozen_bytes=copies,
        longest=config.policy.max_context if _has_masks(trainer) else 0,
        scored=trainer.attention == "eager",
        on_gpu=config.placement.trainer.gpus > 0,
        optimizer=trainer.optimizer,
        optimizer_offload=trainer.optimizer_offload,
        context=trainer.context_parallel,
        experts_over=trainer.expert_parallel if sizes.is_mixture else 1,
    )
    parts = (
        *training_parts(sizes, how),
        *_of_the_teacher(config, sizes, teacher, how),
        *_of_a_custom_loss(config, sizes, how),
    )
    offers = trainer.sharded or rank == 0
    spread = trainer.ranks if trainer.sharded else 1
    offered = MemoryTerm("weights on offer", 2 * _arriving(config, sizes, spread) * offers)
    optimizer = optimizer_of(sizes, how)
    saved = FLOAT * whole // spread + optimizer.state
    copied = MemoryTerm("a checkpoint's copy", saved)
    waiting = how.tokens * offloaded_bytes(sizes, how.number) * how.offloaded
    inputs = MemoryTerm("offloaded activations", waiting)
    offloaded = MemoryTerm("offloaded optimizer state", optimizer.offloaded * how.optimizer_offload)
    reading = _reading(sizes, how, parts, rank, saved + offloaded.bytes)
    host = (offered, copied, inputs, offloaded, reading)
    return _Model(parts, host, parked=("master weights", "optimizer state", "frozen copies"))


def _has_masks(trainer: TrainerConfig) -> bool:
    """Whether attention gets dense masks: of all scores, or of a tree of prefixes."""
    return trainer.attention == "eager" or trainer.sharing == "levels"


def _of_the_teacher(
    config: Config, sizes: ModelSizes, other: ModelSizes | None, how: RankTraining
) -> Parts:
    """Return what a trainer rank holds of the SDPO teacher: another model, or a received head."""
    sdpo = config.sdpo
    if sdpo.has_own_actors and sdpo.has_own_head(config.trainer.updates):
        widths = 2 if sdpo.teacher == "trust_region" else 1
        width = widths * (other or sizes).hidden_size
        return (MemoryTerm("head of the SDPO teacher", FLOAT * sizes.vocab_size * width),)
    if not sdpo.on or sdpo.has_own_actors or other is None:
        return ()
    parts = (
        *weight_parts(
            other, number_of(config.teacher_dtype), split=how.ranks if how.sharded else 1
        ),
        *forward_parts(other, how.number, how.tokens, how.on_gpu),
    )
    return (MemoryTerm("SDPO teacher", total(parts)),)


def _of_a_custom_loss(config: Config, sizes: ModelSizes, how: RankTraining) -> Parts:
    """Return the logits that a custom loss asks for, if each token of a microbatch is sampled."""
    if not isinstance(config.loss, CustomLoss) or "logits" not in config.loss.needs:
        return ()
    head = 0 if how.number == FLOAT else FLOAT * sizes.vocab_size * sizes.hidden_size
    scores = LOGITS_COPIES * FLOAT * config.trainer.microbatch_tokens * sizes.vocab_size
    return (MemoryTerm("logits of the custom loss", scores + 2 * head),)


def _reading(
    sizes: ModelSizes, how: RankTraining, parts: Parts, rank: int, saved: int
) -> MemoryTerm:
    """Return the memory for loading a complete model, beyond what a step needs later."""
    reads = rank == 0 or not how.sharded
    later = 0 if how.on_gpu else sum(one.bytes for one in parts if one.what != "master weights")
    later += saved
    kept = 0 if how.on_gpu or how.sharded else FLOAT * parameter_count(sizes)
    return MemoryTerm(
        "while it loads", max(0, FLOAT * parameter_count(sizes) - kept - later) * reads
    )


def _generator(config: Config, sizes: ModelSizes) -> _Model:
    generator, number = config.generator, served_bytes(config)
    arrived = (MemoryTerm("weights that arrive", _arriving(config, sizes)),)
    if generator.engine == "vllm":
        return _vllm(config, sizes, arrived)
    rows, context = generator.max_concurrent, config.policy.max_context
    kept = rows * context if generator.prefix_tokens is None else generator.prefix_tokens
    on_gpu = config.placement.generator.gpus > 0
    tokens = (BATCH_GPU if on_gpu else BATCH_CPU) + context
    device = (
        *weight_parts(sizes, number),
        MemoryTerm("KV cache", cache_bytes(sizes, number, rows, context)),
        MemoryTerm("kept prefixes", cache_bytes(sizes, number, 1, kept)),
        MemoryTerm("scores", SCORE_BYTES * rows * sizes.vocab_size),
        *forward_parts(sizes, number, tokens, on_gpu),
    )
    parked = ("weights",) if config.syncs_adapters else ()  # else each version replaces them
    loading = _loading(sizes, on_gpu or number != FLOAT)
    return _Model(device, (*arrived, *loading), parked=parked)


def _loading(sizes: ModelSizes, elsewhere: bool) -> Parts:
    """Return the host memory of loading a model in float32, if it is then moved or converted."""
    return (MemoryTerm("while it loads", FLOAT * parameter_count(sizes)),) if elsewhere else ()


def _vllm(config: Config, sizes: ModelSizes, arrived: Parts) -> _Model:
    """On a GPU, vLLM takes its share, which must fit the weights and one full conversation.

    Tensor-parallel parts are separate processes: on a GPU each, or all on the host's CPU.
    """
    vllm, number = config.generator.vllm, served_bytes(config)
    split, context, gpus = vllm.tensor_parallel, config.policy.max_context, config.placement.gpus
    share = min(1.0, gpus("generator"))
    rows = 1 if share else config.generator.max_concurrent + 1
    cache = cache_bytes(sizes, number, rows, context, split)
    if vllm.kv_cache_gb is not None:
        cache = int(vllm.kv_cache_gb * GB)
    batch = BATCH_GPU + context
    device = (
        *weight_parts(sizes, number, split=split),
        MemoryTerm("KV cache", cache),
        *forward_parts(sizes, number, batch // split, bool(share)),
    )
    takes = 0.0 if vllm.kv_cache_gb is not None else vllm.gpu_memory_utilization * share
    if not share and split > 1:
        device = tuple(MemoryTerm(part.what, part.bytes * split) for part in device)
    if config.placement.colocate:
        weights = total(weight_parts(sizes, number))
        arrived += (MemoryTerm(PARKED, weights),)
    workers = split + 1 if split > 1 else 1
    if split > 1:  # files in shared memory, which all workers read
        arrived += (MemoryTerm("copy for vLLM's workers", _arriving(config, sizes)),)
    process = (CUDA_PROCESS if share else VLLM_PROCESS) * workers
    return _Model(device, arrived, takes, process, parked=())


def _sdpo_teacher(config: Config, sizes: ModelSizes) -> _Model:
    copies = 2 if config.sdpo.teacher == "trust_region" else 1
    half = config.teacher_dtype == "bfloat16"
    loading = _loading(sizes, config.placement.sdpo_teacher.gpus > 0 or half)
    if config.sdpo.pulls_weights:
        loading = (MemoryTerm("weights that arrive", _arriving(config, sizes)), *loading)
    return _Model(_frozen(config, sizes, "sdpo_teacher", copies), loading)


def _reference(config: Config, sizes: ModelSizes) -> _Model:
    half = config.trainer.frozen_dtype == "bfloat16"
    loading = _loading(sizes, config.placement.reference.gpus > 0 or half)
    return _Model(_frozen(config, sizes, "reference", 1), loading)


def _frozen(config: Config, sizes: ModelSizes, kind: str, copies: int) -> Parts:
    tokens, on_gpu = config.trainer.microbatch_tokens, config.placement.gpus(kind) > 0
    dtype = config.teacher_dtype if kind == "sdpo_teacher" else config.trainer.frozen_dtype
    return (
        *weight_parts(sizes, number_of(dtype), copies),
        *forward_parts(sizes, number_of(dtype), tokens, on_gpu),
    )


_MODELS: dict[str, Callable[[Config, ModelSizes], _Model]] = {
    "generator": _generator,
    "sdpo_teacher": _sdpo_teacher,
    "reference": _reference,
}


def _gradient_sets(config: Config) -> int:
    """Return how many sets of gradients an update holds: one a channel where it is measured."""
    sections = config.weighted_channels.values()
    bounded = any(one.on and one.is_bounded for one in sections)
    measured = bounded or config.trainer.update_share_every > 0
    shared = sum(one.on for one in sections) - len(config.own_updates)
    return 1 + shared if measured else 1
