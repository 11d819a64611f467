"""`python -m alphaloop.cli`, for where the console script is not on the PATH."""

from __future__ import annotations

from alphaloop.cli import main

main()
