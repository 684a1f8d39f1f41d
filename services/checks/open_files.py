"""Whether this process may open as many files as a command needs, before anything is started."""

from __future__ import annotations

import resource

from composer_mesh.services.checks.accepting import UsageError

NEEDED = 256
"""Files of a command that starts actors or opens several runs: stores, logs and connections."""


def allow_open_files(command: str) -> None:
    """Raise the limit of this process and its children to `NEEDED`, unless it is higher.

    Raises `UsageError` where the system allows fewer.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    if soft == unlimited or soft >= NEEDED:
        return
    if hard != unlimited and hard < NEEDED:
        raise UsageError(
            f"{command} needs {NEEDED} open files, but this shell allows {hard}: raise it with "
            f"`ulimit -n {NEEDED}`, or in the limits of the service or the container"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (NEEDED, hard))
