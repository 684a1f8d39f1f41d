"""Half of the reward is for whole records, and half for their order."""

import json
from pathlib import Path

PEOPLE = [{"name": "Abe", "age": 29}, {"name": "Mia", "age": 35}, {"name": "Eva", "age": 41}]
try:
    found = json.loads(Path("/app/sorted.json").read_text())
    whole = sorted(found, key=lambda one: one["age"]) == PEOPLE
except (OSError, ValueError, TypeError, KeyError):
    found, whole = None, False
rewards = {"reward": (whole + (found == PEOPLE)) / 2, "whole": whole}
Path("/logs/verifier/reward.json").write_text(json.dumps(rewards))
