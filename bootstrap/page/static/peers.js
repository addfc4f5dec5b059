// The peers: sortable, searchable, so many rows at a time.

import { ago, bytes, clock, count, el, loss, percent, setText } from "/format.js";

const PAGE = 50;
const REACHED = { open: "yes", relay: "through a relay", no: "dials out" };
const STATES = ["training", "joining", "paused", "finished", "gone"];
const COLUMNS = [
  ["nickname", "Peer", (row) => row.nickname, null],
  ["state", "State", (row) => STATES.indexOf(row.state), (row) => row.state],
  ["device", "Device", (row) => row.device, (row) => row.device || "–"],
  ["tokens_per_s", "Tokens/s", (row) => row.tokens_per_s, (row) => count(row.tokens_per_s)],
  ["utilisation", "Busy", (row) => row.utilisation ?? -1, (row) => percent(row.utilisation)],
  ["contributed", "Contributed", (row) => row.contributed ?? row.tokens, (row) => count(row.contributed ?? row.tokens)],
  ["rounds", "Rounds", (row) => row.rounds, (row) => count(row.rounds)],
  ["loss", "Loss", (row) => row.loss ?? Infinity, (row) => loss(row.loss)],
  ["round", "At round", (row) => row.round, (row) => count(row.round)],
  ["bytes_sent", "Sent", (row) => row.bytes_sent, (row) => bytes(row.bytes_sent)],
  ["reached", "Reachable", (row) => row.reached, (row) => REACHED[row.reached] ?? "–"],
  ["since", "Joined", (row) => -(row.since ?? 0), (row, now) => ago(row.since, now) || "–"],
];
const NUMBERS = new Set(["tokens_per_s", "utilisation", "contributed", "rounds", "loss", "round", "bytes_sent"]);

export class Peers {
  constructor() {
    this.rows = new Map();
    this.drawn = new Map();
    this.most = PAGE;
    this.sort = ["contributed", -1];
    this.now = 0;
    this.search = document.getElementById("search");
    this.search.addEventListener("input", () => { this.most = PAGE; this.draw(); });
    this.more = document.getElementById("more-peers");
    this.more.addEventListener("click", () => { this.most += PAGE; this.draw(); });
    this.heads = COLUMNS.map(([key, title]) => {
      const button = el("button", { type: "button" }, title);
      button.addEventListener("click", () => this.sortBy(key));
      return el("th", { scope: "col", class: NUMBERS.has(key) ? "number" : "" }, button);
    });
    document.getElementById("peer-head").append(...this.heads);
  }

  begin(rows) {
    this.rows = new Map(rows.map((row) => [row.peer_id, row]));
  }

  update(changed, left) {
    for (const row of changed) this.rows.set(row.peer_id, { ...this.rows.get(row.peer_id), ...row });
    for (const peerId of left) this.rows.delete(peerId);
  }

  sortBy(key) {
    const falls = NUMBERS.has(key) && key !== "loss" ? -1 : 1;
    this.sort = this.sort[0] === key ? [key, -this.sort[1]] : [key, falls];
    this.draw();
  }

  chosen() {
    const wanted = this.search.value.trim().toLowerCase();
    const fits = (row) => [row.nickname, row.peer_id, row.device, row.state].some((text) => text.toLowerCase().includes(wanted));
    const rows = [...this.rows.values()].filter((row) => !wanted || fits(row));
    const [key, way] = this.sort;
    const value = COLUMNS.find(([name]) => name === key)[2];
    const keyed = rows.map((row) => [value(row), row]);
    keyed.sort(([a, one], [b, two]) => {
      const gone = (one.state === "gone") - (two.state === "gone");
      if (gone) return gone;
      const order = typeof a === "string" ? a.localeCompare(b) : a - b;
      return way * order || (one.peer_id < two.peer_id ? -1 : 1);
    });
    return keyed.map(([, row]) => row);
  }

  draw(now = this.now) {
    this.now = now;
    const rows = this.chosen(), shown = rows.slice(0, this.most);
    this.heads.forEach((head, place) => {
      const [key] = COLUMNS[place], mine = this.sort[0] === key;
      head.setAttribute("aria-sort", !mine ? "none" : this.sort[1] > 0 ? "ascending" : "descending");
    });
    const body = document.getElementById("peer-rows");
    shown.forEach((row, place) => {
      const drawn = this.drawn.get(row.peer_id) ?? this.make(row.peer_id);
      this.fill(drawn, row);
      if (body.children[place] !== drawn.line) body.insertBefore(drawn.line, body.children[place] ?? null);
    });
    while (body.children.length > shown.length) {
      this.drawn.delete(body.lastChild.dataset.peer);
      body.lastChild.remove();
    }
    this.more.hidden = rows.length <= shown.length;
    setText(document.getElementById("peers-summary"), this.words(rows.length, shown.length));
  }

  words(found, shown) {
    if (!this.rows.size) return "No peer has joined yet.";
    if (!found) return "No peer fits this search.";
    return found === shown ? `${count(found)} of ${count(this.rows.size)} peers` : `${count(shown)} of ${count(found)} peers`;
  }

  make(peerId) {
    const cells = COLUMNS.map(([key, title]) => el(key === "nickname" ? "th" : "td", {
      class: NUMBERS.has(key) ? "number" : `is-${key}`, "data-label": title, ...(key === "nickname" ? { scope: "row" } : {}),
    }));
    const name = el("span", { class: "nickname" }), id = el("code", {}, peerId.slice(-6));
    cells[0].append(name, " ", id);
    cells[0].title = peerId;
    const line = el("tr", {}, ...cells);
    line.dataset.peer = peerId;
    const drawn = { line, cells, name };
    this.drawn.set(peerId, drawn);
    return drawn;
  }

  fill({ line, cells, name }, row) {
    setText(name, row.nickname);
    if (line.className !== row.state) line.className = row.state;
    COLUMNS.forEach(([key, , , words], place) => {
      if (words) setText(cells[place], words(row, this.now));
      if (key === "since" && row.since) cells[place].title = clock(row.since);
    });
  }
}
