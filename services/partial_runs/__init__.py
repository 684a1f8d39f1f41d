"""Partial runs: a trainer alone on stored rollouts, or generators alone."""
