"""The real SGLang server on this machine's CPU, in the environment that `make test-sglang` sets up."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import httpx

PYTHON = "RSI_TEST_SGLANG"  # environment variable: the interpreter of SGLang's own venv
START_S = 300.0


class RealServer:
    """`with RealServer(model, log) as server: server.url()`. It and its children end with the block."""

    def __init__(self, model: Path, log: Path, *flags: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._url, self._log = f"http://127.0.0.1:{port}", log
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
            self._process = subprocess.Popen(command, env=environment, stdout=out, stderr=out, start_new_session=True)

    def __enter__(self) -> RealServer:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(ProcessLookupError):  # it may have ended by itself
            os.killpg(self._process.pid, signal.SIGTERM)
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def url(self) -> str:
        """Its address, once it is healthy: half a minute to two minutes after its start."""
        end = time.monotonic() + START_S
        while time.monotonic() < end:
            if self._process.poll() is not None:
                raise AssertionError(
                    f"the server ended with {self._process.returncode}:\n{self._log.read_text()[-3000:]}"
                )
            try:
                if httpx.get(f"{self._url}/health", timeout=10).status_code == 200:
                    return self._url
            except httpx.HTTPError:
                pass
            time.sleep(1)
        raise AssertionError(f"the server was not healthy within {START_S:g} s:\n{self._log.read_text()[-3000:]}")
