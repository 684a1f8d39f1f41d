"""`composer-mesh push`: checkpoints of runs become models of a hub (docs/hub.md)."""
