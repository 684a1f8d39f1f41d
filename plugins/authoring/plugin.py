"""What authors of tasks get: names and import paths, by kind (docs/plugins.md)."""

_COMMANDS = "composer_mesh.plugins.authoring.commands"

TABLE = {
    "commands": {
        "new-task": f"{_COMMANDS}:new_task",
        "play": f"{_COMMANDS}:play",
    },
}
