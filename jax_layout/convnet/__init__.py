# SPDX-License-Identifier: Apache-2.0
"""A convnet's operators, which compute in the memory format that their operands have.

Imports formats, products and what those import; nothing that looks at whole programs.
"""
