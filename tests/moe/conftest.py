# SPDX-License-Identifier: Apache-2.0
"""Put the modules beside this file on the path."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
