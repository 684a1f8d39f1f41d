"""Composer Mesh: a training service for agentic language models on Monarch.

The parts are the sub-packages; nothing is imported here, so that reading a config
never loads torch or Monarch.
"""

import os

# Monarch opens its log when it is imported, at a path that others could predict (mesh.monarch_log).
os.environ.setdefault("MONARCH_LOG_SUFFIX", os.urandom(16).hex())
