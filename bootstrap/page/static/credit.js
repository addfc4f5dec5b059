// Who has contributed most, by the certified chain.

import { count, el, setText } from "/format.js";

export const CREDIT_MS = 15000;

export function showCredit(rows) {
  const place = document.getElementById("credit-rows");
  document.getElementById("credit").hidden = !rows.length;
  if (place.childElementCount !== rows.length) {
    place.replaceChildren(...rows.map(() => el("tr", {}, el("th", { scope: "row" }), el("td", { class: "number" }), el("td", { class: "number" }))));
  }
  rows.forEach((row, number) => {
    const cells = place.children[number].children;
    [row.nickname, count(row.tokens), count(row.rounds)].forEach((words, column) => setText(cells[column], words));
    cells[0].title = row.peer_id;
  });
}
