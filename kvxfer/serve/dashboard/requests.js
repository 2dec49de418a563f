// The prompts that came last, each from its arrival to its end.

import { brief, keyed, plural, say, seconds, set, svg } from "./dom.js";
import { axis, chart } from "./transfers.js";

const ROWS_MOST = 16;
const WINDOWS_S = [5, 10, 20, 60, 300, 1800];
const LENGTHS_S = [0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 300, 1800];
const BAR = 12;
const AXIS = 20;
const WORDS = {
  waiting: "waiting", prefill: "prefill", transfer: "hand-over", decode: "decode",
};
// What a state of a worker means here; states that say nothing new are not in it.
const PHASES = {
  prefill: { computing: "prefill", handing_over: "transfer" },
  decode: { filled: "decode", running: "decode" },
};

// A router begins again under the same id with a number behind it.
const isOf = (life, id) => id === life.request_id || id.startsWith(`${life.request_id}.`);

// [(phase, start, end)] from arrival to its end or now.
export function phases(life, workers, now) {
  const marks = [["waiting", life.arrived_s]];
  for (const worker of workers) {
    const meaning = PHASES[worker.who?.role] ?? {};
    for (const told of worker.requests ?? []) {
      if (!isOf(life, told.id)) continue;
      for (const [state, at] of told.states) if (state in meaning) marks.push([meaning[state], at]);
    }
  }
  if (life.first_token_s !== null && !marks.some(([phase]) => phase === "decode")) {
    marks.push(["decode", life.first_token_s]); // its worker tells of it no more
  }
  marks.sort((a, b) => a[1] - b[1]);
  const end = life.ended_s ?? now;
  return marks.map(([phase, at], index) => {
    const next = index + 1 < marks.length ? marks[index + 1][1] : end;
    return { phase, start: Math.min(at, end), end: Math.min(next, end) };
  }).filter((one) => one.end > one.start);
}

function label(life) {
  const tokens = `${brief(life.num_prompt_tokens)} → ${plural(life.num_tokens, "token")}`;
  const bad = ["", "stop", "length"].includes(life.reason) ? "" : ` · ${life.reason}`;
  return `${life.request_id.slice(0, 14)} · ${tokens}${bad}`;
}

function words(life, parts, now) {
  const spent = new Map();
  for (const { phase, start, end } of parts) {
    spent.set(phase, (spent.get(phase) ?? 0) + end - start);
  }
  const told = [...spent].map(([phase, took]) => `${WORDS[phase]} ${seconds(took)}`).join(", ");
  const first = life.first_token_s === null ? "no token yet"
    : `first token after ${seconds(life.first_token_s - life.arrived_s)}`;
  const whole = seconds((life.ended_s ?? now) - life.arrived_s);
  const state = life.ended_s === null ? `under way for ${whole}` : `${life.reason} after ${whole}`;
  const where = life.decode ? ` at ${life.decode}` : "";
  return `${life.request_id}${where}: ${state}, ${first}; ${told}`;
}

export function drawRequests(requests, workers, now) {
  document.getElementById("no-requests").hidden = requests.length > 0;
  const place = document.getElementById("requests");
  place.hidden = requests.length === 0;
  if (!requests.length) return;
  const shown = requests.slice(-ROWS_MOST).reverse();
  const { node, width } = chart(place);
  const isWide = width > 700;
  const gutter = isWide ? 260 : 0;
  const row = isWide ? 22 : 36;
  const fromArrival = document.querySelector("#align input:checked").value === "arrival";
  const times = shown.map((one) => (fromArrival ? one.ended_s ?? now : now) - one.arrived_s);
  const windows = fromArrival ? LENGTHS_S : WINDOWS_S;
  const span = windows.find((one) => Math.max(...times) <= one) ?? windows.at(-1);
  const [inner, height] = [width - gutter, shown.length * row];
  set(node, { height: height + AXIS, viewBox: `0 0 ${width} ${height + AXIS}`,
    role: "group", "aria-label": `The ${shown.length} requests that came last` });
  set(node.firstChild, { transform: `translate(${gutter} 0)` });
  axis(node.firstChild, inner, height, span, fromArrival);
  const start = (life) => (fromArrival ? life.arrived_s : now - span);
  const shape = { gutter, row, inner, span, isWide, width, start };
  keyed(node.lastChild, shown, (one) => one.request_id, createRow, (group, life) => {
    set(group, { transform: `translate(0 ${shown.indexOf(life) * row})` });
    updateRow(group, life, phases(life, workers, now), shape, now);
  });
}

function createRow() {
  const row = svg("g", { class: "row", tabindex: "0", role: "img" },
    svg("rect", { class: "hit" }), svg("text", { class: "label" }),
    svg("g"), svg("line", { class: "first" }));
  const tell = () => say(document.getElementById("requests-detail"), row.words);
  for (const name of ["pointerover", "pointerdown", "focus"]) row.addEventListener(name, tell);
  return row;
}

function updateRow(group, life, parts, shape, now) {
  const [hit, text, bars, first] = group.children;
  const share = (at) => Math.min(1, Math.max(0, (at - shape.start(life)) / shape.span));
  const x = (at) => shape.gutter + shape.inner * share(at);
  const y = shape.isWide ? 5 : 19;
  group.words = words(life, parts, now);
  set(group, { "aria-label": group.words });
  set(hit, { x: 0, y: 0, width: shape.width, height: shape.row });
  set(text, { x: 0, y: shape.isWide ? 15 : 13 });
  say(text, label(life));
  keyed(bars, parts, (one) => parts.indexOf(one), () => svg("rect", { height: BAR }),
    (bar, one) => {
      const [start, end] = [x(one.start), x(one.end)];
      set(bar, { class: `bar ${one.phase}`, x: start.toFixed(1), y,
        width: Math.max(1, end - start).toFixed(1) });
    });
  const at = life.first_token_s === null ? -10 : x(life.first_token_s);
  set(first, { x1: at, x2: at, y1: y - 3, y2: y + BAR + 3,
    visibility: life.first_token_s === null ? "hidden" : "visible" });
}
