# SPDX-License-Identifier: Apache-2.0
"""Whole functions, looked at: what moves, what ran, what would help.

Imports any room; only the command line and the package itself import it.
"""
