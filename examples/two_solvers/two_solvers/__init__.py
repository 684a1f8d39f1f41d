"""Workflows: two agents in one episode, a greedy baseline, and a self-critique."""
