"""Which probes are due, what they would cost, and which of them a run sends."""
