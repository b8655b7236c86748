# SPDX-License-Identifier: Apache-2.0
"""Put the code of the ranks, beside this file, and the launcher of tests/comm on the path."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "comm")]
