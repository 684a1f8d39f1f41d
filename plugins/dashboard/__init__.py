"""The dashboard: runs, rollouts and comparisons in a browser, or in one HTML file."""
