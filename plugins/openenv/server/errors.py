"""Why a request of a client was not served, as its error frame says it."""

from __future__ import annotations

from typing import Any

from composer_mesh.plugins.openenv.client.wire import ErrorCode


class Refused(Exception):
    """A request that is not served; with `ends` its session is over."""

    def __init__(self, code: ErrorCode, text: str, ends: bool = False, **more: Any) -> None:
        super().__init__(code, text, ends, more)
        self.code, self.text, self.ends, self.more = code, text, ends, more

    @property
    def data(self) -> dict[str, Any]:
        """The error as the data of an error frame."""
        return {"message": self.text, "code": self.code.value, **self.more}


def capacity_reached(active: int, most: int) -> Refused:
    """Return the error for a client that comes when all sessions are taken."""
    text = f"{active} of {most} sessions are open: come back later"
    more = {"active_sessions": active, "max_sessions": most}
    return Refused(ErrorCode.CAPACITY_REACHED, text, True, **more)


def invalid(text: str) -> Refused:
    """Return the error for a request that its sender has to change."""
    return Refused(ErrorCode.VALIDATION_ERROR, text)
