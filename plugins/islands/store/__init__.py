"""Objects that are written once and read by many, in a folder or in a cloud's object store."""
