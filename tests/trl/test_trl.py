# SPDX-License-Identifier: Apache-2.0
"""TRL's trainers through TrainerFor and ArgumentsFor against themselves under DDP, two ranks. What the ranks do stands
in cases.py. Needs TRL: pip install zeropp[trl]."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest
from warm import launch

MISSING = [name for name in ("trl", "datasets", "peft") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.skipif(bool(MISSING), reason=f"{', '.join(MISSING)} not installed: pip install zeropp[trl]"),
    pytest.mark.timeout(500),
]
HERE = Path(__file__).parent
ROOT = HERE.parents[1]
ENVIRONMENT = {
    **os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(one for one in sys.path if one),
    "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
}  # fmt: skip


def two_ranks(*command):
    done = launch(2, *command, timeout=400, env=ENVIRONMENT, kind="hf")
    assert done.returncode == 0, done.stderr[-4000:]
    return done


NAMES = ("sft", "sft_lora", "sft_checkpointing", "dpo", "kto", "reward", "grpo")


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """All cases in one launch: importing TRL takes longer than they do."""
    folder = tmp_path_factory.mktemp("trl")
    two_ranks(HERE / "cases.py", folder, *NAMES)
    return {name: [json.loads((folder / f"{name}.{rank}.json").read_text()) for rank in range(2)] for name in NAMES}


@pytest.mark.parametrize("stage", ["stage 1", "stage 2", "zeropp", "on disk"])
@pytest.mark.parametrize("name", NAMES)
def test_losses_norms_and_learning_rates_equal_ddp(name, stage, answers):
    """Both sides add the same fp32 numbers in another order; losses up to 6, norms up to 4."""
    for found in answers[name]:
        assert len(found["stock"]) == len(found[stage]) == 3
        for ours, stock in zip(found[stage], found["stock"], strict=True):
            assert ours == pytest.approx(stock, rel=1e-5, abs=5e-6)
        assert found["stock"][-1] != found["stock"][0] and found["apart"][stage] < 5e-6
        assert found["files"] == ["adapter_model.safetensors" if name == "sft_lora" else "model.safetensors"]


@pytest.mark.parametrize("name", ["trl_sft_lora", "trl_dpo", "trl_grpo"])
def test_the_example_trains(name, tmp_path):
    done = two_ranks(ROOT / "examples" / f"{name}.py", "--folder", tmp_path, "--steps", "6")
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"')]
    assert rows[-1]["step"] == 6
    wanted = "adapter_model.safetensors" if "lora" in name else "model.safetensors"
    assert (tmp_path / "final" / wanted).exists()


def test_a_script_written_for_deepspeed_equals_ddp(tmp_path):
    """unchanged.py knows nothing of zeropp: SFT, and DPO with its reference model, whose configuration TRL writes itself."""
    folder = tmp_path / "model"
    make = "import sys; sys.path.insert(0, sys.argv[1]); import cases; cases.save_model(sys.argv[2]); cases.tokenizer().save_pretrained(sys.argv[2])"
    made = launch(1, "-c", make, HERE, folder, timeout=100, env=ENVIRONMENT, kind="hf")
    assert made.returncode == 0, made.stderr[-4000:]
    config = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
    }
    (tmp_path / "ds.json").write_text(json.dumps({**config, "zero_optimization": {"stage": 3}}))
    script = (HERE / "unchanged.py", tmp_path)
    two_ranks(*script)
    hidden = launch(
        2,
        HERE.parent / "deepspeed" / "hide.py",
        "run",
        *script,
        "--deepspeed",
        tmp_path / "ds.json",
        timeout=300,
        env=ENVIRONMENT,
    )
    assert hidden.returncode == 0, hidden.stderr[-4000:]
    for rank in range(2):
        stock, ours = (json.loads((tmp_path / f"{name}.{rank}.json").read_text()) for name in ("stock", "zeropp"))
        for kind in ("sft", "dpo"):
            assert ours[f"{kind} engine"] == "DeepSpeedEngine" != stock[f"{kind} engine"]
            assert len(ours[kind]) == len(stock[kind]) == 3 and stock[kind][0] != stock[kind][-1]
            for one, other in zip(ours[kind], stock[kind], strict=True):
                assert one == pytest.approx(other, rel=1e-4, abs=5e-5)  # the log has four digits
