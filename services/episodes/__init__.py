"""Rollouts: runs episodes against their ports, with retries."""
