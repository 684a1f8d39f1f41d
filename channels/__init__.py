"""Channels: the parts of a step's loss, and the one function that adds them up.

Knows neither actors nor Monarch. Each channel has its own normalizer, metrics, weight and bounds.
"""
