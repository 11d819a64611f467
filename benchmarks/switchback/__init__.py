"""The switchback experiment on simulated traffic whose true speed-up is known."""
