// What is where in a cache: its blocks as a map, and its addresses as rows of segments.

import { bytes, plural } from "./dom.js";

// As kvxfer.cache.block_states.BlockState numbers them.
export const STATES = ["null", "free", "cached", "in use", "quarantined", "in flight"];
const COLOURS = ["--free", "--free", "--cached", "--used", "--quarantined", "--in-flight"];
const WORDS = [
  "the null block, where padding goes", "free", "kept in the prefix cache", "in use",
  "quarantined: a peer may still write to it", "in flight",
];
// What tells them apart without colour; the page's legend has the same.
const MARKS = [null, null, "row", null, "slope", "column"];
const MARK_STEP = 5;
const SEEN_WIDTH = 3; // that quarantined blocks and those in flight have at least, however few
const MAP_HEIGHT = 150;
const ROWS_MOST = 64;

export function colours() {
  const style = getComputedStyle(document.documentElement);
  const names = ["--reserved", "--hatch", "--registered", "--ink", "--card", ...COLOURS];
  return Object.fromEntries(names.map((name) => [name, style.getPropertyValue(name).trim()]));
}

// A context in CSS pixels on a canvas as wide as its place; sizes it only when that changes.
function context(canvas, height) {
  const width = Math.max(1, canvas.parentElement.clientWidth);
  const scale = devicePixelRatio || 1;
  const [w, h] = [Math.round(width * scale), Math.round(height * scale)];
  if (canvas.width !== w || canvas.height !== h) {
    canvas.width = w;
    canvas.height = h;
    canvas.style.height = `${height}px`;
  }
  const c = canvas.getContext("2d");
  c.setTransform(scale, 0, 0, scale, 0, 0);
  c.clearRect(0, 0, width, height);
  return [c, width];
}

// A box in the colour and with the mark of a state: thin lines in the card's colour, so far apart
// that most of it keeps its own.
function fillState(c, paint, state, x, y, width, height) {
  c.fillStyle = paint[COLOURS[state] ?? "--hatch"];
  c.fillRect(x, y, width, height);
  const mark = MARKS[state];
  if (!mark || width < 3 || height < 3) return;
  const first = (size) => Math.floor(Math.min(size, MARK_STEP) / 2);
  c.fillStyle = paint["--card"];
  if (mark === "row") {
    for (let at = first(height); at < height; at += MARK_STEP) c.fillRect(x, y + at, width, 1);
  } else if (mark === "column") {
    for (let at = first(width); at < width; at += MARK_STEP) c.fillRect(x + at, y, 1, height);
  } else {
    const step = Math.min(MARK_STEP, Math.floor(width)); // a line at least, from edge to edge
    for (let row = 0; row < height; row += 1) {
      for (let at = row % step; at < width; at += step) c.fillRect(x + at, y + row, 1, 1);
    }
  }
}

// The state of block `index`, or null where it may not be used (yet).
export function stateAt(group, index) {
  if (index >= group.usable) return null;
  let cell = Math.floor(index / group.blocks_per_cell);
  for (const [state, count] of group.cells) {
    if (cell < count) return state;
    cell -= count;
  }
  return null;
}

export function wordsOf(group, index) {
  const per = group.blocks_per_cell;
  const named = per > 1 ? `Blocks ${index - index % per} to ${index - index % per + per - 1}`
    : `Block ${index}`;
  const state = stateAt(group, index);
  if (state !== null) return `${named}: ${WORDS[state] ?? "in no state that is known here"}`;
  const isBacked = index < group.committed;
  return `${named}: ${isBacked ? "committed, not in use yet" : "reserved, without memory"}`;
}

// How large cells are so that all blocks of a group fit in width × MAP_HEIGHT.
export function mapShape(group, width) {
  for (const pitch of [14, 12, 10, 8, 7, 6, 5, 4]) {
    const columns = Math.max(1, Math.floor(width / pitch));
    const rows = Math.ceil(group.capacity / columns);
    if (rows * pitch <= MAP_HEIGHT) return { pitch, columns, rows, per: 1 };
  }
  const columns = Math.max(1, Math.floor(width / 4));
  const most = columns * Math.floor(MAP_HEIGHT / 4);
  const per = Math.ceil(group.capacity / most);
  return { pitch: 4, columns, rows: Math.ceil(group.capacity / per / columns), per };
}

// The highest state in each cell of the map, -1 where nothing is committed, -2 not usable yet.
function cellsOf(group, per) {
  const found = new Int8Array(Math.ceil(group.capacity / per)).fill(-1);
  found.fill(-2, 0, Math.min(found.length, Math.ceil(group.committed / per)));
  let block = 0;
  for (const [state, count] of group.cells) {
    const end = Math.min(group.usable, block + count * group.blocks_per_cell);
    const last = Math.min(found.length, Math.ceil(end / per));
    for (let cell = Math.floor(block / per); cell < last; cell += 1) {
      if (state > found[cell]) found[cell] = state;
    }
    block = end;
  }
  return found;
}

export function drawMap(canvas, group, cursor) {
  const shape = mapShape(group, Math.max(1, canvas.parentElement.clientWidth));
  const [c] = context(canvas, shape.rows * shape.pitch);
  const [paint, size] = [colours(), shape.pitch - (shape.pitch > 5 ? 2 : 1)];
  cellsOf(group, shape.per).forEach((state, cell) => {
    const x = (cell % shape.columns) * shape.pitch;
    const y = Math.floor(cell / shape.columns) * shape.pitch;
    if (state === -1) {
      const dot = Math.max(1, Math.round(size * 0.4));
      c.fillStyle = paint["--hatch"];
      c.fillRect(x + (size - dot) / 2, y + (size - dot) / 2, dot, dot);
    } else {
      fillState(c, paint, state, x, y, size, size);
    }
    if (cursor !== null && Math.floor(cursor / shape.per) === cell) {
      c.strokeStyle = paint["--ink"];
      c.lineWidth = 2;
      c.strokeRect(x, y, size, size);
      c.lineWidth = 1;
    }
  });
}

// The block under a point of the map, null beside it.
export function blockAt(canvas, group, x, y) {
  const shape = mapShape(group, canvas.parentElement.clientWidth);
  const column = Math.floor(x / shape.pitch);
  if (column >= shape.columns) return null;
  const block = (Math.floor(y / shape.pitch) * shape.columns + column) * shape.per;
  return block < group.capacity ? block : null;
}

export function addressShape(group) {
  const per = Math.ceil(group.num_segments / ROWS_MOST); // segments that one row stands for
  const rows = Math.ceil(group.num_segments / per);
  const height = Math.min(22, Math.max(2, Math.floor(96 / rows)));
  return { per, rows, height, gap: height >= 4 ? 1 : 0, ribbon: 4 };
}

// Calls `draw(row, from, to)` for what ranges cover of the rows, as shares of a segment.
function inRows(ranges, group, shape, draw) {
  const size = group.segment_bytes;
  for (const [offset, length] of ranges) {
    const start = Math.max(0, offset - group.offset);
    const end = Math.min(group.num_segments * size, offset + length - group.offset);
    for (let at = start; at < end && size > 0;) {
      const segment = Math.floor(at / size);
      const stop = Math.min(end, (segment + 1) * size);
      if (segment % shape.per === 0) {
        draw(segment / shape.per, (at - segment * size) / size, (stop - segment * size) / size);
      }
      at = stop;
    }
  }
}

function hatch(c, paint, width, height) {
  c.fillStyle = paint["--reserved"];
  c.fillRect(0, 0, width, height);
  c.strokeStyle = paint["--hatch"];
  c.beginPath();
  for (let x = -height; x < width; x += 6) {
    c.moveTo(x, height);
    c.lineTo(x + height, 0);
  }
  c.stroke();
}

export function drawAddresses(canvas, cache, group) {
  const shape = addressShape(group);
  const height = shape.rows * shape.height;
  const [c, width] = context(canvas, height + shape.ribbon + 2);
  const paint = colours();
  hatch(c, paint, width, height);
  const box = (from, to) => [from * width, Math.max(1, (to - from) * width)];
  const size = shape.height - shape.gap;
  c.fillStyle = paint["--free"];
  inRows(cache.committed, group, shape, (row, from, to) => {
    const [x, w] = box(from, to);
    c.fillRect(x, row * shape.height, w, size);
  });
  drawBands(c, group, shape, box, paint);
  c.fillStyle = paint["--registered"];
  inRows(cache.registered, group, { ...shape, per: 1 }, (row, from, to) => {
    const [x, w] = box(from, to);
    c.fillRect(x, height + 2, w, shape.ribbon);
  });
}

// Blocks lie at the same place in every segment, so one state is a band through all rows; marks go
// through them as if there were none, since a row may be two pixels high.
function drawBands(c, group, shape, box, paint) {
  const share = group.segment_block_bytes / group.segment_bytes;
  const bands = [];
  let block = 0;
  for (const [state, count] of group.cells) {
    const end = Math.min(group.usable, block + count * group.blocks_per_cell);
    if (state > 1) bands.push([state, ...box(block * share, end * share)]);
    block = end;
  }
  const height = shape.rows * shape.height;
  for (const [state, x, w] of bands.sort((a, b) => a[0] - b[0])) { // the highest state on top
    const width = state > 3 ? Math.max(SEEN_WIDTH, w) : w;
    fillState(c, paint, state, Math.round(x), 0, Math.max(1, Math.round(width)), height);
  }
  c.fillStyle = paint["--reserved"];
  for (let row = 0; row < shape.rows && shape.gap && bands.length; row += 1) {
    for (const [, x, w] of bands) {
      c.fillRect(Math.round(x), (row + 1) * shape.height - shape.gap, Math.round(w), shape.gap);
    }
  }
}

const isIn = (ranges, at) => ranges.some(([offset, size]) => offset <= at && at < offset + size);

// What is at a point of the address picture.
export function addressWords(canvas, cache, group, x, y) {
  const shape = addressShape(group);
  const row = Math.min(shape.rows - 1, Math.max(0, Math.floor(y / shape.height)));
  const share = Math.min(0.999999, Math.max(0, x / canvas.parentElement.clientWidth));
  const segment = row * shape.per;
  const inside = Math.floor(share * group.segment_bytes);
  const offset = group.offset + segment * group.segment_bytes + inside;
  const address = `0x${(cache.base_address + offset).toString(16)}`;
  const block = Math.floor(inside / group.segment_block_bytes);
  const backed = !isIn(cache.committed, offset) ? "reserved, without memory"
    : isIn(cache.registered, offset) ? "committed and registered" : "committed, not registered";
  const held = block < group.usable ? ` ${wordsOf(group, block)}.` : "";
  return `${address}, segment ${segment + 1} of ${group.num_segments}: ${backed}.${held}`;
}

export function groupWords(group) {
  const size = `${plural(group.block_size, "token")}, ${bytes(group.block_bytes)} each`;
  return `${group.committed} of ${group.capacity} · ${size}`;
}
