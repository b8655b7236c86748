# SPDX-License-Identifier: Apache-2.0
"""Layers over the operators of zeropp: block-sparse attention and its patterns."""

from zeropp.nn.sparse_attention import SparseAttention as SparseAttention
from zeropp.nn.sparsity import BigBird as BigBird
from zeropp.nn.sparsity import Dense as Dense
from zeropp.nn.sparsity import Fixed as Fixed
from zeropp.nn.sparsity import Local as Local
from zeropp.nn.sparsity import Longformer as Longformer
from zeropp.nn.sparsity import Pattern as Pattern
from zeropp.nn.sparsity import Variable as Variable

__all__ = ["BigBird", "Dense", "Fixed", "Local", "Longformer", "Pattern", "SparseAttention", "Variable"]
