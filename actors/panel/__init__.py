"""Several teachers behind one budget: panel, ledger, response cache."""
