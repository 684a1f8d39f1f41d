"""Every colour is a color, and nothing else has changed."""

from pathlib import Path

WANTED = {
    "a.md": "the color of a colorful bird\n",
    "b.md": "no word to change\n",
    "c.md": "Colour stays, color goes\n",
}
FOUND = {one.name: one.read_text() for one in Path("/app/notes").iterdir()}
assert FOUND == WANTED, FOUND
