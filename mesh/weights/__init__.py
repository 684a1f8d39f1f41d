"""Versioned weights: how they lie in memory, who offers them, and who takes them over."""
