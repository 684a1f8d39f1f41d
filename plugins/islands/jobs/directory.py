"""The directory of several islands: `islands.json` and a run directory for each.

DIR/islands.json   the address of the store or lighthouse, and the number of islands
DIR/island-0/ ...  a run directory like any other
DIR/summary.json   over all islands, when they have ended
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from composer_mesh.configs.regular_files import read_regular
from composer_mesh.mesh.open_folder import write_whole
from composer_mesh.services.directory.claim import RunDirectoryError

ISLANDS_FILE = "islands.json"
MOST_BYTES = 1 << 20
MeetBy = Literal["store", "lighthouse"]
"""The key of `[islands]` that says where islands meet."""


@dataclass(frozen=True)
class IslandsDirectory:
    """What `islands.json` says."""

    root: Path
    address: str
    count: int
    by: MeetBy = "store"

    def run(self, rank: int) -> Path:
        """Return the run directory of an island."""
        return self.root / f"island-{rank}"

    @property
    def runs(self) -> list[Path]:
        """The run directories by rank."""
        return [self.run(rank) for rank in range(self.count)]

    def write(self) -> None:
        """Write the file atomically."""
        about = {self.by: self.address, "islands": self.count}
        write_whole(self.root / ISLANDS_FILE, (json.dumps(about, indent=1) + "\n").encode())


def islands_in(root: Path) -> IslandsDirectory | None:
    """Return the islands of a directory; None if it has none.

    Raises RunDirectoryError for a file that is unreadable.
    """
    try:
        about = json.loads(read_regular(root / ISLANDS_FILE, MOST_BYTES))
        by: MeetBy = "lighthouse" if "lighthouse" in about else "store"
        return IslandsDirectory(root, str(about[by]), int(about["islands"]), by)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (KeyError, TypeError, ValueError) as error:
        raise RunDirectoryError(
            f"{root / ISLANDS_FILE} does not say where its islands are ({error!r}): put it back "
            "from a copy, or look at one island's directory"
        ) from None
