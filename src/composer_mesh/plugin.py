"""What the core registers: names and import paths, as in `plugins/NAME/plugin.py`."""

_COMMANDS = "composer_mesh.services.commands"

TABLE = {
    "commands": {
        "check": f"{_COMMANDS}.training:check",
        "verify": f"{_COMMANDS}.inspection:verify",
        "train": f"{_COMMANDS}.training:train",
        "new-task": f"{_COMMANDS}.tasks:new_task",
        "play": f"{_COMMANDS}.tasks:play",
        "eval": f"{_COMMANDS}.evaluation:evaluate",
        "launch": f"{_COMMANDS}.clusters:launch",
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
}
