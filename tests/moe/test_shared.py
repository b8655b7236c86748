# SPDX-License-Identifier: Apache-2.0
"""Ranks that hold the same tokens route each of them once (DeepSpeed-TED), against one process on the joined batch."""

from __future__ import annotations

import functools
import shutil
import tempfile
from typing import Any

import expert_parity
import moe_models
import pytest
import torch
import torch.distributed as dist
import zeropp
from expert_parity import BOUND, compare
from memory import Peak, resident_bytes
from ranks import of_all_ranks, on_cpu_only, on_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

WIDTH, INNER, TOKENS, STEPS = 16, 24, 11, 2


class _Sum(torch.autograd.Function):
    """The sum over the ranks of a group, forward or backward (g and f of Megatron-LM)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, here: bool) -> Tensor:
        ctx.group, ctx.here = group, here
        return _summed(x, group) if here else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad if ctx.here else _summed(grad, ctx.group), None, None


def _summed(x: Tensor, group: Any) -> Tensor:
    x = x.clone()
    dist.all_reduce(x, group=group)
    return x


class MLP(nn.Module):
    """Cut by hand: rows of the first matrix, and columns of the second one."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER, bias=False), nn.Linear(INNER, WIDTH, bias=False)
        self.group: Any = None

    def cut(self, mesh: Any) -> None:
        self.group, t, at = mesh.get_group(), mesh.size(), mesh.get_local_rank()
        for linear, dim in ((self.up, 0), (self.down, 1)):
            part = linear.weight.detach().chunk(t, dim)[at].contiguous()
            linear.weight = nn.Parameter(DTensor.from_local(part, mesh, [Shard(dim)]))

    def forward(self, x: Tensor) -> Tensor:
        if self.group is None:
            return x + self.down(torch.relu(self.up(x)))
        inner = torch.relu(_Sum.apply(x, self.group, False) @ self.up.weight.to_local().t())
        return x + _Sum.apply(inner @ self.down.weight.to_local().t(), self.group, True)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 5)
        self.mlps = nn.ModuleList(MLP() for _ in range(2))
        self.moes = nn.ModuleList(zeropp.moe.MoE(WIDTH, 8, 2, intermediate=8) for _ in range(2))
        self.around: Any = lambda moe, x: moe(x)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for mlp, moe in zip(self.mlps, self.moes, strict=True):
            x = mlp(x)
            x = x + self.around(moe, x)
        return self.last(x)


def net(dtype: torch.dtype = torch.float32) -> Net:
    torch.manual_seed(3)
    return Net().to(dtype)


def batch(step: int, at: int, tokens: int = TOKENS) -> Tensor:
    values = torch.randn(tokens, WIDTH, generator=torch.Generator("cpu").manual_seed(10 * step + at), device="cpu")
    return values.to(torch.get_default_device())


def loss_of(model: Any, x: Tensor) -> Tensor:
    return model(x).square().mean()  # type: ignore[no-any-return]


def mesh_of() -> Any:
    shape = (dist.get_world_size() // 2, 2)
    return init_device_mesh(torch.get_default_device().type, shape, mesh_dim_names=("dp", "tp"))


def cut_net(mesh: Any) -> Net:
    model = net()
    for mlp in model.mlps:
        mlp.cut(mesh["tp"])
    return model


def reference(data: int) -> tuple[list[float], list[dict[str, Tensor]], dict[str, Tensor]]:
    model, losses, gradients = net(), [], []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        loss = loss_of(model, torch.cat([batch(step, at) for at in range(data)]))
        loss.backward()
        losses.append(loss.item())
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
    return losses, gradients, dict(model.named_parameters())


def parity(mesh: Any, model: Net, parallel: Any, **more: Any) -> Any:
    """Train, and compare losses, gradients, norm and values with one process."""
    data, at = mesh["dp"].size(), mesh.get_local_rank("dp")
    losses, gradients, values = reference(data)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    experts = zeropp.Experts(parallel=parallel, shared_by=mesh["tp"])
    model, optimizer = zeropp.prepare(model, optimizer, zeropp.Config(experts=experts, **more), mesh=mesh)
    for step in range(STEPS):
        loss = loss_of(model, batch(step, at))
        loss.backward()
        mean = sum(of_all_ranks(loss.item())) / dist.get_world_size()
        assert abs(mean - losses[step]) <= BOUND * losses[step]
        for path, parameter in model.named_parameters():
            if "mlps" not in path:  # of DTensors the norm and the values after the step tell
                compare(zeropp.get_full(parameter, "grad"), gradients[step][path], f"step {step}: gradient of {path}")
        norm = sum(g.double().square().sum() for g in gradients[step].values()) ** 0.5
        assert abs(optimizer.clip_grad_norm_(1e9) - norm) <= BOUND * norm
        optimizer.step()
        optimizer.zero_grad()
    whole = zeropp.full_state_dict(model)
    for path, value in values.items():
        compare(whole[path], value.detach(), f"value of {path}")
    return model, optimizer


@on_ranks(4, devices=("cpu", "sim", pytest.param("sim-lazy", marks=pytest.mark.slow)))
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_tp_2_ep_2_equals_one_process(stage: int) -> None:
    """Four ranks with different experts: 2 batches, each held by 2 ranks."""
    mesh = mesh_of()
    parity(mesh, cut_net(mesh), 4, stage=stage)


@on_ranks(2, 4)
@pytest.mark.parametrize("host_copy", ["auto", "off"])
def test_experts_within_the_ranks_that_share_tokens(host_copy: str) -> None:
    """Two ranks with different experts, which are those with the same tokens; data ranks partition each half."""
    mesh = mesh_of()
    model, _ = parity(mesh, cut_net(mesh), 2, stage=3, host_copy=host_copy)
    experts = model.moes[0].experts.forward
    assert (experts.exchange.ranks, experts.sharers.ranks) == (2, 2)


@on_ranks(4)
def test_checkpoints_go_to_other_layouts() -> None:
    """Saved with 4 parts, loaded with 2, and by a model that is not cut."""
    mesh = mesh_of()
    folder = of_all_ranks(tempfile.mkdtemp() if dist.get_rank() == 0 else None)[0]
    model, optimizer = parity(mesh, cut_net(mesh), 4, stage=3)
    wanted = zeropp.full_state_dict(model)
    zeropp.save(folder, model, optimizer, step=1)
    other = cut_net(mesh)
    experts = zeropp.Experts(parallel=2, shared_by=mesh["tp"])
    other, _ = zeropp.prepare(other, None, zeropp.Config(stage=1, experts=experts), mesh=mesh)
    plain, _ = zeropp.prepare(net(), None, zeropp.Config(stage=3, experts=2))
    for one in (other, plain):
        zeropp.load(folder, one)
        found = zeropp.full_state_dict(one)
        assert [name for name, value in wanted.items() if not torch.equal(found[name], value)] == []
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)


@on_ranks(4)
def test_without_a_cut_all_ranks_are_data_ranks() -> None:
    """Ranks come in pairs with the same batch, and ZeRO partitions over all of them: N counts batches for an expert."""
    mesh = mesh_of()
    _, gradients, _ = reference(2)
    model = net()
    experts = zeropp.Experts(parallel=2, shared_by=mesh["tp"])
    model, optimizer = zeropp.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), zeropp.Config(experts=experts)
    )
    loss = loss_of(model, batch(0, mesh.get_local_rank("dp")))
    loss.backward()
    for path, parameter in model.named_parameters():
        compare(zeropp.get_full(parameter, "grad"), gradients[0][path], f"gradient of {path}")
    norm = sum(g.double().square().sum() for g in gradients[0].values()) ** 0.5
    assert abs(optimizer.clip_grad_norm_(1e9) - norm) <= BOUND * norm


@on_ranks(4)
def test_each_token_is_sent_once() -> None:
    """Rows of all experts: k a token and batch, not t times as many; and what a rank gathers: (t - 1) / t of rows and weights."""
    on_cpu_only("there the group of the mesh gathers, whose bytes zeropp does not count")
    mesh = mesh_of()
    model = cut_net(mesh)
    taken: list[int] = []
    experts = zeropp.Experts(parallel=4, shared_by=mesh["tp"])
    model, _ = zeropp.prepare(model, None, zeropp.Config(experts=experts), mesh=mesh)
    forward = model.moes[0].experts.forward
    outputs = forward._outputs
    forward._outputs = lambda module, rows, ends: taken.append(len(rows)) or outputs(module, rows, ends)
    comm = forward.sharers.comm

    def gathered() -> int:
        return sum(row["bytes"] for row in comm.traffic().values())

    before = gathered()
    x = batch(0, mesh.get_local_rank("dp"))
    loss = loss_of(model, x)
    ahead = gathered() - before
    loss.backward()
    assert sum(of_all_ranks(sum(taken))) == 2 * TOKENS * 2
    other = -(-TOKENS // 2)
    layers = 2
    assert ahead == layers * other * WIDTH * 4, (ahead, comm.traffic())
    assert gathered() - before - ahead == layers * other * (WIDTH + 2) * 4


@on_ranks(4)
def test_checkpointed_layers_join_once() -> None:
    """Selective checkpointing keeps what exchanges and joins return: the recomputation calls none of them."""
    on_cpu_only("there the group of the mesh gathers, whose calls zeropp does not count")
    mesh = mesh_of()
    counts = []
    for context in (None, functools.partial(create_selective_checkpoint_contexts, zeropp.moe.keep_exchanges)):
        model = cut_net(mesh)
        model.around = lambda moe, x, context=context: (
            moe(x) if context is None else checkpoint(moe, x, use_reentrant=False, context_fn=context)
        )
        experts = zeropp.Experts(parallel=4, shared_by=mesh["tp"])
        model, _ = zeropp.prepare(model, None, zeropp.Config(experts=experts), mesh=mesh)
        comm = model.moes[0].experts.forward.sharers.comm
        before = sum(row["calls"] for row in comm.traffic().values())
        loss_of(model, batch(0, mesh.get_local_rank("dp"))).backward()
        counts.append(sum(row["calls"] for row in comm.traffic().values()) - before)
    assert counts[0] == counts[1] > 0


@on_ranks(4)
def test_errors_name_the_expert() -> None:
    """A gradient that is not finite has the number of its expert in the whole model: expert 2 is on tp rank 1 of the first data rank."""
    mesh = mesh_of()
    model = cut_net(mesh)
    experts = zeropp.Experts(parallel=4, shared_by=mesh["tp"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = zeropp.prepare(model, optimizer, zeropp.Config(experts=experts), mesh=mesh)
    path = "moes.1.experts.gate_up_proj"
    entry = next(e for unit in optimizer._engine.units for e in unit.params if e.names[0] == path)
    bad = float("nan") if dist.get_rank() == 1 else 1.0
    entry.param.register_hook(lambda g: torch.cat([g[:1] * bad, g[1:]]))
    loss_of(model, batch(0, mesh.get_local_rank("dp"))).backward()
    with pytest.raises(zeropp.Error, match=rf"'{path}\[2\]'"):
        optimizer.step()


@on_ranks(2, pytest.param(4, marks=pytest.mark.slow))
def test_stock_tensor_and_expert_parallelism() -> None:
    """transformers' own tp x ep over FSDP2, with zeropp's exchange: gradients of one process."""
    on_cpu_only("transformers makes its own group, which knows no simulated GPU")
    import transformers
    import zeropp.hf  # noqa: F401  registers the name
    from transformers.distributed import DistributedConfig

    rank, ranks = dist.get_rank(), dist.get_world_size()
    folder = of_all_ranks(tempfile.mkdtemp() if rank == 0 else None)[0]
    if rank == 0:
        moe_models.build("Mixtral").save_pretrained(folder)
    dist.barrier()
    layout = DistributedConfig(fsdp_size=ranks // 2, tp_size=2, ep_size=ranks, ep_implementation="zeropp")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, distributed_config=layout)
    losses, gradients, _ = expert_parity.reference("Mixtral", ranks // 2, steps=1)
    loss = moe_models.loss_of(model.train(), moe_models.batch(0, rank // 2))
    loss.backward()
    assert abs(sum(of_all_ranks(loss.item())) / ranks - losses[0]) <= BOUND * losses[0]
    for path, parameter in model.named_parameters():
        gradient: Any = parameter.grad
        whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        compare(whole, gradients[0][path], path)
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder)


@on_ranks(4)
def test_fewer_tokens_than_ranks() -> None:
    mesh = mesh_of()
    plain, model = net(), cut_net(mesh)
    x = batch(0, 0, tokens=1)
    experts = zeropp.Experts(parallel=4, shared_by=mesh["tp"])
    model, _ = zeropp.prepare(model, None, zeropp.Config(experts=experts), mesh=mesh)
    torch.testing.assert_close(model(x), plain(x), rtol=BOUND, atol=BOUND)


@on_ranks(4)
def test_what_cannot_be() -> None:
    mesh = mesh_of()
    for experts, sentence in (
        (4, r"Config\.experts: .*tokens go to experts on all ranks of the job.*shared_by=mesh\['tp'\]"),
        (
            zeropp.Experts(parallel=1, shared_by=mesh["tp"]),
            "1 ranks with different experts: it is no multiple of the 2 ranks of",
        ),
    ):
        with pytest.raises(zeropp.ConfigError, match=sentence):
            zeropp.prepare(cut_net(mesh), None, zeropp.Config(experts=experts), mesh=mesh)
    with pytest.raises(
        zeropp.ConfigError, match=r"hold the same tokens, and are not next to each other among the data ranks"
    ):
        zeropp.prepare(net(), None, zeropp.Config(experts=zeropp.Experts(shared_by=mesh["dp"])))
    named = zeropp.Config(experts=zeropp.Experts(shared_by="sp"))
    with pytest.raises(
        zeropp.ConfigError, match=r"shared_by 'sp' is the name of a dimension, and the mesh has 'dp', 'tp'"
    ):
        zeropp.prepare(cut_net(mesh), None, named, mesh=mesh)
    with pytest.raises(zeropp.ConfigError, match=r"shared_by 'sp' is the name of a dimension, and there is no mesh"):
        zeropp.prepare(net(), None, named)
    for wrong in (mesh, 2):
        with pytest.raises(zeropp.ConfigError, match=r"Experts\.shared_by.*a mesh of one dimension"):
            zeropp.Experts(shared_by=wrong)


@on_ranks(2, alone=True, cold=True)
def test_a_step_needs_64_mib() -> None:
    """The tiled optimizer of TED (section 4): 25 million bf16 elements of experts a rank in one unit, of which gradients in fp32 alone would
    be 96 MiB, are stepped with at most 64 MiB beside the states."""
    on_cpu_only("the memory counted here is the host's")
    torch.manual_seed(0)
    model = nn.Sequential(*(zeropp.moe.MoE(512, 8, 2, intermediate=1024) for _ in range(4))).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    config = zeropp.Config(stage=2, experts=2, precision="bf16", units=1 << 40)
    model, optimizer = zeropp.prepare(model, optimizer, config)
    elems = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name) // 2
    assert 4 * elems >= 96 << 20
    for step in range(2):
        model(torch.randn(64, 512, dtype=torch.bfloat16)).float().square().mean().backward()
        optimizer.clip_grad_norm_(1.0)
        before = resident_bytes()
        with Peak() as peak:
            optimizer.step()
        optimizer.zero_grad()
        grown = peak.bytes - before
        assert grown > 96 << 20 if step == 0 else grown <= 64 << 20, (
            step,
            grown / 2**20,
        )  # the first step makes both moments
