"""What islands registers: names and import paths, by kind (docs/plugins.md)."""

TABLE = {
    "commands": {
        "islands": "composer_mesh.plugins.islands.commands:islands",
        "island-job": "composer_mesh.plugins.islands.commands:island_job",
    },
}
