# SPDX-License-Identifier: Apache-2.0
"""Compiles kernels ahead of their first launch, in processes side by side.

Triton compiles a kernel when it is launched first, one after another: most of that is Python that
holds the interpreter's lock, so threads do not help. Here a step is *rehearsed*: its kernels are
noted and neither compiled nor launched. Processes without a GPU then compile what Triton's cache on
disk lacks, and the first launch finds it there.

Seams (Triton 3.6 and 3.8): ``runtime/jit.py: JITFunction.run``, ``_do_compile``,
``JITCallable.cache_key``, ``hash``;
``compiler/compiler.py: compile``, ``ASTSource``, ``make_backend``,
``CompiledKernel._init_handles``; ``knobs.py: compilation.listener``, ``CompileTimes``;
``runtime/cache.py: get_cache_key``, ``get_cache_manager``; ``backends/nvidia/driver.py:
CudaLauncher``, ``make_launcher`` (3.6 alone).
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

import triton
from triton._C.libtriton import get_cache_invalidating_env_vars
from triton.compiler.compiler import ASTSource, compile, make_backend
from triton.runtime import driver
from triton.runtime.cache import get_cache_key, get_cache_manager
from triton.runtime.jit import JITCallable, JITFunction

_OWN = __name__.partition(".")[0]
_WORKER = f"from {__name__} import serve; serve()"


@dataclass(frozen=True)
class Kernel:
    """A kernel with all that its machine code depends on.

    Attributes:
        module, name: where its function is found.
        signature, constants, attributes, options: as ``JITFunction._do_compile`` takes them.
        target: the kind of GPU.
    """

    module: str
    name: str
    signature: dict[str, Any]
    constants: dict[Any, Any]
    attributes: dict[Any, Any]
    options: Any
    target: Any

    def source(self) -> ASTSource:
        """What Triton compiles."""
        function = getattr(importlib.import_module(self.module), self.name)
        settle(function)
        return ASTSource(function, self.signature, self.constants, self.attributes)

    def is_on_disk(self) -> bool:
        """Whether Triton's cache has it, as ``triton.compile`` asks."""
        source, backend = self.source(), make_backend(self.target)
        options = backend.parse_options(dict(self.options.__dict__, **source.parse_options()))
        key = get_cache_key(source, backend, options, env_vars=get_cache_invalidating_env_vars())
        manager = get_cache_manager(hashlib.sha256(key.encode()).hexdigest())
        file = f"{source.name[:150]}.json"
        return file in (manager.get_group(file) or {})

    def compile(self) -> None:
        """Compile it and what launches it into Triton's cache; needs no GPU.

        Triton 3.6 launches it by a C program for its arguments, which the first launch would build;
        Triton 3.8 has one for all kernels.
        """
        from triton.backends.nvidia import driver as nvidia

        kernel = compile(self.source(), target=self.target, options=self.options.__dict__)
        if hasattr(nvidia, "make_launcher"):
            nvidia.CudaLauncher(kernel.src, kernel.metadata)


_settled: set[int] = set()


def settle(function: JITCallable) -> str:
    """Give a function the key on disk that it has in every process, and return it.

    Up to Triton 3.7 a key lacks the global constants of functions that were not hashed yet, so it
    depends on what a process compiled before (mended by triton-lang/triton#10494). Then a launch
    would not find what another process compiled. So those that are called are hashed first.
    """
    if id(function) in _settled:
        return str(function.cache_key)
    _settled.add(id(function))
    for node in ast.walk(function.parse()):
        called = None
        if isinstance(node, ast.Name):
            called = function.__globals__.get(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            called = getattr(function.__globals__.get(node.value.id), node.attr, None)
        if isinstance(called, JITCallable):
            settle(called)
    function.hash = None
    return str(function.cache_key)


@dataclass(frozen=True)
class Compiled:
    """What :func:`compile_ahead` did.

    Attributes:
        found: kernels that were on disk, or that another process put there meanwhile.
        compiled: kernels that were compiled.
        processes: how many processes shared that.
        failures: why others were left for their first launch.
    """

    found: int
    compiled: int
    processes: int
    failures: tuple[str, ...]


@contextmanager
def rehearsal() -> Iterator[dict[tuple[str, str], Kernel]]:
    """Inside, launches of this package's kernels by this thread are noted, and do nothing.

    Yields:
        the kernels that this process has not compiled yet, each once.
    """
    noted: dict[tuple[str, str], Kernel] = {}
    thread, run, do_compile = threading.get_ident(), JITFunction.run, JITFunction._do_compile

    def own(function: JITFunction[Any]) -> bool:
        return threading.get_ident() == thread and function.module.split(".")[0] == _OWN

    def run_unless_own(function: JITFunction[Any], *args: Any, warmup: bool, **rest: Any) -> Any:
        return run(function, *args, warmup=warmup or own(function), **rest)

    def note_if_own(
        function: JITFunction[Any], key: str, signature: Any, device: Any, constexprs: Any,
        options: Any, attrs: Any, warmup: bool,
    ) -> Any:  # fmt: skip
        if not own(function):
            return do_compile(function, key, signature, device, constexprs, options, attrs, warmup)
        name, target = function.fn.__qualname__, driver.active.get_current_target()
        noted[name, key] = Kernel(
            function.module, name, signature, constexprs, attrs, options, target
        )
        return None

    ours: Any = {"run": run_unless_own, "_do_compile": note_if_own}
    theirs = {"run": run, "_do_compile": do_compile}
    try:
        for name, function in ours.items():
            setattr(JITFunction, name, function)
        yield noted
    finally:
        for name, function in theirs.items():
            setattr(JITFunction, name, function)


def compile_ahead(
    rehearse: Callable[[], None],
    *,
    processes: int,
    begin: float = 0.0,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> Compiled:
    """Compile what ``rehearse`` would launch, unless it is on disk.

    Ranks with one cache call this at once. Each begins at a place of its own and goes round, so it
    finds on disk what the rank before which it begins has compiled.

    Args:
        rehearse: runs operators on tensors of the shapes, dtypes and alignments to come. It must
            not depend on what they compute.
        processes: at most so many compile side by side.
        begin: which kernel is first, as a share of those that are missing; from 0 to below 1.
        progress: is told how many of how many kernels are compiled, from threads, in order.

    Returns:
        What was done. A kernel that could not be compiled here is compiled at its first launch,
        which then says why it cannot be.
    """
    with rehearsal() as kernels:
        rehearse()
    absent = [kernel for kernel in kernels.values() if not kernel.is_on_disk()]
    count, failures, lock = len(absent), list[str](), threading.Lock()
    missing: SimpleQueue[Kernel] = SimpleQueue()
    first = int(begin * count)
    for kernel in (*absent[first:], *absent[:first]):
        missing.put(kernel)
    done = compiled = 0
    processes = min(processes, count)
    if count:
        progress(0, count)

    def told(failure: str, was_found: bool) -> None:
        nonlocal done, compiled
        with lock:
            if failure:
                failures.append(failure)
            else:
                done += 1
                compiled += not was_found
            progress(done, count)

    with ThreadPoolExecutor(max(1, processes)) as threads:
        for _ in range(processes):
            threads.submit(_feed, missing, told)
    if missing.qsize():
        failures.append(f"{missing.qsize()} kernels, as no process was left to compile them")
    found = len(kernels) - count + done - compiled
    return Compiled(found, compiled, processes, tuple(failures))


def watch_launches(tell: Callable[[str, float], None]) -> None:
    """Tell of each kernel of this package, from now on, that its launch has to compile.

    A process is watched once, however many backends it has.

    Args:
        tell: is given its name, and the seconds that it took.
    """
    before = triton.knobs.compilation.listener
    if getattr(before, "__module__", "") == __name__:
        return

    def listen(*, src: Any, times: Any, cache_hit: bool, **rest: Any) -> None:
        if before is not None:
            before(src=src, times=times, cache_hit=cache_hit, **rest)
        # Other languages than Triton's own have no function.
        module = getattr(getattr(src, "fn", None), "module", "")
        if not cache_hit and module.split(".")[0] == _OWN:
            tell(src.name, times.total / 1e6)

    triton.knobs.compilation.listener = listen


def _feed(kernels: SimpleQueue[Kernel], told: Callable[[str, bool], None]) -> None:
    """Have a process compile kernels until none is left.

    ``told`` hears of each: why it could not be compiled, "" if it was, and whether it was on disk.
    """
    command, pipe = [sys.executable, "-c", _WORKER], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe) as worker:
        assert worker.stdin is not None
        assert worker.stdout is not None
        while True:
            try:
                kernel = kernels.get_nowait()
            except Empty:
                worker.stdin.close()
                return
            if kernel.is_on_disk():
                told("", True)
                continue
            try:
                pickle.dump(kernel, worker.stdin)
                worker.stdin.flush()
                answer = worker.stdout.readline().decode()
            except (OSError, TypeError, AttributeError, pickle.PicklingError) as error:
                answer = str(error)
            if answer == "ok\n":
                told("", False)
                continue
            told(f"{kernel.name}: {answer.strip() or 'its process ended'}", False)
            if not answer.endswith("\n"):
                return


def serve() -> None:
    """Compile the kernels that come through standard input, with a line for each on output."""
    # Whatever else prints is not an answer.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    while True:
        try:
            pickle.load(sys.stdin.buffer).compile()
        except EOFError:
            return
        except Exception as error:  # whatever it is, the first launch says it again
            print(f"{type(error).__name__}: {error}".splitlines()[0], file=answers)
        else:
            print("ok", file=answers)
