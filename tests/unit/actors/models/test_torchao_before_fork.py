"""What a fork server imports asks nothing of a GPU, also where torchao is installed."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("torchao")

IMPORTS = """
import sys
import torch

asked = []
torch.version.cuda = "13.0"
there = torch.cuda.is_available = lambda: True
torch.cuda.get_device_capability = lambda *_: asked.append("capability") or (9, 0)
torch.cuda.get_device_properties = lambda *_: asked.append("properties")
import composer_mesh.actors.models.torchao_before_fork
import transformers.quantizers.auto

print("torchao" in sys.modules, asked, torch.cuda.is_available is there)
"""


def test_torchao_asks_for_no_gpu_before_a_fork_and_gpus_are_there_after_it() -> None:
    paths = os.pathsep.join(path for path in sys.path if path)
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-P", "-c", IMPORTS],
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.split(maxsplit=1) == ["True", "[] True\n"]
