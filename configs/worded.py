"""Exceptions whose text is a template of their arguments.

They take positional arguments alone, so that they can be pickled and cross a mesh.
"""

from typing import Any, ClassVar


class Worded:
    """Gives an exception class the text `message`, filled with its arguments by their number."""

    args: tuple[Any, ...]
    message: ClassVar[str]

    def __str__(self) -> str:
        return self.message.format(*self.args)
