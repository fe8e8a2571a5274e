# SPDX-License-Identifier: Apache-2.0
"""Times linear layers, forward and backward: `python -m benchmarks.linear --help`."""

import functools
import sys

from benchmarks import profiles
from benchmarks.gemm import main

if __name__ == "__main__":
    groups = "linear", "stacked", "looped", "little", "transposed"
    run = functools.partial(main, name="linear", groups=groups)
    sys.exit(profiles.start(run))
