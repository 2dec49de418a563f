// A card for each worker: its cache as pictures and in numbers.

import {
  STATES, addressWords, blockAt, drawAddresses, drawMap, groupWords, mapShape, wordsOf,
} from "./blocks.js";
import { brief, bytes, el, keyed, plural, say } from "./dom.js";

export function drawWorkers(workers) {
  document.getElementById("no-workers").hidden = workers.length > 0;
  const place = document.getElementById("workers");
  keyed(place, workers, (one) => one.address, createCard, updateCard);
}

function createCard() {
  return el("article", { class: "worker" },
    el("div", { class: "worker-head" },
      el("h3"), el("span", { class: "role" }), el("span", { class: "where" })),
    el("p", { class: "note" }),
    el("div", { class: "picture" }),
    el("p", { class: "detail", "aria-live": "polite" }),
    el("dl", { class: "account memory" }), el("dl", { class: "account" }));
}

function updateCard(card, worker) {
  const { who = {}, cache } = worker;
  say(card.querySelector("h3"), who.name ?? worker.address);
  say(card.querySelector(".role"), who.role || "not met yet");
  card.classList.toggle("away", !who.is_there);
  say(card.querySelector(".where"), cache ? whereOf(cache) : "");
  const note = noteOf(who, cache);
  say(card.querySelector(".note"), note);
  card.querySelector(".note").hidden = note === "";
  for (const part of card.querySelectorAll(".picture, .detail, .account")) part.hidden = !cache;
  if (!cache) return;
  const groups = cache.groups.map((group, index) => ({ group, index, cache }));
  keyed(card.querySelector(".picture"), groups, (one) => one.index, createGroup, updateGroup);
  const [memory, blocks] = card.querySelectorAll(".account");
  fillAccount(memory, memoryOf(cache));
  fillAccount(blocks, blocksOf(cache));
}

function fillAccount(list, rows) {
  keyed(list, rows, ([name]) => name,
    ([name]) => el("div", {}, el("dt", {}, name), el("dd")),
    (node, [, value]) => say(node.lastChild, value));
}

function whereOf(cache) {
  const device = cache.device === "cpu" ? "host memory" : cache.device;
  const ranks = cache.num_ranks > 1 ? `, rank 1 of ${cache.num_ranks}` : "";
  return `${device}${ranks} · ${plural(cache.num_requests, "request")}`;
}

function noteOf(who, cache) {
  if (!who.is_there) return "The router does not reach it, and goes on trying.";
  if (!cache) return "It is there and has not shown its cache yet.";
  if (who.is_draining) return "It drains: it finishes what it has, and takes nothing new.";
  return cache.is_sleeping ? "Its cache sleeps: addresses are kept, memory is given back." : "";
}

function blocksOf(cache) {
  const sum = (state) => cache.groups.reduce((n, group) => n + (group.counts[state] ?? 0), 0);
  return [1, 2, 3, 5, 4].map((state) => [STATES[state], brief(sum(state))]);
}

function memoryOf(cache) {
  const rows = [
    ["reserved", bytes(cache.reserved_bytes)],
    ["budget", bytes(cache.budget_bytes)],
    ["committed", bytes(cache.committed_bytes)],
    ["registered", bytes(cache.registered_bytes)],
    ["generation", brief(cache.generation)],
  ];
  if (cache.epoch) rows.push(["revocations", brief(cache.epoch)]);
  if (cache.tombstone_bytes) rows.push(["tombstones", bytes(cache.tombstone_bytes)]);
  if (cache.pinned_bytes) rows.push(["pinned by peers", bytes(cache.pinned_bytes)]);
  return rows;
}

function createGroup() {
  const addresses = el("canvas", { class: "addresses", role: "img" });
  const map = el("canvas", { class: "map", role: "img", tabindex: "0" });
  const node = el("div", { class: "group" },
    el("p", { class: "caption" }, el("span"), el("span")), addresses,
    el("p", { class: "caption" }, el("span"), el("span")), map);
  node.cursor = null;
  listen(node, addresses, map);
  return node;
}

// `node.shown` is the group as it is now; details follow it until the pointer leaves.
function listen(node, addresses, map) {
  const detail = () => node.closest(".worker").querySelector(".detail");
  const at = (canvas, event) => {
    const box = canvas.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  };
  addresses.addEventListener("pointermove", (event) => {
    const { cache, group } = node.shown;
    say(detail(), addressWords(addresses, cache, group, ...at(addresses, event)));
  });
  const point = (block) => {
    node.cursor = block;
    say(detail(), block === null ? "" : wordsOf(node.shown.group, block));
    drawMap(map, node.shown.group, node.cursor);
  };
  for (const name of ["pointermove", "pointerdown"]) {
    map.addEventListener(name, (event) =>
      point(blockAt(map, node.shown.group, ...at(map, event))));
  }
  map.addEventListener("pointerleave", (event) => {
    if (event.pointerType === "mouse") point(null); // what was tapped stays
  });
  map.addEventListener("blur", () => point(null));
  map.addEventListener("keydown", (event) => {
    const { group } = node.shown;
    const { columns, per } = mapShape(group, map.parentElement.clientWidth);
    const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns };
    if (!(event.key in steps)) return;
    event.preventDefault();
    const next = node.cursor === null ? 0 : node.cursor + steps[event.key] * per;
    point(Math.min(group.capacity - 1, Math.max(0, next)));
  });
}

function updateGroup(node, shown) {
  node.shown = shown;
  const { cache, group, index } = shown;
  const [above, addresses, below, map] = node.children;
  const name = cache.groups.length > 1 ? `group ${index + 1} (${group.kind})` : "";
  const segments = plural(group.num_segments, "segment");
  say(above.firstChild, ["Addresses", name, group.layout].filter(Boolean).join(", "));
  say(above.lastChild, `${segments} of ${bytes(group.segment_bytes)}`);
  say(below.firstChild, "Blocks");
  say(below.lastChild, groupWords(group));
  const counted = group.counts.map((count, state) => `${count} ${STATES[state] ?? "others"}`);
  const words = `${groupWords(group)}: ${counted.join(", ")}`;
  addresses.setAttribute("aria-label", `Address space. ${words}`);
  map.setAttribute("aria-label", `Blocks. ${words}`);
  drawAddresses(addresses, cache, group);
  drawMap(map, group, node.cursor);
  // How far the picture reaches, for whoever does not see it: tests, too.
  node.dataset.committed = group.committed;
  node.dataset.busy = (group.counts[3] ?? 0) + (group.counts[5] ?? 0);
}
