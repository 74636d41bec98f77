"""GPU classes: queues of the work pool `gpu`, each with a limit of cycles at once over all workers of that class.

`RSI_GPU_CLASSES="h100=2,l40s=1"` where `rsi up` or `rsi setup` runs; `rsi worker --pool gpu --gpu-class h100` serves one class,
a worker without a class serves them all; a recipe asks for one with `learner.gpu_class`.
"""

import re
from typing import TYPE_CHECKING

from orchestrator.settings import Settings
from stages.errors import ConfigError, ServiceError

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient

POOL = "gpu"
_ENTRY = re.compile(r"([a-z0-9][a-z0-9_-]{0,39})=([1-9]\d{0,3})")


def gpu_classes(settings: Settings) -> dict[str, int]:
    """Class -> cycles at once. Raises ConfigError that names the part that is wrong."""
    found: dict[str, int] = {}
    for part in filter(None, (p.strip() for p in settings.gpu_classes.split(","))):
        entry = _ENTRY.fullmatch(part)
        if entry is None or entry[1] in found or entry[1] == "default":
            raise ConfigError(f'RSI_GPU_CLASSES: {part!r} is no NAME=CYCLES of its own. Example: "h100=2,l40s=1"')
        found[entry[1]] = int(entry[2])
    return found


def ensure_queues(client: "SyncPrefectClient", settings: Settings) -> None:
    """A queue for each class, with its limit of now. Queues of classes that are gone stay: cycles may wait in them."""
    wanted = gpu_classes(settings)
    known = {queue.name: queue for queue in client.read_work_queues(work_pool_name=POOL)} if wanted else {}
    for name, limit in wanted.items():
        if name not in known:
            client.create_work_queue(name, concurrency_limit=limit, work_pool_name=POOL)
        elif known[name].concurrency_limit != limit:
            client.update_work_queue(known[name].id, concurrency_limit=limit)


def require_class(client: "SyncPrefectClient", name: str) -> None:
    """Raises ServiceError for a class without a queue: its cycle would wait for ever."""
    known = sorted(queue.name for queue in client.read_work_queues(work_pool_name=POOL) if queue.name != "default")
    if name not in known:
        raise ServiceError(
            f"There is no GPU class {name!r} (learner.gpu_class); known: {', '.join(known) or 'none'}. Name it in "
            'RSI_GPU_CLASSES, as in "h100=2", and run `rsi up` or `rsi setup` again.'
        )
