"""Factory of the task that a config names."""

from composer_mesh.configs.schema import Config
from composer_mesh.rollouts.gsm8k import Gsm8kTask
from composer_mesh.rollouts.tasks import Task
from composer_mesh.rollouts.toolbox import ToolboxTask


def make_task(config: Config) -> Task:
    """Create the configured task; loader errors on bad data propagate."""
    environment = config.environment
    if config.data.kind == "toolbox":
        return ToolboxTask(config.run.seed, environment.max_turns, environment.tool_error_penalty)
    return Gsm8kTask.from_config(config.data, environment)
