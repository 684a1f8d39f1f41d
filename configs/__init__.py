"""Configuration of a run: schema, loader and presets. Imports neither torch nor Monarch."""
