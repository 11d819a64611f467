"""The switchback experiment: how much faster speculation makes a task, measured while the task's traffic runs."""
