# SPDX-License-Identifier: Apache-2.0
"""``python -m zeropp run``: scripts that say ``import deepspeed``, or whose frameworks do, unchanged. An installed
deepspeed is hidden from them (hide.py)."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from warm import launch

HERE = Path(__file__).parent
ENVIRONMENT = {
    **os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(one for one in sys.path if one), "HF_HUB_OFFLINE": "1",
}  # fmt: skip
ENVIRONMENT.pop("ACCELERATE_USE_DEEPSPEED", None)
HIDE = str(HERE / "hide.py")


def python(*command, limit_s=100, **more):
    return subprocess.run(
        [sys.executable, *map(str, command)],
        capture_output=True,
        text=True,
        timeout=limit_s,
        env={**ENVIRONMENT, **more},
    )


def two_ranks(*command):
    done = launch(2, *command, timeout=250, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr[-4000:]


# Both sides add the same fp32 numbers in another order: relative 2**-24 a sum, a few hundred sums in a row.
def assert_near(rows, wanted):
    assert len(rows) == len(wanted) > 0
    for one, other in zip(rows, wanted, strict=True):
        assert one == pytest.approx(other, rel=2e-5, abs=5e-6)


CONFIG = {
    "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto", "gradient_clipping": 0.5,
    "zero_optimization": {"stage": 3}, "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"},
}  # fmt: skip


@pytest.mark.slow
def test_an_accelerate_loop_equals_ddp_and_goes_on_where_it_was(tmp_path):
    pytest.importorskip("accelerate", reason="accelerate is not installed: pip install zeropp[hf]")
    found, whole = {}, {}
    (tmp_path / "ds.json").write_text(json.dumps(CONFIG))
    for name, stage in (("ddp", None), ("stage 3", 3)):
        folder = tmp_path / name
        folder.mkdir()
        script = HERE / "accelerate_script.py"
        if stage is None:
            two_ranks(script, folder)
        else:
            two_ranks(HIDE, "run", script, folder, "--zeropp", tmp_path / "ds.json")
        found[name] = json.loads((folder / "result.json").read_text())
        import torch

        whole[name] = torch.load(folder / "whole.pt", weights_only=True)
    assert_near(found["stage 3"]["rows"], found["ddp"]["rows"])
    assert found["stage 3"]["again"] == found["stage 3"]["rows"][-6:] != found["stage 3"]["rows"][6:12]
    for name, value in whole["ddp"].items():
        assert value.sub(whole["stage 3"][name]).abs().max() < 1e-5


def test_a_trainer_script_equals_ddp_and_resumes_bit_for_bit(tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install zeropp[hf]")
    sys.path.insert(0, str(HERE.parent / "hf"))
    from models import llama

    llama().save_pretrained(tmp_path / "model")
    keys = {**CONFIG, "gradient_clipping": "auto", "train_batch_size": "auto"}
    keys["zero_optimization"] = {"stage": 3, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto"}
    (tmp_path / "ds.json").write_text(json.dumps(keys))
    words = (
        "--max_steps 6 --per_device_train_batch_size 4 --gradient_accumulation_steps 2 --max_grad_norm 0.5 --learning_rate 3e-3 "
        "--warmup_steps 2 --logging_steps 1 --eval_strategy steps --eval_steps 3 --save_steps 3 --report_to none --disable_tqdm true"
    ).split()
    script, found = HERE / "trainer_script.py", {}
    for name, ours in (("ddp", False), ("zeropp", True)):
        common = [script, tmp_path / "model", tmp_path / f"{name}.json", "--output_dir", tmp_path / name, *words]
        two_ranks(*([HIDE, "run", *common, "--zeropp", tmp_path / "ds.json"] if ours else [*common, "--use_cpu"]))
        found[name] = json.loads((tmp_path / f"{name}.json").read_text())
    assert_near(found["zeropp"]["logged"], found["ddp"]["logged"])
    assert (
        found["zeropp"]["deepspeed"] and found["zeropp"]["kind"] == "DeepSpeedEngine" and not found["ddp"]["deepspeed"]
    )
    assert found["zeropp"]["again"] == found["zeropp"]["logged"]
    assert found["zeropp"]["generated"] == found["ddp"]["generated"]
    assert {p.name for p in (tmp_path / "zeropp" / "checkpoint-3").iterdir()} >= {
        "global_step3",
        "latest",
        "model.safetensors",
    }
    saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "zeropp" / "final").state_dict()
    for name, value in (
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ddp" / "final").state_dict().items()
    ):
        assert value.sub(saved[name]).abs().max() < 1e-5


def test_the_names_are_there_and_say_whose_they_are(tmp_path):
    (tmp_path / "script.py").write_text(
        "import sys, importlib.metadata, importlib.util\n"
        "import deepspeed, torch, zeropp\n"
        "from deepspeed.ops.adam import DeepSpeedCPUAdam\n"
        "from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad, safe_get_full_optimizer_state\n"
        "assert deepspeed.zero.Init and deepspeed.runtime.zero.partition_parameters.ZeroParamStatus\n"
        "assert importlib.metadata.version('deepspeed') == deepspeed.__version__\n"
        "assert 'zeropp' in importlib.metadata.metadata('deepspeed')['Author']\n"
        "assert importlib.util.find_spec('deepspeed.nowhere') is None and not hasattr(deepspeed, 'Nothing')\n"
        "torch.manual_seed(0)\n"
        "model = torch.nn.Linear(4, 2)\n"
        "optimizer = DeepSpeedCPUAdam(model.parameters(), lr=0.1, adamw_mode=False)\n"
        "config = {'train_batch_size': 4, 'gradient_accumulation_steps': 2, 'gradient_clipping': 0, 'zero_optimization': {'stage': 2}}\n"
        "engine, optimizer, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)\n"
        "assert not hasattr(engine.weight, 'ds_id') and not hasattr(engine.weight, 'ds_status')\n"
        "before = engine.weight.detach().clone()\n"
        "for _ in range(2):\n"
        "    assert torch.equal(engine.weight, before)\n"
        "    engine.backward(engine(torch.ones(2, 4)).mean())\n"
        "    grad = safe_get_full_grad(engine.weight)\n"
        "    engine.step()\n"
        "assert torch.allclose(grad, torch.full((2, 4), 0.5)) and engine.global_steps == 1\n"
        "assert torch.allclose(before - engine.weight, torch.full((2, 4), 0.1))\n"
        "assert torch.equal(safe_get_full_fp32_param(engine.weight), engine.weight)\n"
        "assert torch.allclose(safe_get_full_optimizer_state(engine.weight, 'exp_avg'), torch.full((2, 4), 0.05))\n"
        "print(sys.argv[1:], type(optimizer).__name__)\n"
        "sys.exit(7)\n"
    )
    done = python(HIDE, "run", tmp_path / "script.py", "--zeropp", "a.json", "--zeropp=b.json", "-x")
    assert done.returncode == 7, done.stderr
    assert done.stdout.strip() == "['--deepspeed', 'a.json', '--deepspeed=b.json', '-x'] ZeroDeepSpeedCPUAdam"
    shown = python(HIDE, "run", "-m", "zeropp", "env", "--json")
    assert "compatibility module" in json.loads(shown.stdout)["deepspeed"]
    assert json.loads(python(HIDE, "env", "--json").stdout)["deepspeed"].startswith("nothing;")


def test_a_file_with_keys_of_zeropp_reaches_accelerate_and_trainer(tmp_path):
    """They read DeepSpeed's keys alone: "Please specify the ZeRO optimization config in the DeepSpeed config"."""
    pytest.importorskip("transformers", reason="transformers is not installed: pip install zeropp[hf]")
    (tmp_path / "zeropp.json").write_text(json.dumps({"stage": 2, "precision": "bf16", "bucket_bytes": 1 << 20}))
    alone = json.dumps({"stage": 3, "clip": 0.25, "bucket_bytes": 1 << 21})
    words = (
        f"--output_dir {tmp_path / 'out'} --max_steps 2 --per_device_train_batch_size 2 --max_grad_norm 0.5 --report_to none "
        "--save_strategy no --disable_tqdm true"
    ).split()
    done = python(
        HIDE, "run", "--zeropp", alone, HERE / "frameworks_script.py", tmp_path / "found.json", "--zeropp", tmp_path / "zeropp.json", *words
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads((tmp_path / "found.json").read_text())
    losses = found["accelerate"].pop("losses")
    assert losses[0] == losses[1] > losses[2] == losses[3], "two micro-batches a step"
    assert found["accelerate"] == {
        "kind": "DeepSpeedEngine", "stage": 3, "clip": 0.25, "bucket_bytes": 1 << 21, "accumulate": 2, "dtype": None, "steps": 2,
    }  # fmt: skip
    assert found["trainer"] == {
        "kind": "DeepSpeedEngine", "stage": 2, "clip": 0.5, "bucket_bytes": 1 << 20, "accumulate": 1, "dtype": "bf16", "steps": 2,
    }  # fmt: skip


def test_every_child_interpreter_has_the_names_too(tmp_path):
    """Workers of a DataLoader, spawn, forkserver, subprocess; a sitecustomize that was there runs; nothing is on disk."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text("import sys\nsys.marked = __name__\n")
    path = os.pathsep.join([str(tmp_path / "site"), ENVIRONMENT["PYTHONPATH"]])
    done = python(HIDE, "run", HERE / "children_script.py", tmp_path, limit_s=200, PYTHONPATH=path)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads((tmp_path / "found.json").read_text())
    import zeropp
    from zeropp.deepspeed.names import VERSION

    for name in ("spawn", "forkserver"):
        assert found[name][:2] == [zeropp.__version__, VERSION] and found[name][2] != found["here"]
    assert found["loader"][0] == zeropp.__version__ and found["loader"][1] != found["here"]
    assert found["plain"] == [["zeropp", VERSION], "sitecustomize", False]
    assert found["isolated"] == [None, None, False], "python -I reads no PYTHONPATH, and is left as it is"


@pytest.mark.slow
def test_a_worker_of_ray_has_the_names_too(tmp_path):
    pytest.importorskip("ray", reason="ray is not installed: pip install zeropp[ray]")
    done = python(HIDE, "run", HERE / "ray_script.py", tmp_path / "found.json", limit_s=250)
    assert done.returncode == 0, done.stderr[-4000:]
    here, there = json.loads((tmp_path / "found.json").read_text())
    assert here == there


def test_a_module_whose_package_imports_deepspeed_runs(tmp_path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("import deepspeed\n")
    (tmp_path / "package" / "script.py").write_text("import package\nprint(package.deepspeed.__version__)\n")
    path = os.pathsep.join([str(tmp_path), ENVIRONMENT["PYTHONPATH"]])
    done = python(HIDE, "run", "-m", "package.script", PYTHONPATH=path)
    assert done.returncode == 0 and done.stdout.startswith("0."), done.stderr


def test_a_child_that_has_the_real_package_keeps_it(tmp_path):
    from zeropp.deepspeed.names import CHILDREN

    (tmp_path / "deepspeed").mkdir()
    (tmp_path / "deepspeed" / "__init__.py").write_text("whose = 'its own'\n")
    path = os.pathsep.join([str(CHILDREN), str(tmp_path), ENVIRONMENT["PYTHONPATH"]])
    done = python("-c", "import sys, deepspeed; print(deepspeed.whose, 'torch' in sys.modules)", PYTHONPATH=path)
    assert done.stdout.split() == ["its", "own", "False"], done.stderr


def test_what_cannot_be_says_why(tmp_path):
    (tmp_path / "script.py").write_text("import deepspeed\ndeepspeed.initialize(mpu=1)\n")
    refused = python(HIDE, "run", tmp_path / "script.py")
    assert "(mpu, mesh_param) is not supported" in refused.stderr and refused.returncode == 1
    missing = python(HIDE, "run", tmp_path / "nowhere.py")
    assert missing.returncode == 2 and "there is no such file" in missing.stderr
    real = importlib.util.find_spec("deepspeed")
    if real is None or real.origin is None:
        pytest.skip("deepspeed is not installed: nothing to refuse beside")
    beside = python("-m", "zeropp", "run", tmp_path / "script.py")
    assert beside.returncode == 2 and "zeropp does not stand before it" in beside.stderr


def test_a_folder_of_files_for_deepspeed_is_not_the_package(tmp_path, monkeypatch):
    from zeropp.deepspeed.names import real_package

    (tmp_path / "deepspeed").mkdir()
    (tmp_path / "deepspeed" / "zero3.json").write_text("{}")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "deepspeed", raising=False)
    importlib.invalidate_caches()
    assert importlib.util.find_spec("deepspeed") is not None
    assert real_package() is None


def test_models_under_zero_init_are_built_in_slices(tmp_path):
    """By hand, and by transformers from files: tied weights, a mixture of experts, a head that is not in the file."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install zeropp[hf]")
    sys.path.insert(0, str(HERE.parent / "hf"))
    from models import gpt2

    gpt2().save_pretrained(tmp_path / "gpt2")
    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = transformers.Qwen3MoeConfig(
        vocab_size=99, intermediate_size=32, moe_intermediate_size=16, num_experts=8, num_experts_per_tok=2, **small
    )
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(tmp_path / "moe")
    gptj = transformers.GPTJConfig(vocab_size=99, n_embd=32, n_layer=1, n_head=4, rotary_dim=4, n_positions=64)
    transformers.GPTJModel(gptj).save_pretrained(tmp_path / "gptj")
    part = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    pair = {"text_config": {**part, "vocab_size": 64}, "vision_config": {**part, "image_size": 4, "patch_size": 2}}
    transformers.SiglipModel(transformers.SiglipConfig(**pair)).save_pretrained(tmp_path / "siglip")
    two_ranks(HIDE, "run", HERE / "init_script.py", tmp_path, *"by_hand saved with_transformers built_apart".split())
    for rank in range(2):
        found = json.loads((tmp_path / f"found.{rank}.json").read_text())
        hand = found["by_hand"]
        assert hand["kinds"] == ["ShardedParameter"] and hand["apart"] == 0.0 and hand["state"] == ["meta"]
        assert all("'0.weight' was built inside zeropp.sharded_init()" in hand[name] for name in ("read", "copy"))
        assert hand["hashed"] == 0.0, "state_dict()[...].cpu() on every rank, as TRL hashes a model"
        assert "not every rank came to read its whole values" in hand["alone"] if rank == 0 else "alone" not in hand
        assert hand["changed"] == [0.5] * 3 and max(hand["evaluated"], hand["out"], hand["stepped"]) < 1e-6
        assert hand["low"] == ["torch.bfloat16"] and hand["off"] == ["Parameter"]
        assert found["built_apart"] == {"sines": ["torch.bfloat16", True], "siglip": 0.0}
        saved = found["saved"]
        assert all(saved[f"apart {stage}"] < 1e-6 for stage in (0, 2, 3)), saved
        assert [saved[f"marked {stage}"] for stage in (0, 2, 3)] == [[False] * 4, [False] * 4, [True] * 4]
        assert sorted(set(saved["ids"])) == saved["ids"] and saved["told"] == [960, [40, 24], "torch.float32", 1]
        assert saved["slices"] == [True] * 4 and saved["inside"]
        assert saved["seen"] == [None, None, ["AVAILABLE", True]]
        assert (
            saved["built"] == [True] * 4
            and saved["built told"] == [960, 480, 20]
            and saved["built inside"] == [True, 960]
        )
        assert saved["early"] == [2, 3]
        loaded = found["with_transformers"]
        for name in ("gpt2", "moe"):
            assert loaded[name] == {"kinds": ["ShardedParameter"], "missing": [], "names": True, "apart": 0.0}
        spread, same = loaded["head"]
        assert 0.005 < spread < 0.05 and same, "drawn on rank 0 with the model's own initialisation, 0.02"
        dtype, kinds, tied, ratio = loaded["config"]
        assert (dtype, kinds, tied) == ("torch.bfloat16", ["ShardedParameter"], True) and abs(ratio - 1) < 0.3
        assert loaded["resized"][1] and loaded["loss"] > 0


@pytest.mark.parametrize(
    "cases",
    [
        [
            "test_hf_ds_config_mismatch",
            "test_stage3_nvme_offload",
            "test_load_state_dict_from_zero_checkpoint",
            "test_eval",
        ],
        pytest.param([], marks=pytest.mark.slow, id="all"),
    ],
)
def test_what_transformers_asks_of_deepspeed_under_its_trainer(cases, tmp_path):
    """The cases of transformers' own file for it, on a straight line (regression_script.py); docs/conformance.md lists them."""
    pytest.importorskip("transformers", reason="transformers is not installed: pip install zeropp[hf]")
    done = launch(1, HIDE, "run", HERE / "regression_script.py", tmp_path, *cases, timeout=250, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads((tmp_path / "wrong.json").read_text())
    assert len(found["ran"]) == (len(cases) or 20) and not found["wrong"], "\n".join(found["wrong"].values())
