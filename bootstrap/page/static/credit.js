// Who has contributed most, by the certified chain.

import { count, el, setText } from "/format.js";

export const CREDIT_MS = 15000;

export function showCredit(rows) {
  const place = document.getElementById("credit-rows");
  document.getElementById("credit").hidden = !rows.length;
  if (place.childElementCount !== rows.length) {
    place.replaceChildren(...rows.map(() => el(
      "tr", {}, el("th", { scope: "row" }, el("span", { class: "nickname" }), " ", el("code")),
      ...["Tokens", "Rounds"].map((title) => el("td", { class: "number", "data-label": title })),
    )));
  }
  rows.forEach((row, number) => {
    const [peer, tokens, rounds] = place.children[number].children;
    setText(peer.firstChild, row.nickname);
    setText(peer.lastChild, row.peer_id.slice(-6));
    peer.title = row.peer_id;
    setText(tokens, count(row.tokens));
    setText(rounds, count(row.rounds));
  });
}
