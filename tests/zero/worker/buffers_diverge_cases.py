# SPDX-License-Identifier: Apache-2.0
"""A rank evaluates while another one is in its backward: both raise. It ends the group, so it is alone here."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import zeropp
from bad_input_cases import sentence
from buffers_cases import Net, batch


def diverge() -> str:
    torch.manual_seed(0)
    ours = Net()
    model, optimizer = zeropp.prepare(ours, torch.optim.SGD(ours.parameters(), lr=0.1), zeropp.Config(stage=2))
    loss = model(batch(0)).mean()

    def go_on() -> Any:
        if dist.get_rank() == 1:
            with torch.no_grad():
                return model(batch(1))
        return optimizer.backward(loss)

    return sentence(go_on, zeropp.CommError)


CASES = {"diverge": diverge}
