# A peer:  docker build -f docker/peer.Dockerfile -t atoll-peer .
# Without a GPU, a smaller image: --build-arg TORCH="torch --index-url ADDRESS-OF-TORCH'S-CPU-WHEELS"
#          docker run --gpus all -v atoll-peer:/data atoll-peer join /ip4/.../p2p/... --output-dir /data
FROM python:3.12-slim AS build

# The loops in C, without the compiler in the image.
# The base image pins the distribution and so the compiler.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
WORKDIR /app
COPY setup.cfg setup.py pyproject.toml README.md LICENSE ./
COPY atoll ./atoll
COPY peer ./peer
COPY bootstrap ./bootstrap
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.12-slim

RUN useradd --create-home --uid 1000 atoll && mkdir /data && chown atoll:atoll /data
WORKDIR /app

ARG TORCH=torch
COPY constraints.txt LICENSE ./
COPY configs ./configs
# Several words in one argument.
# hadolint ignore=SC2086
RUN pip install --no-cache-dir -c constraints.txt $TORCH
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels pip install --no-cache-dir -c constraints.txt /wheels/*.whl

USER 1000:1000
ENV PYTHONUNBUFFERED=1
# Identity, checkpoints and logs: everything that must outlive the container.
VOLUME /data
# Healthy while its status is written; the first one comes with the first step.
HEALTHCHECK --interval=60s --timeout=5s --start-period=10m \
    CMD ["python", "-c", "import os, sys, time; sys.exit(time.time() - os.path.getmtime('/data/status.json') > 120)"]
ENTRYPOINT ["atoll"]
CMD ["--help"]
