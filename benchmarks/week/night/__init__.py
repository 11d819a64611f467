"""A night of minutes with a real worker, and the simulated week's claims about it, real beside simulated."""
