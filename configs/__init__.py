"""What a run is: the schema, the loader and the presets. Neither torch nor Monarch."""
