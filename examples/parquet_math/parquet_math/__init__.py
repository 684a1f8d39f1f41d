"""Single-turn arithmetic with rows from a Parquet file."""
