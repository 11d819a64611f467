"""The decision problem, simulated: streams with known acceptance, rules that decide, and an oracle that knows."""
