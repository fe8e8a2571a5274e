# SPDX-License-Identifier: Apache-2.0
"""What jax_layout does, in a minute: `python -m examples.demo`."""

import sys

from examples import digits, images, permutes

if __name__ == "__main__":
    sys.exit(permutes.main([]) or images.main([]) or digits.main())
