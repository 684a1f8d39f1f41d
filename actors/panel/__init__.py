"""Several teachers behind one budget: panel, ledger, kept answers."""
