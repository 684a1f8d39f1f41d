"""The handle of a teacher signal: where its hidden states lie, and which weights made them.

Only the message; making and using signals is the actors' work.
"""

from dataclasses import dataclass

from composer_mesh.mesh.transport import BufferHandle


@dataclass(frozen=True)
class SignalHandle:
    """Teacher's last hidden states `[tokens, hidden size]`: a row for each target of the views.

    The head of the same version makes them logits.
    """

    version: int
    tokens: int
    buffer: BufferHandle
