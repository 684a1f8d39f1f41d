"""Errors of OpenEnv sessions that are not the agent's; none of them becomes a reward.

ServerFailure          nothing usable comes from the server: an attempt fails, and is made again
+-- ConnectionLost     it cannot be reached, or it closed the connection
+-- ServerTimeout      no answer within a limit
+-- ServerFull         it had no free session within the limit
+-- ProtocolViolation  it answered with what the protocol does not allow
EnvironmentRaised      the environment's own code raised: equal ones set the episode aside
"""

from composer_mesh.tasks.errors import TaskError

LONGEST = 300
"""Characters of a server's text that an error repeats."""


class ServerFailure(TaskError):
    """An OpenEnv server failed; `reason` says how, and what helps."""

    failure_class = "provider"

    def __init__(self, url: str, reason: str) -> None:
        super().__init__(url, reason)
        self.url, self.reason = url, reason

    def __str__(self) -> str:
        return f"OpenEnv server {self.url}: {self.reason}"


class ConnectionLost(ServerFailure):
    """The server cannot be reached, or the connection of a session ended."""


class ServerTimeout(ServerFailure):
    """The server did not answer in time."""


class ServerFull(ServerFailure):
    """The server had no free session in time."""


class ProtocolViolation(ServerFailure):
    """The server sent what the protocol does not allow."""


class EnvironmentRaised(TaskError):
    """An exception of the environment's own code, as its server reported it."""

    def __init__(self, url: str, code: str, message: str) -> None:
        super().__init__(url, code, message)
        self.url, self.code, self.message = url, code, message

    def __str__(self) -> str:
        return f"the environment of {self.url} failed ({self.code}): {self.message}"


def shown(text: object) -> str:
    """Return a server's text in one bounded line without control characters."""
    plain = "".join(one if one.isprintable() else " " for one in str(text)[:LONGEST])
    return " ".join(plain.split())
