"""Why acceptance moved: probes compared setup by setup, and one of seven causes named from the evidence."""
