"""Inference servers of others, started here, and the worker in front of them: routing by task beside static routes."""
