"""What `alphaloop replay` goes through, and how it is shown."""
