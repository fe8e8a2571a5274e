"""Benchmarks of jax_layout and its peers; see README.md."""
