"""What a round costs on this device: calibrated, corrected by real rounds, stored."""
