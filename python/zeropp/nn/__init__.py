# SPDX-License-Identifier: Apache-2.0
"""Layers: block-sparse attention and its patterns; tiles of large matrices and of long sequences; activations shared out."""

from zeropp.nn.partition import Partition as Partition
from zeropp.nn.partition import partition_activations as partition_activations
from zeropp.nn.sequence import TiledSequence as TiledSequence
from zeropp.nn.sequence import tile_sequence as tile_sequence
from zeropp.nn.sparsity import BigBird as BigBird
from zeropp.nn.sparsity import Dense as Dense
from zeropp.nn.sparsity import Fixed as Fixed
from zeropp.nn.sparsity import Local as Local
from zeropp.nn.sparsity import Longformer as Longformer
from zeropp.nn.sparsity import Pattern as Pattern
from zeropp.nn.sparsity import SparseAttention as SparseAttention
from zeropp.nn.sparsity import Variable as Variable
from zeropp.nn.tiled_linear import TiledLinear as TiledLinear
from zeropp.nn.tiled_linear import tile_linears as tile_linears
from zeropp.nn.tiling import tiled_call as tiled_call
from zeropp.nn.tiling import tiled_cross_entropy as tiled_cross_entropy

__all__ = [
    "BigBird", "Dense", "Fixed", "Local", "Longformer", "Partition", "Pattern", "SparseAttention", "TiledLinear",
    "TiledSequence", "Variable", "partition_activations", "tile_linears", "tile_sequence", "tiled_call", "tiled_cross_entropy",
]  # fmt: skip
