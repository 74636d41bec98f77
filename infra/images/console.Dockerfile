# The console, and the image of the one-shot `setup` service. Build from the root of the repository:
#   docker build -f infra/images/console.Dockerfile -t rsi-console .
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
EXPOSE 8400
HEALTHCHECK --interval=15s --timeout=5s --start-period=30s \
  CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8400/healthz', timeout=4)"]
ENTRYPOINT ["/usr/local/bin/rsi-entrypoint"]
CMD ["rsi", "console", "--host", "0.0.0.0"]
