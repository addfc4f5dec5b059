// What does not change about the run, and its lineage, traffic and samples.

import { bytes, count, el, setText } from "/format.js";

function pairs(place, entries) {
  if (place.childElementCount !== 2 * entries.length) {
    place.replaceChildren(...entries.flatMap(() => [el("dt"), el("dd")]));
  }
  entries.forEach(([term, words], number) => {
    setText(place.children[2 * number], term);
    setText(place.children[2 * number + 1], words);
  });
}

function part(value) {
  if (value === null) return "none";
  if (typeof value !== "object") return String(value);
  const { name, ...numbers } = value;
  const rest = Object.entries(numbers).filter(([, number]) => number !== null).map(([key, number]) => `${key.replaceAll("_", " ")} ${typeof number === "object" ? JSON.stringify(number) : number}`);
  return rest.length ? `${name}: ${rest.join(", ")}` : String(name);
}

export function showRun(run) {
  document.title = `${run.name} · Atoll`;
  setText(document.getElementById("name"), run.name);
  setText(document.getElementById("run-id"), run.run_id.slice(0, 12));
  setText(document.getElementById("join-command"), run.join[0] ?? "");
  setText(document.getElementById("recipe-summary"), `${run.recipe.name}, as published: ${run.recipe.summary}`);
  const skipped = new Set(["name", "summary"]);
  const parts = Object.entries(run.recipe).filter(([key]) => !skipped.has(key));
  pairs(document.getElementById("recipe"), [...parts.map(([key, value]) => [key, part(value)]), ["trust", run.trust]]);
  setText(document.getElementById("manifest"), JSON.stringify(run.manifest, null, 2));
}

export function showNow(now, run) {
  const goal = now.goal.rounds ? ` of ${count(now.goal.rounds)}` : "";
  pairs(document.getElementById("lineage"), [
    ["tip", now.lineage_id || "each peer has a state of its own"],
    ["certified rounds", `${count(now.round)}${goal}`],
    ["tokens in it", count(now.tokens)],
    ["genesis", run.genesis],
    ["run id", run.run_id],
    ["organiser", run.organiser],
  ]);
  const served = Object.entries(now.served).map(([purpose, [sent, received]]) => [`this node, ${purpose}`, `${bytes(sent)} sent, ${bytes(received)} received`]);
  pairs(document.getElementById("traffic"), [
    ["peers, rounds", `${bytes(now.bytes_sent)} sent, ${bytes(now.bytes_received)} received`], ...served,
  ]);
}

export function showSamples(samples) {
  document.getElementById("samples-card").hidden = !samples.length;
  const place = document.getElementById("samples");
  if (place.childElementCount !== samples.length) {
    place.replaceChildren(...samples.map(() => el("figure", {}, el("pre"), el("figcaption"))));
  }
  samples.forEach((sample, number) => {
    setText(place.children[number].children[0], sample.text);
    setText(place.children[number].children[1], `${sample.peer}, round ${count(sample.round)}`);
  });
}

export function setUpCopy() {
  const button = document.getElementById("copy"), command = document.getElementById("join-command");
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(command.textContent);
    } catch { // no secure context: select it and let the old command do it
      getSelection().selectAllChildren(command);
      document.execCommand("copy");
    }
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = "Copy"; }, 2000);
  });
}
