"""The page on checkpoints shows the settings and files that are, and names what exists."""

from __future__ import annotations

import re

from guides import Guide

from composer_mesh.actors.checkpoints.folder import FOLDER
from composer_mesh.actors.checkpoints.manifest import MANIFEST_FILE
from composer_mesh.actors.checkpoints.state import SHARDS, TRAINING_FILE
from composer_mesh.actors.checkpoints.teacher_average import AVERAGE_FILE
from composer_mesh.configs.trainer import TrainerConfig

PAGE = Guide.read("checkpoints.md")
ROWS = dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \|", PAGE.text, re.MULTILINE))


def test_each_setting_stands_there_with_its_default() -> None:
    for name in TrainerConfig.model_fields:
        if name.startswith("checkpoint"):
            assert ROWS[name].strip() == str(getattr(TrainerConfig(), name)).lower()


def test_the_files_are_called_as_they_are() -> None:
    for name in (SHARDS, TRAINING_FILE, AVERAGE_FILE, MANIFEST_FILE, FOLDER, "quarantine/"):
        assert name in PAGE.text
