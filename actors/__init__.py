"""What lives in a process. An actor never holds another actor's handle."""
