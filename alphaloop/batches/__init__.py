"""Batch files in OpenAI's form: their lines as jobs, and what became of them as output and error files."""
