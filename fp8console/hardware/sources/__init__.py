"""What the sampler reads: one module a source, each a plain function from a place to a record."""
