# SPDX-License-Identifier: Apache-2.0
"""Who is timed, one module per library.

Each module has `contenders(case, buffers, device)`, which returns [] where its
library is missing and raises `Unsupported` where the library cannot do the case.
"""


class Unsupported(Exception):
    """A library is there, but cannot do a case; the message says why."""
