"""The real SGLang server on this machine's CPU, in the environment that `make test-sglang` sets up."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

PYTHON = "RSI_TEST_SGLANG"  # environment variable: the interpreter of SGLang's own venv
START_S = 300.0


@contextmanager
def real_server(model: Path, log: Path, *flags: str) -> Iterator[str]:
    """Its address, once it is healthy (half a minute to a minute). It and its children end with the block."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [os.environ[PYTHON], "-m", "sglang.launch_server", "--model-path", str(model), "--device", "cpu"]
    command += ["--attention-backend", "torch_native", "--dtype", "float32", "--max-total-tokens", "8192"]
    command += ["--skip-server-warmup", "--skip-tokenizer-init", "--host", "127.0.0.1", "--port", str(port), *flags]
    environment = os.environ | {
        "SGLANG_USE_CPU_ENGINE": "1",  # else it looks for a GPU
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    with log.open("w") as out:
        process = subprocess.Popen(command, env=environment, stdout=out, stderr=out, start_new_session=True)
        try:
            yield _healthy(process, f"http://127.0.0.1:{port}", log)
        finally:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _healthy(process: subprocess.Popen[bytes], url: str, log: Path) -> str:
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        if process.poll() is not None:
            raise AssertionError(f"the server ended with {process.returncode}:\n{log.read_text()[-3000:]}")
        try:
            if httpx.get(f"{url}/health", timeout=10).status_code == 200:
                return url
        except httpx.HTTPError:
            pass
        time.sleep(1)
    raise AssertionError(f"the server was not healthy within {START_S:g} s:\n{log.read_text()[-3000:]}")
