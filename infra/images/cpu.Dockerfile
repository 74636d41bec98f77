# The CPU images: one installation, two targets. From the root of the repository:
#   docker build -f infra/images/cpu.Dockerfile --target console -t rsi-console:0.1.0 .
#   docker build -f infra/images/cpu.Dockerfile --target worker-cpu -t rsi-worker-cpu:0.1.0 .
# BASE_IMAGE is any Linux root with bash and Python 3.11 or newer with its venv module.
ARG BASE_IMAGE=python:3.11-slim-bookworm

FROM ${BASE_IMAGE} AS rsi
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
# PyPI's torch carries CUDA. An index with its CPU builds makes the images 3 GB smaller. (Its address stays in the image's
# history: no password in it.)
ARG PIP_EXTRA_INDEX_URL
WORKDIR /src
COPY pyproject.toml constraints.txt LICENSE README.md ./
# What we depend on, without us: 2 GB that are built, pushed and pulled again only when that changes.
RUN python3 -m venv /opt/rsi && /opt/rsi/bin/pip install -c constraints.txt ".[kubernetes,oidc]"
COPY migrations migrations
COPY orchestrator orchestrator
COPY stages stages
COPY webui webui
RUN /opt/rsi/bin/pip install --no-deps --force-reinstall . \
  && rm -rf build ./*.egg-info \
  && /opt/rsi/bin/rsi --help > /dev/null

COPY infra/images/entrypoint.sh /usr/local/bin/rsi-entrypoint
RUN useradd --system --uid 10001 --home-dir /data rsi && install -d -o rsi /data
ENV PATH=/opt/rsi/bin:$PATH PYTHONUNBUFFERED=1 RSI_HOME=/data
USER 10001
WORKDIR /data
VOLUME /data
ENTRYPOINT ["/usr/local/bin/rsi-entrypoint"]

# The cycles' processes: embedded sampler and learner, bubblewrap sandboxes. Bubblewrap needs user namespaces: see the
# security options of the service in compose.yaml.
FROM rsi AS worker-cpu
CMD ["rsi", "worker", "--pool", "cpu"]

# The console, and with other commands: setup, reconciler, the Prefect server.
FROM rsi AS console
EXPOSE 8400
HEALTHCHECK --interval=15s --timeout=5s --start-period=30s \
  CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8400/healthz', timeout=4)"]
CMD ["rsi", "console", "--host", "0.0.0.0"]
