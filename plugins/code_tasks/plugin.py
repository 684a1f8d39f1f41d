"""What code tasks registers: names and import paths, by kind (docs/plugins.md)."""

TABLE = {
    "commands": {
        "make-code-tasks": "composer_mesh.plugins.code_tasks.commands:make_code_tasks",
    },
    "tasks": {
        "code": "composer_mesh.plugins.code_tasks.task:CodeTask",
        "one_liners": "composer_mesh.plugins.code_tasks.one_liners:OneLiners",
    },
}
