# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's interface over the same core: ``zeropp.initialize``, and its names (:mod:`zeropp.deepspeed.names`)."""
