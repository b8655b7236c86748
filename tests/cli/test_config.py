# SPDX-License-Identifier: Apache-2.0
"""``python -m zeropp config FILE``."""

from __future__ import annotations

import json

import pytest
from zeropp.cli import main


def told(capsys, tmp_path, keys, *more):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(keys))
    status = main(["config", str(path), "--json", *more])
    answer = json.loads(capsys.readouterr().out)
    return status, {row["key"]: row for row in answer["keys"]}, answer


def test_every_key_is_explained(capsys, tmp_path):
    keys = {
        "train_batch_size": 16, "gradient_accumulation_steps": 2, "train_micro_batch_size_per_gpu": "auto",
        "gradient_clipping": 0.5, "bf16": {"enabled": True}, "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": 3, "overlap_comm": True, "sub_group_size": 1e9, "stage3_prefetch_bucket_size": 1000},
    }  # fmt: skip
    status, rows, answer = told(capsys, tmp_path, keys, "--ranks", "2")
    assert status == 0 and answer["problem"] is None
    assert rows["train_micro_batch_size_per_gpu"]["state"] == "auto"
    assert rows["gradient_clipping"]["said"] == "Config.clip = 0.5"
    assert rows["zero_optimization.sub_group_size"]["state"] == "changes nothing"
    assert "unit by unit" in rows["zero_optimization.sub_group_size"]["said"]
    assert rows["zero_optimization.stage3_prefetch_bucket_size"]["said"] == "Config.prefetch = 4000"
    assert "zeropp.initialize builds it" in rows["optimizer"]["said"]
    assert (
        answer["config"]["stage"] == 3 and answer["config"]["accumulate"] == 2 and answer["config"]["prefetch"] == 2000
    )


@pytest.mark.parametrize(
    ("section", "stage", "state", "said"),
    [
        ({"type": "OneBitAdam", "params": {"lr": "auto", "freeze_step": 9}}, 2, "used", "zeropp.optim.OneBitAdam"),
        ({"type": "OneBitLamb"}, 3, "refused", "Config.stage: 3 does not combine with optimizer OneBitLamb"),
        ({"type": "ZeroOneAdam"}, 1, "refused", "use local_step_clipper=1, or stage 0"),
        ({"type": "AdamW"}, 3, "used", "torch.optim.AdamW"),
        ({"type": "OneBitAdm"}, 0, "refused", "'OneBitAdm' is not supported; wanted one of Adam, "),
    ],
)
def test_optimizers_are_named_or_refused(capsys, tmp_path, section, stage, state, said):
    status, rows, _ = told(capsys, tmp_path, {"optimizer": section, "zero_optimization": {"stage": stage}})
    assert rows["optimizer"]["state"] == state and said in rows["optimizer"]["said"]
    assert status == (state == "refused")


def test_everything_that_is_refused_is_said_at_once(capsys, tmp_path):
    keys = {
        "zero_optimization": {"stage": 3, "load_from_fp32_weights": False, "ovrlap_comm": True},
        "flops_profiler": {"enabled": True}, "stpes": 3,
    }  # fmt: skip
    status, rows, _ = told(capsys, tmp_path, keys)
    assert status == 1
    refused = {key for key, row in rows.items() if row["state"] == "refused"}
    assert refused == {
        "zero_optimization.load_from_fp32_weights",
        "zero_optimization.ovrlap_comm",
        "flops_profiler",
        "stpes",
    }
    assert "torch.profiler" in rows["flops_profiler"]["said"], "what to use in its place"
    assert "did you mean 'overlap_comm'" in rows["zero_optimization.ovrlap_comm"]["said"]


def test_batch_sizes_that_do_not_fit_and_the_table(capsys, tmp_path):
    keys = {"train_batch_size": 15, "gradient_accumulation_steps": 2, "zero_optimization": {"stage": 1}}
    status, _, answer = told(capsys, tmp_path, keys)
    assert status == 1 and "15 does not fit" in answer["problem"]
    assert main(["config", '{"stage": 2}']) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("stage  used") and "zeropp.Config(stage=2" in printed
    assert main(["config", str(tmp_path / "none.json")]) == 2
    assert "python -m zeropp config: " in (said := capsys.readouterr().err) and "cannot be read" in said


def test_no_configuration_is_shown_after_a_refusal(capsys, tmp_path):
    """Without the refused key the configuration is not that of the file, and a user might copy it."""
    assert main(["config", '{"stage": 2, "stge": 1}']) == 1
    printed = capsys.readouterr().out
    assert "zeropp.Config(" not in printed
    assert printed.splitlines()[-1] == "no configuration: 1 key refused (stge); mend or remove it"
    status, _, answer = told(capsys, tmp_path, {"stage": 2, "stge": 1, "clp": 1})
    assert (status, answer["config"]) == (1, None)
    assert answer["problem"] == "no configuration: 2 keys refused (stge, clp); mend or remove them"


def test_what_is_left_out_and_where_deepspeed_disagrees_with_itself(capsys, tmp_path):
    """Defaults that changed between its releases, and keys about which its documentation and its code say different things."""
    keys = {
        "zero_optimization": {"stage": 3, "overlap_comm": True, "offload_optimizer": {"device": "cpu"}},
        "bf16": {"enabled": True},
    }
    status, rows, _ = told(capsys, tmp_path, keys)
    assert status == 0
    left_out = {key: row["said"] for key, row in rows.items() if row["state"] == "left out"}
    assert "1.0 in DeepSpeed since 0.19.3" in left_out["gradient_clipping"]
    assert "skips a step" in left_out["bf16.check_grad_overflow"]
    assert "since 0.19.5" in left_out["zero_optimization.offload_optimizer.pin_memory"]
    assert "5e8 in its documentation" in left_out["zero_optimization.stage3_prefetch_bucket_size"]
    assert not {"zero_optimization.overlap_comm", "zero_optimization.offload_param.pin_memory"} & set(left_out)
    _, rows, _ = told(
        capsys, tmp_path, {"aio": {"thread_count": 2}, "zero_optimization": {"stage": 3, "grad_hooks": True}}
    )
    assert "its code reads intra_op_parallelism" in rows["aio"]["said"]
    assert "its code refuses it" in rows["zero_optimization.grad_hooks"]["said"]
    _, rows, _ = told(capsys, tmp_path, {"stage": 2})
    assert list(rows) == ["stage"], "nothing of DeepSpeed's in zeropp's own file"
