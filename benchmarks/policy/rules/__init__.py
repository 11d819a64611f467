"""The rules that are compared: ours and those it has to beat."""
