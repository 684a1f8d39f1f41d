"""`composer-mesh serve-env`: a task as an OpenEnv server, whose tools are an MCP server too."""
