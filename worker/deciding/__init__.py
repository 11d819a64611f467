"""What the worker knows and decides about drafting."""
