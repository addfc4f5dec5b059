# The bootstrap:  docker build -f docker/bootstrap.Dockerfile -t atoll-bootstrap .
#                 docker run -p 31337:31337 -v atoll-bootstrap:/data atoll-bootstrap configs/runs/quickstart.yaml --state-dir /data
FROM python:3.12-slim AS build

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

COPY constraints.txt LICENSE ./
COPY configs ./configs
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels pip install --no-cache-dir -c constraints.txt /wheels/*.whl

USER 1000:1000
ENV PYTHONUNBUFFERED=1
# The identity and the initial state: with them a new container is the same bootstrap.
VOLUME /data
# Peers; the page, where --http names this port.
EXPOSE 31337 8080
HEALTHCHECK --interval=30s --timeout=5s --start-period=60s \
    CMD ["python", "-c", "import socket; socket.create_connection(('127.0.0.1', 31337), 3)"]
ENTRYPOINT ["atoll-bootstrap"]
CMD ["--help"]
