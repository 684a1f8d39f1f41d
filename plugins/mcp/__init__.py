"""Clients of MCP servers: their tools, calls and processes. Needs the extra `mcp`."""
