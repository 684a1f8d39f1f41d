"""What OpenEnv registers: names and import paths, by kind (docs/plugins.md)."""

TABLE = {
    "commands": {
        "serve-env": "composer_mesh.plugins.openenv.commands:serve_env",
    },
    "tasks": {
        "openenv": "composer_mesh.tasks.openenv.task:OpenEnvTask",
    },
}
