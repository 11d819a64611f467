"""Claim check: content that is too large for Kafka lies in a folder or an object store, and messages refer to it."""
