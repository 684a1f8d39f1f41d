"""Channel 3 (teacher replay) in a run: teacher queries, pair refinement and late rewards."""
