"""For authors of tasks: a new package from files in `template`, and an episode in the terminal."""
