"""The stages of a refresh: capture prompts, train, judge against the parent, keep the files."""
