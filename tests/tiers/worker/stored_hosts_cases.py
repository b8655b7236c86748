# SPDX-License-Identifier: Apache-2.0
"""stored_cases with every rank on a host of its own, over the loopback interface: each host has a copy, and no rank gathers."""

from __future__ import annotations

import os

os.environ["ZEROPP_HOST_ID"] = os.environ["RANK"]  # before the communicator is made

import pytest
import torch
import torch.distributed as dist
import zeropp
from state_cases import scratch
from stored_cases import a_fraction, a_read_that_fails, bytes_are_counted, kept, rounds_as_stated, writes_text
from training import batch, gpt
from zeropp import Comm


def texts_of_other_lengths() -> None:
    """A rank needs nothing from other hosts, so each may run any number of passes; all ranks have rank 0's values."""
    with scratch() as path:
        for where in (path, None):
            torch.manual_seed(dist.get_rank())
            model = gpt(width=64)
            for parameter in model.parameters():
                parameter.data.normal_()
            model, _ = zeropp.prepare(model, None, kept("int4", where))
            zeropp.traffic(reset=True)
            with torch.inference_mode():
                losses = [model(*batch(0)) for _ in range(1 + 3 * dist.get_rank())]
            assert "network" not in zeropp.traffic() or not sum(
                row["bytes"] for row in zeropp.traffic()["network"].values()
            )
            values = [loss.clone() for loss in losses[:1]]
            assert all(torch.equal(one, values[0]) for one in losses)
            own = values[0].clone()
            dist.broadcast(own, 0)
            assert dist.get_rank() == 0 or not torch.equal(own, values[0]), "each has a batch of its own"
            digest = torch.stack([value.double().abs().sum() for value in _whole(model)])
            theirs = digest.clone()
            dist.broadcast(theirs, 0)
            assert torch.equal(digest, theirs)
            del model
        config = kept("int8", None)
        with pytest.raises(
            zeropp.ConfigError, match="each host has a whole copy of quantised weights anyway; leave it at 0"
        ):
            zeropp.prepare(
                gpt(),
                None,
                zeropp.Config(precision=config.precision, offload=config.offload, comm=Comm(secondary_shard="host")),
            )


def _whole(model: torch.nn.Module) -> list[torch.Tensor]:
    with zeropp.gathered(model):
        return [parameter.detach().clone() for parameter in model.parameters()]


CASES = {
    function.__name__: function
    for function in (
        rounds_as_stated, bytes_are_counted, a_fraction, writes_text, a_read_that_fails, texts_of_other_lengths,
    )
}  # fmt: skip
