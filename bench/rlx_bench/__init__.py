"""Benchmarks against other engines: one subprocess per engine, rounds interleaved, outputs compared."""
