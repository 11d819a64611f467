"""Do all screens show one figure, and is it the one that forced runs measure."""
