"""Probes: their jobs, and how they are sent."""
