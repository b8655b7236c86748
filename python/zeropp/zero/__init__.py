# SPDX-License-Identifier: Apache-2.0
"""The ZeRO coordinator's Python side: preparing a model, whole values for a while, construction, checkpoints."""
