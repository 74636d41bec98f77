"""What a task needs that the bubblewrap backend does not have: an image build, other services, a writable system folder."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from stages.backends.sandbox.layout import read_only_place
from stages.tasks.dockerfile import Workspace, workspace
from stages.tasks.schema import TaskToml, key_line

_DOCKERFILE = "environment/Dockerfile"


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """One reason. `str()` is a clause of a sentence."""

    path: str  # of the task folder's file that says so
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.reason} ({self.path} line {self.line})"


def image_of(content: Mapping[str, bytes], config: TaskToml) -> Workspace | None:
    """What `environment/Dockerfile` makes of its context; None without one.

    A task that names a prepared root filesystem (`rootfs` in [metadata.terminal_rsi]) says that it holds what RUN would install.
    """
    if _DOCKERFILE not in content:
        return None
    context = {n.removeprefix("environment/"): d for n, d in content.items() if n.startswith("environment/")}
    text = content[_DOCKERFILE].decode("utf-8", "replace")
    return workspace(text, context, prepared=config.metadata.terminal_rsi.rootfs is not None)


def needs(content: Mapping[str, bytes], config: TaskToml, built: Workspace | None) -> list[Need]:
    """Why only the Docker backend can run a task as it is meant; empty when bubblewrap can, too. `built`: of `image_of`."""
    text = content.get("task.toml", b"").decode("utf-8", "replace")
    context = [n.removeprefix("environment/") for n in content if n.startswith("environment/")]
    found = [
        Need(path=f"environment/{name}", line=1, reason="several services (a compose file)")
        for name in context
        if re.fullmatch(r"(docker-)?compose\.ya?ml", name)
    ]
    workdir = config.environment.workdir
    if built is not None:
        found += [Need(path=_DOCKERFILE, line=line, reason=reason) for line, reason in built.unsupported]
        workdir = workdir or built.workdir
        if workdir != built.workdir:
            line = key_line(text, ("environment", "workdir"))
            found.append(
                Need(path="task.toml", line=line, reason=f"workdir {workdir} is not the Dockerfile's {built.workdir}")
            )
    elif config.environment.docker_image and config.metadata.terminal_rsi.rootfs is None:
        line = key_line(text, ("environment", "docker_image"))
        found.append(Need(path="task.toml", line=line, reason=f"the image {config.environment.docker_image}"))
    if workdir and read_only_place(workdir):
        where = _DOCKERFILE if built is not None and not config.environment.workdir else "task.toml"
        line = 1 if where == _DOCKERFILE else key_line(text, ("environment", "workdir"))
        found.append(Need(path=where, line=line, reason=f"the workspace {workdir} lies in system files"))
    return found
