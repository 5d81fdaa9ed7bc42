"""Processes that stay alive between tests, one per tensor parallel rank, each with sglang's process state.

Importing sglang takes ten seconds and its state is one per process, so the ranks are forked from a server that has
imported it once, and every test runs its function in them.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

_ENVIRONMENT = {"SGLANG_NCCL_SO_PATH": "/nowhere", "OMP_NUM_THREADS": "1", "SGLANG_PLUGINS": "weightprep"}
_UNSET = ("TRITON_INTERPRET", "WEIGHTPREP_TARGET")


class RankFailed(AssertionError):
    """A rank raised; the message holds its type, its text and its stack."""


class Ranks:
    """`world` processes that form one gloo group; `run` calls a function in each and returns their results in order."""

    def __init__(self, world: int, model_path: str, **server: Any) -> None:
        kept = {name: os.environ.get(name) for name in (*_ENVIRONMENT, *_UNSET)}
        os.environ.update(_ENVIRONMENT)
        for name in _UNSET:
            os.environ.pop(name, None)
        try:
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload(["rank_imports"])
            port = _free_port()
            self._pipes: list[Connection] = []
            self._processes = []
            for rank in range(world):
                ours, theirs = context.Pipe()
                arguments = (theirs, rank, world, port, model_path, server)
                process = context.Process(target=_serve, args=arguments, daemon=True)
                process.start()
                theirs.close()
                self._pipes.append(ours)
                self._processes.append(process)
        finally:
            for name, value in kept.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
        self._collect()

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """`function(state, *args, **kwargs)` on every rank; `state` lasts as long as the process."""
        for pipe in self._pipes:
            pipe.send((function, args, kwargs))
        return self._collect()

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(20)
            if process.is_alive():
                process.kill()
                process.join()

    def _collect(self) -> list[Any]:
        replies = [torch.load(io.BytesIO(pipe.recv_bytes()), weights_only=False) for pipe in self._pipes]
        failures = [f"rank {rank}: {value}" for rank, (ok, value) in enumerate(replies) if not ok]
        if failures:
            raise RankFailed("\n".join(failures))
        return [value for _, value in replies]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _serve(pipe: Connection, rank: int, world: int, port: int, model_path: str, server: dict[str, Any]) -> None:
    from types import SimpleNamespace

    import live_sglang
    from sglang.srt.plugins import load_plugins

    widths = {"tp_size": world // server.get("pp_size", 1), **server}
    state = SimpleNamespace(rank=rank, world=world, models={}, server=widths)

    def begin() -> None:
        load_plugins()
        state.args = live_sglang.start(rank, world, port, model_path, **widths)

    _answer(pipe, begin)
    while True:
        try:
            function, args, kwargs = pipe.recv()
        except EOFError:
            return
        _answer(pipe, function, state, *args, **kwargs)


def _answer(pipe: Connection, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    try:
        reply = (True, function(*args, **kwargs))
    except Exception as error:
        reply = (False, f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
    # not pipe.send: sglang replaces the way in which tensors go through it
    buffer = io.BytesIO()
    torch.save(reply, buffer)
    pipe.send_bytes(buffer.getvalue())
