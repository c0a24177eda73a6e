"""Numbers of few bits."""
