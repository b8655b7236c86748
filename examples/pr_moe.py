# SPDX-License-Identifier: Apache-2.0
"""Train a byte-level GPT with a pyramid of experts and residual branches (PR-MoE), and then a shallower student of it (MoS), both by
Rajbhandari et al. 2022, section 4:

    torchrun --nproc-per-node 2 examples/pr_moe.py --steps 200 --student-steps 200

Later layers have more experts than earlier ones, and every token passes a dense branch beside the one expert that it chooses. The
student has fewer layers, begins with the teacher's values, and follows the teacher for the first three quarters of its steps.
"""

import argparse

import torch
import torch.distributed as dist
import zeropp
from gpt import GPT, Block, GPTConfig
from text import Text
from torch import Tensor, nn
from torch.nn import functional as F
from zeropp.moe import Distill, Gate, MoE, shallower

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--steps", type=int, default=200, help="of the teacher")
parser.add_argument("--student-steps", type=int, default=200)
parser.add_argument("--experts", type=int, nargs="+", default=[4, 4, 8, 8], help="of each layer")
parser.add_argument("--layers", type=int, default=3, help="of the student")
parser.add_argument("--width", type=int, default=64)
parser.add_argument("--batch", type=int, default=8, help="sequences a rank and step")
parser.add_argument("--data", help="a folder or file of text; default: the source of Python's standard library")


class ExpertBlock(Block):
    """A transformer layer whose MLP is the residual branch of a layer of experts."""

    def __init__(self, config: GPTConfig, experts: int) -> None:
        super().__init__(config)
        dense = nn.Sequential(self.up, nn.GELU(), self.down)
        del self.up, self.down
        gate = Gate(capacity=1.25, eval_capacity=None, drop="random")
        self.moe = MoE(config.width, experts, intermediate=2 * config.width, gate=gate, residual=dense)

    def forward(self, x_BTD: Tensor) -> Tensor:
        b, t, d = x_BTD.shape
        q, k, v = self.qkv(self.norm_1(x_BTD)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BTD = x_BTD + self.out(attended.transpose(1, 2).reshape(b, t, d))
        return x_BTD + self.moe(self.norm_2(x_BTD))


class ExpertGPT(GPT):
    """The GPT of the examples with so many experts in each layer."""

    def __init__(self, config: GPTConfig, experts: list[int]) -> None:
        super().__init__(config)
        self.blocks = nn.ModuleList(ExpertBlock(config, number) for number in experts)

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def balance_loss(self) -> Tensor:
        return torch.stack([block.moe.balance_loss for block in self.blocks]).mean()


def main(args: argparse.Namespace) -> None:
    dist.init_process_group()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    text = Text(args.data)
    config = GPTConfig(layers=len(args.experts), heads=4, width=args.width, context=64)
    batches = {
        "rank": rank,
        "ranks": ranks,
        "batch": args.batch,
        "context": config.context,
        "device": torch.device("cpu"),
    }

    def prepared(model: ExpertGPT) -> tuple[ExpertGPT, torch.optim.Optimizer]:
        return zeropp.prepare(model, torch.optim.AdamW(model.parameters(), lr=2e-3), zeropp.Config(stage=3))

    torch.manual_seed(0)
    teacher, optimizer = prepared(ExpertGPT(config, args.experts))
    for step in range(args.steps):
        inputs, targets = text.batch(step, **batches)
        loss = teacher(inputs, targets)
        (loss + 0.01 * teacher.balance_loss()).backward()
        optimizer.step()
        optimizer.zero_grad()
        report("teacher", step, args.steps, loss)
    counts = zeropp.moe.load(teacher, group=dist.group.WORLD)

    values = zeropp.full_state_dict(teacher)
    whole = ExpertGPT(config, args.experts)
    whole.load_state_dict(values)
    student, optimizer = prepared(shallower(whole, args.layers))
    teacher, _ = zeropp.prepare(whole, None, zeropp.Config(stage=3))
    distill = Distill(student, teacher, weight=1.0, until=args.student_steps * 3 // 4)
    for step in range(args.student_steps):
        inputs, _ = text.batch(args.steps + step, **batches)
        loss = distill(step=step, bytes_BT=inputs, labels=inputs)
        (loss + 0.01 * student.balance_loss()).backward()
        optimizer.step()
        optimizer.zero_grad()
        report("student", step, args.student_steps, loss)
    if rank == 0:
        for name, count in counts.items():
            print(f"{name}: shares of tokens by expert {[round(x, 2) for x in (count / count.sum()).tolist()]}")
    dist.destroy_process_group()


def report(who: str, step: int, steps: int, loss: Tensor) -> None:
    if dist.get_rank() == 0 and (step % 20 == 0 or step + 1 == steps):
        print(f"{who} step {step}: loss {loss.item():.3f}", flush=True)


if __name__ == "__main__":
    main(parser.parse_args())
