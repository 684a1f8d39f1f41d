"""What a command was given, refused before anything is started."""
