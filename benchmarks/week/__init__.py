"""A simulated week: jobs with deadlines under production's admission, without slack, first come, and clairvoyant."""
