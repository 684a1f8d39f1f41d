"""What the core registers: names and import paths, as in `plugins/NAME/plugin.py`."""

_COMMANDS = "composer_mesh.services.commands"

TABLE = {
    "commands": {
        "check": f"{_COMMANDS}.training:check",
        "explain": f"{_COMMANDS}.explain:explain",
        "verify": f"{_COMMANDS}.inspection:verify",
        "train": f"{_COMMANDS}.training:train",
        "sft": f"{_COMMANDS}.training:sft",
        "new-task": f"{_COMMANDS}.tasks:new_task",
        "play": f"{_COMMANDS}.tasks:play",
        "eval": f"{_COMMANDS}.evaluation:evaluate",
        "launch": f"{_COMMANDS}.clusters:launch",
        "push": f"{_COMMANDS}.push:push",
        "worker": f"{_COMMANDS}.clusters:worker",
        "stop": f"{_COMMANDS}.clusters:stop",
        "join": f"{_COMMANDS}.clusters:join",
        "replay": f"{_COMMANDS}.inspection:replay",
        "traces": f"{_COMMANDS}.inspection:traces",
        "reward": f"{_COMMANDS}.inspection:reward",
        "events": f"{_COMMANDS}.inspection:events",
        "scale": f"{_COMMANDS}.inspection:scale",
        "tree": f"{_COMMANDS}.inspection:tree",
        "stacks": f"{_COMMANDS}.inspection:stacks",
        "query": f"{_COMMANDS}.inspection:query",
        "tui": f"{_COMMANDS}.inspection:tui",
    },
    "tasks": {
        "toolbox": "composer_mesh.tasks.toolbox:ToolboxTask",
        "gsm8k": "composer_mesh.tasks.gsm8k:Gsm8kTask",
    },
    "channels": {
        "echo": "composer_mesh.channels.echo:Echo",
    },
    "engines": {
        "embedded": "composer_mesh.actors.engines.embedded:start",
        "vllm": "composer_mesh.actors.engines.vllm_start:start",
    },
    "launchers": {
        "local": "composer_mesh.services.launch.by_ssh:HostsLauncher",
        "hosts": "composer_mesh.services.launch.by_ssh:HostsLauncher",
    },
}
