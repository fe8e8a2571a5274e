# SPDX-License-Identifier: Apache-2.0
"""Measures tables of choices.

Imports the package as a user does, and `choices`, which reads what is written here.
"""
