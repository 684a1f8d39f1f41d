"""Where the repository is, for tests that read its presets, documents or sources."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
