"""`python -m composer_mesh`: the command line, for places without the installed script.

`-m` puts the working directory first on the import path; it is taken off before anything else is
imported, so that a file there is not taken for a module. `python -P -m` does not put it there.
"""

import sys

if __name__ == "__main__":
    if not sys.flags.safe_path:
        del sys.path[0]
    from composer_mesh.services.cli import main

    raise SystemExit(main())
