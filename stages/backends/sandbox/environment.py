"""The environments of the agent's shell and of the verifier's script: written out, never inherited. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping

SANDBOX_UID = (
    59_999  # of every jail, where we are root; below 65536 so that it exists in containers with a small user map
)
AGENT_ENV = {
    "HOME": "/root",
    "USER": "root",
    "LOGNAME": "root",
    "SHELL": "/bin/bash",
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "LANG": "C.UTF-8",
    "TERM": "dumb",
    "PAGER": "cat",
}
SCRIPT_ENV = {
    **AGENT_ENV,
    "HOME": "/logs/home",
    "TMPDIR": "/logs/tmp",
    "TEST_DIR": "/tests",  # original Terminal-Bench scripts look there
    "PATH": "/opt/rsi/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
}
_RESERVED = frozenset({"PATH", "HOME", "TMPDIR", "ENV", "IFS", "SHELLOPTS", "BASHOPTS", "GCONV_PATH"})
_RESERVED_STARTS = ("LD_", "BASH_", "PYTHON", "PYTEST_", "PERL", "RSI_")


def is_reserved(name: str) -> bool:
    """Whether a variable steers which code a verifier runs: no task sets it there, it could lead into the workspace."""
    return name in _RESERVED or name.startswith(_RESERVED_STARTS)


def script_env(task_env: Mapping[str, str], own: Mapping[str, str]) -> dict[str, str]:
    """Of `tests/test.sh` or `solution/solve.sh`: the task's variables and the script's own, ours where they steer code."""
    harmless = {name: value for name, value in {**task_env, **own}.items() if not is_reserved(name)}
    return {**SCRIPT_ENV, **harmless}
