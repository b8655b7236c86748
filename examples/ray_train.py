# SPDX-License-Identifier: Apache-2.0
"""Train the byte-level GPT of gpt.py under Ray Train: Ray starts the workers and sets rank and size, and zeropp shards the
model inside of them. On one machine:

    python examples/ray_train.py --workers 2
"""

import argparse
import json
import sys
from pathlib import Path

import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

HERE = str(Path(__file__).resolve().parent)


def train(options: dict) -> None:
    """Train in one worker. Imports are here, because Ray runs this function in another process."""
    sys.path.insert(0, options["here"])
    import torch
    import zeropp
    from gpt import GPT, GPTConfig
    from text import Text

    rank = torch.distributed.get_rank()
    torch.manual_seed(0)
    model = GPT(GPTConfig(layers=options["layers"], heads=4, width=options["width"], context=64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.1)
    model, optimizer = zeropp.prepare(model, optimizer, zeropp.Config(stage=3))
    text = Text(options["data"]).train
    losses = []
    for step in range(options["steps"]):
        draw = torch.Generator().manual_seed(step * 2 + rank)
        rows = text[torch.randint(len(text) - 65, (8, 1), generator=draw) + torch.arange(65)].long()
        loss = model(rows[:, :-1], rows[:, 1:])
        loss.backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    zeropp.save(Path(options["folder"]) / "checkpoint", model, optimizer, step=options["steps"])
    held = zeropp.memory(model, optimizer)["cpu"]["optimizer"]["held"]
    ray.train.report({"last": losses[-1]})
    if rank == 0:
        found = {"first": losses[0], "last": losses[-1], "optimizer_bytes": held}
        (Path(options["folder"]) / "result.json").write_text(json.dumps(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--data", help="folder or file; default: Python's own source")
    parser.add_argument("--folder", type=Path, default=Path("out/ray"), help="Ray's own files, and the checkpoint")
    args = parser.parse_args()
    ray.init(num_cpus=args.workers, include_dashboard=False, log_to_driver=False)
    options = {
        "here": HERE, "steps": args.steps, "width": args.width, "layers": args.layers, "data": args.data,
        "folder": str(args.folder.resolve()),
    }  # fmt: skip
    trainer = TorchTrainer(
        train,
        train_loop_config=options,
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=args.workers, resources_per_worker={"CPU": 1}),
        run_config=RunConfig(name="zeropp", storage_path=str(args.folder.resolve())),
    )
    trainer.fit()  # raises what a worker raised
    print((args.folder / "result.json").read_text())
    ray.shutdown()


if __name__ == "__main__":
    main()
