"""For a fork server: a torch that reports a GPU, and CUDA as initialized before the fork."""

import sys
from types import ModuleType, SimpleNamespace

torch = ModuleType("torch")
torch.__dict__["_C"] = SimpleNamespace(_cuda_isInBadFork=lambda: True)
torch.__dict__["cuda"] = SimpleNamespace(device_count=lambda: 1)
sys.modules["torch"] = torch
