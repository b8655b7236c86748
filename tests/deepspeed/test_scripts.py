# SPDX-License-Identifier: Apache-2.0
"""Scripts with the calls of other projects' scripts (scripts/), under ``python -m zeropp run``, on two ranks and small data."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from warm import launch

HERE = Path(__file__).parent
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(one for one in sys.path if one)}
GAN = {"train_batch_size": 16, "gradient_clipping": 0, "zero_optimization": {"stage": 1}}
BERT = {
    "train_batch_size": 16, "train_micro_batch_size_per_gpu": 4, "steps_per_print": 100, "prescale_gradients": False,
    "gradient_clipping": 1.0, "wall_clock_breakdown": False, "fp16": {"enabled": False},
    "optimizer": {"type": "Lamb", "params": {"lr": 2e-2, "weight_decay": 0.01, "bias_correction": True}},
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """All of them in one pair of processes."""
    folder = tmp_path_factory.mktemp("scripts")
    for name, keys in (("gan-keys", GAN), ("bert-keys", BERT)):
        (folder / f"{name}.json").write_text(json.dumps(keys))
    bert = [str(folder / "bing"), "--deepspeed", "--deepspeed_config", str(folder / "bert-keys.json")]
    scripts = [
        ["bing_bert", "bing_bert", bert],  # first, because it begins the process group: with "nccl", without a GPU too
        ["cifar-fp16", "cifar", ["--dtype", "fp16", "--stage", "1"]],
        ["cifar-bf16", "cifar", ["--dtype", "bf16", "--stage", "3", "--moe-param-group"]],
        ["cifar-moe", "cifar", ["--moe", "--moe-param-group", "--dtype", "fp32"]],
        ["hello_bert", "hello_bert", [str(folder / "hello")]],
        ["gan", "gan", ["--deepspeed_config", str(folder / "gan-keys.json")]],
        ["chat_sft-3", "chat_sft", [str(folder / "chat-3"), "--zero_stage", "3", "--offload"]],
        ["chat_sft-2", "chat_sft", [str(folder / "chat-2"), "--zero_stage", "2"]],
        ["saving", "saving", []],
        ["comm", "comm", []],
    ]
    for name in ("chat-2", "chat-3"):
        (folder / name).mkdir()
    (folder / "list.json").write_text(
        json.dumps([[name, script, [str(folder / f"{name}.json"), *words]] for name, script, words in scripts])
    )
    done = launch(2, HERE / "hide.py", "run", HERE / "scripts" / "every.py", folder, timeout=280, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


def result(folder, name):
    raised = folder / f"{name}.0.raised"
    assert not raised.exists(), raised.read_text()
    return json.loads((folder / f"{name}.json").read_text())


@pytest.mark.parametrize(
    ("name", "dtype"), [("cifar-fp16", "torch.float16"), ("cifar-bf16", "torch.bfloat16"), ("cifar-moe", "None")]
)
def test_cifar(folder, name, dtype):
    found = result(folder, name)
    assert found["dtype"] == dtype and len(found["losses"]) == 20
    most = 0.97 if name == "cifar-moe" else 0.9  # a gate of one expert shrinks what it passes on, and drops tokens
    assert sum(found["losses"][-3:]) < most * sum(found["losses"][:3]) and found["right"] > 0.1


def test_hello_deepspeed_goes_on_from_its_checkpoint(folder):
    found = result(folder, "hello_bert")
    assert found["again"] == found["losses"][5:] and found["losses"][-1] < found["losses"][0]


def test_bing_bert(folder):
    found = result(folder, "bing_bert")
    assert found["lamb"] and not found["fp16"] and found["client"] == {"epoch": 1, "last_global_step": 6}
    assert found["again"] == found["second"], "the checkpoint brings parameters and states back, bit for bit"
    assert sum(found["losses"][-4:]) < sum(found["losses"][:4])


def test_gan_equals_plain_torch(folder):
    """Two backwards a step in one engine, and a loss through both. The same batch on both ranks: their mean is it."""
    found = result(folder, "gan")
    for ours, plain in zip(found["rows"], found["plain"], strict=True):
        assert ours == pytest.approx(plain, rel=1e-4)


@pytest.mark.parametrize("stage", [2, 3])
def test_deepspeed_chat_fine_tunes_and_saves(folder, stage):
    found = result(folder, f"chat_sft-{stage}")
    assert found["after"] < 0.9 * found["before"] and found["shape"] == [16, 16]
    wanted = {"model.embed.weight", "model.q_proj.weight", "model.q_proj.bias", "model.out.weight", "model.out.bias"}
    assert {name for name in found["names"] if "lora" not in name} == wanted


def test_fastchat_and_llava_save_whole_parameters(folder):
    found = result(folder, "saving")
    for stage, one in found.items():
        assert one["same"] and all(one["shapes"]) and one["frozen"] and one["trained"], stage
    assert found["stage 3"]["split"] == ["0.weight", "0.bias", "1.weight", "1.bias"] and found["stage 2"]["split"] == []
    assert found["stage 3"]["numel"] == [64, 8, 24, 3] and found["stage 3"]["ids"] == 4
    assert found["stage 3"]["ds_shape"] == [[8, 8], [8], [3, 8], [3]]


def test_deepspeed_comm_is_whole(folder):
    first, second = result(folder, "comm"), json.loads((folder / "comm.1.json").read_text())
    assert first.pop("mesh") == second.pop("mesh") == [True, 1]
    assert "deepspeed's log of communication (prof=True) is not supported" in first.pop("prof") == second.pop("prof")
    same = {
        "all_reduce": [3.0, 3.0], "inference_all_reduce": [2.0, 2.0], "all_reduce_coalesced": [[3.0, 3.0], [30.0, 30.0]],
        "broadcast": [2.0, 2.0], "broadcast_object_list": [1], "all_gather": [[1.0, 1.0], [2.0, 2.0]],
        **{
            name: [1.0, 1.0, 2.0, 2.0]
            for name in ("all_gather_into_tensor", "allgather_fn", "all_gather by name", "all_gather_coalesced")
        },
        "all_gather_object": [0, 1], "reduce": [3.0, 3.0], "gather": [[1.0, 1.0], [2.0, 2.0]], "point False": [1.0, 1.0],
        "point True": [1.0, 1.0],
    }  # fmt: skip
    scattered = ("reduce_scatter_tensor", "reduce_scatter_fn", "reduce_scatter")
    own = [
        {**dict.fromkeys(scattered, summed), "scatter": part, "all_to_all_single": swapped, "all_to_all_single by name": swapped,
         "all_to_all": [[one] for one in swapped]}
        for summed, part, swapped in (([2.0, 4.0], [1.0, 2.0], [10.0, 11.0]), ([6.0, 8.0], [3.0, 4.0], [20.0, 21.0]))
    ]  # fmt: skip
    assert first == {**same, **own[0]} and second == {**same, **own[1]}
