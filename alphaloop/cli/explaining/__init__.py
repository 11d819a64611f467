"""What `alphaloop explain` finds, and how it is shown."""
