"""Multi-turn tasks of the Berkeley Function Calling Leaderboard, without its executor."""
