# SPDX-License-Identifier: Apache-2.0
"""Models built under deepspeed.zero.Init, by hand and by transformers, in a script that does not mention zeropp:
init_script.py FOLDER (with models in it) CASE.... Every rank writes what it found."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch import nn

CONFIG = {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0, "zero_optimization": {"stage": 3}}


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(24, 40), nn.ReLU(), nn.Linear(40, 3))


def whole(model: Any) -> dict[str, torch.Tensor]:
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        return {name: p.detach().clone() for name, p in model.named_parameters(remove_duplicate=False)}


def kinds(model: nn.Module) -> list[str]:
    return sorted({type(p).__name__ for p in model.parameters()})


def alone(read: Any) -> None:
    """Read on one rank alone; a test waits for less time than a user."""
    sys.modules["zeropp.comm.rendezvous"].LIMIT_S = 0.3  # type: ignore[attr-defined]
    read()


def by_hand(folder: Path) -> dict[str, Any]:
    """Ranks draw different values, and rank 0's count; one is changed before the model is trained."""
    torch.manual_seed(100 + int(os.environ["RANK"]))
    with deepspeed.zero.Init(config_dict_or_path={"bf16": {"enabled": False}}):
        model = network()
    torch.manual_seed(100)
    plain = network()
    found: dict[str, Any] = {"kinds": kinds(model)}
    found["apart"] = max(float((value - whole(plain)[name]).abs().max()) for name, value in whole(model).items())
    found["state"] = sorted({str(one.device) for one in model.state_dict().values()})
    listed = model.state_dict()["0.weight"]
    found["hashed"] = float((listed.cpu() - plain[0].weight).abs().max().detach())
    for name, read in {
        "read": lambda: model[0].weight.sum(),
        "copy": listed.clone,
        "alone": lambda: dist.get_rank() or alone(listed.cpu),
    }.items():
        try:
            read()
        except Exception as error:
            found[name] = str(error)
    everything = set(model.parameters())  # in any order
    with deepspeed.zero.GatheredParameters(list(everything), modifier_rank=0):
        if dist.get_rank() == 0:
            model[2].bias.data.fill_(0.5)
    with torch.no_grad():
        plain[2].bias.fill_(0.5)
    with deepspeed.zero.GatheredParameters(model[2].bias):
        found["changed"] = model[2].bias.tolist()
        model[2].bias.data.fill_(9.0)  # without modifier_rank this is lost
    inputs = torch.randn(4, 24, generator=torch.Generator().manual_seed(3))
    engine, _, _, _ = deepspeed.initialize(model=model, config=CONFIG)  # to evaluate first, as TRL does for a reference
    with torch.no_grad():
        found["evaluated"] = float((engine.eval()(inputs) - plain(inputs)).abs().max())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, _, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)
    assert engine.module[0].weight.ds_status == ZeroParamStatus.NOT_AVAILABLE
    found["out"] = float((engine(inputs) - plain(inputs)).abs().max().detach())
    engine.backward(engine(inputs).square().mean())
    engine.step()
    plain(inputs).square().mean().backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    found["stepped"] = float((engine(inputs) - plain(inputs)).abs().max().detach())
    with deepspeed.zero.Init(dtype=torch.bfloat16):
        low = network()
    found["low"] = sorted({str(p.dtype) for p in low.parameters()})
    with deepspeed.zero.Init(enabled=False):
        found["off"] = kinds(network())
    return found


def with_transformers(folder: Path) -> dict[str, Any]:
    """from_pretrained and from_config take their ZeRO-3 ways; values are the file's, and what it lacks is drawn on rank 0."""
    import transformers
    from transformers.integrations import HfDeepSpeedConfig

    found: dict[str, Any] = {}
    tied = transformers.AutoModelForCausalLM.from_pretrained(folder / "gpt2")
    moe = transformers.AutoModelForCausalLM.from_pretrained(folder / "moe")
    plain = {"gpt2": dict(tied.named_parameters(remove_duplicate=False)), "moe": dict(moe.named_parameters())}
    held = HfDeepSpeedConfig(CONFIG)  # while it lives, transformers builds for ZeRO-3
    for name in ("gpt2", "moe"):
        model, said = transformers.AutoModelForCausalLM.from_pretrained(folder / name, output_loading_info=True)
        values = whole(model)
        found[name] = {
            "kinds": kinds(model), "missing": sorted(said["missing_keys"]), "names": sorted(values) == sorted(plain[name]),
            "apart": max(float((values[key] - value).abs().max()) for key, value in plain[name].items()),
        }  # fmt: skip
    head = transformers.AutoModelForSequenceClassification.from_pretrained(
        folder / "gpt2", num_labels=5, pad_token_id=0
    )
    drawn = whole(head)["score.weight"]
    every = [torch.zeros_like(drawn) for _ in range(dist.get_world_size())]
    dist.all_gather(every, drawn)
    found["head"] = [float(drawn.std()), bool(torch.equal(every[0], every[-1]))]
    held = HfDeepSpeedConfig({**CONFIG, "bf16": {"enabled": True}})
    torch.manual_seed(5)
    made = transformers.AutoModelForCausalLM.from_config(tied.config)
    weight = made.transformer.h[0].attn.c_attn.weight
    found["config"] = [str(weight.dtype), kinds(made), made.lm_head.weight is made.transformer.wte.weight]
    with deepspeed.zero.GatheredParameters([weight]):
        found["config"].append(
            float(weight.float().std()) / float(plain["gpt2"]["transformer.h.0.attn.c_attn.weight"].std())
        )
    resized = made.resize_token_embeddings(made.config.vocab_size + 3)
    with deepspeed.zero.GatheredParameters([resized.weight]):
        found["resized"] = [list(resized.weight.shape), bool(torch.isfinite(resized.weight).all())]
    engine, _, _, _ = deepspeed.initialize(model=made, config={**CONFIG, "bf16": {"enabled": True}})
    out = engine(input_ids=torch.tensor([[1, 2, 3]]), labels=torch.tensor([[1, 2, 3]]))
    found["loss"] = float(out.loss)
    del held
    return found


def built_apart(folder: Path) -> dict[str, Any]:
    """Check what transformers computes while it builds: tables of sines stay fp32 in a bf16 model (test_arange_bf16), and layers with an
    initialisation of their own keep the file's values (test_init_zero3_variance_scaling)."""
    import transformers
    from transformers.integrations import HfDeepSpeedConfig

    plain = transformers.SiglipModel.from_pretrained(folder / "siglip")
    held = HfDeepSpeedConfig({**CONFIG, "bf16": {"enabled": True}})
    model = transformers.AutoModel.from_pretrained(folder / "gptj", dtype=torch.float32)
    wanted = transformers.models.gptj.modeling_gptj.create_sinusoidal_positions(
        model.config.max_position_embeddings, model.config.rotary_dim
    )
    attention = model.h[0].attn
    found: dict[str, Any] = {
        "sines": [str(attention.q_proj.weight.dtype), bool(torch.equal(attention.embed_positions.cpu(), wanted))]
    }
    held = HfDeepSpeedConfig(CONFIG)
    values = whole(transformers.SiglipModel.from_pretrained(folder / "siglip"))
    found["siglip"] = max(float((values[name] - p).abs().max().detach()) for name, p in plain.named_parameters())
    del held
    return found


def maybe_zero_3(param: Any) -> torch.Tensor:
    """LLaVA's llava/train/train.py; FastChat's and Qwen's are the same."""
    if hasattr(param, "ds_id"):
        assert param.ds_status == ZeroParamStatus.NOT_AVAILABLE
        with deepspeed.zero.GatheredParameters([param]):
            param = param.data.detach().cpu().clone()
    else:
        param = param.detach().cpu().clone()
    return param


def saved(folder: Path) -> dict[str, Any]:
    """A script's own saving code, at every stage; what parameters say of themselves, split, in forward, and inside a gather."""
    found: dict[str, Any] = {}
    inputs, seen = torch.ones(2, 24), []
    for stage in (0, 2, 3):
        torch.manual_seed(7)
        model, plain = network(), network()
        plain.load_state_dict(model.state_dict())
        config = {**CONFIG, "zero_optimization": {"stage": stage}}
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine, _, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        engine.module[0].register_forward_hook(
            lambda m, a, o, seen=seen: seen.append([getattr(m.weight, "ds_status", None), hasattr(m.weight, "ds_id")])
        )
        engine.backward(engine(inputs).mean())
        engine.step()
        plain(inputs).mean().backward()
        torch.optim.SGD(plain.parameters(), lr=0.1).step()
        values = {name: maybe_zero_3(p) for name, p in model.named_parameters()}
        found[f"apart {stage}"] = max(float((values[n] - p).abs().max().detach()) for n, p in plain.named_parameters())
        found[f"marked {stage}"] = [hasattr(p, "ds_id") and hasattr(p, "ds_status") for p in model.parameters()]
    weight, parts = model[0].weight, []
    found["ids"] = [p.ds_id for p in model.parameters()]
    found["told"] = [weight.ds_numel, list(weight.ds_shape), str(weight.ds_tensor.dtype), weight.ds_tensor.dim()]
    for one in model.parameters():
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, one.ds_tensor.clone())
        parts.append(bool(torch.equal(torch.cat(every), maybe_zero_3(one).view(-1))))
    found["slices"] = parts
    with deepspeed.zero.GatheredParameters(weight):
        found["inside"] = weight.ds_status == ZeroParamStatus.AVAILABLE
    found["seen"] = [None if status is None else [status.name, marked] for status, marked in seen]
    with deepspeed.zero.Init():
        built = network()
    found["built"] = [p.ds_status == ZeroParamStatus.NOT_AVAILABLE for p in built.parameters()]
    found["built told"] = [
        built[0].weight.ds_numel,
        built[0].weight.ds_tensor.numel(),
        built[0].bias.ds_tensor.ds_numel,
    ]
    with deepspeed.zero.Init():  # initialize inside of it, too
        early = network()
        engine, _, _, _ = deepspeed.initialize(model=early, config=CONFIG)
        found["early"] = list(engine(inputs).shape)
    with deepspeed.zero.GatheredParameters(list(built.parameters())):
        found["built inside"] = [built[0].weight.ds_status == ZeroParamStatus.AVAILABLE, built[0].weight.numel()]
    return found


CASES = {"saved": saved, "built_apart": built_apart, "by_hand": by_hand, "with_transformers": with_transformers}

if __name__ == "__main__":
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    found = {name: CASES[name](folder) for name in sys.argv[2:]}
    (folder / f"found.{os.environ['RANK']}.json").write_text(json.dumps(found))
    dist.destroy_process_group()
