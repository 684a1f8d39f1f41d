"""OpenEnv: plays environments of its servers, and serves tasks to its clients."""
