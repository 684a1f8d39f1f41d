"""What the long tasks register: names and import paths, by kind (docs/plugins.md)."""

_FOLDER = "composer_mesh.plugins.long_tasks"

TABLE = {
    "tasks": {
        "tool_chains": f"{_FOLDER}.tool_chains:ToolChains",
        "home_devices": f"{_FOLDER}.home_devices:HomeDevices",
    },
}
