# SPDX-License-Identifier: Apache-2.0
"""What a manifest says: version 1 is read, what does not fit together is refused by name, and nothing else is raised."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import zeropp
from checkpoint.models import make, train
from zeropp.checkpoint import content as contents
from zeropp.checkpoint import offline
from zeropp.checkpoint.manifest import manifest_text, read_manifest
from zeropp.errors import CheckpointError

NAME = "blocks.0.up.weight"


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    folder = tmp_path_factory.mktemp("good")
    model, optimizer, scheduler = make()
    train(model, optimizer, scheduler, 0, 1)
    zeropp.save(folder, model, optimizer, step=1, scheduler=scheduler)
    return folder / "step-1"


@pytest.fixture
def saved(good, tmp_path):
    shutil.copytree(good, tmp_path / "step-1")
    return tmp_path / "step-1"


def change(folder: Path, edit) -> dict[str, Any]:
    """Change the content of a manifest, and sign it anew, as whoever writes a wrong one would."""
    path = folder / "manifest.json"
    content = json.loads(path.read_text())["content"]
    edit(content)
    path.write_text(manifest_text(content))
    return content


def test_version_1_is_read(saved):
    """Version 1: buffers in rank 0's file, and no parts."""

    def older(content: dict[str, Any]) -> None:
        content["version"] = 1
        content["buffers"] = list(content["buffers"])
        del content["groups"]
        for index, one in enumerate(content["parameters"].values()):
            one["unit"] = index

    model, optimizer, _ = make()
    zeropp.load(saved, model, optimizer)
    wanted = zeropp.full_state_dict(model)
    change(saved, older)
    again, optimizer, scheduler = make()
    train(again, optimizer, scheduler, 0, 2)
    zeropp.load(saved, again, optimizer, scheduler=scheduler)
    found = zeropp.full_state_dict(again)
    assert all(torch.equal(found[name], values) for name, values in wanted.items())
    assert all(torch.equal(values, wanted[name]) for name, values in offline.whole_state(saved, None).items())


def half(one: dict[str, Any], rows: int) -> None:
    """Say that the file holds the first rows of the parameter only."""
    shape = one["shape"]
    part = {"shape": [rows, shape[1]], "boxes": [[[0, 0], [rows, shape[1]], [0, 0]]]}
    one["parts"] = [part]
    one["pieces"] = {kind: [[0, 0, rows * shape[1]]] for kind in one["pieces"]}


@pytest.mark.parametrize(
    "edit, says",
    [
        (lambda one: one["pieces"][""].append([0, 5, 9]), "has pieces that overlap behind element"),
        (lambda one: one["pieces"].update({"": [[0, 0, 371]]}), "has 372 elements, and its pieces hold elements 0 to 371"),
        (lambda one: one["pieces"].update({"": [[1, 0, 372]]}), "has a piece of part 0 of 1 in file 1 of 1"),
        (lambda one: one["pieces"].update({"": [[0, 0, 372, 1]]}), "has a piece of part 1 of 1 in file 0 of 1"),
        (lambda one: one["pieces"].update({"exp_avg": [[0, 0, 373]]}), "has a piece from 0 to 373 of 372 elements (state 'exp_avg')"),
        (lambda one: one["pieces"].pop(""), "has no values"),
        (lambda one: half(one, 30), "has 372 elements, and its parts hold 360 of them"),
        (lambda one: half(one, 32), "has a part that reaches beyond the tensor"),
        (lambda one: one.update(parts=[]), "has no parts"),
        (lambda one: one.update(shape=[31, -12]), "has shape '[31, -12]'; wanted whole numbers"),
        (lambda one: one.update(dtype="Tensor"), "has dtype 'Tensor'; wanted a dtype of torch"),
        (lambda one: one.pop("names"), "lacks 'names'"),
    ],
)  # fmt: skip
def test_a_parameter_that_does_not_fit_together_is_named(saved, edit, says):
    change(saved, lambda content: edit(content["parameters"][NAME]))
    model, _, _ = make()
    for call in (lambda: zeropp.load(saved, model), lambda: offline.export(saved, saved / "out")):
        with pytest.raises(CheckpointError) as raised:
            call()
        assert f"'{NAME}' {says}" in str(raised.value), str(raised.value)
    assert says in str(offline.verify(saved)[0].wrong)


def test_a_file_outside_of_the_folder_is_not_read(saved):
    change(
        saved, lambda content: content.update(files={"../x.safetensors": content["files"]["rank-00000.safetensors"]})
    )
    assert "other files than those" in str(offline.verify(saved)[0].wrong)


VALUES = (None, True, -1, 0, 1, 2, 1 << 70, 1.5, "x", "", [], {}, [[0, 0, 0]], [0, 0, 1], {"a": 1}, [[]], ["x"], [None])


def mutate(node: Any, chance: random.Random) -> None:
    """Replace, remove or double one value somewhere in a tree of JSON."""
    while True:
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        if not keys:
            return
        key = chance.choice(keys)
        if isinstance(node[key], (dict, list)) and node[key] and chance.random() < 0.75:
            node = node[key]
            continue
        action = chance.random()
        if action < 0.15:
            del node[key]
        elif action < 0.25 and isinstance(node, list):
            node.append(copy.deepcopy(node[key]))
        elif action < 0.5 and isinstance(node[key], int):
            node[key] += chance.choice((-1, 1, 7, 1000))
        else:
            node[key] = copy.deepcopy(chance.choice(VALUES))
        return


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_any_manifest_is_read_or_refused(saved, tmp_path, seed):
    """Mutated content with a right sum: it is read, or refused as a damaged checkpoint. An export of what is read writes
    files, or refuses it too. Nothing else is raised."""
    chance, path = random.Random(seed), saved / "manifest.json"
    good = json.loads(path.read_text())["content"]
    plain = copy.deepcopy(good["parameters"][NAME])
    good["parameters"][NAME]["parts"] = [
        {"shape": [11, 12], "boxes": [[[0, 0], [5, 12], [0, 0]], [[25, 0], [6, 12], [5, 0]]]},
        {"shape": [20, 12], "boxes": [[[5, 0], [20, 12], [0, 0]]]},
    ]
    for kind in good["parameters"][NAME]["pieces"]:
        good["parameters"][NAME]["pieces"][kind] = [[0, 0, 132, 0], [0, 0, 240, 1]]
    contents.check("manifest", copy.deepcopy(good))
    read = written = 0
    for _ in range(3000 if seed else 600):
        content = copy.deepcopy(good)
        if chance.random() < 0.5:  # as it was saved: what is read may then be written
            content["parameters"][NAME] = copy.deepcopy(plain)
        part = content if chance.random() < 0.3 else content["parameters"][NAME]
        for _ in range(chance.choice((1, 1, 2, 3))):
            mutate(part, chance)
        text = json.dumps(content, separators=(",", ":"), sort_keys=True).encode()
        path.write_text(json.dumps({"sha256": hashlib.sha256(text).hexdigest(), "content": content}))
        try:
            read_manifest(saved)
        except CheckpointError:
            continue
        read += 1
        if read % 4 == 0:
            with contextlib.suppress(CheckpointError):
                offline.export(saved, tmp_path / "out")
                written += 1
    assert read > 20 and written > 2, (read, written)
