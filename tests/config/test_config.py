# SPDX-License-Identifier: Apache-2.0
"""zeropp.Config: every field's good and bad values, and the sentence that each mistake gets."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from zeropp.config import Comm, Config, LossScale, Offload, Precision, Tier
from zeropp.errors import ConfigError, Error


class Block(torch.nn.Module):
    """A class to name in `units`."""


def sentence(make) -> str:
    with pytest.raises(ConfigError) as caught:
        make()
    return str(caught.value)


def test_defaults_are_zero_3_in_the_models_own_types():
    config = Config()
    assert (config.stage, config.dtype_name, config.units, config.host_copy) == (3, None, "auto", "auto")
    assert (config.prefetch, config.accumulate, config.clip, config.device) == ("auto", 1, None, None)
    assert config.offload == Offload() and config.comm == Comm()


def test_every_field_says_what_it_is():
    """The docstring under each field is part of the interface; a field without one is refused here."""
    import ast
    import inspect
    import itertools

    for cls in (Config, Offload, Tier, Precision, Comm):
        body = ast.parse(inspect.getsource(cls)).body[0].body
        for field, after in itertools.pairwise(body):
            if isinstance(field, ast.AnnAssign):
                assert isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant), (cls, field.target.id)


@pytest.mark.parametrize(
    "make, path, says",
    [
        (lambda: Config(stagee=3), "Config.stagee", "did you mean 'stage'?"),
        (lambda: Config(nonsense=1), "Config.nonsense", "known are stage, precision"),
        (lambda: Config(stage=4), "Config.stage", "4 is not allowed; wanted 0, 1, 2 or 3"),
        (lambda: Config(stage="3"), "Config.stage", "'3' is not allowed"),
        (lambda: Config(stage=True), "Config.stage", "True is not allowed"),
        (lambda: Config(stage=2.0), "Config.stage", "2.0 is not allowed"),
        (lambda: Config(precision="bf61"), "Config.precision", "did you mean 'bf16'?"),
        (lambda: Config(precision=torch.bfloat16), "Config.precision", "torch.bfloat16"),
        (lambda: Config(loss_scale=1024.0), "Config.loss_scale", "only fp16 needs a scale"),
        (lambda: Config(precision="fp16", loss_scale="auto"), "Config.loss_scale", "None (dynamic)"),
        (lambda: LossScale(backoff=1.0), "LossScale.backoff", "below 1"),
        (lambda: LossScale(interval=0), "LossScale.interval", "good steps"),
        (lambda: LossScale(least=1e9), "LossScale.least", "at most init"),
        (lambda: Config(units="atuo"), "Config.units", "did you mean 'auto'?"),
        (lambda: Config(units=()), "Config.units", "at least one class"),
        (lambda: Config(units=(3,)), "Config.units", "a module class or the name of one"),
        (lambda: Config(units=int), "Config.units", "a subclass of torch.nn.Module"),
        (lambda: Config(units=0), "Config.units", "whole number >= 1"),
        (lambda: Config(host_copy="on"), "Config.host_copy", "one of 'auto', 'off'"),
        (lambda: Config(prefetch="aut"), "Config.prefetch", "did you mean 'auto'?"),
        (lambda: Config(prefetch=-1), "Config.prefetch", "whole number >= 0"),
        (lambda: Config(bucket_bytes=-1), "Config.bucket_bytes", "whole number >= 0"),
        (lambda: Config(bucket_bytes=1.5), "Config.bucket_bytes", "1.5"),
        (lambda: Config(accumulate=0), "Config.accumulate", "whole number >= 1"),
        (lambda: Config(accumulate=True), "Config.accumulate", "True"),
        (lambda: Config(clip=0), "Config.clip", "None for no clipping"),
        (lambda: Config(clip=float("nan")), "Config.clip", "nan"),
        (lambda: Config(clip=float("inf")), "Config.clip", "inf"),
        (lambda: Config(clip="1"), "Config.clip", "'1'"),
        (lambda: Config(device="cdua"), "Config.device", "'cdua' is not allowed"),
        (lambda: Tier("cpu", checksums=True), "Tier.checksums", "False elsewhere"),
        (lambda: Offload(optimizer="cpu", checksums=True), "Offload.checksums", "False where nothing is on 'nvme'"),
        (lambda: Offload(checksums=1), "Offload.checksums", "wanted True or False"),
        (lambda: Config(offload="cpu"), "Config.offload", "wanted a zeropp.Offload(...)"),
        (lambda: Config(comm="int8"), "Config.comm", "wanted a zeropp.Comm(...)"),
        (lambda: Offload(params=1), "Offload.params", "wanted a zeropp.Tier(...)"),
        (lambda: Offload(params="nvm"), "Offload.params", "did you mean 'nvme'?"),
        (lambda: Offload(optimizer="nvme"), "Offload.path", "a folder for optimizer='nvme'"),
        (
            lambda: Offload(optimizer="cpu", path="/swap"),
            "Offload.path",
            "None where no kind is given by name as 'nvme'",
        ),
        (lambda: Offload(weights=Tier()), "Offload.weights", "known are params, grads, optimizer, activations"),
        (lambda: Tier("gpu"), "Tier.kind", "one of 'device', 'cpu', 'nvme'"),
        (lambda: Tier("nvme"), "Tier.path", "a folder for 'nvme'"),
        (lambda: Tier("nvme", path=""), "Tier.path", "a folder's name"),
        (lambda: Offload(params="nvme", path=3), "Offload.path", "a folder's name"),
        (lambda: Offload(params="nvme", path=b"/swap"), "Offload.path", "a folder's name"),
        (lambda: Tier("cpu", path="/swap"), "Tier.path", "None for 'device' and 'cpu'"),
        (lambda: Tier("cpu", path=["/a", "/b"]), "Tier.path", "None for 'device' and 'cpu'"),
        (lambda: Tier("nvme", path=[]), "Tier.path", "a list of up to 16, one for each disk; there are 0"),
        (lambda: Tier("nvme", path=[f"/{n}" for n in range(17)]), "Tier.path", "there are 17"),
        (lambda: Tier("nvme", path=["/a", 3]), "Tier.path", "['/a', 3] is not allowed; wanted a folder's name"),
        (lambda: Tier("nvme", path=["/a", ""]), "Tier.path", "a folder's name"),
        (lambda: Tier("nvme", path={"/a", "/b"}), "Tier.path", "a folder's name"),
        (lambda: Tier("nvme", path=["/a", "/b", "/a"]), "Tier.path", "each folder once; '/a' and '/a' are the same"),
        (lambda: Tier("nvme", path=["/a", "/a/../a/"]), "Tier.path", "'/a' and '/a/../a/' are the same"),
        (lambda: Offload(params="nvme", path=("/a", "/a")), "Offload.path", "each folder once"),
        (lambda: Offload(optimizer="cpu", path=["/a", "/b"]), "Offload.path", "None where no kind"),
        (lambda: Tier("cpu", fraction=0), "Tier.fraction", "above 0 and at most 1"),
        (lambda: Tier("cpu", fraction=1.5), "Tier.fraction", "1.5"),
        (lambda: Comm(grads="int3"), "Comm.grads", "did you mean 'int8'?"),
        (lambda: Comm(secondary_shard=-1), "Comm.secondary_shard", "whole number >= 0"),
        (
            lambda: Config(comm=Comm(secondary_shard=2)),
            "Config.comm.secondary_shard",
            "2 is not allowed; wanted 'host', or 0",
        ),
        (lambda: Precision(param="float32"), "Precision.param", "one of 'fp32', 'bf16', 'fp16'"),
        (lambda: Precision(param="bf16", compute="fp32"), "Precision.compute", "'bf16' or None with param='bf16'"),
        (lambda: Precision(param="fp32", master="bf16"), "Precision.master", "'bf16' is for parameters in bf16"),
        (
            lambda: Precision(param="fp16", master="fp16"),
            "Precision.master",
            "'fp16' is not allowed; wanted 'fp32' or None",
        ),
        (lambda: Precision(compute="fp32"), "Precision.compute", "param='fp32' with it"),
        (
            lambda: Precision(param="fp32", accumulate="bf16"),
            "Precision.accumulate",
            "Precision.param='fp32': sums are in fp32",
        ),
        (lambda: Precision(param="bf16", reduce="fp32", accumulate="bf16"), "Precision.accumulate", "reduce='fp32'"),
        (lambda: Config(loss_scale=8.0, precision=Precision(compute="bf16")), "Config.loss_scale", "only fp16"),
        (
            lambda: Config(precision=Precision(reduce="bf16"), comm=Comm(grads="int8")),
            "Config.comm.grads",
            "does not combine with Precision.reduce='bf16'",
        ),
    ],
)
def test_a_mistake_is_named(make, path, says):
    text = sentence(make)
    assert text.startswith(path + ":") and says in text, text


@pytest.mark.parametrize(
    "make, path",
    [
        (lambda: Config(stage=1, comm=Comm(grads="int4")), "Config.comm.grads"),
        (
            lambda: Config(precision=Precision(master="bf16"), offload=Offload(optimizer="nvme", path="/tmp")),
            "Precision.master",
        ),
        (
            lambda: Config(precision=Precision(master="bf16"), offload=Offload(optimizer="cpu", delayed_update=3)),
            "Precision.master",
        ),
        (
            lambda: Config(precision=Precision(state="int8"), offload=Offload(optimizer="nvme", path="/tmp")),
            "Precision.state",
        ),
    ],
)
def test_what_does_not_combine_says_so_and_names_a_way_out(make, path):
    text = sentence(make)
    assert text.startswith(path + ":") and " does not combine with " in text and "; " in text, text


@pytest.mark.parametrize(
    "make, path",
    [
        (lambda: Config(stage=2, offload=Offload(params=Tier("cpu"))), "Config.offload.params.kind"),
        (lambda: Config(stage=1, offload=Offload(grads=Tier("cpu"))), "Config.offload.grads.kind"),
        (lambda: Config(stage=0, offload=Offload(optimizer=Tier("cpu"))), "Config.offload.optimizer.kind"),
        (lambda: Config(stage=2, comm=Comm(params="int8")), "Config.comm.params"),
        (lambda: Config(stage=1, comm=Comm(secondary_shard="host")), "Config.comm.secondary_shard"),
    ],
)
def test_impossible_combinations_are_refused_for_what_they_are(make, path):
    text = sentence(make)
    assert text.startswith(path + ":") and "does not combine with Config.stage=" in text, text


def test_good_values():
    assert [Config(stage=stage).stage for stage in range(4)] == [0, 1, 2, 3]
    assert Config(units=Block).units == (Block,)
    assert Config(units=[Block, "Other"]).units == (Block, "Other")
    assert Config(units=1 << 20).units == 1 << 20
    assert Config(clip=1).clip == 1.0 and isinstance(Config(clip=1).clip, float)
    assert Config(precision="bf16").dtype_name == "bf16"
    assert Config(precision=Precision()).dtype_name is None
    same = Precision(param=torch.bfloat16, compute="bf16", reduce="bf16", master="fp32", state="fp32")
    assert Config(precision=same).dtype_name == "bf16" and Config(precision=same).autocast_name is None
    assert Config(precision=Precision(compute="fp16"), loss_scale=8.0).autocast_name == "fp16"
    assert Config(device=torch.device("cpu")).device == torch.device("cpu")
    assert Config(prefetch=0).prefetch == 0


def test_frozen_comparable_replaceable():
    config = Config(stage=2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.stage = 3  # type: ignore[misc]
    assert config == Config(stage=2) and hash(config) == hash(Config(stage=2))
    assert dataclasses.replace(config, stage=1).stage == 1
    with pytest.raises(TypeError):
        Config(3)  # type: ignore[misc]


def test_config_error_is_an_error_of_zeropp_and_a_value_error():
    assert issubclass(ConfigError, Error) and issubclass(ConfigError, ValueError)


def test_a_tier_may_be_given_by_name():
    assert Offload(optimizer="nvme", path="/swap") == Offload(optimizer=Tier("nvme", path="/swap"))
    assert Offload(params="nvme", path="~/swap").params.path == str(Path.home() / "swap")


def test_several_folders(tmp_path):
    both = Tier("nvme", path=["/a", Path("~/b")])
    assert both.path == both.folders == ("/a", str(Path.home() / "b"))
    assert both == Tier("nvme", path=("/a", str(Path.home() / "b"))) and hash(both) == hash(dataclasses.replace(both))
    assert both != Tier("nvme", path=[both.path[1], both.path[0]]), "a stripe is found by its folder's place"
    assert Tier("nvme", path=["/a"]) == Tier("nvme", path="/a") and Tier("nvme", path="/a").folders == ("/a",)
    assert Tier().folders == ()
    offload = Offload(params="nvme", optimizer="nvme", path=["/a", "/b"])
    assert offload.params == offload.optimizer == Tier("nvme", path=("/a", "/b"))
    assert hash(Config(offload=offload)) == hash(
        Config(offload=Offload(params=offload.params, optimizer=offload.optimizer))
    )
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert "are the same one" in sentence(lambda: Tier("nvme", path=[tmp_path / "real", tmp_path / "link"]))
    assert Config(offload=Offload(params="cpu", optimizer="cpu")).offload.params == Tier("cpu")
