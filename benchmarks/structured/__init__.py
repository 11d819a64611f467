"""Structured output, measured: how fast constrained decoding is, and whether what it writes is right."""
