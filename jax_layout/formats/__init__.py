# SPDX-License-Identifier: Apache-2.0
"""Memory formats: how the elements of a logically NCHW array lie, and who remembers it.

Imports the ground and permute.
"""
