// The row of large numbers.

import { count, duration, el, loss, percent, setText } from "/format.js";

const FIGURES = [
  ["round", "Round", (now) => [count(now.round), now.goal.rounds ? `of ${count(now.goal.rounds)}` : ""]],
  ["tokens", "Tokens", (now) => [count(now.tokens), now.goal.tokens ? `of ${count(now.goal.tokens)}` : "committed"]],
  ["speed", "Tokens/s", (now) => [count(now.tokens_per_s), `${count(now.committed_tokens_per_s)} committed`]],
  ["loss", "Loss", (now) => [loss(now.loss), now.validation === null ? "training" : `validation ${loss(now.validation)}`]],
  ["peers", "Peers", (now) => [count(now.states.training), others(now.states)]],
  ["busy", "Utilisation", (now) => [percent(now.utilisation), "of the time in steps"]],
  ["left", "Time left", (now) => [now.eta_s === null ? "–" : duration(now.eta_s), now.done === null ? "no end is set" : `${percent(now.done)} done`]],
];

function others(states) {
  const named = [["joining", "joining"], ["paused", "paused"], ["finished", "finished"], ["gone", "gone"]].filter(([state]) => states[state]);
  return named.length ? named.map(([state, word]) => `${states[state]} ${word}`).join(", ") : "training";
}

export class Figures {
  constructor(place) {
    this.cells = new Map();
    for (const [key, title] of FIGURES) {
      const value = el("strong"), note = el("small");
      place.append(el("div", { class: `figure ${key}` }, el("span", {}, title), value, note));
      this.cells.set(key, [value, note]);
    }
    this.bar = el("progress", { max: 1, value: 0, hidden: true, "aria-label": "How much of the run is done" });
    place.append(this.bar);
  }

  show(now) {
    for (const [key, , read] of FIGURES) {
      const [value, note] = this.cells.get(key);
      const [text, small] = read(now);
      setText(value, text);
      setText(note, small);
    }
    this.bar.hidden = now.done === null;
    this.bar.value = now.done ?? 0;
  }
}
