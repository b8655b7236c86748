# SPDX-License-Identifier: Apache-2.0
"""Weights of linear layers in 8 and 4 bits on NVMe and in memory, for inference: rounded as stated, everything else exact, bytes
counted, and training refused."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import zeropp
from disk import scratch
from ranks import on_ranks, shards_tier
from training import CONTEXT, batch, gpt
from zeropp import Comm, Config, Offload, Precision, Tier
from zeropp.zero.engine import engine_of
from zeropp.zero.offload.weight_quant import matrices

BLOCK = 64
LEVELS = {"int8": 127, "int4": 7}


def kept(stored: str, path: str | None, param: str | None = "bf16", fraction: float = 1.0) -> Config:
    tier = Tier("cpu", fraction=fraction) if path is None else Tier("nvme", path=path, fraction=fraction)
    return Config(precision=Precision(param=param, stored=stored), offload=Offload(params=tier))


def prepared(config: Config, width: int = 64, layers: int = 2) -> Any:
    model = gpt(width=width, layers=layers)
    model, _ = zeropp.prepare(model, None, config)
    return model.eval()


def linear_weights(model: torch.nn.Module) -> set[str]:
    """Return the linear weights of the blocks; the head is the embedding."""
    modules = dict(model.named_modules())
    linear = {name for name, module in modules.items() if isinstance(module, torch.nn.Linear) and "blocks" in name}
    return {f"{name}.weight" for name in linear}


def rounded_as_stated(exact: torch.Tensor, got: torch.Tensor, stored: str) -> None:
    """|x - value| <= scale (1/2 + 4 L u) + half an ulp of bf16, with scale = max |x| / L of each 64 elements."""
    exact, got = exact.cpu(), got.cpu()
    flat, seen, most = exact.double().reshape(-1), got.double().reshape(-1), LEVELS[stored]
    pad = -flat.numel() % BLOCK
    blocks = torch.nn.functional.pad(flat, (0, pad)).reshape(-1, BLOCK)
    scale = (blocks.abs().amax(1) / most).clamp_min(2.0**-126).repeat_interleave(BLOCK)[: flat.numel()]
    bound = scale * (0.5 + 4 * most * 2.0**-24) + (seen.abs() * 2.0**-8 if got.dtype == torch.bfloat16 else 0.0)
    assert bool(((flat - seen).abs() <= bound).all()), ((flat - seen).abs() / bound).max()
    assert int(seen.unique().numel()) > 2 and not torch.equal(flat, seen)


@on_ranks(1, 2, "2 hosts")
def test_rounds_as_stated() -> None:
    """Matrices of linear layers within the bound, everything else untouched; and what is computed is what plain torch computes with
    those values."""
    with scratch() as path:
        for stored, where, param in (
            ("int8", path, "bf16"),
            ("int4", path, None),
            ("int4", None, "bf16"),
            ("int8", None, None),
        ):
            plain = gpt(width=64, dtype=torch.bfloat16 if param else torch.float32).eval()
            model = prepared(kept(stored, where, param))
            low, values = linear_weights(plain), zeropp.full_state_dict(model)
            assert len(low) >= 8
            for name, exact in plain.state_dict().items():
                if name in low:
                    rounded_as_stated(exact, values[name], stored)
                else:
                    assert torch.equal(exact.cpu(), values[name].cpu()), name
            plain.load_state_dict(values)
            for mode in (torch.inference_mode, torch.no_grad):
                with mode():
                    assert torch.equal(model(*batch(0)), plain(*batch(0))), (stored, where, param)
            del model, plain


@on_ranks(1, 2, "2 hosts")
def test_bytes_are_counted() -> None:
    """On disk and read in a pass: 1 or 1/2 byte an element of a matrix and 1/16 for its scale, against 2 in bf16; in memory the
    same, and nothing is read."""
    ranks, width, layers = dist.get_world_size(), 256, 3
    with scratch() as path:
        for stored, bytes_ in (("int8", 1.0), ("int4", 0.5)):
            for where in (path, None):
                model = prepared(kept(stored, where), width, layers)
                low = linear_weights(model)
                numel = {name: p.numel() for name, p in model.named_parameters()}
                small = sum(n for name, n in numel.items() if name not in low)
                matrices = sum(n for name, n in numel.items() if name in low)
                wanted = matrices * (bytes_ + 4 / BLOCK)
                figures = engine_of(model).params.figures
                assert wanted <= figures()["qcopies_bytes"] <= wanted + 2 * small + 8192 * (layers + 4), figures()
                seen = zeropp.memory(model)["cpu" if where is None else "nvme"]["params"]
                assert abs(seen["held"] - seen["planned"]) <= 0.03 * seen["planned"] + 8192 * (layers + 4), seen
                with torch.inference_mode():
                    model(*batch(0))
                    dist.barrier()
                    before = figures()["read_bytes"]
                    dist.barrier()
                    model(*batch(1))
                    dist.barrier()
                read = torch.tensor(figures()["read_bytes"] - before, device="cpu")
                dist.all_reduce(read)
                if where is None:
                    assert int(read) == 0
                else:
                    assert wanted <= int(read) <= ranks * (figures()["qcopies_bytes"] + 2 * 256 * width + 8192), int(
                        read
                    )
                    assert int(read) < ranks * 2 * matrices * (0.6 if stored == "int8" else 0.35) + 4 * ranks * small
                assert figures()["acquired_bytes"] == 0
                del model, figures


@on_ranks(1, 2, "2 hosts")
def test_a_fraction() -> None:
    """The values do not depend on it: what is left of "nvme" stays in memory in as few bits, of "cpu" as numbers, rounded alike."""
    layers = 5
    with scratch() as path:
        wanted = None
        for where, fraction in ((path, 1.0), (path, 0.6), (None, 1.0), (None, 0.6), (None, 1e-6)):
            model = prepared(kept("int8", where, fraction=fraction), 128, layers)
            tier = engine_of(model).params
            assert tier.in_file
            seen, figures = zeropp.memory(model), tier.figures()
            for one in (seen[shards_tier()]["params"], seen.get("nvme", {}).get("params", {"held": 0, "planned": 0})):
                assert abs(one["held"] - one["planned"]) <= 0.03 * one["planned"] + 8192 * (layers + 4), (
                    fraction,
                    seen,
                )
            if where is not None:
                file_bytes = tier.path.stat().st_size
                assert file_bytes == figures["qcopies_bytes"] - figures["qcopies_held_bytes"]
                assert abs(file_bytes - fraction * figures["qcopies_bytes"]) <= 4096 and figures["resident_bytes"] == 0
            else:
                assert abs(figures["resident_bytes"] / figures["mapping_bytes"] - 1 + fraction) < 1.5 / layers, (
                    fraction,
                    figures,
                )
                assert figures["qcopies_held_bytes"] == figures["qcopies_bytes"]
            with torch.inference_mode():
                got = [model(*batch(step)) for step in (0, 1, 2)]
            got += list(zeropp.full_state_dict(model).values())
            wanted = got if wanted is None else wanted
            assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True)), (where, fraction)
            del model, tier


class SomeExperts(torch.nn.Module):
    """Experts as transformers holds them: a stack of matrices each, and a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.up_proj = torch.nn.Parameter(torch.randn(4, 96, 64))
        self.down_proj = torch.nn.Parameter(torch.randn(4, 64, 96))
        self.up_proj_bias = torch.nn.Parameter(torch.randn(4, 96))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i in range(4):
            hidden = torch.nn.functional.linear(x, self.up_proj[i], self.up_proj_bias[i]).relu()
            x = x + torch.nn.functional.linear(hidden, self.down_proj[i])
        return x


class Mixture(torch.nn.Module):
    """Experts, and other parameters of three dimensions: positions, and the kernel of a convolution."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.positions = torch.nn.Parameter(torch.randn(1, 512, 64))
        self.mix = torch.nn.Conv1d(64, 64, 3, padding=1)
        self.experts = SomeExperts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.positions[:, : x.shape[1]]
        return self.experts(self.mix(x.transpose(1, 2)).transpose(1, 2))


@on_ranks(1, 2)
def test_experts_are_matrices() -> None:
    with scratch() as path:
        for stored, where in (("int8", path), ("int4", None)):
            plain = Mixture().bfloat16()
            model, _ = zeropp.prepare(Mixture(), None, kept(stored, where))
            values, x = zeropp.full_state_dict(model), torch.randn(2, 16, 64, dtype=torch.bfloat16)
            for name, exact in plain.state_dict().items():
                if name in ("experts.up_proj", "experts.down_proj"):
                    rounded_as_stated(exact, values[name], stored)
                else:
                    assert torch.equal(exact, values[name]), name
            plain.load_state_dict(values)
            with torch.inference_mode():
                assert torch.equal(model(x), plain(x))
            del model, plain


@on_ranks(1, 2, "2 hosts")
def test_writes_text() -> None:
    """A model built in shards on the disk, which no rank ever holds whole, continues a text; each token is what plain
    torch writes with the same values."""
    from gpt import generate

    with scratch() as path:
        with zeropp.sharded_init(path=path):
            model = gpt(width=64)
        model, _ = zeropp.prepare(model, None, kept("int4", path))
        plain = gpt(width=64, dtype=torch.bfloat16)
        plain.load_state_dict(zeropp.full_state_dict(model))
        prompt, device = b"import zeropp", torch.device("cpu")
        written = [generate(one.eval(), prompt, 12, context=CONTEXT, device=device) for one in (model, plain)]
        assert written[0] == written[1] and len(written[0]) == 12 + len(prompt)
        del model, plain


@on_ranks(1, 2, "2 hosts")
def test_a_read_that_fails() -> None:
    """The file loses its end: a forward raises, naming it, and goes on once it is whole."""
    with scratch() as path:
        model = prepared(kept("int8", path), 256)
        with torch.inference_mode():
            wanted = model(*batch(0))
            file, first = engine_of(model).params.path, engine_of(model).params.writes(dist.get_rank())
            values = file.read_bytes()
            dist.barrier()
            if first:
                os.truncate(file, len(values) // 2)
            dist.barrier()
            with pytest.raises(zeropp.TierError, match=r"params(-1)?\".*at offset \d+") as caught:
                model(*batch(0))
            assert caught.value.path == str(file)
            del caught
            dist.barrier()
            if first:
                file.write_bytes(values)
            dist.barrier()
            assert torch.equal(model(*batch(0)), wanted)
        del model


@on_ranks(1, 2)
def test_refuses_training() -> None:
    with scratch() as path:
        model = gpt()
        adam = torch.optim.AdamW(model.parameters())
        with pytest.raises(
            zeropp.ConfigError, match="'int8' does not combine with optimizer AdamW: rounded weights are for inference"
        ):
            zeropp.prepare(model, adam, kept("int8", path))
        model = prepared(kept("int8", path))
        with pytest.raises(zeropp.ConfigError, match="rounded weights are for inference"):
            zeropp.prepare(model, torch.optim.AdamW(model.parameters()), kept("int8", path))
        with pytest.raises(
            zeropp.Error, match=r"backward reached parameter '.*', but this model's weights are kept in int8"
        ):
            model(*batch(0)).backward()
        for refused in (
            lambda model: zeropp.load_full_state_dict(model, zeropp.full_state_dict(model)),
            lambda model: zeropp.set_full(model.blocks[0].up.weight, torch.zeros_like(model.blocks[0].up.weight)),
            lambda model: zeropp.save(Path(path) / "ckpt", model),
            lambda model: zeropp.gathered(model, write=True).__enter__(),
        ):
            with pytest.raises(zeropp.Error, match="weights are kept in int8 for inference"):
                refused(model)
        with torch.no_grad():
            assert model(*batch(0)).isfinite()
        del model


@pytest.mark.slow
@on_ranks(1, 2)
def test_transformers_generate() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    with scratch() as path:
        config = LlamaConfig(
            vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=64,
        )  # fmt: skip
        torch.manual_seed(0)
        model, plain = LlamaForCausalLM(config), LlamaForCausalLM(config)
        model, _ = zeropp.prepare(model, None, kept("int8", path, None))
        plain.load_state_dict(zeropp.full_state_dict(model))
        prompt = torch.arange(8).reshape(1, 8)
        written = [
            one.eval().generate(prompt, min_new_tokens=12, max_new_tokens=12, do_sample=False) for one in (model, plain)
        ]
        assert torch.equal(*written) and written[0].shape == (1, 20)
        del model, plain


@pytest.mark.slow
@on_ranks(1, 2)
def test_transformers_experts() -> None:
    """Real ones of several kinds: which are found, how many bytes they take, and a text token by token as plain torch writes it with
    the same values."""
    import transformers

    common = {
        "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 64,
    }  # fmt: skip
    kinds: dict[str, dict[str, Any]] = {
        "Mixtral": {"num_local_experts": 4},
        "Qwen3Moe": {"num_experts": 4, "moe_intermediate_size": 32, "num_experts_per_tok": 2, "decoder_sparse_step": 1},
        "GptOss": {"num_local_experts": 4, "head_dim": 16, "layer_types": ["full_attention"] * 2},
    }
    with scratch() as path:
        for kind, more in kinds.items():
            config = getattr(transformers, f"{kind}Config")(**common, **more)
            torch.manual_seed(0)
            model, plain = (getattr(transformers, f"{kind}ForCausalLM")(config).eval() for _ in range(2))
            exact = {name: value.clone() for name, value in model.state_dict().items()}
            low = {id(p) for p in matrices(model)}
            stacked = {name for name, p in model.named_parameters() if p.ndim == 3}
            assert len(stacked) == 4 and all(id(p) in low for n, p in model.named_parameters() if n in stacked), kind
            model, _ = zeropp.prepare(model, None, kept("int8", path, None))
            values = zeropp.full_state_dict(model)
            for name in stacked:
                rounded_as_stated(exact[name], values[name], "int8")
            plain.load_state_dict(values)
            prompt = torch.arange(8).reshape(1, 8)
            written = [
                one.generate(prompt, min_new_tokens=8, max_new_tokens=8, do_sample=False) for one in (model, plain)
            ]
            assert torch.equal(*written) and written[0].shape == (1, 16), kind
            del model, plain


@on_ranks("2 hosts")
def test_texts_of_other_lengths() -> None:
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


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Precision(stored="int3"), "Precision.stored: 'int3' is not allowed; wanted one of 'int8', 'int4'"),
        (
            lambda: Config(precision=Precision(stored="int8")),
            "does not combine with Config.offload.params.kind='device'",
        ),
    ],
)
def test_what_cannot_be_stored_is_said(make: Any, said: str) -> None:
    with pytest.raises(zeropp.ConfigError) as caught:
        make()
    assert said in str(caught.value)
