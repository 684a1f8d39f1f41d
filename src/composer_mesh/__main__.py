"""`python -m composer_mesh`: the command line, for places without the installed script."""

from composer_mesh.services.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
