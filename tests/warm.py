# SPDX-License-Identifier: Apache-2.0
"""Start Python processes without ``import torch`` each time: a warm process has imported it and forks.

    process = start(["script.py", "argument"], slot=rank, env=environment, stdout=file, stderr=file)
    done = launch(2, "script.py", "argument", env=environment, timeout=100)

A started process has the environment, the arguments and the files of the request; zeropp is never imported beforehand. Ranks 0, 1
and all others have a warm process each, with another hash seed, so that ranks do not agree by chance on the order of a set. A
variable that is read before Python code runs, or when a preloaded module is imported, starts a cold process.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

PRELOADED = {
    # torch.optim imports torch._dynamo when the first optimizer is made, which costs as much as torch itself.
    "torch": ["pytest", "torch.distributed.fsdp", "torch.distributed.checkpoint", "torch._dynamo"],
    "hf": ["torch.distributed", "torch._dynamo", "transformers.trainer", "accelerate", "peft"],
    "lightning": ["torch.distributed", "torch._dynamo", "lightning"],
}

# Read by the loader, the C library, OpenMP or Python at start, or by a preloaded module when it is imported.
EARLY = ("LD_", "GLIBC_", "MALLOC_", "OMP_", "MKL_", "KMP_", "GOMP_", "PYTHON", "TORCH_", "PYTORCH_", "CUDA_")
EARLY_HF = (*EARLY, "HF_", "TRANSFORMERS_", "TOKENIZERS_")
LATE = {"PYTHONPATH", "PYTHONUNBUFFERED", "PYTORCH_NVML_BASED_CUDA_CHECK"}


def early(environment: Mapping[str, str], kind: str) -> dict[str, str]:
    """Return the variables that have to be equal in a warm process of this kind."""
    names = EARLY_HF if kind == "hf" else EARLY
    return {name: value for name, value in environment.items() if name.startswith(names) and name not in LATE}


# ---------------------------------------------------------------------------------------------------------------------
# The warm process


def serve(control: socket.socket) -> dict[str, Any] | None:
    """Fork for every request. Return the request in the child, and None in the warm process after the last request."""
    selector, children = selectors.DefaultSelector(), {}
    selector.register(control, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.fileobj is not control:
                pid, status = children.pop(key.fd)
                selector.unregister(key.fd)
                os.close(key.fd)
                _, code = os.waitpid(pid, 0)
                with contextlib.suppress(BrokenPipeError):  # the reader is gone
                    os.write(status, str(os.waitstatus_to_exitcode(code)).encode())
                os.close(status)
                continue
            data, files, _, _ = socket.recv_fds(control, 1 << 20, 3)
            if not data:
                return None
            pid = os.fork()
            if pid == 0:
                selector.close()
                for handle in [control.detach(), files[2], *children, *(status for _, status in children.values())]:
                    os.close(handle)
                return {**json.loads(data), "files": files[:2]}
            os.close(files[0])
            os.close(files[1])
            handle = os.pidfd_open(pid)
            children[handle] = (pid, files[2])
            selector.register(handle, selectors.EVENT_READ)
            control.send(str(pid).encode())


def become(request: dict[str, Any]) -> list[str]:
    """Give this process the environment and files of the request. Return the words after ``python``."""
    if request["new_session"]:
        os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for handle, place in zip(request["files"], (1, 2), strict=True):
        os.dup2(handle, place)
    for handle in set(request["files"]):
        os.close(handle)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    tempfile.tempdir = None  # TMPDIR is read again
    if "PYTHONUNBUFFERED" in os.environ:
        sys.stdout.reconfigure(write_through=True)
    words: list[str] = request["arguments"]
    first = {"-c": "", "-m": request["cwd"]}.get(words[0]) if words[0] in ("-c", "-m") else str(Path(words[0]).parent)
    sys.path[:] = [first, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), *BEFORE]
    return words


def run(words: list[str]) -> None:
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        return
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    if words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        code = compile(words[1], "<string>", "exec")
    else:
        sys.argv = words
        main.__file__ = words[0]
        code = compile(Path(words[0]).read_bytes(), words[0], "exec")
    exec(code, main.__dict__)


# ---------------------------------------------------------------------------------------------------------------------
# Those who ask


class Process:
    """The part of ``subprocess.Popen`` that tests need, for a process whose parent is a warm one."""

    def __init__(self, pid: int, status: int) -> None:
        self.pid, self._status = pid, status
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            os.set_blocking(self._status, False)
            with contextlib.suppress(BlockingIOError):
                self._read()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            with selectors.DefaultSelector() as selector:
                selector.register(self._status, selectors.EVENT_READ)
                if not selector.select(timeout):
                    raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            self._read()
        assert self.returncode is not None
        return self.returncode

    def _read(self) -> None:
        text = os.read(self._status, 16)
        os.close(self._status)
        self.returncode = int(text or b"-9")  # no answer: the warm process itself was ended

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Warm:
    """A warm process."""

    def __init__(self, kind: str, slot: int) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        variables = {**AT_START, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        self.early = early(variables, kind)
        variables["PYTHONHASHSEED"] = str(slot + 1)
        # transformers imports datasets where it is installed, that imports Arrow, whose allocator would start a thread.
        variables["JE_ARROW_MALLOC_CONF"] = "background_thread:false"
        variables.pop("PYTHONPATH", None)
        with theirs:
            command = [sys.executable, __file__, str(theirs.fileno()), *PRELOADED[kind]]
            self.process = subprocess.Popen(command, env=variables, pass_fds=[theirs.fileno()])
        self.control = ours
        self.ready: bool | None = None

    def can(self, environment: Mapping[str, str], kind: str) -> bool:
        """True if it can fork a process with this environment. Write the reason to standard error if it can fork none."""
        if self.ready is None:
            self.ready = self.control.recv(64) == b"ready"
        return self.ready and early(environment, kind) == self.early

    def start(self, request: dict[str, Any], stdout: int, stderr: int) -> Process:
        read, write = os.pipe()
        try:
            socket.send_fds(self.control, [json.dumps(request).encode()], [stdout, stderr, write])
        finally:
            os.close(write)
        answer = self.control.recv(64)
        assert answer, f"the warm process ended with {self.process.wait()}"
        return Process(int(answer), read)

    def close(self) -> None:
        self.control.close()
        self.process.wait()


AT_START = dict(os.environ)  # imported modules change it later
_warm: dict[tuple[str, int], Warm] = {}
_asking = threading.Lock()  # a request and its answer, of a thread at a time


@atexit.register
def _close_all() -> None:
    while _warm:
        _warm.popitem()[1].close()


def _warm_process(kind: str, slot: int) -> Warm:
    if (kind, slot) not in _warm:
        _warm[kind, slot] = Warm(kind, slot)
    return _warm[kind, slot]


def start(
    arguments: Sequence[Any],
    *,
    slot: int = 0,
    env: Mapping[str, str],
    stdout: Any,
    stderr: Any,
    cwd: Any = None,
    new_session: bool = False,
    kind: str = "torch",
    cold: bool = False,
) -> Process | subprocess.Popen[bytes]:
    """Start ``python ARGUMENTS...``, warm where the environment allows.

    Args:
        kind: which modules are imported already, a key of PRELOADED.
        cold: never warm, for tests that measure the memory of the process.
        stdout, stderr: files; ``stderr`` may be ``subprocess.STDOUT``.
    """
    words = [str(word) for word in arguments]
    request = {"arguments": words, "env": dict(env), "cwd": str(cwd or Path.cwd()), "new_session": new_session}
    with _asking:
        warm = None if cold else _warm_process(kind, min(slot, 2))
        if warm is not None and warm.can(env, kind):
            return warm.start(request, stdout.fileno(), (stdout if stderr == subprocess.STDOUT else stderr).fileno())
    command = [sys.executable, *words]
    return subprocess.Popen(command, env=env, stdout=stdout, stderr=stderr, cwd=cwd, start_new_session=new_session)


def free_port() -> int:
    """Return a port of the loopback interface that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def launch(
    ranks: int,
    *command: Any,
    env: Mapping[str, str],
    timeout: float,
    kind: str = "torch",
    cwd: Any = None,
) -> subprocess.CompletedProcess[str]:
    """Run COMMAND as ``torchrun --nproc-per-node RANKS`` on one host, without its agent. Every rank has the variables that torchrun
    sets. The first that fails ends the others. The result has the output, rank by rank.

    Raises:
        subprocess.TimeoutExpired: with the output until then. No process is left running.
    """
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    sizes = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"}
    elastic = {"TORCHELASTIC_RUN_ID": "test", "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0"}
    with contextlib.ExitStack() as stack:
        files = [[stack.enter_context(tempfile.TemporaryFile("w+b")) for _ in range(2)] for _ in range(ranks)]
        processes = []
        for rank, (out, err) in enumerate(files):
            variables = {**env, **address, **sizes, **elastic, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            processes.append(start(command, slot=rank, env=variables, stdout=out, stderr=err, cwd=cwd, kind=kind))
        code = _first_failure(processes, time.monotonic() + timeout)
        texts = ["".join(_text(pair[one]) for pair in files) for one in range(2)]
    if code is None:
        raise subprocess.TimeoutExpired(list(map(str, command)), timeout, texts[0], texts[1])
    return subprocess.CompletedProcess(list(map(str, command)), code, texts[0], texts[1])


def _first_failure(processes: Sequence[Any], deadline: float) -> int | None:
    """Return 0 when all ended well, else the code of the one that failed first, and None at the timeout."""
    failed = None
    try:
        while any(one.poll() is None for one in processes):
            codes = [one.returncode for one in processes if one.returncode]
            if codes and failed is None:
                failed = codes[0]
                deadline = min(deadline, time.monotonic() + 20.0)  # what the others have to say
            if time.monotonic() > deadline:
                return failed
            time.sleep(0.02)
        return failed or next((one.returncode for one in processes if one.returncode), 0)
    finally:
        for one in processes:
            if one.poll() is None:
                one.kill()
            one.wait()


def _text(file: Any) -> str:
    file.seek(0)
    text: str = file.read().decode(errors="replace")
    return text


def _import(modules: Iterable[str]) -> None:
    import gc
    import importlib

    for module in modules:
        importlib.import_module(module)
    threads = len(list(Path("/proc/self/task").iterdir()))
    if threads > 1:
        sys.exit(
            f"tests/warm.py: {threads} threads after importing {' '.join(modules)}: every test starts its ranks cold"
        )
    os.close(os.pidfd_open(os.getpid()))  # raises where the kernel refuses it
    gc.freeze()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    BEFORE = sys.path[1:]
    sys.path[0] = ""
    handle = int(sys.argv[1])
    _import(sys.argv[2:])
    control = socket.socket(fileno=handle)
    control.send(b"ready")
    asked = serve(control)
    if asked is not None:
        run(become(asked))
