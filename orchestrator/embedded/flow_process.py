"""What a process worker runs for one flow run: Prefect's engine with its output in a log file of its own.

`python -m orchestrator.embedded.flow_process`; the worker names the flow run in `PREFECT__FLOW_RUN_ID`. A worker that
streams the output holds the other end of a pipe, and its death would end the flow at the next line it prints.
"""

import os
import runpy
import sys

from orchestrator.embedded.layout import Layout
from orchestrator.settings import get_settings


def main() -> None:
    flow_run_id = os.environ["PREFECT__FLOW_RUN_ID"]
    log = Layout(get_settings().home).flow_log(flow_run_id)
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "ab") as handle:
        os.dup2(handle.fileno(), 1)
        os.dup2(handle.fileno(), 2)
    sys.argv = ["prefect.engine", flow_run_id]
    runpy.run_module("prefect.engine", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
