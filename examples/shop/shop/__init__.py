"""A stateful task with several tools: buy what the prompt requests."""
