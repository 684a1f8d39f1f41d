"""Half a run: its trainer alone on stored rollouts, or its generators alone."""
