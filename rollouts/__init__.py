"""Rollout logic without processes or Monarch: episodes, traces, hints, alignment, windows."""
