"""What OpenEnv registers: names and import paths, by kind (docs/plugins.md)."""

TABLE = {
    "commands": {
        "serve-env": "composer_mesh.plugins.openenv.commands:serve_env",
    },
    "reward_servers": {
        "openenv": "composer_mesh.plugins.openenv.commands:follow_rewards",
    },
    "tasks": {
        "openenv": "composer_mesh.plugins.openenv.client.task:OpenEnvTask",
    },
}
