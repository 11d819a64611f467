"""The order of waiting jobs: shares of the device, bands of priority and slack inside a segment, shared prefixes."""
