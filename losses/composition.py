"""Composition of the three channels. Index of the modules:

`channels` sums computed losses; `harness` computes all three on one model and one batch, for tests
and debugging. The trainer's own step uses only the former.
"""

from composer_mesh.losses.channels import CHANNELS, Composition, compose
from composer_mesh.losses.harness import ComposedLoss, compose_loss

__all__ = ["CHANNELS", "ComposedLoss", "Composition", "compose", "compose_loss"]
