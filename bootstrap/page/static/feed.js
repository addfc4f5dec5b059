// Where the figures come from: the state once, then updates; after a gap in them the state again, and while no stream
// can be had, the state every ten seconds.

const RETRY_MS = 3000;
const POLL_MS = 10000;

export async function get(path) {
  const answer = await fetch(path, { headers: { accept: "application/json" } });
  if (!answer.ok) throw new Error(`${path}: ${answer.status}`);
  return answer.json();
}

export class Feed {
  constructor({ onState, onUpdate, onLive }) {
    Object.assign(this, { onState, onUpdate, onLive });
    this.version = null;
    this.source = null;
    this.pending = [];
    this.loading = false;
    this.timer = 0;
  }

  async start() {
    this.listen();
    await this.reload();
  }

  // One reload at a time, and one that waits at most: a server that is away is asked by one timer alone.
  async reload() {
    if (this.loading) return;
    this.loading = true;
    this.version = null;
    try {
      const state = await get("/api/v1/state");
      this.onState(state);
      this.version = state.version;
    } catch {
      this.onLive(false);
      this.later(RETRY_MS);
    }
    this.loading = false;
    if (this.version === null) return;
    for (const update of this.pending.splice(0)) this.take(update);
  }

  later(milliseconds) {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => {
      if (this.source.readyState === EventSource.CLOSED) this.listen();
      this.reload();
    }, milliseconds);
  }

  listen() {
    this.source = new EventSource("/api/v1/updates");
    this.source.addEventListener("open", () => this.onLive(true));
    this.source.addEventListener("update", (event) => this.take(JSON.parse(event.data)));
    this.source.addEventListener("error", () => {
      this.onLive(false);
      if (this.source.readyState === EventSource.CLOSED) this.later(POLL_MS);
    });
  }

  take(update) {
    if (this.version === null) {
      this.pending = [...this.pending.slice(-20), update];
    } else if (update.version === this.version + 1) {
      this.version = update.version;
      this.onLive(true);
      this.onUpdate(update);
    } else if (update.version > this.version) { // some were missed, or the bootstrap began again
      this.pending = [update];
      this.reload();
    }
  }
}
