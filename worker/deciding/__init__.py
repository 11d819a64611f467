"""The worker's decisions about drafting, and their evidence."""
