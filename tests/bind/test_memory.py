# SPDX-License-Identifier: Apache-2.0
"""Memory of the core as a tensor: no copy, the owner outlives each view, on the CPU and on a simulated GPU."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import pytest
import torch
from zeropp import _C
from zeropp.zero.model_state import DTYPES, tensor_over


class Owner:
    """Own memory, as a communicator owns its regions."""

    def __init__(self, size_bytes: int = 64) -> None:
        self.bytes = torch.zeros(size_bytes, dtype=torch.uint8)

    def over(self, elems: int, dtype: torch.dtype) -> torch.Tensor:
        return tensor_over(self, self.bytes.data_ptr(), elems, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_tensor_is_the_memory_itself(dtype: torch.dtype) -> None:
    owner = Owner()
    flat = owner.over(4, dtype)
    assert flat.dtype == dtype and flat.shape == (4,) and flat.is_contiguous() and flat.device.type == "cpu"
    assert flat.data_ptr() == owner.bytes.data_ptr()
    flat.copy_(torch.tensor([1, 0, 1, 1]))
    assert torch.equal(owner.bytes[: flat.nbytes].view(dtype), torch.tensor([1, 0, 1, 1]).to(dtype))
    assert flat._version == 1 and not flat.requires_grad


def test_views_share_a_storage_that_cannot_be_resized() -> None:
    flat = Owner().over(8, torch.float32)
    view = flat[2:4]
    assert view.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
    assert flat.untyped_storage().nbytes() == 32
    with pytest.raises(RuntimeError, match="not resizable"):
        flat.untyped_storage().resize_(128)


def test_the_owner_lives_as_long_as_the_last_view() -> None:
    owner = Owner()
    alive = weakref.ref(owner)
    view = owner.over(8, torch.float32)[3:]
    del owner
    gc.collect()
    assert alive() is not None
    views = [view]
    del view
    last = threading.Thread(target=views.clear)  # it ends in another thread than it was made in
    last.start()
    last.join()
    assert alive() is None


def test_a_capsule_that_nobody_took_lets_its_owner_go() -> None:
    owner = Owner()
    alive = weakref.ref(owner)
    capsule = _C.memory_capsule(owner, owner.bytes.data_ptr(), 4, 0, 1, 0)
    del owner
    assert alive() is not None
    del capsule
    assert alive() is None


def test_no_elements_need_no_memory() -> None:
    assert tensor_over(None, 0, 0, torch.bfloat16).shape == (0,)


def test_wrong_arguments_are_refused() -> None:
    for elems, address, dtype in ((-1, 64, 0), (1, 0, 0), (1, 64, len(DTYPES)), (1, 64, -1)):
        with pytest.raises(ValueError, match="memory_capsule"):
            _C.memory_capsule(None, address, elems, dtype, 1, 0)


ON_SIM = """
import torch
import sim
from zeropp.zero.model_state import tensor_over

owner = torch.arange(8.0, device="sim")
flat = tensor_over(owner, owner.data_ptr(), 8, torch.float32, torch.device("sim", 0))
assert flat.device == owner.device and flat.data_ptr() == owner.data_ptr()
flat[4:].mul_(2)
assert owner.tolist() == [0, 1, 2, 3, 8, 10, 12, 14]
"""


def test_memory_of_a_simulated_gpu(root: Path) -> None:
    sys.path.insert(0, str(root / "tests" / "sim"))
    import sim_build

    if why_not := sim_build.why_no_torch_device():
        pytest.skip(why_not)
    paths = os.pathsep.join(str(root / folder) for folder in ("tests/sim", "python"))
    done = subprocess.run(
        [sys.executable, "-c", ON_SIM], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": paths}
    )
    assert done.returncode == 0, done.stderr
