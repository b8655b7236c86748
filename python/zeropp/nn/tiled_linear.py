# SPDX-License-Identifier: Apache-2.0
"""A Linear in tiles, for a matrix that is too large to be whole (memory-centric tiling; ZeRO-Infinity, arXiv:2104.07857,
section 5.1.3).

    y[:, o] = sum over i of x[:, i] W[o, i]^T + b[o]        o: output tiles, i: input tiles

Each tile is a unit of its own under ``zeropp.prepare``: it is gathered, or read from NVMe, when its product is computed,
and given back before the next one's, in forward and in backward. So the working memory of the layer is that of a tile.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn

from zeropp.errors import ConfigError

__all__ = ["TiledLinear", "tile_linears"]

_WOULD_BE_LOST = ("forward", "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class LinearTile(nn.Linear):
    """One tile. ``is_tile`` makes it a unit (zeropp/zero/model/units.py)."""

    is_tile = True


def _cuts(features: int, tiles: int) -> list[int]:
    """Borders of ``tiles`` parts that differ by one at most."""
    return [features * i // tiles for i in range(tiles + 1)]


class TiledLinear(nn.Module):
    """A linear layer whose matrix is in ``out_tiles`` x ``in_tiles`` tiles.

    Args:
        in_features, out_features, bias, device, dtype: as for ``nn.Linear``.
        out_tiles: parts of the output; every element is the same sum as without tiles.
        in_tiles: parts of the input; their products are added, in another order than without tiles.

    Its parameters are ``tiles.N.weight`` and, on the first tile of each output part, ``tiles.N.bias``: checkpoints of a
    plain Linear are taken by :meth:`from_linear`, and :meth:`whole` gives them back.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        out_tiles: int = 1,
        in_tiles: int = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        for name, tiles, features in (("out_tiles", out_tiles, out_features), ("in_tiles", in_tiles, in_features)):
            if isinstance(tiles, bool) or not isinstance(tiles, int) or not 1 <= tiles <= max(1, features):
                raise ValueError(f"TiledLinear: {name} is {tiles!r}, wanted 1 to {features}")
        self.in_features, self.out_features = in_features, out_features
        self._in, self._out = _cuts(in_features, in_tiles), _cuts(out_features, out_tiles)
        self.tiles = nn.ModuleList(
            LinearTile(
                self._in[i + 1] - self._in[i],
                self._out[o + 1] - self._out[o],
                bias and i == 0,
                device=device,
                dtype=dtype,
            )
            for o in range(out_tiles)
            for i in range(in_tiles)
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw values as ``nn.Linear`` does: the bounds are those of the whole matrix."""
        bound = self.in_features**-0.5 if self.in_features else 0.0
        for tile in self.tiles:
            for parameter in tile.parameters():
                nn.init.uniform_(parameter, -bound, bound)

    @classmethod
    def from_linear(cls, linear: nn.Linear, *, out_tiles: int = 1, in_tiles: int = 1) -> TiledLinear:
        """Return a layer with the same values in tiles; the plain layer is not changed."""
        weight = linear.weight
        with torch.device("meta"):
            tiled = cls(
                linear.in_features, linear.out_features, linear.bias is not None, out_tiles=out_tiles,
                in_tiles=in_tiles, dtype=weight.dtype,
            )  # fmt: skip
        tiled = tiled.to_empty(device=weight.device) if not weight.is_meta else tiled
        tiled.train(linear.training)
        for tile, rows, columns in tiled._places():
            tile.weight.requires_grad_(weight.requires_grad)
            if tile.bias is not None:
                tile.bias.requires_grad_(linear.bias.requires_grad)
            if weight.is_meta:
                continue
            with torch.no_grad():
                tile.weight.copy_(weight[rows, columns])
                if tile.bias is not None:
                    tile.bias.copy_(linear.bias[rows])
        return tiled

    def _places(self) -> list[tuple[nn.Linear, slice, slice]]:
        """Return each tile, with its rows and columns of the whole."""
        places = []
        tiles = iter(self.tiles)
        for o in range(len(self._out) - 1):
            for i in range(len(self._in) - 1):
                tile = next(tiles)
                assert isinstance(tile, nn.Linear)
                places.append((tile, slice(self._out[o], self._out[o + 1]), slice(self._in[i], self._in[i + 1])))
        return places

    def whole(self) -> tuple[Tensor, Tensor | None]:
        """Copies of weight and bias as ``nn.Linear`` has them. Of a prepared model: inside ``zeropp.gathered``."""
        first, *_ = self._places()
        weight = first[0].weight.new_empty(self.out_features, self.in_features)
        bias = None if first[0].bias is None else first[0].bias.new_empty(self.out_features)
        with torch.no_grad():
            for tile, rows, columns in self._places():
                weight[rows, columns] = tile.weight
                if bias is not None and tile.bias is not None:
                    bias[rows] = tile.bias
        return weight, bias

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(..., in_features)`` to ``(..., out_features)``."""
        parts = len(self._in) - 1
        columns = [x] if parts == 1 else [x[..., self._in[i] : self._in[i + 1]] for i in range(parts)]
        outputs: list[Tensor] = []
        for o in range(len(self._out) - 1):
            total = self.tiles[o * parts](columns[0])
            for i in range(1, parts):
                total = total + self.tiles[o * parts + i](columns[i])
            outputs.append(total)
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)

    def __getattr__(self, name: str) -> Any:
        """Parameters and tiles; and where the whole is asked for, as some models do."""
        if name in ("weight", "bias"):
            raise AttributeError(
                f"TiledLinear has no {name} of its own, only tiles; whole() gives a copy. Where a model reads its layer's {name}, leave "
                "that layer as it is"
            )
        return super().__getattr__(name)

    def extra_repr(self) -> str:
        tiles = f"out_tiles={len(self._out) - 1}, in_tiles={len(self._in) - 1}"
        return f"in_features={self.in_features}, out_features={self.out_features}, {tiles}"


def tile_linears(model: nn.Module, most_bytes: int) -> list[str]:
    """Replace every ``nn.Linear`` whose matrix is larger than ``most_bytes`` by a :class:`TiledLinear` of output tiles that
    are not; before ``zeropp.prepare``.

    Returns:
        The names of what was replaced; a layer that stands in several places has one for each, and is one layer still. A matrix of
        two layers (a tied embedding) stays whole, and so does one that is computed (weight_norm).

    Raises:
        zeropp.ConfigError: the model is prepared already, or such a layer has hooks or a forward of its own, which would be lost.
    """
    if isinstance(most_bytes, bool) or not isinstance(most_bytes, int) or most_bytes < 1:
        raise ValueError(f"tile_linears: most_bytes is {most_bytes!r}, wanted a number of bytes above 0")
    replaced = []
    tiled: dict[nn.Module, TiledLinear] = {}
    for path, module, name, child in _linears_alone(model):
        if hasattr(child.weight, "_zeropp"):
            raise ConfigError("tile_linears: the model was prepared already; tile it before zeropp.prepare")
        size = child.weight.numel() * child.weight.itemsize
        if size <= most_bytes:
            continue
        full = f"{path}.{name}" if path else name
        if any(child.__dict__.get(hooks) for hooks in _WOULD_BE_LOST):
            raise ConfigError(
                f"tile_linears: {full} has hooks or a forward of its own, which its tiles would not have; add them afterwards"
            )
        if child not in tiled:
            tiles = min(child.out_features, -(-size // most_bytes))
            tiled[child] = TiledLinear.from_linear(child, out_tiles=tiles)
        setattr(module, name, tiled[child])
        replaced.append(full)
    return replaced


def _linears_alone(model: nn.Module) -> list[tuple[str, nn.Module, str, nn.Linear]]:
    """Return (path of the parent, parent, name in it, layer) for each ``nn.Linear`` whose matrix no other layer has."""
    owned = (parameter for module in model.modules() for parameter in module._parameters.values())
    uses = Counter(id(parameter) for parameter in owned if parameter is not None)
    return [
        (path, module, name, child)
        for path, module in model.named_modules()
        for name, child in module._modules.items()
        if type(child) is nn.Linear and uses[id(child.weight)] == 1
    ]
