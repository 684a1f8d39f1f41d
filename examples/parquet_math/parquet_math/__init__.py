"""Single-turn questions about numbers, with rows from a Parquet file."""
