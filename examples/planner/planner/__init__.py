"""Three workflows on questions about numbers: a planner with workers, ReMax, a self-critique."""
