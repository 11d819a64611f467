"""Parts of `alphaloop probes`."""
