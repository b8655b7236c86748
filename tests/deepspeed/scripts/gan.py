# SPDX-License-Identifier: Apache-2.0
"""The calls of gan_deepspeed_train.py, two engines in one loss: gan.py RESULT --deepspeed_config FILE."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import deepspeed
import torch
from torch import nn


def nets() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(3)
    made = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))
    judge = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1), nn.Sigmoid())
    return made, judge


def main(args: argparse.Namespace, plain: bool = False) -> list[list[float]]:
    netG, netD = nets()
    criterion = nn.BCELoss()
    optimizerD = torch.optim.Adam(netD.parameters(), lr=1e-2, betas=(0.5, 0.999))
    optimizerG = torch.optim.Adam(netG.parameters(), lr=1e-2, betas=(0.5, 0.999))
    if not plain:
        engineD, optimizerD, _, _ = deepspeed.initialize(
            args=args, model=netD, model_parameters=netD.parameters(), optimizer=optimizerD
        )
        engineG, optimizerG, _, _ = deepspeed.initialize(
            args=args, model=netG, model_parameters=netG.parameters(), optimizer=optimizerG
        )
    draw, rows = torch.Generator().manual_seed(5), []
    for _ in range(5):
        netD.zero_grad()
        real = torch.randn(8, 2, generator=draw) + 3
        label = torch.full((8,), 1.0)
        errD_real = criterion(netD(real).view(-1), label)
        errD_real.backward() if plain else engineD.backward(errD_real)
        fake = netG(torch.randn(8, 4, generator=draw))
        label.fill_(0.0)
        errD_fake = criterion(netD(fake.detach()).view(-1), label)
        errD_fake.backward() if plain else engineD.backward(errD_fake)
        optimizerD.step() if plain else engineD.step()
        netG.zero_grad()
        label.fill_(1.0)
        errG = criterion(netD(fake).view(-1), label)
        errG.backward() if plain else engineG.backward(errG)
        optimizerG.step() if plain else engineG.step()
        rows.append([(errD_real + errD_fake).item(), errG.item()])
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("result", type=Path)
    args = deepspeed.add_config_arguments(parser).parse_args()
    found = {"rows": main(args), "plain": main(args, plain=True)}
    if torch.distributed.get_rank() == 0:
        args.result.write_text(json.dumps(found))
