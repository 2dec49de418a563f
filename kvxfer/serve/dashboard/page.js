// The page: takes the router's parts apart and has each section drawn.

import { brief, plural, say } from "./dom.js";
import { drawLanes } from "./lanes.js";
import { drawRequests } from "./requests.js";
import { Stream } from "./stream.js";
import { History, drawTransfers } from "./transfers.js";
import { drawWorkers } from "./workers.js";

const history = new History();
let latest = { workers: [], requests: [], now: 0 };

// One object a worker, of the parts that begin with its address.
function workersOf(parts) {
  const found = new Map();
  for (const [name, part] of parts) {
    const cut = name.lastIndexOf("/");
    if (cut < 0) continue;
    const address = name.slice(0, cut);
    if (!found.has(address)) found.set(address, { address });
    found.get(address)[name.slice(cut + 1)] = part;
  }
  const order = (one) => [one.who?.role === "prefill" ? 0 : 1, one.who?.name ?? one.address];
  return [...found.values()].sort((a, b) => {
    const [x, y] = [order(a), order(b)];
    return x[0] - y[0] || x[1].localeCompare(y[1], "en", { numeric: true });
  });
}

function summary({ workers, requests }) {
  const count = (role) => workers.filter((w) => w.who?.is_there && w.who.role === role).length;
  const open = requests.filter((one) => one.ended_s === null).length;
  return `${brief(count("prefill"))} prefill · ${brief(count("decode"))} decode · ` +
    `${plural(open, "request")} under way`;
}

function draw() {
  say(document.getElementById("summary"), summary(latest));
  drawWorkers(latest.workers);
  drawTransfers(history, latest.workers, latest.now);
  drawLanes(history, latest.workers, latest.now);
  drawRequests(latest.requests, latest.workers, latest.now);
}

function changed(parts, now) {
  latest = { workers: workersOf(parts), requests: parts.get("requests") ?? [], now };
  history.take(latest.workers, now);
  if (!document.hidden) draw();
}

function turned(state, since) {
  document.body.dataset.stream = state;
  const ago = `${Math.round(since / 1000)} s`;
  const lost = `The router has not been heard for ${ago}: this is how it was. Trying again …`;
  say(document.getElementById("stream"), state === "live" ? "Live" : lost);
}

new Stream("/ui/events", changed, turned);
document.getElementById("align").addEventListener("change", draw);
addEventListener("resize", draw);
document.addEventListener("visibilitychange", draw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
