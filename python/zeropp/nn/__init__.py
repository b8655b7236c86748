# SPDX-License-Identifier: Apache-2.0
"""Layers: block-sparse attention and its patterns; tiles of large matrices and of long sequences; activations shared out."""

from zeropp.efficiency.attention import sparsify_attention as sparsify_attention
from zeropp.nn.partition import Partition as Partition
from zeropp.nn.partition import partition_activations as partition_activations
from zeropp.nn.sequence import TiledSequence as TiledSequence
from zeropp.nn.sequence import tile_sequence as tile_sequence
from zeropp.nn.sparsity import SparseAttention as SparseAttention
from zeropp.nn.tiled_linear import TiledLinear as TiledLinear
from zeropp.nn.tiled_linear import tile_linears as tile_linears
from zeropp.nn.tiling import tiled_call as tiled_call
from zeropp.nn.tiling import tiled_cross_entropy as tiled_cross_entropy
from zeropp.ops.patterns import BigBird as BigBird
from zeropp.ops.patterns import Dense as Dense
from zeropp.ops.patterns import Fixed as Fixed
from zeropp.ops.patterns import Local as Local
from zeropp.ops.patterns import Longformer as Longformer
from zeropp.ops.patterns import Pattern as Pattern
from zeropp.ops.patterns import Variable as Variable

__all__ = [
    "BigBird", "Dense", "Fixed", "Local", "Longformer", "Partition", "Pattern", "SparseAttention", "TiledLinear",
    "TiledSequence", "Variable", "partition_activations", "sparsify_attention", "tile_linears", "tile_sequence", "tiled_call", "tiled_cross_entropy",
]  # fmt: skip
