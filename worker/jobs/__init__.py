"""Jobs between intake and engine: where they wait, and which of them is admitted next."""
