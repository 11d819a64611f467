"""What rounds cost: calibrated, learned from rounds and requests, stored."""
