"""How models write tool calls: one format a family, each read strictly and written alike."""
