"""Products on the core: each one a folder with a table `plugin.py` of what it registers."""
