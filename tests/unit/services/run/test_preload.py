"""What fork servers import before the first fork."""

import subprocess
import sys

from composer_mesh.services.run.preload import PRELOAD


def test_nothing_that_is_imported_before_a_fork_imports_monarch() -> None:
    code = (
        "import importlib, sys; "
        "[importlib.import_module(name) for name in sys.argv[1:]]; "
        "sys.exit('monarch' in sys.modules)"
    )
    command = [sys.executable, "-c", code, *PRELOAD]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
