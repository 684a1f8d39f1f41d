"""What the tools of MCP servers register: names and import paths, by kind (docs/plugins.md)."""

TABLE = {
    "tool_servers": {
        "mcp": "composer_mesh.plugins.mcp.servers:McpServers",
    },
}
