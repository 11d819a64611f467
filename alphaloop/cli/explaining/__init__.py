"""How an explanation is shown on a terminal."""
