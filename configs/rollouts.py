"""The section `[rollouts]`: the actors that play episodes."""

from composer_mesh.configs.base import Processes, Section


class RolloutsConfig(Section):
    """The actors that play episodes: they render chats, tokenize and call generators and
    environments."""

    workers: Processes | None = None
    """Number of rollout workers; by default one for every 256 episodes in flight, 32 at most."""
