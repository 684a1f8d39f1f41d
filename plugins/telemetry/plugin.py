"""What telemetry registers: names and import paths, by kind (docs/plugins.md)."""

_FOLDER = "composer_mesh.plugins.telemetry"

TABLE = {
    "commands": {
        "query": f"{_FOLDER}.command:query",
    },
    "telemetry": {
        "monarch": f"{_FOLDER}.start:start_telemetry",
    },
}
