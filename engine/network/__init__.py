"""Models as functions of the slot cache: their layers, their passes, their keys and values."""
