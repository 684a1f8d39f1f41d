"""What islands registers: names and import paths, by kind (docs/plugins.md)."""

TABLE = {
    "commands": {
        "islands": "composer_mesh.plugins.islands.commands:islands",
        "island-job": "composer_mesh.plugins.islands.commands:island_job",
    },
    "step_hooks": {
        "islands": "composer_mesh.plugins.islands.learner:LearnerIsland",
    },
    "checks": {
        "islands": "composer_mesh.plugins.islands.rounds.torchft_rules:check_torchft",
    },
    "trees": {
        "islands": "composer_mesh.plugins.islands.commands:tree_of",
    },
}
