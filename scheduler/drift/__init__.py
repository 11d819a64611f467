"""The drift test of traffic: its memory, its mathematics, its life from job to job, and a run over all streams."""
