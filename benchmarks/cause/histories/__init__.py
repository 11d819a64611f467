"""Histories of two weeks, drawn anew for every seed: the faults that a review has found, and more."""
