"""What became of jobs, read from Kafka and the database: their results, refusals, and texts while they grow."""
