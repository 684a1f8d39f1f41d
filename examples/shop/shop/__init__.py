"""A stateful task with several tools: buy what is asked for."""
