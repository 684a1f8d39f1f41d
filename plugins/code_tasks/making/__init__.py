"""Makes coding tasks of a package: what can be deleted, which tests reach it, and the proof."""
