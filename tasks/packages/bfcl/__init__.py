"""Multi-turn function calling of the Berkeley Function Calling Leaderboard, without its executor."""
