# SPDX-License-Identifier: Apache-2.0
"""Files and folders: safetensors files, the operations on a disk, scratch files, measured settings of a device."""
