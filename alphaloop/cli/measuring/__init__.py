"""What `alphaloop measure` found, as it is shown."""
