# SPDX-License-Identifier: Apache-2.0
"""Products of arrays: one contraction, gemm_p, and what is made of it.

Imports the ground and permute; formats know nothing of products, nor these of them.
"""
