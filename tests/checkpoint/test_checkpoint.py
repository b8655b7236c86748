# SPDX-License-Identifier: Apache-2.0
"""save and load on one rank: exact resumption, atomicity under kills and full disks, verification, clear refusals."""

from __future__ import annotations

import json
import os
import resource
import signal
from pathlib import Path

import pytest
import torch
import zeropp
from checkpoint.models import Model, make, train
from zeropp.errors import CheckpointError, ConfigError, TierError
from zeropp.files import folder_writer


def names_in(folder: Path) -> list[str]:
    return sorted(one.name for one in folder.iterdir() if one.name != ".writer")


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x10
    path.write_bytes(data)


def weights(model) -> dict[str, torch.Tensor]:
    return zeropp.full_state_dict(model)


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.fixture
def saved(tmp_path):
    """Checkpoints of steps 1 and 2 of one run."""
    model, optimizer, scheduler = make()
    for step in (1, 2):
        train(model, optimizer, scheduler, step - 1, step)
        zeropp.save(tmp_path, model, optimizer, step=step, scheduler=scheduler, extra={"epoch": step})
    return tmp_path


# --- exact resumption
# ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind, config",
    [
        ("adamw", {}),
        ("adamw", {"precision": "bf16"}),
        ("adamw", {"precision": "fp16", "loss_scale": zeropp.LossScale(interval=3)}),  # the scale grows after step 4
        ("amsgrad", {}),
        ("sgd", {}),
        ("lion", {}),
        ("nesterov", {}),
        ("adagrad", {}),
        ("rmsprop", {}),
        ("rmsprop centered", {}),
        ("adadelta", {}),
        ("adamax", {}),
        ("nadam", {}),
        ("radam", {}),
        ("asgd", {}),
        ("rprop", {}),
        ("lamb", {}),
        ("nadam", {"stage": 0}),
        ("asgd", {"precision": "bf16"}),
        ("adamw", {"stage": 0}),
    ],
)
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(tmp_path, kind, config):
    model, optimizer, scheduler = make(kind, **config)
    train(model, optimizer, scheduler, 0, 4)
    folder = zeropp.save(tmp_path, model, optimizer, step=4, scheduler=scheduler, extra={"list": [1, (2, 3)]})
    assert folder == tmp_path / "step-4"
    wanted = train(model, optimizer, scheduler, 4, 9)
    final = weights(model)

    model, optimizer, scheduler = make(kind, **config)
    found = zeropp.load(tmp_path, model, optimizer, scheduler=scheduler)
    assert (found["step"], found["path"], found["damaged"]) == (4, folder, {})
    assert found["extra"] == {"list": [1, (2, 3)]} and found["random_restored"]
    assert train(model, optimizer, scheduler, 4, 9) == wanted
    assert same(weights(model), final)


def test_into_a_model_that_has_trained_already(saved):
    model, optimizer, scheduler = make()
    wanted = zeropp.load(saved, model, optimizer, scheduler=scheduler) and train(model, optimizer, scheduler, 2, 5)
    zeropp.load(saved, model, optimizer, scheduler=scheduler)  # the moments of step 5 have to go
    assert train(model, optimizer, scheduler, 2, 5) == wanted


def test_a_checkpoint_from_before_the_first_step_clears_the_moments(tmp_path):
    model, optimizer, scheduler = make()
    zeropp.save(tmp_path, model, optimizer, step=0, scheduler=scheduler)
    wanted = train(model, optimizer, scheduler, 0, 3)
    zeropp.load(tmp_path, model, optimizer, scheduler=scheduler)
    assert train(model, optimizer, scheduler, 0, 3) == wanted


def test_weights_alone(saved):
    model, optimizer, _ = make()
    trained, _, _ = make()
    zeropp.load(saved, trained)
    zeropp.load(saved, model, optimizer)
    assert same(weights(model), weights(trained))


def test_files_are_readable_without_zeropp(saved):
    from safetensors.torch import load_file

    model, _, _ = make()
    zeropp.load(saved, model)
    manifest = json.loads((saved / "step-2" / "manifest.json").read_text())["content"]
    values = load_file(saved / "step-2" / "rank-00000.safetensors")
    for name, whole in zeropp.full_state_dict(model).items():
        if name in manifest["parameters"]:
            assert torch.equal(values[name], whole.flatten()), name
            assert manifest["parameters"][name]["shape"] == list(whole.shape)
    assert values["seen"] == 2 and "scratch" not in values
    assert manifest["parameters"]["tokens.weight"]["names"] == ["tokens.weight", "head.weight"]


# --- folders
# -------------------------------------------------------------------------------------------------------------


def test_numbers_latest_and_keep(tmp_path):
    model, optimizer, _ = make()
    for wanted in (0, 1):
        assert zeropp.save(tmp_path, model, optimizer).name == f"step-{wanted}"
    assert zeropp.save(tmp_path, model, optimizer, step=10).name == "step-10"
    assert (tmp_path / "latest").read_text() == "step-10\n"
    assert zeropp.save(tmp_path, model, optimizer, keep=2).name == "step-11"
    assert names_in(tmp_path) == ["latest", "step-10", "step-11"]
    zeropp.save(tmp_path, model, optimizer, step=3, keep=1)  # the one just saved stays, whatever its number
    assert names_in(tmp_path) == ["latest", "step-3"]


def test_a_step_saved_again_is_replaced(saved):
    model, optimizer, _ = make()
    zeropp.save(saved, model, optimizer, step=2, extra="again")
    assert zeropp.load(saved, model, optimizer)["extra"] == "again"
    assert names_in(saved) == ["latest", "step-1", "step-2"]


def test_either_folder_is_taken(saved):
    model, optimizer, _ = make()
    assert zeropp.load(saved, model, optimizer)["step"] == 2
    assert zeropp.load(str(saved / "step-1"), model, optimizer)["step"] == 1
    (saved / "latest").write_text("step-1\n")
    assert zeropp.load(saved, model, optimizer)["step"] == 1
    (saved / "latest").unlink()
    assert zeropp.load(saved, model, optimizer)["step"] == 2
    (saved / "latest").write_text("../../etc\n")
    assert zeropp.load(saved, model, optimizer)["step"] == 2


# --- damage
# --------------------------------------------------------------------------------------------------------------


def test_a_damaged_byte_is_passed_over_with_a_warning(saved):
    model, optimizer, _ = make()
    path = saved / "step-2" / "rank-00000.safetensors"
    flip(path, path.stat().st_size // 2)
    with pytest.warns(UserWarning, match="step-2 is damaged and was passed over"):
        found = zeropp.load(saved, model, optimizer)
    assert found["step"] == 1 and list(found["damaged"]) == [str(saved / "step-2")]
    assert "damaged between offset 0 and" in found["damaged"][str(saved / "step-2")]


@pytest.mark.parametrize("part", ["file", "manifest", "gone", "no manifest", "truncated"])
def test_a_named_checkpoint_is_taken_or_refused_and_the_model_untouched(saved, part):
    file, manifest = saved / "step-2" / "rank-00000.safetensors", saved / "step-2" / "manifest.json"
    says = {
        "file": lambda: flip(file, 1000) or "damaged between offset 0 and",
        "manifest": lambda: flip(manifest, 500) or "manifest.json",
        "gone": lambda: file.unlink() or "the manifest names this file, and it is missing",
        "no manifest": lambda: manifest.unlink() or "no checkpoint there",
        "truncated": lambda: os.truncate(file, 900) or "damaged from offset 900 on",
    }[part]()
    model, optimizer, scheduler = make()
    train(model, optimizer, scheduler, 0, 1)
    before = weights(model)
    with pytest.raises(CheckpointError) as caught:
        zeropp.load(saved / "step-2", model, optimizer)
    assert says in str(caught.value) and str(saved / "step-2") in str(caught.value)
    assert same(weights(model), before)


def test_every_byte_of_the_manifest_counts(saved):
    model, _, _ = make()
    manifest = saved / "step-2" / "manifest.json"
    good = manifest.read_bytes()
    for offset in range(0, len(good), 97):
        manifest.write_bytes(good)
        flip(manifest, offset)
        with pytest.raises(CheckpointError, match="step-2"):
            zeropp.load(saved / "step-2", model)


def test_nothing_good_left_names_every_fault(saved):
    for step in (1, 2):
        flip(saved / f"step-{step}" / "rank-00000.safetensors", 700)
    model, _, _ = make()
    with pytest.raises(
        CheckpointError, match=r"none of 2 checkpoints is good: step-2 is damaged: .*; step-1 is damaged: "
    ):
        zeropp.load(saved, model)
    with pytest.raises(CheckpointError, match=r"^step-2 is damaged: .*rank-00000.* restore it from a copy$"):
        zeropp.load(saved / "step-2", model)
    with pytest.raises(CheckpointError, match="no such folder"):
        zeropp.load(saved / "nowhere", model)


# --- a save that fails
# ---------------------------------------------------------------------------------------------------


def in_child(work) -> int:
    """Exit status of a forked child that runs `work`, and is the one that saves from now on."""
    folder_writer.leave_all()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    return os.waitpid(child, 0)[1]


def test_no_space_left(saved):
    """A file-size limit makes the kernel refuse in the middle of the file, as a full disk does."""
    model, optimizer, scheduler = make()
    zeropp.load(saved, model, optimizer, scheduler=scheduler)

    def work() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        with pytest.raises(
            TierError,
            match=r"rank-00000\.safetensors: cannot be written: File too large \(\d+ bytes wanted, \d+ free\)",
        ):
            zeropp.save(saved, model, optimizer, step=3)

    assert in_child(work) == 0
    assert names_in(saved) == ["latest", "step-1", "step-2"]
    assert zeropp.load(saved, model, optimizer)["step"] == 2


def test_a_folder_that_cannot_be_made(tmp_path):
    model, optimizer, _ = make()
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(TierError, match="cannot be written: Not a directory"):
        zeropp.save(tmp_path / "file", model, optimizer, step=1)


# --- refusals
# ------------------------------------------------------------------------------------------------------------


def test_what_cannot_be_saved_or_restored_says_why(saved):
    model, optimizer, _ = make()
    other, other_optimizer, _ = make("sgd")
    with pytest.raises(ConfigError, match="background 'yes' is not allowed; wanted True or False"):
        zeropp.save(saved, model, optimizer, background="yes")
    for step in (-1, "7", True, 1.0):
        with pytest.raises(ConfigError, match="wanted a whole number >= 0"):
            zeropp.save(saved, model, optimizer, step=step)
    with pytest.raises(ConfigError, match="keep 0"):
        zeropp.save(saved, model, optimizer, keep=0)
    with pytest.raises(ConfigError, match="was not prepared"):
        zeropp.save(saved, torch.nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="together with this model"):
        zeropp.save(saved, model, other_optimizer)
    with pytest.raises(CheckpointError, match=r"extra\.f: a builtin_function_or_method cannot be saved without pickle"):
        zeropp.save(saved, model, optimizer, step=9, extra={"f": len})
    assert not (saved / "step-9").exists() and not list(saved.glob(".step*"))
    with pytest.raises(CheckpointError, match="holds the state of AdamW, the optimizer is SGD"):
        zeropp.load(saved, other, other_optimizer)
    with pytest.raises(CheckpointError, match="holds a MultiStepLR, and a StepLR is to be restored"):
        zeropp.load(saved, model, optimizer, scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 1))
    zeropp.save(saved, model, step=9)
    with pytest.raises(CheckpointError, match="was saved without an optimizer"):
        zeropp.load(saved, model, optimizer)


def test_another_model_is_refused(saved):
    for change, says in (
        (lambda m: setattr(m, "more", torch.nn.Linear(2, 2)), r"2 parameters are not in it \(first 'more.bias'\)"),
        (lambda m: delattr(m, "frozen"), r"2 parameters of it are not in the model \(first 'frozen.bias'\)"),
        (
            lambda m: setattr(m, "norm", torch.nn.LayerNorm(13)),
            r"'norm.weight' has shape \[12\] there, \[13\] in the model",
        ),
    ):
        model = Model()
        change(model)
        model, _ = zeropp.prepare(model)
        with pytest.raises(CheckpointError, match=says):
            zeropp.load(saved, model)


# --- whole values
# --------------------------------------------------------------------------------------------------------


def test_full_state_dict_is_that_of_the_plain_model():
    model, _, _ = make()
    torch.manual_seed(0)
    plain = Model()
    ours = zeropp.full_state_dict(model)
    assert list(ours) == list(plain.state_dict()) and same(ours, plain.state_dict())
    assert ours["head.weight"] is ours["tokens.weight"]
    assert dict(zeropp.named_full_tensors(model, bucket_bytes=1)).keys() == dict(plain.named_parameters()).keys() | {
        "seen"
    }


def test_load_full_state_dict_from_mapping_file_and_folder(tmp_path):
    torch.manual_seed(5)
    plain = Model()
    plain.seen += 7
    source, _, _ = make()
    zeropp.load_full_state_dict(source, plain.state_dict())
    assert same(zeropp.full_state_dict(source), plain.state_dict())
    zeropp.export(source, tmp_path / "one")
    zeropp.export(source, tmp_path / "many", file_bytes=2000)
    assert names_in(tmp_path / "one") == ["model.safetensors"]
    assert len(list((tmp_path / "many").glob("model-0000*-of-0000*.safetensors"))) > 2
    for path in (tmp_path / "one", tmp_path / "one" / "model.safetensors", tmp_path / "many"):
        model, _, _ = make(precision="fp32")
        zeropp.load_full_state_dict(model, path)
        assert same(zeropp.full_state_dict(model), plain.state_dict())


def test_load_full_state_dict_from_files_of_torch(tmp_path):
    """pytorch_model.bin, whole and in shards with an index, mapped; safetensors go first where there are both."""
    torch.manual_seed(5)
    plain = Model().state_dict()
    (tmp_path / "one").mkdir()
    torch.save(plain, tmp_path / "one" / "pytorch_model.bin")
    halves = dict(list(plain.items())[:3]), dict(list(plain.items())[3:])
    names = [f"pytorch_model-0000{i}-of-00002.bin" for i in (1, 2)]
    (tmp_path / "many").mkdir()
    for half, name in zip(halves, names, strict=True):
        torch.save(half, tmp_path / "many" / name)
    index = {"weight_map": {key: name for half, name in zip(halves, names, strict=True) for key in half}}
    (tmp_path / "many" / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    for path in (tmp_path / "one", tmp_path / "one" / "pytorch_model.bin", tmp_path / "many"):
        model, _, _ = make(precision="fp32")
        zeropp.load_full_state_dict(model, path)
        assert same(zeropp.full_state_dict(model), plain)
    other, _, _ = make()
    zeropp.export(other, tmp_path / "one")
    model, _, _ = make(precision="fp32")
    zeropp.load_full_state_dict(model, tmp_path / "one")
    assert same(zeropp.full_state_dict(model), zeropp.full_state_dict(other))


class Code:
    """Runs code when it is unpickled."""

    def __reduce__(self):
        return print, ("must never be printed",)


def test_load_full_state_dict_refuses_files_that_it_cannot_map(tmp_path, capsys):
    model, _, _ = make()
    before = zeropp.full_state_dict(model)
    torch.save({"w": Code()}, tmp_path / "code.bin")
    torch.save(before, tmp_path / "old.bin", _use_new_zipfile_serialization=False)
    torch.save([1, 2], tmp_path / "list.bin")
    (tmp_path / "cut.bin").write_bytes((tmp_path / "code.bin").read_bytes()[:100])
    (tmp_path / "empty").mkdir()
    (tmp_path / "index").mkdir()
    (tmp_path / "index" / "model.safetensors.index.json").write_text("[]")
    said = {
        "code.bin": "code.bin: cannot be mapped as a file of torch.save that holds tensors only",
        "old.bin": "old.bin: cannot be mapped as a file of torch.save that holds tensors only",
        "cut.bin": "cut.bin: cannot be mapped as a file of torch.save that holds tensors only",
        "list.bin": "list.bin: holds a list; a state dict",
        "none.bin": "none.bin: cannot be mapped",
        "none.safetensors": "none.safetensors: cannot be read as safetensors",
        "empty": r"empty: neither \*.safetensors nor pytorch_model\*.bin is there",
        "index": "model.safetensors.index.json: no index with a weight_map",
    }
    for name, sentence in said.items():
        with pytest.raises(CheckpointError, match=sentence):
            zeropp.load_full_state_dict(model, tmp_path / name)
    assert "must never be printed" not in capsys.readouterr().out
    assert same(zeropp.full_state_dict(model), before)


def test_load_full_state_dict_shows_a_bar(tmp_path, capsys):
    model, _, _ = make()
    zeropp.load_full_state_dict(model, zeropp.full_state_dict(model))
    assert capsys.readouterr().err == ""
    zeropp.load_full_state_dict(model, zeropp.full_state_dict(model), progress=True)
    assert "loading: 100%" in capsys.readouterr().err


def test_load_full_state_dict_refuses_what_does_not_fit():
    model, _, _ = make()
    before = zeropp.full_state_dict(model)
    changed = {**before, "norm.weight": torch.zeros(13)}
    with pytest.raises(CheckpointError, match=r"'norm.weight' has shape \(13,\), the model's has \(12,\)"):
        zeropp.load_full_state_dict(model, changed)
    fewer = {name: torch.zeros_like(value) for name, value in before.items() if name != "norm.weight"} | {
        "x": torch.zeros(1)
    }
    with pytest.raises(
        CheckpointError, match=r"1 name is missing \('norm.weight'\), 1 name is unknown to the model \('x'\); strict"
    ):
        zeropp.load_full_state_dict(model, fewer)
    assert same(zeropp.full_state_dict(model), before)
    zeropp.load_full_state_dict(model, fewer, strict=False)
    assert zeropp.full_state_dict(model)["norm.bias"].abs().sum() == 0


def test_exported_files_open_with_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=40, n_positions=16)
    torch.manual_seed(0)
    plain = transformers.GPT2LMHeadModel(config).eval()
    tokens = torch.arange(10)[None]
    wanted = plain(tokens).logits
    model, _ = zeropp.prepare(plain)
    zeropp.export(model, tmp_path)
    again = transformers.GPT2LMHeadModel.from_pretrained(tmp_path).eval()
    assert torch.equal(again(tokens).logits, wanted)
