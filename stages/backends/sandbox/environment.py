"""The environments of the agent's shell and of the verifier's script: written out, never inherited. Standard library only."""

from __future__ import annotations

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
