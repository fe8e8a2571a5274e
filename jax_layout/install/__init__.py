# SPDX-License-Identifier: Apache-2.0
"""Kernels of ours as the lowerings of jax's own primitives: programs stay as they are.

Imports the operators and, of optimize, what is known of XLA; cli and tune import it.
"""
