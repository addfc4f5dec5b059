// The rounds as a timeline, in the words of `atoll rounds`.

import { ago, clock, duration, el, setText } from "/format.js";
import { get } from "/feed.js";

const PAGE = 20;
const PHASES = ["match", "exchange", "commit", "install"];

export class Rounds {
  constructor() {
    this.list = document.getElementById("timeline");
    this.older = document.getElementById("older");
    this.status = "";
    this.most = PAGE; // rounds that are shown; "Older rounds" adds to them
    this.now = 0;
    this.older.addEventListener("click", () => this.more());
    for (const button of document.querySelectorAll("#status button")) {
      button.addEventListener("click", () => this.choose(button.dataset.status));
    }
  }

  async choose(status) {
    this.status = status;
    for (const button of document.querySelectorAll("#status button")) {
      button.setAttribute("aria-pressed", String(button.dataset.status === status));
    }
    try {
      const rows = await get(`/api/v1/rounds?limit=${PAGE}${this.wanted()}`);
      if (this.status === status) this.begin(rows, this.now);
    } catch { /* the server is away: what is shown stays, and the next state brings the rest */ }
  }

  wanted() { return this.status ? `&status=${this.status}` : ""; }

  begin(rows, now) {
    this.now = now;
    this.most = PAGE;
    this.list.replaceChildren(...rows.slice(0, PAGE).map((row) => this.item(row)));
    this.older.hidden = rows.length < PAGE;
    this.empty();
  }

  update(rows, now) {
    this.now = now;
    for (const row of [...rows].reverse()) {
      if (this.status && row.status !== this.status) continue;
      const there = this.list.querySelector(`[data-id="${Number(row.id)}"]`);
      if (there) this.replace(there, row);
      else this.list.prepend(this.item(row));
    }
    while (this.list.children.length > this.most) {
      this.list.lastChild.remove();
      this.older.hidden = false;
    }
    this.list.querySelector(".none")?.remove();
    this.empty();
    for (const time of this.list.querySelectorAll("time[datetime]")) setText(time, ago(Number(time.dataset.at), now));
  }

  replace(there, row) {
    const item = this.item(row, there.querySelector("details")?.open), focused = there.contains(document.activeElement);
    there.replaceWith(item);
    if (focused) item.querySelector("summary")?.focus();
  }

  empty() {
    if (!this.list.children.length) this.list.append(el("li", { class: "none" }, "No round has ended yet."));
  }

  async more() {
    const last = this.list.lastChild?.dataset.id;
    if (!last) return;
    const rows = await get(`/api/v1/rounds?limit=${PAGE}&before=${last}${this.wanted()}`).catch(() => null);
    if (rows === null) return;
    this.most = this.list.children.length + rows.length;
    const items = rows.map((row) => this.item(row));
    this.list.append(...items);
    this.older.hidden = rows.length < PAGE;
    items[0]?.querySelector("summary")?.focus();
  }

  item(row, open = false) {
    const number = el("span", { class: "number" }, row.round.toLocaleString("en-US"));
    number.title = `round ${row.round}`;
    const when = el("time", { "data-at": String(row.at ?? "") }, ago(row.at, this.now));
    if (row.at) { when.title = clock(row.at); when.dateTime = new Date(row.at * 1000).toISOString(); }
    const teller = row.status === "committed" && !row.details.some((line) => line.startsWith("drawn with")) ? null : el("b", {}, row.teller);
    const line = el("span", { class: "headline" }, teller, teller ? " " : null, row.headline);
    const other = row.lineage === "other" ? el("span", { class: "tag" }, "not on the chain") : null;
    const head = [number, line, other, phases(row), when];
    const body = row.details.length || row.members.length
      ? el("details", { open }, el("summary", {}, ...head), details(row))
      : el("div", { class: "summary" }, ...head);
    const item = el("li", { class: row.tone }, body);
    item.dataset.id = String(row.id);
    return item;
  }
}

function phases(row) {
  const known = PHASES.filter((phase) => row.seconds[phase] > 0);
  if (!known.length) return el("span", { class: "phases" });
  const words = known.map((phase) => `${phase} ${duration(row.seconds[phase])}`).join(", ");
  const bar = el("span", { class: "phases", role: "img", "aria-label": words, title: words });
  for (const phase of known) {
    const part = el("span", { class: phase });
    part.style.flexGrow = String(Math.max(0.02, row.seconds[phase] / (row.seconds.total || 1)));
    bar.append(part);
  }
  return bar;
}

function details(row) {
  const lines = [...row.details];
  if (row.members.length) lines.push(`group of ${row.members.length}: ${row.members.join(", ")}`);
  if (row.status === "committed") lines.push(`lineage ${row.lineage_id}`);
  return el("ul", {}, ...lines.map((line) => el("li", {}, line)));
}
