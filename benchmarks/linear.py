# SPDX-License-Identifier: Apache-2.0
"""Times linear layers, forward and backward: `python -m benchmarks.linear --help`."""

import sys

from benchmarks.gemm import main

if __name__ == "__main__":
    sys.exit(main(name="linear", groups=("linear",)))
