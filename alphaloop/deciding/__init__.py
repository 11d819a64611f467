"""Speculative or vanilla, which drafter, how far ahead, and why: what is remembered, believed, weighed and chosen."""
