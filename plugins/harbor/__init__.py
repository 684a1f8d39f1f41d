"""Harbor tasks: folders with a container, an instruction and a test script."""
