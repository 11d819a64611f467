"""Bodies of requests as the libraries that people use build them."""
