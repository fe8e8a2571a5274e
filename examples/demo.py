# SPDX-License-Identifier: Apache-2.0
"""What jax_layout does, in a minute: `python -m examples.demo`."""

import sys

from examples import digits, images, one_line, permutes

if __name__ == "__main__":
    sys.exit(one_line.main() or permutes.main([]) or images.main([]) or digits.main())
