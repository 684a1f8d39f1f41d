"""Environments of OpenEnv servers as tasks: the wire format, the client and the task."""
