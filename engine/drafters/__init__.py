"""Drafters: one file a method."""

from __future__ import annotations
