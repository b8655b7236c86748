# SPDX-License-Identifier: Apache-2.0
"""Property tests: whatever value a field or a key has, it is taken, or it is a ConfigError with the key's path."""

from __future__ import annotations

import dataclasses
import pathlib
import re
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from zeropp.config import Comm, Config, LossScale, Offload, Precision, Tier, deepspeed_json, deepspeed_keys
from zeropp.errors import ConfigError

CLASSES = (Tier, Offload, Precision, LossScale, Comm, Config)
FIELDS = [(cls, field.name) for cls in CLASSES for field in dataclasses.fields(cls)]
SECTIONS = {
    "zero_optimization": [
        *deepspeed_json._ZERO_MAPPED, *deepspeed_json._ZERO_ALWAYS, *deepspeed_json._ZERO_HINTS, *deepspeed_keys.ZERO_REFUSED,
    ],
    "fp16": ["enabled", *deepspeed_json._FP16_MAPPED, *deepspeed_json._FP16_ALWAYS, "hysteresis"],
    "bf16": ["enabled", "bf16_master_weights_and_grads", "bf16_optimizer_states", "check_grad_overflow"],
    "torch_autocast": ["enabled", "dtype", "lower_precision_safe_modules"],
    "data_types": ["grad_accum_dtype", *deepspeed_json._DATA_TYPES_ALWAYS],
    "aio": list(deepspeed_keys.AIO),
    "checkpoint": list(deepspeed_json._CHECKPOINT_ALWAYS),
    "activation_checkpointing": list(deepspeed_json._CHECKPOINTING_ALWAYS),
    "offload": ["params", "grads", "optimizer", "activations", "path", "checksums", "delayed_update"],
    "comm": ["params", "grads", "block_elems", "secondary_shard"],
}  # fmt: skip
KEYS = [(section, key) for section, keys in SECTIONS.items() for key in keys]
KEYS += [("", key) for key in (*deepspeed_json.DEEPSPEED_KEYS, *(field.name for field in dataclasses.fields(Config)))]
BESIDE = {
    "zero_optimization": {"stage": 3}, "fp16": {"enabled": True}, "bf16": {"enabled": True}, "torch_autocast": {"enabled": True},
}  # fmt: skip


class NoRepr:
    """A user's class that cannot be shown."""

    def __repr__(self) -> str:
        raise RuntimeError("no repr")


class NoTruth:
    """A value that, like an array, gives no bool when compared."""

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("ambiguous")

    __hash__ = None  # type: ignore[assignment]


NUMBERS = st.one_of(st.integers(), st.floats(), st.sampled_from([10**400, -(10**400), 2**63, 2**62, 1e308, 1 << 31]))
WORDS = st.one_of(
    st.text(max_size=8), st.binary(max_size=4),
    st.sampled_from(["auto", "nvme", "cpu", "device", "host", "int8", "bf16", "fp32", "cuda:99", "cpu:-1", "~nobody/x", "a\0b", "\ud800"]),
)  # fmt: skip
_OBJECTS = [
    None, True, False, 10**5000, NoRepr(), NoTruth(), NoRepr, int, torch.nn.Linear, (torch.nn.Linear,), torch.float32, torch.float64,
    torch.device("meta"), torch.tensor(1), torch.tensor([1.0, 2.0]), np.array([1, 2]), np.array(["a", "b"]), np.float32(1),
    np.int64(1), np.bool_(True), pathlib.Path("/x"), pathlib.Path("a\0b"), Tier(), Offload(), Precision(), LossScale(), Comm(),
    Config(), 1j, len, range(3), ..., torch.nn.Linear(1, 1), {1: 2}, {"params": {1: 2}}, {None: 1}, ["a\0", "b"], ["\ud800", "b"],
]  # fmt: skip
OBJECTS = st.integers(0, len(_OBJECTS) - 1).map(
    lambda at: _OBJECTS[at]
)  # hypothesis shows elements by repr, which some lack
ODD = st.recursive(
    st.one_of(NUMBERS, WORDS, OBJECTS),
    lambda inner: st.one_of(
        st.lists(inner, max_size=2), st.tuples(inner), st.dictionaries(st.sampled_from(["kind", "path", "a"]), inner, max_size=2)
    ),
    max_leaves=3,
)  # fmt: skip


@settings(max_examples=600, deadline=None)
@given(which=st.sampled_from(FIELDS), value=ODD, nvme=st.booleans())
def test_an_odd_value_of_a_field(which, value, nvme):
    cls, name = which
    beside = {}
    if nvme:  # so that a value of another field is looked at
        beside = {Tier: {"kind": "nvme", "path": "/x"}, Offload: {"optimizer": "nvme", "path": "/x"}}.get(cls, {})
        beside = {"precision": "fp16"} if cls is Config else beside
    try:
        taken = cls(**{**beside, name: value})
    except ConfigError as error:
        path = re.match(r"(Tier|Offload|Precision|LossScale|Comm|Config)\.(\w+)[.\w]*: ", str(error))
        assert path is not None, error
        assert path[2] in {field.name for field in dataclasses.fields(globals()[path[1]])}, error
    else:
        hash(taken)


@settings(max_examples=800, deadline=None)
@given(which=st.sampled_from(KEYS), value=ODD)
def test_an_odd_value_of_a_key(which, value):
    section, key = which
    keys = {section: {**BESIDE.get(section, {}), key: value}} if section else {key: value}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            Config.from_json(keys, ranks=2)
        except ConfigError as error:
            assert key in str(error) or section in str(error), error


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Config(device=10**400), "Config.device: 1000"),  # was a bare ValueError of torch
        (lambda: Config(prefetch=-(10**5000)), "Config.prefetch: <int without a repr> is not allowed"),
        (lambda: Config(prefetch=np.array([1, 2])), "Config.prefetch: array([1, 2]) is not allowed; wanted a whole"),
        (lambda: Config(clip=10**400), "Config.clip: 1000"),
        (lambda: Config(bucket_bytes=2**63), "Config.bucket_bytes: 9223372036854775808 is not allowed; wanted a whole number below 2**63"),
        (lambda: Tier("nvme", path=["a\0", "b"]), "Tier.path: ['a\\x00', 'b'] is not allowed"),
        (lambda: Config.from_json({1: 2}), "1: unknown key (value 2)"),
        (lambda: Config.from_json({"comm": {1: 2}}), "comm: the key 1 is not allowed; wanted a string"),
        (lambda: Config.from_json({"zero_optimization": {"stage": torch.ones(2)}}), "zero_optimization.stage: tensor([1., 1.]) is not allowed; wanted"),
        (lambda: Config.from_json({"zero_optimization": {"sub_group_size": float("nan")}}), "zero_optimization.sub_group_size: nan is not"),
        (lambda: Config.from_json("a\0b"), "cannot be read as a configuration: embedded null byte"),
        (lambda: Config.from_json('{"stage": ' + "9" * 5000 + "}"), "JSON text: cannot be read as a configuration"),
    ],
)  # fmt: skip
def test_what_came_out_as_something_else(make, says):
    with pytest.raises(ConfigError) as caught:
        make()
    assert says in str(caught.value)
