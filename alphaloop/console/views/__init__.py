"""The views: each reads what one page shows."""
