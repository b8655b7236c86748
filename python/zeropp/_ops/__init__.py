# SPDX-License-Identifier: Apache-2.0
"""Doors and fake kernels of operators, one file an area; ``zeropp.ops`` gathers them."""
