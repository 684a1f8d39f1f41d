"""What the Tinker service registers: names and import paths, by kind (docs/plugins.md)."""

TABLE = {
    "commands": {
        "serve": "composer_mesh.plugins.tinker.commands:serve",
    },
}
