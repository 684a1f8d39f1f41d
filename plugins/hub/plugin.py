"""What models of a hub register: names and import paths, by kind (docs/plugins.md)."""

TABLE = {
    "commands": {
        "push": "composer_mesh.plugins.hub.push:push",
    },
}
