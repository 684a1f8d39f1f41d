"""What Harbor tasks register: names and import paths, by kind (docs/plugins.md)."""

TABLE = {
    "tasks": {
        "harbor": "composer_mesh.plugins.harbor.task:HarborTask",
    },
    "sandboxes": {
        "containers": "composer_mesh.plugins.harbor.containers.opening:open_containers",
    },
}
