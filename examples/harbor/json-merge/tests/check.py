"""The objects are merged at every depth."""

import json
from pathlib import Path

WANTED = {"name": "app", "log": {"level": "debug", "file": "app.log"}, "ports": [9], "on": True}
assert json.loads(Path("/app/merged.json").read_text()) == WANTED
