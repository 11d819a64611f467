"""The engines that benchmarks/decode.py compares: one process each, all loaded, one at work at a time."""
