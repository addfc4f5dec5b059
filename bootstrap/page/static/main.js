// Puts the page together.

import { Charts } from "/charts.js";
import { Feed, get } from "/feed.js";
import { Figures } from "/figures.js";
import { CREDIT_MS, showCredit } from "/credit.js";
import { setText } from "/format.js";
import { Peers } from "/peers.js";
import { Rounds } from "/rounds.js";
import { setUpCopy, showNow, showRun, showSamples } from "/run.js";

const figures = new Figures(document.getElementById("figures"));
const charts = new Charts();
export const peers = new Peers(), rounds = new Rounds();
const live = document.getElementById("live");
let run = null;

function show(state) {
  figures.show(state.now);
  showNow(state.now, run);
  showSamples(state.samples);
  peers.draw(state.now.time);
}

const feed = new Feed({
  onState(state) {
    run = state.run;
    showRun(run);
    peers.begin(state.peers);
    if (rounds.status) rounds.choose(rounds.status);
    else rounds.begin(state.rounds, state.now.time);
    show(state);
    get("/api/v1/curve?points=1500").then((columns) => charts.begin(columns), () => {});
  },
  onUpdate(update) {
    performance.mark("update");
    peers.update(update.peers, update.left);
    rounds.update(update.rounds, update.now.time);
    show(update);
    charts.add(update.now);
    performance.measure("update", "update"); // for those who measure; nothing is kept
    performance.clearMarks();
    performance.clearMeasures();
  },
  onLive(isLive) {
    setText(live, isLive ? "live" : "reconnecting");
    live.classList.toggle("on", isLive);
  },
});

document.getElementById("theme").addEventListener("click", () => {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  try { localStorage.setItem("atoll-theme", root.dataset.theme); } catch { /* storage is off */ }
  charts.rebuild();
});
setUpCopy();
const refreshCredit = () => get("/api/v1/credit?limit=50").then(showCredit, () => {});
refreshCredit();
setInterval(refreshCredit, CREDIT_MS);
feed.start();
