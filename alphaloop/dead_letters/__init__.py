"""Dead letters as an operator handles them: read, chosen, sent again, deleted."""
