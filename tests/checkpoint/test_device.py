# SPDX-License-Identifier: Apache-2.0
"""Files of tensors that are on an accelerator: the same bytes as from the host, copied block by block."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from ranks import on_ranks
from zeropp.files import safefile


@on_ranks(1, devices=("sim", "sim-lazy"))
def test_tensors_of_a_device_go_to_files_and_come_back() -> None:
    safefile.BLOCK_BYTES = 4096  # several blocks, the last one shorter
    values = {"a": torch.arange(5003.0), "b": torch.arange(3000).to(torch.bfloat16), "none": torch.empty(0)}
    assert {one.device.type for one in values.values()} == {"sim"}
    with tempfile.TemporaryDirectory() as folder:
        path, other, image = Path(folder) / "device", Path(folder) / "host", Path(folder) / "image"
        pieces = [safefile.piece_of(name, one) for name, one in values.items()]
        entry = safefile.write_pieces(path, pieces, {"format": "pt"})
        safefile.verify(path, entry)
        safefile.write_pieces(
            other, [safefile.piece_of(name, one.cpu()) for name, one in values.items()], {"format": "pt"}
        )
        assert path.read_bytes() == other.read_bytes()
        memory, size_bytes = safefile.image_of(pieces, {"format": "pt"}, None)
        image.write_bytes(memory[:size_bytes])
        assert image.read_bytes() == other.read_bytes()

        file, back = safefile.TensorFile(path), {name: torch.empty_like(one) for name, one in values.items()}
        with safefile.Fills() as fills:
            for name, one in back.items():
                file.fill(fills, name, 0, one)
        for name, one in back.items():
            assert one.device.type == "sim"
            assert torch.equal(one.cpu(), values[name].cpu()), name
