# A worker of the pool `cpu`: cycle flows, embedded sampler and learner, bubblewrap sandboxes.
# Bubblewrap needs user namespaces: see the security options of the service in compose.yaml.
#   docker build -f infra/images/worker-cpu.Dockerfile -t rsi-worker-cpu .
ARG BASE_IMAGE=python:3.11-slim-bookworm
FROM ${BASE_IMAGE}

ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1
WORKDIR /src
COPY pyproject.toml constraints.txt LICENSE README.md ./
COPY migrations migrations
COPY orchestrator orchestrator
COPY stages stages
COPY webui webui
RUN python3 -m venv /opt/rsi && /opt/rsi/bin/pip install -c constraints.txt .

COPY infra/images/entrypoint.sh /usr/local/bin/rsi-entrypoint
RUN useradd --system --uid 10001 --home-dir /data rsi && install -d -o rsi /data
ENV PATH=/opt/rsi/bin:$PATH RSI_HOME=/data
USER rsi
WORKDIR /data
VOLUME /data
ENTRYPOINT ["/usr/local/bin/rsi-entrypoint"]
CMD ["rsi", "worker", "--pool", "cpu"]
