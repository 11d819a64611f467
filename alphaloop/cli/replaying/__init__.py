"""The replay of `alphaloop replay`, and its screens."""
