// The lanes that pairs of workers agreed on, and how fast they are.

import { bytes, el, keyed, rate, say } from "./dom.js";

// A pair is told of by both of its ends; decode chose, so its word is shown.
function pairs(workers) {
  const found = new Map();
  for (const worker of workers) {
    const name = worker.who?.name ?? worker.address;
    const isDecode = worker.who?.role === "decode";
    for (const one of worker.lanes ?? []) {
      const [from, to] = isDecode ? [one.peer, name] : [name, one.peer];
      const key = `${from} → ${to}`;
      if (isDecode || !found.has(key)) found.set(key, { key, from, to, ...one });
    }
  }
  return [...found.values()].sort((a, b) => a.key.localeCompare(b.key, "en", { numeric: true }));
}

export function drawLanes(history, workers) {
  const lanes = pairs(workers);
  document.getElementById("no-lanes").hidden = lanes.length > 0;
  const table = document.getElementById("lanes");
  table.hidden = lanes.length === 0;
  keyed(table.tBodies[0], lanes, (one) => one.key,
    () => el("tr", {}, el("td"), el("td", { class: "lane" }), el("td", { class: "number" }),
      el("td", { class: "number" })),
    (row, one) => {
      const { moved, gbps } = history.measured(one.from, one.to);
      const [pair, lane, tried, now] = row.cells;
      say(pair, one.key);
      say(lane, one.lane);
      say(tried, rate(one.gbps));
      say(now, moved ? `${bytes(moved)}, ${rate(gbps)}` : "–");
    });
}
