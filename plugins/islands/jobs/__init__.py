"""`composer-mesh islands`: several runs of one config that average their weights."""
