"""The handle of a teacher signal: where its logits lie, and which weights made them.

Only the message; making and using signals is the actors' work.
"""

from dataclasses import dataclass

from composer_mesh.mesh.transport import BufferHandle


@dataclass(frozen=True)
class SignalHandle:
    """Teacher logits `[tokens, vocabulary]`, float32: a row for each target of the views."""

    version: int
    tokens: int
    buffer: BufferHandle
