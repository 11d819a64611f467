"""Whether a draft model fits a target."""
