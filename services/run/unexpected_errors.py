"""What a run says of an error that no part of it has worded."""

import errno
import traceback
from pathlib import Path

from composer_mesh.services.store.writing import disk_error

OF_DISKS = frozenset(
    (errno.EACCES, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ENOSPC, errno.EPERM, errno.EROFS)
)
"""Errors of a disk that is full, forbidden or broken, whoever writes to it."""


def unexpected(error: Exception, root: Path) -> str:
    """Return one line for a disk that does not take what a run writes, else the traceback."""
    if isinstance(error, OSError) and error.errno in OF_DISKS:
        return str(disk_error(root, error))
    return "".join(traceback.format_exception(error)).rstrip()
