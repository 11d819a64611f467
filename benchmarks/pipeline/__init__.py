"""The worker as a pipeline, with an engine that answers at once, beside three peers on one broker and one Postgres."""
