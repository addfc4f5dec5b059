#!/usr/bin/env bash
# A public run from `init` to the hub, all of it on one machine: about five minutes.
#
#     hf auth login                                   # once; needs a token that may write
#     bash examples/public_run.sh runs/reef YOU/reef
#
# In a run among people the organiser types 1, 2 and 4 on a machine with an open TCP port, with its --host-maddrs and
# --announce-maddrs; everyone types 3 at home, with the address that 2 prints; one of them types 5.
set -euo pipefail
folder=$1 name=$2
mkdir -p "$folder"
cd "$folder"
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT

# 1. Describe the run. Read run.yaml before it is opened: what is changed later is another run.
atoll-bootstrap init run.yaml --name reef --size tiny --audience strangers --data local --rounds 0
sed -i 's/batch_sequences: 8/batch_sequences: 2/' run.yaml   # short steps: here one machine makes those of both peers

# 2. Open it. The first thing it says is the address to join with.
atoll-bootstrap run.yaml --state-dir bootstrap --host-maddrs /ip4/127.0.0.1/tcp/0 --no-nat-port-map --json > run.jsonl &
bootstrap=$!
until address=$(grep -om1 '/ip4/[^"]*/p2p/[A-Za-z0-9]*' run.jsonl); do
  kill -0 "$bootstrap"
  sleep 1
done

# 3. Two peers train. Each has an identity, a log and checkpoints in a folder of its own.
peers=()
for peer in ada bea; do
  atoll join "$address" --output-dir "$peer" --host-maddrs /ip4/127.0.0.1/tcp/0 --json > "$peer.log" 2>&1 &
  peers+=($!)
done

# 4. After their first round the organiser ends the run: they make the last round together, export the model and leave.
until grep -q '"committed"' ada/rounds.jsonl 2>/dev/null; do
  for peer in "${peers[@]}"; do kill -0 "$peer"; done
  sleep 1
done
atoll-bootstrap finish --state-dir bootstrap
for peer in "${peers[@]}"; do wait "$peer"; done

# 5. Look at what they made, and publish it with a model card that says how.
atoll generate ada --prompt "def " --max-new-tokens 40
atoll evaluate ada
atoll export ada --to model --push-to-hub "$name"
