"""The decision how jobs are decoded: evidence, posteriors, expected goodput, exploration and the policy."""
