# SPDX-License-Identifier: Apache-2.0
"""A store whose answers are waited for no longer than a time-out. torch waits for each as long as the connection stands: for
ever, where the process that has the store is stopped, or its machine is cut off without a word.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from queue import SimpleQueue
from typing import Any

from zeropp.errors import CommTimeoutError
from zeropp.wording import seconds

__all__ = ["PatientStore"]

Question = tuple["Future[Any]", str, tuple[Any, ...]]


class PatientStore:
    """``set``, ``get`` and ``check`` of `store`, asked by a thread that ends with the block. One caller at a time.

    Raises:
        zeropp.CommTimeoutError: no answer in time. The thread is left to its question; it holds up no exit.
    """

    def __init__(self, store: Any, timeout_s: float, name: str) -> None:
        self.prefix = ""
        """What stands before every key."""
        self._store, self._timeout_s, self._name = store, timeout_s, name
        self._questions: SimpleQueue[Question | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._answer, name="zeropp store", daemon=True)
        self._answers = True

    def __enter__(self) -> PatientStore:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._questions.put(None)
        if self._answers:
            self._thread.join()

    def _answer(self) -> None:
        while (question := self._questions.get()) is not None:
            answer, what, arguments = question
            try:
                answer.set_result(getattr(self._store, what)(*arguments))
            except BaseException as error:  # it is the asking thread's
                answer.set_exception(error)
            del question, answer, arguments

    def _ask(self, what: str, *arguments: Any) -> Any:
        answer: Future[Any] = Future()
        self._answers = False  # also where Ctrl-C ends the wait
        self._questions.put((answer, what, arguments))
        try:
            seen = answer.exception(self._timeout_s or None)
        except FutureTimeoutError:
            raise CommTimeoutError(
                f'comm: the store in which the ranks of group "{self._name}" meet has not answered for {seconds(self._timeout_s)}; its '
                "process is stopped, or its machine is not to be reached"
            ) from None
        self._answers = True
        if seen is not None:
            raise seen
        return answer.result()

    def set(self, key: str, value: Any) -> None:
        self._ask("set", self.prefix + key, value)

    def get(self, key: str) -> bytes:
        value: bytes = self._ask("get", self.prefix + key)
        return value

    def check(self, keys: list[str]) -> bool:
        return bool(self._ask("check", [self.prefix + key for key in keys]))
