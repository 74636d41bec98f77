# A worker of the pool `gpu`: Megatron-core learner, and SGLang's server in a venv of its own.
# Linted only: this image was never built or run where it was written.
#   docker build -f infra/images/worker-gpu.Dockerfile -t rsi-worker-gpu:0.1.0 .
# CUDA 13, as PyPI's torch and SGLang's kernels are built for it; with its compiler, as SGLang compiles more at run time.
ARG BASE_IMAGE=nvidia/cuda:13.0.1-cudnn-devel-ubuntu24.04
FROM ${BASE_IMAGE}

ENV DEBIAN_FRONTEND=noninteractive PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1
# hadolint ignore=DL3008
RUN apt-get update \
  && apt-get install -y --no-install-recommends python3 python3-venv python3-dev git \
  && rm -rf /var/lib/apt/lists/*

ARG SGLANG_VERSION=0.5.23
RUN python3 -m venv /opt/sglang && /opt/sglang/bin/pip install "sglang==${SGLANG_VERSION}"

WORKDIR /src
COPY pyproject.toml constraints.txt LICENSE README.md ./
COPY migrations migrations
COPY orchestrator orchestrator
COPY stages stages
COPY webui webui
# Transformer Engine is not in it (it has to be compiled against torch): the learner then takes Megatron's own layers.
RUN python3 -m venv /opt/rsi \
  && /opt/rsi/bin/pip install -c constraints.txt . \
  && /opt/rsi/bin/pip install --no-deps megatron-core==0.16.1

COPY infra/images/entrypoint.sh /usr/local/bin/rsi-entrypoint
RUN useradd --system --uid 10001 --home-dir /data rsi && install -d -o rsi /data
ENV PATH=/opt/rsi/bin:$PATH RSI_HOME=/data
USER 10001
WORKDIR /data
VOLUME /data
ENTRYPOINT ["/usr/local/bin/rsi-entrypoint"]
CMD ["rsi", "worker", "--pool", "gpu"]
