# A peer:  docker build -f docker/peer.Dockerfile -t atoll-peer .
#          docker run --gpus all -v atoll-peer:/data atoll-peer join /ip4/.../p2p/... --output-dir /data
FROM python:3.12-slim

RUN useradd --create-home --uid 1000 atoll && mkdir /data && chown atoll:atoll /data
WORKDIR /app

COPY setup.cfg pyproject.toml constraints.txt README.md LICENSE ./
COPY peer ./peer
COPY bootstrap ./bootstrap
COPY configs ./configs
RUN pip install --no-cache-dir -c constraints.txt .

USER atoll
ENV PYTHONUNBUFFERED=1
# Identity, checkpoints and logs: everything that must outlive the container.
VOLUME /data
ENTRYPOINT ["atoll"]
CMD ["--help"]
