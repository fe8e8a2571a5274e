# SPDX-License-Identifier: Apache-2.0
"""Attention in one call, and the caches that it reads.

Imports the ground alone.
"""
