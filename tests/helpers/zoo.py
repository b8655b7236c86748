# SPDX-License-Identifier: Apache-2.0
"""Models that broke a design of ZeRO-3 once, each as small as it can be. No dropout, so that every run draws the
same."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

SMALL = dict(
    hidden_size=64, num_attention_heads=4, num_key_value_heads=2, vocab_size=300, num_hidden_layers=3, use_cache=False
)


def gpt2() -> nn.Module:
    import transformers as tf

    return tf.GPT2LMHeadModel(
        tf.GPT2Config(
            n_layer=3, n_embd=64, n_head=4, vocab_size=300, n_positions=64, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
            use_cache=False,
        )
    )  # fmt: skip


def llama(**more: Any) -> nn.Module:
    import transformers as tf

    return tf.LlamaForCausalLM(tf.LlamaConfig(intermediate_size=128, **SMALL, **more))


def tied_llama() -> nn.Module:
    return llama(tie_word_embeddings=True)


def mixtral() -> nn.Module:
    """3-D expert weights, and a router that leaves some experts without a token."""
    import transformers as tf

    return tf.MixtralForCausalLM(tf.MixtralConfig(intermediate_size=96, num_local_experts=4, **SMALL))


def switch() -> nn.Module:
    """Its router calls ``self.classifier.to(dtype)`` in every forward."""
    import transformers as tf

    return tf.SwitchTransformersForConditionalGeneration(
        tf.SwitchTransformersConfig(
            vocab_size=300, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_decoder_layers=2, num_heads=4, num_experts=4,
            num_sparse_encoder_layers=1, num_sparse_decoder_layers=1, expert_capacity=64, dropout_rate=0.0, router_jitter_noise=0.0,
            use_cache=False, decoder_start_token_id=0,
        )
    )  # fmt: skip


def lora() -> nn.Module:
    """Two units a block: a frozen one, and a trainable one."""
    from peft import LoraConfig, get_peft_model

    return get_peft_model(llama(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))


class SharedReentrant(nn.Module):
    """One block three times under re-entrant checkpointing: its gradient comes in three parts."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.b, self.c = nn.Linear(8, 32), nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        for _ in range(3):
            x = checkpoint(lambda y: self.c(torch.tanh(self.b(y))), x, use_reentrant=True)
        return (x**2).mean()


class Shared(nn.Module):
    """One block twice, and one weight in two different modules."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(8, 32)
        self.twice = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32))
        self.left, self.right = nn.Linear(32, 32), nn.Linear(32, 32, bias=False)
        self.right.weight = self.left.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.twice(self.twice(self.into(x)))
        return (self.right(torch.relu(self.left(x))) ** 2).mean()


class Recurrent(nn.Module):
    """torch's own encoder (its fast path looks at sub-modules' weights) and an LSTM (whose weights it flattens)."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.lstm = nn.LSTM(16, 16, num_layers=2, batch_first=True)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        h, _ = self.lstm(self.encoder(x.view(4, 2, 4).repeat(1, 3, 4)))
        return (self.head(h) ** 2).mean()


class Unused(nn.Module):
    """A layer that no loss needs, one that only odd ranks need, and a lonely parameter."""

    def __init__(self, divergent: bool) -> None:
        super().__init__()
        self.divergent = divergent
        self.a, self.b, self.c, self.never = nn.Linear(8, 32), nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32)
        self.scale = nn.Parameter(torch.ones(32))

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        odd = dist.get_rank() % 2 == 1
        x = self.c(x) if self.divergent and odd else self.b(x)
        return ((x * self.scale) ** 2).mean()


class Critic(nn.Module):
    """For a gradient penalty: the backward of a backward reads the weights a third time."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


@dataclass
class Answer:
    hidden: Tensor
    extra: Any = None


Pair = namedtuple("Pair", "first second")


class Plain:
    """An output that is no container torch knows."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


class Outputs(nn.Module):
    """Blocks that answer in every shape: dict, nested list, named tuple, dataclass, plain object, side attribute, and
    a tensor that the caller changes in place."""

    class Block(nn.Module):
        def __init__(self, kind: str) -> None:
            super().__init__()
            self.kind, self.up, self.down = kind, nn.Linear(16, 32), nn.Linear(32, 16)

        def forward(self, x: Tensor) -> Any:
            y = self.down(torch.tanh(self.up(x)))
            if self.kind == "dict":
                return {"hidden": y, "other": [None, 3, "text"]}
            if self.kind == "nested":
                return [{"deep": (y,)}, None]
            if self.kind == "pair":
                return Pair(y, y * 2)
            if self.kind == "dataclass":
                return Answer(y)
            if self.kind == "object":
                return Plain(y)
            if self.kind == "side":
                self.result = y
                return None
            return y

    KINDS = ("dict", "nested", "pair", "dataclass", "object", "side", "inplace")

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(8, 16)
        self.blocks = nn.ModuleList(self.Block(kind) for kind in self.KINDS)

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        for block in self.blocks:
            out = block(x)
            if block.kind == "dict":
                out = out["hidden"]
            elif block.kind == "nested":
                out = out[0]["deep"][0]
            elif block.kind == "pair":
                out = out.first + out.second
            elif block.kind == "dataclass":
                out = out.hidden
            elif block.kind == "object":
                out = out.value
            elif block.kind == "side":
                out, block.result = block.result, None
            else:
                out.mul_(2.0)
            x = x + out
        return (x**2).mean()


class Keeper(torch.autograd.Function):
    """Keeps its weight in a plain attribute of ctx: neither saved-tensor hooks nor output hooks see it being read."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.w = w
        ctx.save_for_backward(x)
        return x @ w.detach().t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        (x,) = ctx.saved_tensors
        return grad @ ctx.w, grad.t() @ x


class KeepsWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 32), nn.Linear(32, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return (Keeper.apply(self.a(x), self.b.weight) ** 2).mean()


class LeakyLeaves(nn.Module):
    """Linears whose weight is saved by more than what their output depends on: by a hook, and by a forward of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.a, self.b = nn.Linear(8, 32), nn.Linear(32, 32), nn.Linear(32, 32)
        self.a.register_forward_hook(self._note)
        self.b.forward = self._own_forward
        self.side: list[Tensor] = []

    def _note(self, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        self.side.append(F.linear(inputs[0], module.weight))

    def _own_forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.b.weight, self.b.bias)
        self.side.append(F.linear(y, self.b.weight))
        return y

    def forward(self, x: Tensor) -> Tensor:
        self.side.clear()
        y = self.b(self.a(self.first(x)))
        return (y**2).mean() + sum((s**2).mean() for s in self.side)


class Convolutions(nn.Module):
    """Weights in channels-last order, and gradients that come so."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        self.norm, self.head = nn.GroupNorm(4, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x.repeat(1, 3 * 8).view(4, 3, 8, 8).to(memory_format=torch.channels_last)
        return (self.head(self.norm(self.b(torch.relu(self.a(x)))).mean((2, 3))) ** 2).mean()


class Odd(nn.Module):
    """Sizes that divide by nothing, a scalar, an empty parameter, a frozen one, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.scalar = nn.Parameter(torch.tensor(0.7))
        self.empty = nn.Parameter(torch.empty(0, 5))
        self.frozen = nn.Parameter(torch.randn(7, 3), requires_grad=False)
        self.a, self.b = nn.Linear(8, 7), nn.Linear(3, 13)
        self.register_buffer("shift", torch.randn(13))

    def forward(self, x: Tensor) -> Tensor:
        return ((self.b(self.a(x) @ self.frozen) * self.scalar + self.shift) ** 2).mean() + self.empty.sum()


class ReadFromOutside(nn.Module):
    """Weights that are read outside of their modules: two units below 64 KiB, which keep their memory, and a larger one, which does
    not."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.middle, self.down = nn.Linear(8, 160), nn.Linear(160, 160), nn.Linear(160, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.middle(torch.tanh(self.up(x))))
        return self.down(hidden @ self.middle.weight.t())

    def again(self, out: Tensor) -> Tensor:
        """Compute with the output after the forward, with one weight as it is and two views."""
        hidden = nn.functional.linear(out, self.up.weight)
        return hidden @ self.middle.weight.t() @ self.down.weight.view(8, 160).T


class TwoLosses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32))
        self.left, self.right = nn.Linear(32, 4), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.body(x)
        return (self.left(h) ** 2).mean(), F.softplus(self.right(h)).mean()


class Mlp(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.into(x).relu()).relu()
