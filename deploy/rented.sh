#!/usr/bin/env bash
# Start command of a rented GPU. Image: any with Python 3.11 to 3.13 and CUDA's driver, or atoll-peer.
# Ports to open: 31337 and 31338 (TCP). Volume: /workspace. Variables of the template:
#   ADDRESS=/ip4/.../p2p/...    of the run
#   SOURCE=...                  what pip installs; unset: Atoll is installed already
#   ATOLL_...                   any setting, such as ATOLL_NICKNAME
set -euo pipefail
: "${ADDRESS:?set ADDRESS to the address of the run}"
[ -z "${SOURCE:-}" ] || pip install --quiet "$SOURCE"
mkdir -p /workspace/atoll
# exec: the provider's SIGTERM reaches the peer, which then writes a last checkpoint
exec atoll join "$ADDRESS" --output-dir /workspace/atoll --resume-from-checkpoint --device cuda --bf16 \
    --auto-find-batch-size --host-maddrs /ip4/0.0.0.0/tcp/31337 --direct-port 31338 --no-nat-port-map --json
