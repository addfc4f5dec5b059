# The bootstrap:  docker build -f docker/bootstrap.Dockerfile -t atoll-bootstrap .
#                 docker run -p 31337:31337 -v atoll-bootstrap:/data atoll-bootstrap configs/runs/quickstart.yaml --state-dir /data
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
# The identity and the initial state: with them a new container is the same bootstrap.
VOLUME /data
EXPOSE 31337
ENTRYPOINT ["atoll-bootstrap"]
CMD ["--help"]
