"""Results of a client's forward: log-probs, and losses by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from composer_mesh.plugins.tinker.models.messages import Shape, TrainResult

TOTAL = "loss:sum"
"""SDKs add up the metrics of several requests whose names end so."""


def metrics_of(total: Tensor, channels: Mapping[str, Tensor]) -> dict[str, float]:
    """Return a loss, and those of its channels, by the names that clients read."""
    own = {f"loss/{name}:sum": float(loss) for name, loss in channels.items()}
    return {TOTAL: float(total.detach()), **own}


def joined(parts: Sequence[TrainResult], shape: Shape) -> TrainResult:
    """Return the results of a call's microbatches as one."""
    logprobs = tuple(one for part in parts for one in part.logprobs)
    names = dict.fromkeys(name for part in parts for name in part.metrics)
    metrics = {name: sum(part.metrics.get(name, 0.0) for part in parts) for name in names}
    return TrainResult(logprobs, metrics, shape)
