"""What the dashboard registers: names and import paths, by kind (docs/plugins.md)."""

TABLE = {
    "commands": {
        "dashboard": "composer_mesh.plugins.dashboard.commands:dashboard",
        "report": "composer_mesh.plugins.dashboard.commands:report",
    },
}
