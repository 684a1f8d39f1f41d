"""Rollouts: one episode played against its ports, and again where that fails."""
