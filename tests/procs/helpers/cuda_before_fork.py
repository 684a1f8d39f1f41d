"""For a fork server: a torch by whose word CUDA was initialized before the fork."""

import sys
from types import ModuleType, SimpleNamespace

torch = ModuleType("torch")
torch.__dict__["_C"] = SimpleNamespace(_cuda_isInBadFork=lambda: True)
sys.modules["torch"] = torch
