// Transfers of the last seconds, a row for each pair and lane.

import { bytes, keyed, rate, say, seconds, set, svg } from "./dom.js";

export const WINDOW_S = 20;
const ROW = 34;
const BAR = 12;
const AXIS = 20;
const BARS_MOST = 1500;

// What workers told of their transfers: the newest few each time, kept here for the window.
export class History {
  constructor() {
    this.known = new Map();
  }

  take(workers, now) {
    for (const worker of workers) {
      const name = worker.who?.name ?? worker.address;
      for (const one of worker.transfers?.newest ?? []) {
        const [connector, direction] = one.lane.split("/");
        const pulls = direction === "pull";
        const [from, to] = pulls ? [one.peer, name] : [name, one.peer];
        const key = `${worker.address} ${one.number}`;
        this.known.set(key, { ...one, key, connector, from, to, row: `${from} → ${to}` });
      }
    }
    for (const [key, one] of this.known) {
      const end = one.end_s ?? now;
      if (end < now - WINDOW_S || one.end_s === null && !stillTold(workers, key)) {
        this.known.delete(key);
      }
    }
    const over = this.known.size - BARS_MOST;
    for (const key of [...this.known.keys()].slice(0, Math.max(0, over))) this.known.delete(key);
  }

  get all() {
    return [...this.known.values()];
  }

  // Bytes and rate while something moved, of one pair.
  measured(from, to) {
    const own = this.all.filter((one) => one.from === from && one.to === to && one.end_s !== null);
    const moved = own.reduce((n, one) => n + (one.error ? 0 : one.bytes), 0);
    let [busy, until] = [0, -Infinity];
    for (const one of own.sort((a, b) => a.start_s - b.start_s)) {
      busy += Math.max(0, one.end_s - Math.max(one.start_s, until));
      until = Math.max(until, one.end_s);
    }
    return { moved, gbps: busy > 0 ? moved / busy / 1e9 : 0, count: own.length };
  }
}

function stillTold(workers, key) {
  const cut = key.lastIndexOf(" ");
  const worker = workers.find((one) => one.address === key.slice(0, cut));
  const told = worker?.transfers?.newest ?? [];
  return told.some((one) => String(one.number) === key.slice(cut + 1));
}

function words(one) {
  const took = one.end_s === null ? "under way" : `${bytes(one.bytes)} in ` +
    `${seconds(one.end_s - one.start_s)}`;
  const fast = one.end_s === null || one.end_s <= one.start_s ? ""
    : `, ${rate(one.bytes / (one.end_s - one.start_s) / 1e9)}`;
  return `${one.row} by ${one.lane}: ${took}${fast}${one.error ? `. Failed: ${one.error}` : ""}`;
}

// Ticks over `span` seconds that end now or, with `fromZero`, begin at an arrival.
export function axis(group, width, height, span, fromZero = false) {
  const parts = width > 600 ? 10 : 4;
  const ticks = Array.from({ length: parts + 1 }, (_, index) => index);
  keyed(group, ticks, (index) => index,
    () => svg("g", {}, svg("line", { class: "tick" }), svg("text")),
    (node, index) => {
      const x = (index / parts) * width;
      set(node.firstChild, { x1: x, x2: x, y1: 0, y2: height });
      const anchor = index === 0 ? "start" : index === parts ? "end" : "middle";
      set(node.lastChild, { x, y: height + 15, "text-anchor": anchor });
      const at = Number((fromZero ? index * span / parts : span - index * span / parts).toFixed(2));
      say(node.lastChild, fromZero ? `${at} s` : at === 0 ? "now" : `−${at} s`);
    });
}

export function chart(place) {
  if (!place.firstChild) {
    place.append(svg("svg", {}, svg("g", { class: "axis" }), svg("g", { class: "rows" })));
  }
  const style = getComputedStyle(place);
  const inner = place.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight);
  return { node: place.firstChild, width: Math.max(1, Math.floor(inner)) };
}

export function drawTransfers(history, workers, now) {
  const all = history.all;
  document.getElementById("no-transfers").hidden = all.length > 0;
  const place = document.getElementById("transfers");
  place.hidden = all.length === 0;
  if (!all.length) return;
  const rows = Map.groupBy ? Map.groupBy(all, (one) => one.row) : groupBy(all);
  const names = [...rows.keys()].sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
  const { node, width } = chart(place);
  const height = names.length * ROW;
  set(node, { height: height + AXIS, viewBox: `0 0 ${width} ${height + AXIS}`,
    role: "group", "aria-label": "Transfers of the last 20 seconds" });
  axis(node.firstChild, width, height, WINDOW_S);
  keyed(node.lastChild, names, (name) => name, createRow, (row, name) => {
    const index = names.indexOf(name);
    set(row, { transform: `translate(0 ${index * ROW})` });
    say(row.children[0], name);
    set(row.children[1], { y: 17, width, height: BAR, rx: 3 });
    drawBars(row.children[2], rows.get(name), width, now);
  });
}

function groupBy(all) {
  const found = new Map();
  for (const one of all) found.set(one.row, [...(found.get(one.row) ?? []), one]);
  return found;
}

function createRow() {
  return svg("g", { class: "row" }, svg("text", { class: "label", y: 12 }),
    svg("rect", { class: "track", x: 0 }), svg("g"));
}

function drawBars(group, transfers, width, now) {
  const x = (at) => Math.max(0, width - ((now - at) / WINDOW_S) * width);
  const tell = (event) => say(document.getElementById("transfers-detail"), words(event.target.one));
  keyed(group, transfers, (one) => one.key, () => {
    const bar = svg("rect", { y: 17, height: BAR });
    bar.addEventListener("pointerover", tell);
    bar.addEventListener("pointerdown", tell);
    return bar;
  }, (bar, one) => {
    bar.one = one;
    const start = x(one.start_s);
    const end = Math.min(width, x(one.end_s ?? now));
    set(bar, { class: one.error ? "bar failed" : "bar moving", x: start.toFixed(1),
      width: Math.max(1.5, end - start).toFixed(1) });
  });
}

