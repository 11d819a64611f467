"""The life of a job: waiting, claimed, decoded, recorded, published."""
