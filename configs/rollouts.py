"""The section `[rollouts]`: the actors that play episodes."""

from pydantic import Field

from composer_mesh.configs.base import FreeTable, ImportPath, Processes, Seconds, Section


class RolloutsConfig(Section):
    """The actors that play episodes: they render chats, tokenize and call generators and
    environments."""

    workers: Processes | None = None
    """Number of rollout workers; by default one for every 256 episodes in flight, 16 at most."""

    workflow: ImportPath | None = None
    """A workflow class of your own, as "my_package.my_module:MyWorkflow" or
    "my_file.py:MyWorkflow"; by default one agent acts until its session ends."""

    options: FreeTable = Field(default_factory=dict)
    """Keyword arguments of your workflow's class."""

    workflow_s: Seconds = 3600.0
    """Seconds that a workflow may take for one episode."""
