# SPDX-License-Identifier: Apache-2.0
"""Experts on demand: the experts that tokens chose are read, and no others; what is computed is what whole layers compute."""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import moe_models
import pytest
import torch
import zeropp
from moe_models import batch, loss_of
from ranks import of_all_ranks, on_ranks
from zeropp.moe import on_demand
from zeropp.zero.engine import engine_of

# A layer's sums are of the same products in another order: a few roundings of fp32, through two layers.
BOUND = 1e-5
EXPERTS = 8


def build() -> Any:
    """A Qwen3-MoE whose experts are whole pages: 32 KiB and 16 KiB."""
    import transformers

    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        **{**moe_models.HEADS, "hidden_size": 64}, num_hidden_layers=2, num_experts_per_tok=2, intermediate_size=64,
        moe_intermediate_size=64, num_experts=EXPERTS, head_dim=16, norm_topk_prob=True,
        experts_implementation="grouped_mm", attn_implementation="eager",
    )  # fmt: skip
    return transformers.Qwen3MoeForCausalLM(config).float().eval()


@contextmanager
def folder() -> Iterator[str]:
    first = torch.distributed.get_rank() == 0
    found = of_all_ranks(tempfile.mkdtemp() if first else None)[0]
    yield found
    torch.distributed.barrier()
    if first:
        shutil.rmtree(found)


def prepared(
    path: str, cache: Any, make: Callable[[], Any] = build, optimizer: Any = None, **more: Any
) -> tuple[Any, Any]:
    model = make()
    states = {} if optimizer is None else {"optimizer": "cpu"}
    offload = zeropp.Offload(params="nvme", path=path, **states)
    config = zeropp.Config(experts=zeropp.Experts(parallel=1, cache=cache), offload=offload, **more)
    return zeropp.prepare(model, None if optimizer is None else optimizer(model.parameters()), config)


def demand_of(model: Any) -> Any:
    return model.model.layers[0].mlp.experts.forward.demand.cache


def read_bytes(model: Any, ids: torch.Tensor) -> tuple[int, torch.Tensor]:
    """Return the bytes that a pass reads from the file, and its logits."""
    params = engine_of(model).params
    before = params.figures()["read_bytes"]
    with torch.no_grad():
        logits = model(ids).logits
    return params.figures()["read_bytes"] - before, logits


@on_ranks(1, 2, devices=("cpu", "sim-lazy"))
def test_reads_the_experts_that_tokens_chose(ranks: int) -> None:
    """A cache of all experts reads each chosen one once; one of two experts reads them in each pass; logits are those of the plain model.
    Bytes are counted on one rank: ranks of a host share reads of whole units."""
    with folder() as path:
        plain, chosen = build(), []
        for layer in plain.model.layers:
            layer.mlp.gate.register_forward_hook(lambda _, args, out: chosen.append(set(out[-1].flatten().tolist())))
        ids = batch(0, torch.distributed.get_rank(), rows=1, length=1)
        with torch.no_grad():
            wanted = plain(ids).logits
        count = sum(map(len, chosen))
        expert = 3 * 64 * 64 * 4
        assert count < 2 * EXPERTS
        for cache, again in (("2MiB", 0), (2 * expert + 8192, count)):
            model, _ = prepared(path, cache)
            units = [unit for unit in engine_of(model).units if unit.in_file]
            whole = sum(unit.elems * 4 for unit in units)
            dense = sum(-(-unit.elems * 4 // 4096) * 4096 for unit in units if "experts" not in unit.name)
            assert whole - dense > 2 * EXPERTS * expert - 8192
            for experts in (count, again):
                reads = demand_of(model).reads
                moved, logits = read_bytes(model, ids)
                assert demand_of(model).reads - reads == experts
                assert ranks > 1 or experts * expert <= moved <= dense + experts * expert, (
                    moved,
                    dense,
                    experts,
                    expert,
                )
                torch.testing.assert_close(logits, wanted, rtol=BOUND, atol=BOUND)
            tier = "cpu" if ids.device.type == "cpu" else "device"
            counted = zeropp.memory(model)[tier]["expert_cache"]
            assert counted["planned"] == demand_of(model).most_bytes
            assert 0 < counted["held"] <= counted["planned"] + on_demand.SPARE * (expert + 4096)
            with torch.device("meta"):
                empty = build()
            config = dataclasses.replace(engine_of(model).config, device=ids.device.type)
            said = zeropp.estimate(empty, ranks=ranks, config=config, optimizer="none")
            assert said[tier]["expert_cache"] == counted["planned"]


@on_ranks(1)
@pytest.mark.parametrize("stored", ["int8", "int4"])
@pytest.mark.parametrize("name", ["Qwen3", "GptOss"])
@pytest.mark.parametrize("tier", ["nvme", pytest.param("cpu", marks=pytest.mark.slow)])
def test_experts_in_fewer_bits(stored: Any, name: str, tier: Any) -> None:
    """The same numbers as of whole layers in 8 or 4 bits. Against the plain model: a weight is off by up to half a code, in the mean
    by 1/sqrt(12) of a code, which is 1/127 or 1/7 of the largest of 64 weights, about 2.4 standard deviations. So each product is off by
    0.0055 or 0.10 of itself, and 14 of them in a row by sqrt(14) times as much."""

    def make() -> Any:
        return build() if name == "Qwen3" else moe_models.build(name, "grouped_mm").eval()

    with folder() as path:
        how: dict[str, Any] = {
            "offload": zeropp.Offload(params=tier, **({"path": path} if tier == "nvme" else {})),
            "precision": zeropp.Precision(stored=stored),
        }
        ids = batch(0, 0, rows=1, length=5)
        with torch.no_grad():
            exact = make()(ids).logits
            whole, _ = zeropp.prepare(make(), None, zeropp.Config(**how))
            some, _ = zeropp.prepare(make(), None, zeropp.Config(experts=zeropp.Experts(cache="256KiB"), **how))
            logits = some(ids).logits
            torch.testing.assert_close(logits, whole(ids).logits, rtol=BOUND, atol=BOUND)
        code = 1 / 127 if stored == "int8" else 1 / 7
        assert 0 < (logits - exact).norm() <= 14**0.5 * 2.4 * code / 12**0.5 * exact.norm()


@on_ranks(1)
def test_generate_and_training_between() -> None:
    """Passes with gradients gather whole layers, as ever; afterwards the experts are read again, with their new values."""
    with folder() as path:
        plain = build().train()
        optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
        model, ours = prepared(path, "1MiB", optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2))
        how: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        ids = batch(0, 0, rows=1, length=5)
        for step in range(2):
            assert torch.equal(model.eval().generate(ids, **how), plain.eval().generate(ids, **how))
            for one, its in ((plain.train(), optimizer), (model.train(), ours)):
                loss = loss_of(one, batch(step, 0))
                loss.backward()
                its.step()
                its.zero_grad()
        zeropp.load_full_state_dict(model, {name: torch.zeros_like(p) for name, p in plain.named_parameters()})
        with torch.no_grad():
            assert not model(ids).logits.any()


@on_ranks(2, pytest.param(4, marks=pytest.mark.slow), devices=("cpu", "sim"))
@pytest.mark.parametrize("kind", ["nvme", "int8"])
def test_experts_of_several_ranks(kind: str) -> None:
    """Each rank reads those of its own experts that the tokens of all ranks chose, and no others; logits are those of the plain model, or
    of whole layers in as many bits."""
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    with folder() as path:
        plain, chosen = build(), []
        for layer in plain.model.layers:
            layer.mlp.gate.register_forward_hook(lambda _, args, out: chosen.append(set(out[-1].flatten().tolist())))
        batches = [batch(0, r, rows=1, length=2) for r in range(ranks)]
        how: dict[str, Any] = {"offload": zeropp.Offload(params="nvme", path=path)}
        if kind == "int8":
            how = {"offload": zeropp.Offload(params="cpu"), "precision": zeropp.Precision(stored="int8")}
        with torch.no_grad():
            wanted = [plain(ids).logits for ids in batches][rank]
            if kind == "int8":
                whole, _ = zeropp.prepare(build(), None, zeropp.Config(experts=2, **how))
                wanted = whole(batches[rank]).logits
        experts = zeropp.Experts(parallel=2, cache="2MiB")
        model, _ = zeropp.prepare(build(), None, zeropp.Config(experts=experts, **how))
        with torch.no_grad():
            for _ in range(2):
                logits = model(batches[rank]).logits
                torch.testing.assert_close(logits, wanted, rtol=BOUND, atol=BOUND)
        mine = range(EXPERTS // 2 * (rank % 2), EXPERTS // 2 * (rank % 2 + 1))
        together = range(rank // 2 * 2, rank // 2 * 2 + 2)  # the ranks of one exchange
        read = sum(len({e for r in together for e in chosen[2 * r + at]} & set(mine)) for at in range(2))
        if kind == "nvme":  # codes in other bits may choose otherwise
            assert demand_of(model).reads == read, (demand_of(model).reads, read)
        assert 0 < demand_of(model).reads <= 2 * len(mine)
        how = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        if kind == "nvme":
            tokens = plain.generate(batches[rank], **how)
            assert torch.equal(model.generate(batches[rank], **how, synced_gpus=True), tokens)


@on_ranks(1, devices=("sim", "sim-lazy"))
def test_more_experts_than_stagings() -> None:
    """Through one staging every expert waits for the copy of the one before; through several they wait in turns. The cache of a GPU is on
    the GPU."""
    ids = batch(0, 0, rows=1, length=12)
    with folder() as path, torch.no_grad():
        wanted = build()(ids).logits
        kept = on_demand.STAGINGS
        for stagings, cache in ((1, "2MiB"), (3, "2MiB"), (3, 3 * 64 * 64 * 4 * 4)):
            on_demand.STAGINGS = stagings
            model, _ = prepared(path, cache)
            for _ in range(2):
                torch.testing.assert_close(model(ids).logits, wanted, rtol=BOUND, atol=BOUND)
            held = demand_of(model)._held.values()
            assert held
            assert all(one.memory.device == ids.device and one.staging is None for one in held)
            expert_bytes = next(iter(held)).memory.nbytes
            counted = zeropp.memory(model)
            spare = counted["device"]["expert_cache"]["held"] - len(held) * expert_bytes
            assert spare in [count * expert_bytes for count in range(on_demand.SPARE + 1)]
            assert counted["pinned"]["expert_cache"]["held"] in [
                count * expert_bytes for count in range(1, stagings + 1)
            ]
        on_demand.STAGINGS = kept


@on_ranks(1, devices=("sim", "sim-lazy"))
def test_a_layer_on_two_streams() -> None:
    """A layer that is called on another stream finds the experts that the call before copied to the GPU, and waits for their copies."""
    with folder() as path, torch.no_grad():
        plain = build().model.layers[0].mlp.experts
        routed = torch.randn(12, 64), torch.arange(24).view(12, 2) % EXPERTS, torch.full((12, 2), 0.5)
        wanted = plain(*routed)
        torch.accelerator.synchronize()  # the next model's seed is set on the host
        model, _ = prepared(path, "2MiB")
        experts = model.model.layers[0].mlp.experts
        main, side = torch.accelerator.current_stream(), torch.Stream(device=wanted.device)
        side.wait_stream(main)
        with side:
            on_side = experts(*routed)
        reads = demand_of(model).reads
        on_main = experts(*routed)
        assert demand_of(model).reads == reads, "the second call read experts again"
        torch.testing.assert_close(on_main, wanted, rtol=BOUND, atol=BOUND)
        main.wait_stream(side)
        torch.testing.assert_close(on_side, wanted, rtol=BOUND, atol=BOUND)


@on_ranks(1, devices=("cpu", "sim"))
def test_a_disk_error_names_the_expert() -> None:
    with folder() as path:
        model, _ = prepared(path, "1MiB")
        for part in engine_of(model).params.file.parts:
            with Path(part).open("r+b") as file:
                file.truncate(0)
        module = model.model.layers[1].mlp.experts
        sentence = r"'model.layers.1.mlp.experts.gate_up_proj\[5\]': "
        with torch.no_grad(), pytest.raises(zeropp.TierError, match=sentence) as error:
            module(torch.ones(1, 64), torch.tensor([[5]]), torch.ones(1, 1))
        assert error.value.path is not None
        assert not demand_of(model)._held


@on_ranks(1, 2, devices=("cpu", "sim"))
@pytest.mark.parametrize("disks", [1, 2])
def test_a_disk_error_of_a_whole_layer_names_the_expert(disks: int, ranks: int) -> None:
    """The file is cut in the middle of a layer; with several ranks or folders it is empty, so the first expert of each rank is missed."""
    with folder() as path:
        paths = tuple(f"{path}/{at}" for at in range(disks))
        for one in paths:
            Path(one).mkdir(exist_ok=True)
        offload = zeropp.Offload(params=zeropp.Tier("nvme", path=paths))
        model, _ = zeropp.prepare(
            build(), None, zeropp.Config(experts=ranks, offload=offload, units=("Qwen3MoeExperts",))
        )
        file = engine_of(model).params.file
        module = model.model.layers[1].mlp.experts
        first, length = EXPERTS // ranks * torch.distributed.get_rank(), 0
        if ranks == disks == 1:
            first, before = 5, [unit for unit in engine_of(model).units if unit.in_file]
            while before[-1].name != "model.layers.1.mlp.experts":
                before.pop()
            length = sum(-(-unit.elems * 4 // 4096) * 4096 for unit in before[:-1]) + 5 * 32768 + 8192
        torch.distributed.barrier()
        if torch.distributed.get_rank() == 0:
            for part in file.parts:
                with Path(part).open("r+b") as opened:
                    opened.truncate(length)
        torch.distributed.barrier()
        sentence = rf"'model.layers.1.mlp.experts.gate_up_proj\[{first}\]': aio: "
        with torch.no_grad(), pytest.raises(zeropp.TierError, match=sentence):
            module(torch.ones(1, 64), torch.tensor([[5]]), torch.ones(1, 1))


@on_ranks(1, devices=("cpu", "sim"))
@pytest.mark.parametrize("stored", ["int8", "int4"])
def test_a_disk_error_of_quantised_experts_names_the_expert(stored: str) -> None:
    """The file is empty, so the layer's first scale is missed. tests/c/test_zero_unit_file_qcopy.c has the places within a copy."""
    with folder() as path:
        config = zeropp.Config(
            experts=1, offload=zeropp.Offload(params=zeropp.Tier("nvme", path=path)), units=("Qwen3MoeExperts",),
            precision=zeropp.Precision(stored=stored),
        )  # fmt: skip
        model, _ = zeropp.prepare(build(), None, config)
        (part,) = engine_of(model).params.file.parts
        with Path(part).open("r+b") as file:
            file.truncate(0)
        sentence = r"'model.layers.1.mlp.experts.gate_up_proj\[0\]': aio: "
        module = model.model.layers[1].mlp.experts
        with torch.no_grad(), pytest.raises(zeropp.TierError, match=sentence):
            module(torch.ones(1, 64), torch.tensor([[5]]), torch.ones(1, 1))


@on_ranks(1)
def test_what_cannot_be() -> None:
    with folder() as path:
        with pytest.raises(
            zeropp.ConfigError, match=r"Experts\.cache: 4096 bytes, and one expert of 'model.layers.0.mlp"
        ):
            prepared(path, 4096)
        for more in (
            {"offload": zeropp.Offload(params="nvme", path=path)},
            {"offload": zeropp.Offload(params="cpu"), "precision": zeropp.Precision(stored="int8")},
        ):
            with pytest.raises(
                zeropp.ConfigError, match=r"Experts\.slices: 2 .*: sliced experts live .*; use slices=1"
            ):
                zeropp.Config(experts=zeropp.Experts(slices=2, cache="1MiB"), **more)
        with pytest.raises(
            zeropp.ConfigError, match=r"Experts\.cache: 1073741824 bytes of experts on demand, of parame"
        ):
            zeropp.prepare(build(), None, zeropp.Config(experts=zeropp.Experts(cache="1GiB")))


@on_ranks("2 hosts")
def test_files_of_several_hosts_are_refused() -> None:
    with (
        folder() as path,
        pytest.raises(zeropp.ConfigError, match=r"on 2 hosts, each of which has a part of every expert in"),
    ):
        zeropp.prepare(
            build(),
            None,
            zeropp.Config(
                experts=zeropp.Experts(parallel=2, cache="1MiB"), offload=zeropp.Offload(params="nvme", path=path)
            ),
        )


@pytest.mark.parametrize(
    ("given", "wanted"), [("4GiB", 4 << 30), ("1.5 MB", 1_500_000), ("4096", 4096), (7, 7), ("64KiB", 65536)]
)
def test_sizes(given: Any, wanted: int) -> None:
    assert zeropp.Experts(cache=given).cache == wanted


@pytest.mark.parametrize("given", ["4 gigs", 0, True, "-1", "0"])
def test_sizes_that_are_none(given: Any) -> None:
    with pytest.raises(zeropp.ConfigError, match=r"Experts\.cache: "):
        zeropp.Experts(cache=given)
