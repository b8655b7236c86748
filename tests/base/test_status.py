# SPDX-License-Identifier: Apache-2.0
"""From a status of the C core to a Python exception: every row of csrc/base/status.def."""

from __future__ import annotations

import builtins
import errno
import pickle

import pytest
import zeropp
from zeropp import _C, errors

ROWS = [row for row in _C.status_table() if row[1] < 0]
VALUE = {name: value for name, value, _, _ in _C.status_table()}


def class_of(exception: str) -> type[BaseException]:
    if exception.startswith("zeropp."):
        return getattr(errors, exception.removeprefix("zeropp."))
    return getattr(builtins, exception)


def test_table_has_every_status_once() -> None:
    names = [row[0] for row in _C.status_table()]
    values = [row[1] for row in _C.status_table()]
    assert len(set(names)) == len(names) and len(set(values)) == len(values)
    assert VALUE["OK"] == 0 and VALUE["AGAIN"] > 0 and len(ROWS) >= 13


@pytest.mark.parametrize("name, value, sentence, exception", ROWS, ids=lambda v: v if isinstance(v, str) else "")
def test_raises_the_class_of_the_table(name: str, value: int, sentence: str, exception: str) -> None:
    assert sentence
    with pytest.raises(class_of(exception)) as raised:
        _C.raise_status(value, f"unit 3: {name} seen, another wanted")
    assert type(raised.value) is class_of(exception)
    assert str(raised.value) == f"unit 3: {name} seen, another wanted"


def test_success_raises_nothing() -> None:
    assert _C.raise_status(VALUE["OK"], "") is None
    assert _C.raise_status(VALUE["AGAIN"], "") is None


@pytest.mark.parametrize("name", ["PEER", "TIMEOUT", "ABORTED"])
def test_comm_errors_name_the_rank(name: str) -> None:
    with pytest.raises(zeropp.CommError) as raised:
        _C.raise_status(VALUE[name], "rank 5 died", 5)
    assert raised.value.rank == 5
    with pytest.raises(zeropp.CommError) as raised:
        _C.raise_status(VALUE[name], "somebody died")
    assert raised.value.rank is None


def test_os_errors_have_their_number_and_class() -> None:
    with pytest.raises(FileNotFoundError, match="open") as raised:
        _C.raise_status(VALUE["OS"], 'open "x": No such file or directory', -1, errno.ENOENT)
    assert raised.value.errno == errno.ENOENT


def test_text_that_is_no_utf8_is_told_all_the_same() -> None:
    long = "é" * 1000  # cut inside a character
    with pytest.raises(ValueError, match=r"é{300}"):
        _C.raise_status(VALUE["INVALID"], long)


def test_hierarchy_of_the_interface() -> None:
    for name in errors.__all__:
        assert issubclass(getattr(errors, name), zeropp.Error)
        assert getattr(zeropp, name) is getattr(errors, name)
    assert issubclass(zeropp.ConfigError, ValueError)
    assert issubclass(zeropp.CommTimeoutError, (zeropp.CommError, TimeoutError))
    assert issubclass(zeropp.CommTimeoutError, TimeoutError)
    assert issubclass(zeropp.TierError, OSError)


def test_attributes_survive_pickling() -> None:
    peer = pickle.loads(pickle.dumps(zeropp.CommError("rank 2 died", rank=2)))
    assert (str(peer), peer.rank) == ("rank 2 died", 2)
    late = pickle.loads(pickle.dumps(zeropp.CommTimeoutError("rank 2 is late", rank=2)))
    assert (str(late), late.rank) == ("rank 2 is late", 2)
    full = zeropp.TierError("no space", path="/x", bytes_wanted=10, bytes_free=3, errno=errno.ENOSPC)
    back = pickle.loads(pickle.dumps(full))
    assert (str(back), back.path, back.bytes_wanted, back.bytes_free) == ("no space", "/x", 10, 3)
    assert full.errno == errno.ENOSPC
