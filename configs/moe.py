"""Mixtures of experts in the trainer: precision of routers, balance of experts, router replay."""

from composer_mesh.configs.base import CountOrZero, NotNegative, Section


class MoeConfig(Section):
    """How a mixture of experts is trained; nothing of it concerns dense models."""

    router_float32: bool = True
    """Whether routers compute their logits in float32 where the rest is in bfloat16, in the trainer
    and in the embedded engine."""

    load_balancing: NotNegative = 0.0
    """Weight of the auxiliary loss that spreads tokens over experts, 1 for each layer in which all
    are equally busy."""

    router_replay: bool = False
    """Whether the policy loss is computed with the experts that the engine chose when it sampled,
    which travel with the rollouts: a byte for each layer and expert of a token."""

    compare_every: CountOrZero = 0
    """Steps between measurements of the mismatch without router replay, each a forward over the
    step's rollouts; 0 for none."""
