# SPDX-License-Identifier: Apache-2.0
"""Experts in files of the Hub, each a tensor of its own there: read on the rank that keeps it, and written under those names."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import moe_models
import pytest
import torch
import zeropp
from moe_models import batch, loss_of
from ranks import of_all_ranks, on_ranks
from safetensors.torch import load_file
from torch import nn
from zeropp.files.hub_names import reading_rows
from zeropp.zero.model.init import own_shard


@contextmanager
def on_the_hub(name: str) -> Iterator[tuple[str, Any]]:
    """A folder with a model as transformers saves it, and the model."""
    plain = moe_models.build(name)
    first = torch.distributed.get_rank() == 0
    folder = of_all_ranks(tempfile.mkdtemp() if first else None)[0]
    if first:
        plain.save_pretrained(folder)
    torch.distributed.barrier()
    yield folder, plain
    torch.distributed.barrier()
    if first:
        shutil.rmtree(folder)


@contextmanager
def counted_reads(seen: list[int]) -> Iterator[None]:
    """Append the bytes of each tensor of three dimensions, or of an expert, that from_pretrained reads."""
    from transformers import core_model_loading as core

    before = core._materialize_copy

    def read(tensor: Any, *args: Any) -> torch.Tensor:
        found = before(tensor, *args)
        seen.append(found.nbytes)
        return found

    core._materialize_copy = read
    try:
        yield
    finally:
        core._materialize_copy = before


@on_ranks(2)
@pytest.mark.parametrize("name", ["Mixtral", "Qwen3Moe", "GptOss"])
def test_from_pretrained_reads_a_ranks_own_rows(name: str) -> None:
    """Of vectors, matrices and experts, which GptOss has in one tensor also in its files, each rank reads 1/2; the model is the one that
    was saved."""
    import transformers

    with on_the_hub(name) as (folder, plain):
        seen: list[int] = []
        with counted_reads(seen), zeropp.sharded_init():
            model = transformers.AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, experts_implementation="grouped_mm", attn_implementation="eager"
            )
        named = dict(plain.named_parameters())
        assert any(p.dim() == 3 for p in named.values())
        rows = [(p.nbytes, p[0].nbytes) for p in named.values()]
        wanted = sum(size for size, _ in rows) // 2
        assert wanted <= sum(seen) <= wanted + sum(row for _, row in rows)  # a row may be cut between ranks
        shards = [weakref.ref(own_shard(p)) for p in model.parameters()]
        model, _ = zeropp.prepare(model.train(), None, zeropp.Config(experts=2))
        assert not [shard for shard in shards if shard() is not None]  # or all would be in memory twice
        for path, value in zeropp.full_state_dict(model).items():
            assert path not in named or torch.equal(value, named[path]), path
        ids = batch(0, torch.distributed.get_rank())
        with torch.no_grad():
            torch.testing.assert_close(loss_of(model, ids), loss_of(plain, ids), rtol=1e-5, atol=0)


@on_ranks(2)
def test_from_pretrained_refuses_another_shape() -> None:
    """Rows are read of a tensor that has the model's shape, so that transformers sees one that has not."""
    import transformers

    with on_the_hub("Mixtral") as (folder, plain):
        with pytest.raises(RuntimeError, match=r"size mismatch|shape|mismatched"), zeropp.sharded_init():
            transformers.AutoModelForCausalLM.from_pretrained(folder, vocab_size=plain.config.vocab_size + 8)
        of_all_ranks(None)


@on_ranks(2)
@pytest.mark.parametrize("name", ["Mixtral", "Qwen3Moe", "DeepseekV3", "GptOss"])
def test_export_is_a_plain_model(name: str) -> None:
    """What an expert-parallel model exports after a step is what from_pretrained loads: each weight equal to the last bit."""
    import transformers

    first = torch.distributed.get_rank() == 0
    folder = of_all_ranks(tempfile.mkdtemp() if first else None)[0]
    model = moe_models.build(name)
    model, optimizer = zeropp.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2), zeropp.Config(experts=2))
    loss_of(model, batch(0, torch.distributed.get_rank())).backward()
    optimizer.step()
    zeropp.export(model, folder)
    wanted = zeropp.full_state_dict(model)
    if first:
        plain, report = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
        assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
        found = plain.state_dict()
        assert type(plain) is type(model) and found.keys() == wanted.keys()
        assert [path for path, value in wanted.items() if not torch.equal(found[path], value)] == []
        shutil.rmtree(folder)


@on_ranks(2)
@pytest.mark.parametrize("name", ["Mixtral", "DeepseekV3", "NemotronH"])
def test_export_has_the_names_of_the_hub(name: str) -> None:
    """The files are those of transformers' own save, which it loads; zeropp.load_full_state_dict takes them back."""
    with on_the_hub(name) as (folder, plain):
        model, _ = zeropp.prepare(moe_models.build(name), None, zeropp.Config(experts=2))
        zeropp.export(model, Path(folder) / "ours", file_bytes=20_000)
        torch.distributed.barrier()
        ours = {k: v for one in Path(folder, "ours").glob("*.safetensors") for k, v in load_file(one).items()}
        theirs = load_file(Path(folder) / "model.safetensors")
        assert ours.keys() == theirs.keys()
        assert [key for key in theirs if not torch.equal(ours[key], theirs[key])] == []
        for parameter in model.parameters():
            zeropp.set_full(parameter, torch.zeros(parameter.shape))
        zeropp.load_full_state_dict(model, Path(folder) / "ours")
        whole = zeropp.full_state_dict(model)
        assert [n for n, p in plain.named_parameters() if not torch.equal(whole[n], p)] == []


@on_ranks(2)
def test_load_full_state_dict_reads_a_ranks_own_experts() -> None:
    from zeropp.checkpoint import sources

    with on_the_hub("Qwen3Moe") as (folder, plain):
        model, _ = zeropp.prepare(moe_models.build("Qwen3Moe"), None, zeropp.Config(experts=2))
        seen: set[str] = set()
        whole = sources._Safetensors.whole
        sources._Safetensors.whole = lambda self, name: seen.add(name) or whole(self, name)  # type: ignore[method-assign, func-returns-value, assignment]
        try:
            zeropp.load_full_state_dict(model, folder)
        finally:
            sources._Safetensors.whole = whole  # type: ignore[method-assign]
        first = 4 * torch.distributed.get_rank()
        assert {int(name.split("experts.")[1].split(".")[0]) for name in seen if "experts." in name} == {
            *range(first, first + 4)
        }
        values = zeropp.full_state_dict(model)
        assert [n for n, p in plain.named_parameters() if not torch.equal(values[n], p)] == []


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("case", ["joined", "joined beside", "cut", "turned", "interleaved", "mixed"])
def test_rules_that_join_and_cut_read_a_ranks_own_rows(case: str, rank: int) -> None:
    """A third of the bytes, and the values of transformers' own conversion in these rows; a rule that mixes rows reads all of them."""
    from transformers import core_model_loading as core

    draw = torch.Generator().manual_seed(0)
    operations, sources, targets, files = {
        "joined": ([core.Concatenate(dim=0)], ["q", "k", "v"], ["qkv"], [(6, 4), (3, 4), (3, 4)]),
        "joined beside": ([core.Concatenate(dim=1)], ["a", "b"], ["ab"], [(12, 4), (12, 2)]),
        "cut": ([core.Chunk(dim=0)], ["qkv"], ["q", "k", "v"], [(36, 4)]),
        "turned": ([core.Transpose(1, 2)], ["experts"], ["turned"], [(12, 4, 2)]),
        "interleaved": ([core.Interleave(dim=1)], ["rope"], ["turned"], [(12, 4)]),
        "mixed": ([core.Interleave(dim=0)], ["rope"], ["turned"], [(12, 4)]),
    }[case]
    values = [torch.randn(shape, generator=draw) for shape in files]
    seen: list[int] = []
    whole, mine = ({}, {})
    for found, rows in ((whole, None), (mine, slice(4 * rank, 4 * rank + 4))):
        rule = core.WeightConverter(source_patterns=sources, target_patterns=targets, operations=operations)
        model = nn.Module()
        for name in targets:
            shape = (whole[name].shape if whole else values[0].shape) if targets else ()
            model.register_parameter(name, nn.Parameter(torch.empty(shape, device="meta")))
        noted: list[torch.Tensor] = []
        reading = (
            contextlib.nullcontext()
            if rows is None
            else reading_rows(lambda _, rows=rows: (rows.start, rows.stop), noted.append)
        )
        with reading, counted_reads(seen):
            seen.clear()
            for source, tensor in zip(sources, values, strict=True):
                rule.add_tensor(targets[0], source, source, core.spawn_materialize(None, tensor))
            made = rule.convert(targets[0], model=model, config=None)
        found.update({name: one[0] if isinstance(one, list) else one for name, one in made.items()})
    assert mine.keys() == whole.keys()
    bytes_of_all = sum(tensor.nbytes for tensor in values)
    assert sum(seen) == (bytes_of_all if case == "mixed" else bytes_of_all // 3)
    own = slice(4 * rank, 4 * rank + 4)
    assert all(torch.equal(mine[name][own], one[own]) for name, one in whole.items())
    assert {one.data_ptr() for one in noted} == (
        set() if case == "mixed" else {one.data_ptr() for one in mine.values()}
    )
