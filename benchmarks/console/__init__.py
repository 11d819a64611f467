"""The console with a thousand tasks and many jobs: how long its pages take, and what they look like."""
