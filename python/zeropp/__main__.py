# SPDX-License-Identifier: Apache-2.0
"""``python -m zeropp``: the command line."""

from __future__ import annotations

import sys

from zeropp.cli import main

if __name__ == "__main__":
    sys.exit(main())
