"""Installs the torch of torch.txt into this Python, in the build that fits the machine.

    python install_torch.py [PIP ARGUMENT ...]

The default build for Linux brings 2.5 GB of CUDA. Without arguments and without a GPU, a CPU build
is installed on Linux if the configured indexes offer one; where PyPI is the index, PyTorch's own
index of CPU builds is tried too. torch comes alone, so that this index never serves another
package. An index that does not answer at once is passed over, for the default build.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PINNED = Path(__file__).with_name("torch.txt")
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
GPU_DEVICES = ("nvidia[0-9]*", "nvidiactl", "kfd", "dxg")
"""Files in /dev of NVIDIA's driver, AMD's, and the GPUs that Windows lends to its Linux."""
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")
AT_ONCE = ("--retries", "0", "--timeout", "10")


def main(arguments: Sequence[str], devices: str = "/dev") -> int:
    """Return pip's exit status."""
    (pinned,) = (one for one in PINNED.read_text().splitlines() if one.startswith("torch=="))
    number = pinned.removeprefix("torch==")
    if not arguments and not installed(number) and sys.platform == "linux" and not gpus(devices):
        index = cpu_index(number)
        if index is not None:
            note = (
                f"No GPU is found: installing torch {number}+cpu; TORCH_ARGS chooses another build"
            )
            sys.stdout.write(f"{note}\n")
            sys.stdout.flush()
            done = pip("install", "--no-compile", "--no-deps", *index, f"{pinned}+cpu")
            if done != 0:
                return done
    return pip("install", "--no-compile", *arguments, pinned)


def installed(number: str) -> bool:
    """Whether some build of this version is installed."""
    try:
        return version("torch").partition("+")[0] == number
    except PackageNotFoundError:
        return False


def gpus(devices: str) -> bool:
    """Whether a driver of GPUs has a file in a folder of devices."""
    return any(any(Path(devices).glob(name)) for name in GPU_DEVICES)


def cpu_index(number: str) -> Sequence[str] | None:
    """Return pip's arguments for an index with a CPU build; None if no index has one."""
    if offers(number):
        return ()
    configured = pip_says("config", "list")
    pypi = ("--index-url", CPU_INDEX)
    if re.search(r"\.(index-url|no-index)=", configured) is None and offers(number, *pypi):
        return pypi
    return None


def offers(number: str, *index: str) -> bool:
    """Whether the configured indexes, or another one, have a CPU build for this Python."""
    lines = pip_says("index", "versions", "torch", *AT_ONCE, *index).splitlines()
    found = [line for line in lines if line.startswith("Available versions:")]
    return f"{number}+cpu" in " ".join(found).replace(",", " ").split()


def pip_says(*arguments: str) -> str:
    """Return the output of pip; empty if it failed."""
    done = subprocess.run([*PIP, *arguments], capture_output=True, text=True, check=False)
    return done.stdout if done.returncode == 0 else ""


def pip(*arguments: str) -> int:
    """Run pip; returns its exit status."""
    return subprocess.run([*PIP, *arguments], check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
