"""The whole of alphaloop, Kafka to Kafka, beside its own engine, an earlier commit and vLLM."""
