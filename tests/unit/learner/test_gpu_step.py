"""The script that measures a bfloat16 step on a GPU, on a tiny model without one: its code runs, its numbers are sane."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "gpu_step.py"


def test_the_step_is_measured_without_a_gpu():
    size = ["--size", "tiny", "--device", "cpu", "--rows", "4", "--mean", "120", "--max-tokens-per-gpu", "512"]
    done = subprocess.run([sys.executable, str(SCRIPT), *size], capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert 0 < found["gap_mean"] <= 0.05  # bfloat16 against float32: neither equal nor far
    assert found["gap_mean"] <= found["gap_max"]
    assert found["updated"]
    assert found["finite"]
    assert found["actor_tokens_per_s"] > 0
    assert found["sampled_tokens"] < found["tokens"]
