// Elements, lists of them that stay the same from one drawing to the next, and numbers for people.

const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

export const el = (tag, attributes = {}, ...children) =>
  fill(document.createElement(tag), attributes, children);

export const svg = (tag, attributes = {}, ...children) =>
  fill(document.createElementNS(SVG, tag), attributes, children);

// Attributes of an element that is there; only those that differ are touched.
export function set(node, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    if (node.getAttribute(name) !== String(value)) node.setAttribute(name, value);
  }
}

export function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

// Make the children of `parent` those of `items`, in order: one that was there for a key stays, so
// that focus and pointer stay with it. `parent` has no other children.
export function keyed(parent, items, keyOf, create, update) {
  const known = new Map([...parent.children].map((node) => [node.dataset.key, node]));
  let before = null;
  for (const item of items) {
    const key = String(keyOf(item));
    let node = known.get(key);
    known.delete(key);
    if (!node) {
      node = create(item);
      node.dataset.key = key;
    }
    const next = before ? before.nextSibling : parent.firstChild;
    if (next !== node) parent.insertBefore(node, next);
    before = node;
    update(node, item);
  }
  for (const node of known.values()) node.remove();
}

export function bytes(count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let value = count;
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${brief(value)} ${units[unit]}`;
}

export const brief = (value) =>
  value === 0 || Number.isInteger(value) && value < 1e4 ? String(value)
    : value >= 100 ? Math.round(value).toLocaleString("en")
      : String(Number(value.toPrecision(3)));

export function rate(gbps) {
  if (!(gbps > 0)) return "–";
  return gbps < 1 ? `${brief(gbps * 1e3)} MB/s` : `${brief(gbps)} GB/s`;
}

export function seconds(value) {
  if (value < 1e-3) return `${brief(value * 1e6)} µs`;
  return value < 1 ? `${brief(value * 1e3)} ms` : `${brief(value)} s`;
}

export const plural = (count, noun) => `${brief(count)} ${noun}${count === 1 ? "" : "s"}`;
