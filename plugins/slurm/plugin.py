"""What Slurm registers: names and import paths, by kind (docs/plugins.md)."""

TABLE = {
    "launchers": {
        "slurm": "composer_mesh.plugins.slurm.launcher:SlurmLauncher",
    },
}
