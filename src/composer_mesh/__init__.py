"""Composer Mesh: a training service for agentic language models on Monarch.

The parts are the sub-packages; nothing is imported here, so that reading a config
never loads torch or Monarch.
"""
