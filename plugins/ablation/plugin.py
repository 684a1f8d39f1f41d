"""What ablation registers: names and import paths, by kind (docs/plugins.md)."""

TABLE = {
    "commands": {
        "ablate": "composer_mesh.plugins.ablation.commands:ablate",
    },
}
