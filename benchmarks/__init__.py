# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of jax_layout and its peers; see README.md."""
