"""How the actors work together: the controller, the run store, the command line."""
