// Loss and speed over tokens, rounds or time.

import { count, loss, percent, setText } from "/format.js";

const MOST_POINTS = 3000;
const NAMES = ["time", "round", "tokens", "peers", "tokens_per_s", "loss", "validation", "validated", "utilisation"];
const CHARTS = {
  loss: [["loss", "training", "--line-1", loss], ["validation", "validation", "--line-2", loss]],
  speed: [["tokens_per_s", "tokens/s", "--line-3", count], ["utilisation", "utilisation", "--line-4", percent]],
};

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

export class Charts {
  constructor() {
    this.columns = Object.fromEntries(NAMES.map((name) => [name, []]));
    this.axis = "tokens";
    this.plots = {};
    for (const button of document.querySelectorAll("#axis button")) {
      button.addEventListener("click", () => this.choose(button.dataset.axis));
    }
    const observer = new ResizeObserver(() => this.resize());
    for (const kind of Object.keys(CHARTS)) observer.observe(this.place(kind));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.rebuild());
  }

  place(kind) { return document.getElementById(`${kind}-plot`); }

  choose(axis) {
    this.axis = axis;
    for (const button of document.querySelectorAll("#axis button")) {
      button.setAttribute("aria-pressed", String(button.dataset.axis === axis));
    }
    this.rebuild();
  }

  begin(columns) {
    this.columns = columns;
    this.rebuild();
  }

  add(now, everySeconds = 4) {
    const times = this.columns.time;
    if (times.length && now.time < times[times.length - 1] + everySeconds) return;
    for (const name of NAMES) this.columns[name].push(now[name]);
    if (times.length > MOST_POINTS) {
      for (const name of NAMES) this.columns[name] = this.columns[name].filter((_, place) => place % 2 === 0 || place > MOST_POINTS / 2);
    }
    for (const kind of Object.keys(CHARTS)) this.fill(kind);
  }

  // Along tokens and rounds several moments share a place: the newest of them stands for all.
  data(kind) {
    const along = this.columns[this.axis], validated = this.columns.validated;
    const kept = [];
    for (let place = 0; place < along.length; place += 1) {
      if (place + 1 < along.length && along[place + 1] <= along[place]) continue;
      if (kept.length && along[place] <= along[kept[kept.length - 1]]) continue;
      kept.push(place);
    }
    const series = CHARTS[kind].map(([name]) => {
      let before = null;
      return kept.map((place) => {
        if (name !== "validation") return this.columns[name][place];
        const fresh = validated[place] !== before;
        before = validated[place];
        return fresh ? this.columns[name][place] : null;
      });
    });
    return [kept.map((place) => along[place]), ...series];
  }

  fill(kind) {
    const plot = this.plots[kind];
    if (!plot) { this.build(kind); return; }
    plot.setData(this.data(kind));
    this.read(kind, null);
  }

  rebuild() {
    for (const kind of Object.keys(CHARTS)) {
      this.plots[kind]?.destroy();
      delete this.plots[kind];
      this.build(kind);
    }
  }

  build(kind) {
    const place = this.place(kind);
    const grid = { stroke: css("--grid"), width: 1 }, ticks = { stroke: css("--grid"), width: 1, size: 4 };
    const font = "12px system-ui, sans-serif", stroke = css("--muted");
    const along = this.axis === "time" ? {} : { values: (_, marks) => marks.map((mark) => (Number.isInteger(mark) ? count(mark) : "")) };
    const axes = [{ stroke, grid, ticks, font, space: 70, size: 30, ...along }, { stroke, grid, ticks, font, size: 56, values: (_, marks) => marks.map((mark) => (kind === "loss" ? String(+mark.toFixed(3)) : count(mark))) }];
    const scales = { x: { time: this.axis === "time" } };
    if (kind === "speed") {
      scales.y = { range: (_, least, most) => [0, Math.max(1, (most ?? 1) * 1.1)] };
      scales.share = { range: [0, 1.02] };
      axes.push({ scale: "share", side: 1, stroke, grid: { show: false }, ticks, font, size: 44, values: (_, marks) => marks.map((mark) => percent(mark)) });
    }
    const series = CHARTS[kind].map(([name, label, colour]) => ({
      label, stroke: css(colour), width: name === "validation" ? 2 : 1.75, spanGaps: true,
      points: { show: name === "validation", size: 5, fill: css(colour) },
      scale: name === "utilisation" ? "share" : "y",
      ...(name === "utilisation" ? { dash: [5, 4] } : {}),
    }));
    const options = {
      ...this.size(place), axes, scales, series: [{}, ...series], legend: { show: false },
      cursor: { points: { size: 7 }, drag: { x: true, y: false } },
      hooks: { setCursor: [(plot) => this.read(kind, plot.cursor.idx)] },
    };
    this.plots[kind] = new window.uPlot(options, this.data(kind), place);
    this.read(kind, null);
  }

  size(place) { return { width: Math.max(200, place.clientWidth), height: Math.max(180, place.clientHeight) }; }

  resize() {
    for (const [kind, plot] of Object.entries(this.plots)) {
      const size = this.size(this.place(kind));
      if (size.width !== plot.width || size.height !== plot.height) plot.setSize(size);
    }
  }

  // The newest values, or those under the pointer, in words.
  read(kind, index) {
    const plot = this.plots[kind];
    if (!plot) return;
    const parts = CHARTS[kind].map(([, label, colour, words], number) => {
      const values = plot.data[number + 1];
      let place = index ?? values.length - 1;
      while (place > 0 && (values[place] === null || values[place] === undefined)) place -= 1;
      return [label, colour, words(values[place] ?? null)];
    });
    const readout = document.getElementById(`${kind}-readout`);
    if (readout.childElementCount !== parts.length) {
      readout.replaceChildren(...parts.map(() => document.createElement("span")));
    }
    parts.forEach(([label, colour, words], number) => {
      const part = readout.children[number];
      part.className = `key ${colour.slice(2)}`;
      setText(part, `${label} ${words}`);
    });
    if (index === null || index === undefined) {
      this.place(kind).setAttribute("aria-label", `${kind === "loss" ? "Loss" : "Speed"} over ${this.axis}: now ${parts.map(([label, , words]) => `${label} ${words}`).join(", ")}`);
    }
  }
}
