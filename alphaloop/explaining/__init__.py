"""How a task is decoded and why: what `alphaloop explain` and the console show."""
