"""Which drafted tokens stay: pure tensors, no model."""
