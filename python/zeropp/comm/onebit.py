# SPDX-License-Identifier: Apache-2.0
"""The mean over ranks at one bit an element, with error feedback (1-bit Adam): protocol in csrc/comm/onebit.h."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from zeropp import _C
from zeropp.comm.group import BYTES, communicator, dtype_code
from zeropp.ops import OneBit, onebit_compress_, onebit_decode_, onebit_reduce_

__all__ = ["OneBitAllReduce"]

_ALL_TO_ALL = _C.COMM_COLLECTIVES["all_to_all"]
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class OneBitAllReduce:
    """The compressed all-reduce of one tensor, again and again: the errors of both sides live here.

    ``reduce(tensor)`` then ``decode_(output)``; each rank reads ``n / 8`` bytes of signs and ``4 n / chunk_elems`` of
    scales, times ``(N - 1) / N``, twice: from the workers to the servers of slices, and back. What a call loses is
    added in the next one, so the sum over calls is that of the exact mean, up to the errors held.

    Args:
        elems: number of elements of the tensor.
        chunk_elems: elements that share a scale; a multiple of 16.
        group: a torch.distributed group of any backend, or a ``_C.Comm``; default: the world.
        device: of the tensor. On a GPU kernels compress and add, with the bits of the CPU. Messages go through memory of the host,
            which waits for them.

    Memory, on ``device``: ``worker_error`` (4 bytes an element), ``server_error`` (4 / N), and 3/8 of a byte for messages.

    Raises:
        ValueError: chunk_elems not a multiple of 16.
    """

    def __init__(
        self, elems: int, *, chunk_elems: int = 4096, group: Any = None, device: torch.device | str = "cpu"
    ) -> None:
        if not isinstance(group, _C.Comm):
            group = communicator(group)
        self._comm: Any = group
        self.elems, self.chunk_elems = elems, chunk_elems
        self.rank: int = group.rank
        self.ranks: int = group.ranks
        self.slice_elems: int
        self.message_bytes: int
        self.slice_elems, self.message_bytes, scratch, result = group.onebit_layout(elems, chunk_elems)
        self.device = torch.device(device)
        self.worker_error = torch.zeros(elems, device=device)
        """What my compression lost, fp32."""
        self.server_error = torch.zeros(self.length(self.rank), device=device)
        """What the compression of my slice's mean lost, fp32."""
        self._scratch = torch.zeros(scratch, dtype=torch.uint8, device=device)
        self._result = torch.zeros(result, dtype=torch.uint8, device=device)
        self._gathered = False

    def begin(self, rank: int) -> int:
        """Return where shard ``rank`` begins."""
        return min(rank * self.slice_elems, self.elems)

    def length(self, rank: int) -> int:
        """Return elements of slice ``rank``: the last ones may be shorter, or empty."""
        return min(self.slice_elems, self.elems - self.begin(rank))

    def reduce(self, tensor: torch.Tensor, *, gather: bool = True) -> None:
        """Collective: compress ``tensor`` plus what is owed, and average. ``decode_`` then gives the result.

        Args:
            tensor: fp32, bf16 or fp16, contiguous; read only. The same dtype on every rank.
            gather: False: only my own slice's result comes; half the bytes.

        Raises:
            ValueError: another length, dtype or device, not contiguous.
            zeropp.CommError: a rank died or does something else; the errors are not to be used any more then.
        """
        self._check(tensor, "reduce")
        if tensor.numel() != self.elems:
            raise ValueError(f"comm: reduce of {tensor.numel()} elements, wanted {self.elems}")
        if self.device.type == "cpu":
            self._comm.onebit_all_reduce(
                self.elems, self.chunk_elems, tensor.data_ptr(), dtype_code(tensor.dtype), self.worker_error.data_ptr(),
                self.server_error.data_ptr(), self._scratch.data_ptr(), self._result.data_ptr(), gather,
            )  # fmt: skip
        else:
            self._reduce_on_device(tensor.view(-1), gather)
        self._gathered = gather

    def decode_(self, output: torch.Tensor, *, scale: float = 1.0, accumulate: bool = False) -> torch.Tensor:
        """Set ``output = scale * mean``, or ``output += scale * mean``; the same bits on every rank.

        Args:
            output: ``elems`` elements, fp32, bf16 or fp16.
            scale: multiplies the chunks' scales, one rounding to fp32.
        """
        if not self._gathered:
            raise ValueError("comm: only my own slice was reduced (gather=False); take it with decode_slice_")
        if output.numel() != self.elems:
            raise ValueError(f"comm: decode into {output.numel()} elements, wanted {self.elems}")
        self._check(output, "decode")
        flat = output.view(-1)
        for rank in range(self.ranks):
            part = flat[self.begin(rank) : self.begin(rank) + self.length(rank)]
            self._decode(rank, part, scale, accumulate)
        return output

    def decode_slice_(self, output: torch.Tensor, *, scale: float = 1.0, accumulate: bool = False) -> torch.Tensor:
        """Decode this rank's own shard."""
        if output.numel() != self.length(self.rank):
            raise ValueError(f"comm: decode into {output.numel()} elements, wanted {self.length(self.rank)}")
        self._check(output, "decode")
        self._decode(self.rank, output.view(-1), scale, accumulate)
        return output

    def scale_(self, factor: float) -> None:
        """Multiply the result by ``factor``, above 0, where it is: one rounding of each chunk's scale."""
        if not factor > 0:
            raise ValueError(f"comm: scale_ by {factor}, wanted a factor above 0")
        for rank in range(self.ranks):
            if self._gathered or rank == self.rank:
                self._message(self._result, rank, self.length(rank)).scales.mul_(factor)

    def tensors(self) -> list[torch.Tensor]:
        """Return all memory held: errors and messages."""
        return [self.worker_error, self.server_error, self._scratch, self._result]

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """Collective: the mean over ranks in place, at one bit an element."""
        self.reduce(tensor)
        return self.decode_(tensor)

    def _reduce_on_device(self, tensor: torch.Tensor, gather: bool) -> None:
        """Do what csrc/comm/coll_onebit.c does, with kernels of the device and messages of the same bytes."""
        with torch.no_grad():
            for rank in range(self.ranks):
                begin, elems = self.begin(rank), self.length(rank)
                error = self.worker_error[begin : begin + elems]
                onebit_compress_(tensor[begin : begin + elems], error, self._message(self._scratch, rank, elems))
            self._send_to_servers()
            mine = self._message(self._result, self.rank, self.server_error.numel())
            onebit_reduce_(self._received(), self.server_error, mine, factor=1.0 / self.ranks)
            if gather:
                own = self._slot(self._result, self.rank).cpu()
                every = torch.empty(self._result.numel(), dtype=torch.uint8, device="cpu")
                self._comm.all_gather(every.data_ptr(), own.data_ptr(), own.numel())
                self._result.copy_(every)

    def _send_to_servers(self) -> None:
        """Exchange the messages of the first half of the scratch memory, each with the rank whose slice it is, into the second half."""
        half = self.ranks * self.message_bytes
        sent = self._scratch[:half].cpu()
        came = torch.zeros(half, dtype=torch.uint8, device="cpu")

        def pieces(of: torch.Tensor, elems: list[int]) -> list[tuple[int, int]]:
            return [
                (of.data_ptr() + rank * self.message_bytes, self._message_bytes(count))
                for rank, count in enumerate(elems)
            ]

        lengths = [self.length(rank) for rank in range(self.ranks)]
        there = pieces(came, [lengths[self.rank]] * self.ranks)
        self._comm.exchange(_ALL_TO_ALL, BYTES, 0, there, pieces(sent, lengths))
        self._scratch[half:].copy_(came)

    def _received(self) -> list[OneBit]:
        """Return what all ranks sent for this rank's slice, in their order."""
        return [
            self._message(self._scratch, self.ranks + rank, self.server_error.numel()) for rank in range(self.ranks)
        ]

    def _decode(self, rank: int, output: torch.Tensor, scale: float, accumulate: bool) -> None:
        if output.numel() == 0:
            return
        source = self._message(self._result, rank, output.numel())
        if scale != 1.0:
            source = replace(source, scales=source.scales * scale)
        onebit_decode_(source, output, accumulate=accumulate)

    def _message_bytes(self, elems: int) -> int:
        """Return the bytes of a message of so many elements, which fill words of four."""
        return -(-(4 * -(-elems // self.chunk_elems) + -(-elems // 8)) // 4) * 4

    def _slot(self, messages: torch.Tensor, at: int) -> torch.Tensor:
        return messages[at * self.message_bytes : (at + 1) * self.message_bytes]

    def _message(self, messages: torch.Tensor, at: int, elems: int) -> OneBit:
        """Return message ``at`` of some: scales and signs of so many elements."""
        bits_at = 4 * -(-elems // self.chunk_elems)
        slot = self._slot(messages, at)
        bits = slot[bits_at : bits_at + -(-elems // 8)]
        return OneBit(bits=bits, scales=slot[:bits_at].view(torch.float32), elems=elems, chunk_elems=self.chunk_elems)

    def _check(self, tensor: torch.Tensor, what: str) -> None:
        if tensor.device.type != self.device.type:
            raise ValueError(f"comm: {what} of a tensor on {tensor.device}, wanted {self.device}")
        if tensor.dtype not in _DTYPES:
            raise ValueError(f"comm: {what} of {tensor.dtype} at one bit, wanted float32, bfloat16 or float16")
        if not tensor.is_contiguous():
            raise ValueError(
                f"comm: {what} of a tensor of shape {tuple(tensor.shape)} with strides {tensor.stride()}, wanted a "
                "contiguous one"
            )
