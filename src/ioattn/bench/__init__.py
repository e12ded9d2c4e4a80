"""Benchmarks: the table of named cases, an alternating timer, and peers that compute the same thing."""
