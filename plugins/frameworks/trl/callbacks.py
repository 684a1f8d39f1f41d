"""Callbacks of TRL's trainer with three channels. Needs the extra `trl`."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from composer_mesh.plugins.frameworks.trl.pairs import PairSource


class ClosesPairs(TrainerCallback):
    """Closes a source of pairs at the end of training."""

    def __init__(self, pairs: PairSource) -> None:
        self._pairs = pairs

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self._pairs.close()
