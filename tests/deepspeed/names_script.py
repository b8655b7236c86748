# SPDX-License-Identifier: Apache-2.0
"""Reads every name of projects.json, and asks deepspeed's small parts for what they promise: names_script.py RESULT."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
from zeropp.errors import ConfigError

DATA = json.loads(Path(__file__).with_name("projects.json").read_text())


def read(name: str) -> Any:
    """Read a name as an import statement and a chain of attributes do."""
    if name.startswith("get_accelerator()"):
        return getattr(deepspeed.get_accelerator(), name.partition(".")[2])
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:length]))
            break
        except ModuleNotFoundError:
            continue
    for part in parts[length:]:
        found = getattr(found, part)
    return found


def used(name: str) -> str:
    """Return the message of a name that is not built, when it is called or its builder loads the module."""
    found = read(name)
    try:
        found().load() if name.startswith("deepspeed.ops.op_builder") else found()
    except ConfigError as error:
        return str(error)
    return ""


def wrong_names() -> dict[str, str]:
    from zeropp.deepspeed.names.later import is_later

    wrong = {}
    for kind, names in DATA["names"].items():
        for name in names:
            try:
                found, said = read(name), used(name) if kind == "sentence" else ""
            except Exception as error:
                wrong[name] = repr(error)
                continue
            if kind == "works" and is_later(found):
                wrong[name] = "recorded as working, and raises a sentence"
            if kind == "sentence" and "is not supported by zeropp; " not in said:
                wrong[name] = f"recorded as a sentence, and said {said!r}"
    return wrong


def said(statement: str) -> str:
    try:
        exec(statement, {"deepspeed": deepspeed})
    except (ImportError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def accelerator() -> dict[str, Any]:
    """Every method of DeepSpeed's abstract accelerator, called."""
    here = deepspeed.get_accelerator()
    state = here.get_rng_state()
    drawn = (here.manual_seed(7), torch.rand(1).item())[1]
    here.manual_seed_all(7)
    again = torch.rand(1).item()
    here.set_rng_state(state)
    block = torch.ones(4 << 20)
    before = here.memory_allocated()
    here.reset_peak_memory_stats()
    for quiet in (
        here.synchronize,
        here.empty_cache,
        here.reset_max_memory_allocated,
        here.reset_max_memory_cached,
        here.range_pop,
    ):
        assert quiet() is None
    here.set_device(0)
    here.range_push("a range")
    graph = here.create_graph()
    with here.stream(here.current_stream()), here.capture_to_graph(graph):
        here.replay_graph(graph)
    environment: dict[str, str] = {}
    here.set_visible_devices_envs(environment, [1, 3])
    here.set_compile_backend("eager")
    fast = here.get_compile_backend(), here.set_compile_backend("inductor")
    with here.device(0):
        inside = torch.ones(1).device.type
    assert here.memory_stats()["allocated_bytes.all.current"] <= here.max_memory_allocated() <= here.total_memory()
    assert (
        0 < here.available_memory() < here.total_memory()
        and here.max_memory_reserved() >= here.memory_reserved() > block.nbytes
    )
    assert (
        here.random() is torch.random
        and here.lazy_call(lambda: 5) == 5
        and here.default_generator(0) is torch.default_generator
    )
    assert here.FloatTensor([1.0]).dtype == torch.float32 and here.LongTensor([1]).dtype == torch.int64
    assert torch.float in here.supported_dtypes() and here.is_fp16_supported() == (
        torch.half in here.supported_dtypes()
    )
    assert here.on_accelerator(block) and here.pin_memory(block) is block and not here.is_pinned(block)
    assert here.get_op_builder("CPUAdamBuilder").NAME == "cpu_adam" and here.create_op_builder("Nothing") is None
    return {
        "names": [here._name, here.device_name(), here.device_name(1), here.current_device_name(), here.communication_backend_name()],
        "counts": [here.current_device(), here.device_count() >= 1], "available": here.is_available(), "drawn": drawn == again,
        "synchronous": [here.is_synchronized_device(), here.use_host_timers(), here.resolves_data_dependency()],
        "visible": environment, "backend": fast[0], "inside": inside, "held": before > block.nbytes,
        "triton": here.is_triton_supported(), "bf16": here.is_bf16_supported(), "seed": here.initial_seed() is not None,
    }  # fmt: skip


def cuda() -> dict[str, Any]:
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
    from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator

    cpu, here = CPU_Accelerator(), CUDA_Accelerator()
    known = {*dir(here), "get_rss", "reset_rss"}
    return {
        "lacks": [name for name in dir(cpu) if not name.startswith("_") and name not in known],
        "names": [
            here.device_name(), here.device_name(1), str(here.device(1)), here.communication_backend_name(), here.is_synchronized_device(),
            here.export_envs(),
        ],
        "same": [here.memory_cached is torch.cuda.memory_reserved, here.Stream is torch.cuda.Stream],
        "on": here.on_accelerator(torch.ones(1)),
    }  # fmt: skip


def small_parts() -> dict[str, Any]:
    from deepspeed.runtime.lr_schedules import OneCycle, WarmupDecayLR, WarmupLR
    from deepspeed.runtime.utils import move_to_device, set_random_seed
    from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum
    from deepspeed.runtime.zero.stage3 import (
        estimate_zero3_model_states_mem_needs,
        estimate_zero3_model_states_mem_needs_all_live,
    )
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs_all_cold
    from deepspeed.utils import RepeatingLoader, logger

    with deepspeed.OnDevice(dtype=torch.float16, device="meta"):
        model = torch.nn.Linear(1 << 15, 1 << 15)
    loader = RepeatingLoader([1, 2])
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    schedule = WarmupDecayLR(optimizer, 10, 0.0, 0.1, 5, "linear")
    rates = [(optimizer.step(), schedule.step(), schedule.get_last_lr()[0])[2] for _ in range(6)]
    assert isinstance(schedule, WarmupLR) and OneCycle(optimizer, 0.1, cycle_max_lr=0.2) is not None
    set_random_seed(3)
    assert callable(logger.warning_once) and callable(logger.log_dist_once)
    here, moved = torch.ones(2), torch.zeros(2)
    assert move_to_device({"a": [here, (moved,)]}, "cpu")["a"][1][0].device.type == "cpu"

    from deepspeed import checkpointing

    configured = [checkpointing.is_configured()]
    checkpointing.configure(None, partition_activations=True, checkpoint_in_cpu=True, synchronize=True)
    x = torch.ones(3, requires_grad=True)
    checkpointing.checkpoint(lambda value: value.sin().sum(), x).backward()
    estimate_zero3_model_states_mem_needs_all_live(model, num_gpus_per_node=2)
    estimate_zero2_model_states_mem_needs_all_cold(10**9, num_gpus_per_node=2)
    return {
        "meta": [str(model.weight.device), str(model.weight.dtype)], "default": str(torch.ones(1).dtype),
        "loader": [next(loader) for _ in range(5)], "rates": rates, "enum": OffloadDeviceEnum("cpu") == "cpu",
        "checkpoint": torch.equal(x.grad, torch.ones(3).cos()), "configured": [*configured, checkpointing.is_configured()],
        "needs": estimate_zero3_model_states_mem_needs(10**9, 10**8, num_gpus_per_node=4),
    }  # fmt: skip


if __name__ == "__main__":
    found = {
        "wrong": wrong_names(),
        "said": [
            said("from deepspeed.utils import RepeatingLoadr"), said("import deepspeed.runtime.zero.stage4"), said("deepspeed.inititalize"),
            said("deepspeed.get_accelerator().divice_name"), said("from deepspeed import FusedAdam"),
        ],
        "hasattr": [hasattr(deepspeed, "nothing"), importlib.util.find_spec("deepspeed.nothing") is not None],
        "accelerator": accelerator(), "cuda": cuda(), "parts": small_parts(),
    }  # fmt: skip
    Path(sys.argv[1]).write_text(json.dumps(found))
