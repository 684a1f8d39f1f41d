"""`composer-mesh play`: an episode of a task in the terminal."""
