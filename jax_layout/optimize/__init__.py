# SPDX-License-Identifier: Apache-2.0
"""Whole functions, rewritten: formats planned for every value of a jaxpr.

Imports the operators that it writes into a program; nothing that reports on one.
"""
