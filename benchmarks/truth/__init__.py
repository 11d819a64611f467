"""How often the intervals that are shown hold the truth, on simulated jobs whose truth is known."""
