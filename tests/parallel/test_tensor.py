# SPDX-License-Identifier: Apache-2.0
"""DTensors under every ZeRO stage: tensor parallelism of 2 over 1 and 2 data ranks, against one process on the joined batch."""

from __future__ import annotations

import tempfile
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
import zeropp
from ranks import of_all_ranks, on_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleOutput, RowwiseParallel, SequenceParallel
from zeropp.errors import ConfigError, PartitionedParameterError
from zeropp.zero.engine import engine_of
from zeropp.zero.model import arrivals
from zeropp.zero.model.boxes import Box
from zeropp.zero.model.dtensor import boxes_of_dtensor
from zeropp.zero.model.init import own_shard

WIDTH, CLIP = 16, 0.5


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 28), nn.Linear(28, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    """The head has 11 rows: 6 on one rank, and 5 on the other."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layers = nn.Linear(WIDTH, WIDTH), nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 11)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def _mesh() -> Any:
    return init_device_mesh(
        torch.get_default_device().type, (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp")
    )


def _net(dtype: torch.dtype = torch.float32) -> Net:
    torch.manual_seed(0)
    return Net().to(dtype)


def _cut(mesh: Any, dtype: torch.dtype = torch.float32, model: Net | None = None) -> Net:
    plan: dict[str, Any] = {"head": ColwiseParallel(output_layouts=Replicate())}
    for i in range(2):
        plan |= {f"layers.{i}.up": ColwiseParallel(), f"layers.{i}.down": RowwiseParallel()}
    return zeropp.parallel.tensor(_net(dtype) if model is None else model, mesh["tp"], plan)


def _batch(step: int, at: int) -> Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(10 * step + at))


def _adam(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def _train(model: Any, optimizer: Any, mesh: Any, steps: int) -> list[float]:
    norms = []
    for step in range(steps):
        dtype = next(model.parameters()).dtype
        model(_batch(step, mesh.get_local_rank("dp")).to(dtype)).float().square().mean().backward()
        norms.append(optimizer.clip_grad_norm_(CLIP))
        optimizer.step()
        optimizer.zero_grad()
    return norms


def _joined(steps: int, data: int) -> tuple[list[float], dict[str, Tensor]]:
    model = _net()
    optimizer, norms = _adam(model), []
    for step in range(steps):
        model(torch.cat([_batch(step, at) for at in range(data)])).square().mean().backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        optimizer.zero_grad()
    return norms, model.state_dict()


def _require_training_of_one_process(model: Any, optimizer: Any, mesh: Any) -> None:
    """Train 4 clipped steps of AdamW in fp32: sums in another order, which a step of 1e-3 amplifies to at most 2e-6."""
    norms = [float(norm) for norm in _train(model, optimizer, mesh, 4)]
    wanted, values = _joined(4, mesh.size(0))
    assert norms == pytest.approx(wanted, rel=1e-5)  # a copy that counted twice would be off by percents
    whole = zeropp.full_state_dict(model)
    for name, value in values.items():
        assert (whole[name] - value.cpu()).abs().max() < 2e-6, name


@pytest.mark.parametrize(
    "stage, host_copy",
    [(0, "auto"), (2, "auto"), (3, "off"), pytest.param(1, "off", marks=pytest.mark.slow), pytest.param(3, "auto", marks=pytest.mark.slow)],
)  # fmt: skip
@on_ranks(2, 4)
def test_parity_with_one_process(stage: int, host_copy: str) -> None:
    mesh = _mesh()
    model = _cut(mesh)
    model, optimizer = zeropp.prepare(model, _adam(model), zeropp.Config(stage=stage, host_copy=host_copy), mesh=mesh)
    _require_training_of_one_process(model, optimizer, mesh)


@pytest.mark.parametrize("stage", [3, pytest.param(1, marks=pytest.mark.slow)])
@on_ranks(4)
def test_parity_in_bf16(stage: int) -> None:
    """bf16 with fp32 masters: 4 steps of 1e-3 differ from fp32's by at most a sign each, 8e-3, and a rounding of 2^-8 of the value."""
    mesh = _mesh()
    model = _cut(mesh, torch.bfloat16)
    model, optimizer = zeropp.prepare(model, _adam(model), zeropp.Config(stage=stage, precision="bf16"), mesh=mesh)
    norms = _train(model, optimizer, mesh, 4)
    wanted, values = _joined(4, 2)
    assert norms == pytest.approx(wanted, rel=0.05)
    whole = zeropp.full_state_dict(model)
    for name, value in values.items():
        assert ((whole[name].float() - value).abs() <= 8e-3 + value.abs() / 128).all(), name


@pytest.mark.parametrize(
    "kind, stage",
    [("Qwen3", 3), ("Llama", 2), *(pytest.param("Qwen3", stage, marks=pytest.mark.slow) for stage in (0, 1, 2))],
)
@on_ranks(2, 4)
def test_models_of_transformers_by_their_own_plan(kind: str, stage: int) -> None:
    """65 tokens over 2 ranks, tied; transformers sums the gradients of Qwen3's q_norm and k_norm in hooks of the first forward."""
    transformers = pytest.importorskip("transformers")
    mesh = _mesh()
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=65, hidden_size=32, intermediate_size=36, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, attn_implementation="sdpa", use_cache=False, tie_word_embeddings=True,
    )  # fmt: skip

    def make() -> Any:
        torch.manual_seed(0)
        return getattr(transformers, f"{kind}ForCausalLM")(config)

    def tokens(step: int, at: int) -> Tensor:
        return torch.randint(0, 65, (2, 8), generator=torch.Generator().manual_seed(10 * step + at))

    def adam(model: Any) -> Any:
        return torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3)

    one, model = make(), zeropp.parallel.tensor(make(), mesh["tp"])
    model, optimizer = zeropp.prepare(model, adam(model), zeropp.Config(stage=stage), mesh=mesh)
    plain = adam(one)
    for step in range(3):
        ids = tokens(step, mesh.get_local_rank("dp"))
        model(input_ids=ids, labels=ids).loss.backward()
        norm = optimizer.clip_grad_norm_(CLIP)
        optimizer.step()
        optimizer.zero_grad()
        ids = torch.cat([tokens(step, at) for at in range(mesh.size(0))])
        one(input_ids=ids, labels=ids).loss.backward()
        assert norm == pytest.approx(float(nn.utils.clip_grad_norm_(one.parameters(), CLIP)), rel=1e-5)
        plain.step()
        plain.zero_grad()
    whole = zeropp.full_state_dict(model)
    for name, value in one.state_dict().items():
        assert (whole[name] - value).abs().max() < 2e-6, name


@on_ranks(4)
def test_released_dtensors_are_not_read_in_silence() -> None:
    mesh = _mesh()
    model, _ = zeropp.prepare(_cut(mesh), None, zeropp.Config(stage=3, host_copy="off"), mesh=mesh)
    weight = model.layers[0].up.weight
    assert (
        type(weight).__name__ == "PartitionedDTensor"
        and weight.shape == (28, WIDTH)
        and weight.placements == (Shard(0),)
    )
    for read in (
        weight.to_local,
        weight.full_tensor,
        weight.sum,
        lambda: weight.redistribute(placements=[Replicate()]),
    ):
        with pytest.raises(PartitionedParameterError, match=r"'layers\.0\.up\.weight' is partitioned over 2 ranks"):
            read()
    with zeropp.gathered(weight):
        assert torch.equal(weight.full_tensor(), _net().layers[0].up.weight)


@on_ranks(2)
def test_what_is_cut_is_said() -> None:
    mesh = _mesh()
    with pytest.raises(
        ConfigError, match=r"parameter 'layers\.0\.up\.weight' is a DTensor over ranks \[0, 1\].*mesh=mesh"
    ):
        zeropp.prepare(_cut(mesh), None, zeropp.Config(stage=2))
    model = _net()
    model.first.weight = nn.Parameter(torch.full((8, WIDTH), float(dist.get_rank())))
    with pytest.raises(
        ConfigError, match=r"plain parameter 'first\.weight' has other values on rank 1.*DTensor\.from_local"
    ):
        zeropp.prepare(model, None, zeropp.Config(stage=2), mesh=mesh)
    with pytest.raises(ConfigError, match=r"Net has no plan of its own; give plan="):
        zeropp.parallel.tensor(_net(), mesh["tp"])
    with pytest.raises(ConfigError, match=r"mesh is of 2 dimensions; wanted a DeviceMesh of one dimension"):
        zeropp.parallel.tensor(_net(), mesh, {"head": ColwiseParallel()})


@on_ranks(2)
def test_a_model_without_a_plan_of_transformers_is_named() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=65, n_embd=32, n_layer=1, n_head=4, n_positions=16)
    with pytest.raises(ConfigError, match="transformers has no tensor-parallel plan for GPT2LMHeadModel; give plan="):
        zeropp.parallel.tensor(transformers.GPT2LMHeadModel(config), _mesh()["tp"])


@on_ranks(2)
def test_strided_shards_are_several_boxes() -> None:
    from torch.distributed.tensor.placement_types import _StridedShard

    mesh, rank = _mesh()["tp"], dist.get_rank()
    packed = torch.arange(48.0).view(8, 6)
    local = torch.cat([packed[2 * rank : 2 * rank + 2], packed[4 + 2 * rank : 6 + 2 * rank]])
    tensor = DTensor.from_local(
        local, mesh, [_StridedShard(0, split_factor=2)], run_check=False, shape=(8, 6), stride=(6, 1)
    )
    found = boxes_of_dtensor(tensor)
    assert found is not None and found.boxes == (
        Box((2 * rank, 0), (2, 6), (0, 0)),
        Box((4 + 2 * rank, 0), (2, 6), (2, 0)),
    )


@on_ranks(2)
def test_hooks_of_others_run_before_ours() -> None:
    """Plain parameters too: a hook that is put on after ``prepare`` reads p.grad before the reduction takes it."""
    model, _ = zeropp.prepare(_net(), None, zeropp.Config(stage=2))
    seen: list[float] = []
    model.first.weight.register_post_accumulate_grad_hook(lambda p: seen.append(float(p.grad.abs().sum())))
    model(_batch(0, 0)).square().mean().backward()
    assert len(seen) == 1 and seen[0] > 0


@pytest.mark.parametrize("grads", ["nvme", pytest.param("device", marks=pytest.mark.slow)])
@on_ranks(4)
def test_states_and_gradients_on_nvme(grads: str) -> None:
    mesh = _mesh()
    model = _cut(mesh)
    with tempfile.TemporaryDirectory() as folder:
        offload = zeropp.Offload(optimizer="nvme", grads=grads, path=of_all_ranks(folder)[0])
        model, optimizer = zeropp.prepare(model, _adam(model), zeropp.Config(stage=3, offload=offload), mesh=mesh)
        _require_training_of_one_process(model, optimizer, mesh)
        dist.barrier()


@on_ranks(4)
def test_a_model_in_shards_is_cut() -> None:
    """Uneven slices too, a plan that fails changes nothing, and training goes on as if the model had been whole."""
    mesh = _mesh()
    torch.manual_seed(0)
    with zeropp.sharded_init(mesh=mesh):
        model = Net()
    before = dict(model.named_parameters())
    with pytest.raises(ConfigError, match="Net has no plan of its own"):
        zeropp.parallel.tensor(model, mesh["tp"])
    assert all(one is before[name] for name, one in model.named_parameters())
    _cut(mesh, model=model)
    assert model.head.weight.shape == (11, WIDTH)
    shards = [weakref.ref(own_shard(parameter)) for parameter in model.parameters()]
    model, optimizer = zeropp.prepare(model, _adam(model), zeropp.Config(stage=3), mesh=mesh)
    assert not [shard for shard in shards if shard() is not None]  # or all would be in memory twice
    _require_training_of_one_process(model, optimizer, mesh)


@pytest.mark.parametrize(
    "stage", [0, 3, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)]
)
@on_ranks(2, devices=("sim",), backend="simulated")
def test_slices_on_gpus(stage: int) -> None:
    _slices_on_gpus(stage)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@on_ranks(4, devices=("sim", "sim-lazy"), backend="simulated")
def test_slices_on_gpus_over_data_ranks(stage: int) -> None:
    _slices_on_gpus(stage)


def _slices_on_gpus(stage: int) -> None:
    """Shards are on the device; values and norms are those of one process, within the bound of the CPU."""
    mesh = _mesh()
    model = _cut(mesh)
    model, optimizer = zeropp.prepare(model, _adam(model), zeropp.Config(stage=stage), mesh=mesh)
    _require_training_of_one_process(model, optimizer, mesh)


@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(4)
def test_values_of_single_parameters(stage: int) -> None:
    """Of a slice, get_full returns and set_full takes the whole tensor."""
    mesh = _mesh()
    model = _cut(mesh)
    model, optimizer = zeropp.prepare(model, _adam(model), zeropp.Config(stage=stage), mesh=mesh)
    _train(model, optimizer, mesh, 1)
    model(_batch(1, mesh.get_local_rank("dp"))).square().mean().backward()
    plain = _net()
    step = _adam(plain)
    for at in range(2):
        plain(torch.cat([_batch(at, 0), _batch(at, 1)])).square().mean().backward()
        if at == 0:
            nn.utils.clip_grad_norm_(plain.parameters(), CLIP)
            step.step()
            step.zero_grad()
    named = list(zip(model.named_parameters(), plain.parameters(), strict=True))
    for (name, one), wanted in named:
        for kind, want in (
            ("value", wanted.detach()),
            ("grad", wanted.grad),
            ("exp_avg", step.state[wanted]["exp_avg"]),
        ):
            found = zeropp.get_full(one, kind)
            assert found is not None and type(found) is Tensor and found.shape == want.shape, (name, kind)
            assert float((found - want).abs().max()) < 2e-6, (name, kind)
    optimizer.zero_grad()
    for (name, one), wanted in named:
        for kind in ("value", "exp_avg"):
            given = torch.arange(wanted.numel(), dtype=torch.float32).view(wanted.shape)
            zeropp.set_full(one, given, kind)
            read = zeropp.get_full(one, kind)
            assert read is not None and torch.equal(read, given), (name, kind)


def _along_the_sequence(mesh: Any) -> Net:
    """Tokens are shared out between the blocks' matrices, so gradients of norms and of biases arrive as parts of a sum."""
    plan: dict[str, Any] = {
        "first": PrepareModuleOutput(
            output_layouts=Replicate(), desired_output_layouts=Shard(1), use_local_output=True
        ),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    for i in range(2):
        plan |= {
            f"layers.{i}.norm": SequenceParallel(use_local_output=True),
            f"layers.{i}.up": ColwiseParallel(input_layouts=Shard(1)),
            f"layers.{i}.down": RowwiseParallel(output_layouts=Shard(1)),
        }
    return zeropp.parallel.tensor(_net(), mesh["tp"], plan)


@pytest.mark.parametrize(
    "stage", [0, 3, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)]
)
@on_ranks(2, 4)
def test_one_message_a_unit(stage: int) -> None:
    """Two micro-steps: gradients that are parts of a sum travel once a unit and backward, and no backward sums another's again."""
    mesh, data = _mesh(), dist.get_world_size() // 2
    model = _along_the_sequence(mesh)
    model.first.requires_grad_(False)  # its gradient is that of the rank's own tokens, which nothing here sums
    config = zeropp.Config(stage=stage, accumulate=2, host_copy="off")
    model, optimizer = zeropp.prepare(model, _adam(model), config, mesh=mesh)
    one = _net()
    one.first.requires_grad_(False)
    batches = [torch.stack([_batch(at, 2 * row + mesh.get_local_rank("dp")) for row in range(2)]) for at in range(2)]
    sent, plain = [], arrivals.dist.all_reduce
    arrivals.dist.all_reduce = lambda tensor, **options: (sent.append(tensor.numel()), plain(tensor, **options))
    try:
        for batch in batches:
            model(batch).square().mean().backward()
    finally:
        arrivals.dist.all_reduce = plain
    units = [unit for unit in engine_of(model).units if "norm" in unit.params[0].names[0]]
    assert len(sent) == 2 * len(units) and 0 < len(units) <= 2, (sent, [unit.name for unit in units])
    norm = optimizer.clip_grad_norm_(CLIP)
    for at in range(2):
        for rank in range(data):
            batch = torch.stack([_batch(at, 2 * row + rank) for row in range(2)])
            (one(batch).square().mean() / (2 * data)).backward()
    assert norm == pytest.approx(float(nn.utils.clip_grad_norm_(one.parameters(), CLIP)), rel=1e-5)
    optimizer.step()
    plain_optimizer = _adam(one)
    plain_optimizer.step()
    whole = zeropp.full_state_dict(model)
    for name, value in one.state_dict().items():
        assert (whole[name] - value).abs().max() < 2e-6, name
