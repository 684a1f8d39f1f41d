"""Looking back into a run: its rollouts listed, shown and exported."""
