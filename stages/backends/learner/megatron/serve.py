"""One rank of a `RemoteLearner`'s group: torchrun starts it, a Unix socket connects it with its owner.

    torchrun … -m stages.backends.learner.megatron.serve GROUP.json

Every rank beats on a connection of its own and ends at once when the owner is gone, in the middle of a step if need be.
Rank 0 has a second connection, on which it takes commands and answers them.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

import torch

from stages.backends.learner.megatron import wire
from stages.backends.learner.megatron.layout import Layout
from stages.backends.learner.megatron.learner import CLOSE, MegatronLearner, start
from stages.errors import RsiError

BEAT_S = 2.0
OWNER_GONE = 70  # exit code


def main() -> None:
    group: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
    rank = int(os.environ["RANK"])
    threading.Thread(target=_live, args=(_connect(group["socket"], rank, "life"),), daemon=True).start()
    owner = _connect(group["socket"], rank, "commands") if rank == 0 else None
    if group["num_threads"]:
        torch.set_num_threads(group["num_threads"])
    try:
        learner = start(layout=Layout(**group["layout"]), timeout_s=group["collective_timeout_s"], **group["options"])
    except RsiError as error:  # every rank has found it
        if owner is not None:
            wire.put(owner, wire.encode_error(error, ours=True))
        return
    if learner is not None and owner is not None:
        wire.put(owner, wire.encode_answer(None))
        _obey(learner, owner)


def _obey(learner: MegatronLearner, owner: socket.socket) -> None:
    with learner:
        while (frame := wire.take(owner)) is not None:
            name, kwargs = wire.decode(frame)
            if name == CLOSE:
                break
            try:
                answer = wire.encode_answer(getattr(learner, name)(**kwargs))
            except RsiError as error:
                answer = wire.encode_error(error, ours=True)
            except Exception as error:  # the ranks may disagree about where they are: the group ends
                traceback.print_exc()
                wire.put(owner, wire.encode_error(error, ours=False))
                raise
            wire.put(owner, answer)


def _connect(path: str, rank: int, role: str) -> socket.socket:
    s = socket.socket(socket.AF_UNIX)
    s.connect(path)
    wire.put(s, json.dumps({"rank": rank, "role": role, "pid": os.getpid()}).encode())
    return s


def _live(owner: socket.socket) -> None:
    while True:
        readable, _, _ = select.select([owner], [], [], BEAT_S)
        try:
            if readable and not owner.recv(1):
                os._exit(OWNER_GONE)
            with contextlib.suppress(BlockingIOError):  # nobody has looked for a while: no need for more beats
                owner.send(b".", socket.MSG_DONTWAIT)
        except OSError:
            os._exit(OWNER_GONE)


if __name__ == "__main__":
    main()
