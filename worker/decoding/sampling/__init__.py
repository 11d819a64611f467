"""How tokens are chosen: scores, distributions, randomness."""
