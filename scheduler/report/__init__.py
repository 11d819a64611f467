"""The report: as data, in sentences, as text for a terminal, and as one self-contained page."""
