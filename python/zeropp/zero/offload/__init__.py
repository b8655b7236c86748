# SPDX-License-Identifier: Apache-2.0
"""State that lives outside device memory: optimizer states, parameters, gradients and activations on other tiers."""
