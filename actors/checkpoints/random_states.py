"""Where a process stands in its random numbers, as JSON: Python's, NumPy's, torch's.

The losses here draw none; dropout of adapters and custom functions do. NumPy's is that of its
global functions; a generator that a custom function made for itself is its own business.
"""

import base64
import random
from typing import Any

import numpy as np
import torch
from torch import Tensor


def random_states(device: torch.device) -> dict[str, Any]:
    """Where everything stands now, on the CPU and on one device."""
    version, numbers, gauss = random.getstate()
    kind, keys, *rest = np.random.get_state(legacy=True)
    return {
        "python": [version, list(numbers), gauss],
        "numpy": [kind, [int(key) for key in keys], *rest],
        "torch": _text(torch.get_rng_state()),
        "cuda": _text(torch.cuda.get_rng_state(device)) if device.type == "cuda" else None,
    }


def restore_random_states(states: dict[str, Any], device: torch.device) -> None:
    """Go on from what `random_states` gave; a device that it had not keeps its own."""
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers), gauss))
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(_tensor(states["torch"]))
    if states["cuda"] is not None and device.type == "cuda":
        torch.cuda.set_rng_state(_tensor(states["cuda"]), device)


def _text(state: Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _tensor(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
