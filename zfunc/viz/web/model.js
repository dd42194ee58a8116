// What the page shows, as values and pure functions: no document here, so that all of it can be tested alone.
// Operations are numbers, their position in the graph; times are seconds since the step began.
"use strict";

// The data of the page, with what follows from it: names, lanes, who follows whom, rows in order of time.
const decode = (data) => timedBy(related(data), data.timelines.map(inSeconds));

function related(data) {
  const { verb, index, waits } = data.ops;
  const count = verb.length;
  const lane = new Int32Array(count).fill(-1);
  const previous = new Int32Array(count).fill(-1);
  const next = new Int32Array(count).fill(-1);
  data.lanes.forEach(({ ops }, n) => ops.forEach((op, place) => {
    lane[op] = n;
    if (place > 0) [previous[op], next[ops[place - 1]]] = [ops[place - 1], op];
  }));
  const awaited = Array.from({ length: count }, () => []);
  waits.forEach((before, op) => before.forEach((n) => awaited[n].push(op)));
  const name = (op) => data.verbs[verb[op]] + (index[op].length ? `[${index[op]}]` : "");
  return { ...data, count, lane, previous, next, awaited, name };
}

function timedBy(model, given) {
  const timelines = given.map((t) => timed(t, model.lanes));
  return { ...model, timelines, seconds: Math.max(...timelines.map((t) => t.seconds)) || 1 };
}

function inSeconds({ source, tick, start, took, after, last }) {
  const from = Float64Array.from(start, (t) => t * tick);
  return { source, from, to: from.map((_, op) => (start[op] + took[op]) * tick), after, last };
}

// A timeline with its critical path, and a row a lane.
function timed({ source, from, to, after, last }, lanes) {
  const critical = new Uint8Array(from.length);
  const chain = [];
  for (let op = last; op >= 0; op = after[op]) {
    critical[op] = 1;
    chain.push(op);
  }
  const seconds = last < 0 ? 0 : to[last];
  const rows = lanes.map(({ ops }) => row(ops, from, to));
  return { source, from, to, after, critical, chain: chain.reverse(), seconds, rows };
}

// Operations by start, and for each the latest end so far: both only grow, so both can be searched.
function row(ops, from, to) {
  const order = Int32Array.from(ops).sort((a, b) => from[a] - from[b]);
  let latest = 0;
  const reach = Float64Array.from(order, (op) => (latest = Math.max(latest, to[op])));
  return { order, reach, from: Float64Array.from(order, (op) => from[op]) };
}

// How many of `sorted` are below `value` (or at it, with `orAt`).
function below(sorted, value, orAt = false) {
  let low = 0, high = sorted.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] < value || (orAt && sorted[middle] === value)) low = middle + 1;
    else high = middle;
  }
  return low;
}

// The places in a row, from and up to, of the operations that can be seen between two times.
function visible(row, t0, t1) {
  return [below(row.reach, t0), below(row.from, t1, true)];
}

// The operation of a row at a time, else the nearest within `slack` seconds, else -1. Hidden ones are passed over.
function at(row, timeline, time, slack, shown = () => true) {
  const [first, end] = visible(row, time - slack, time + slack);
  let best = -1, nearest = Infinity;
  for (let k = end - 1; k >= first && nearest > 0; k--) {
    const op = row.order[k];
    const away = Math.max(timeline.from[op] - time, time - timeline.to[op], 0);
    if (away < nearest && away <= slack && shown(op)) [best, nearest] = [op, away];
  }
  return best;
}

// What to paint of a row `width` px wide: bar(op, x0, x1) for operations of a pixel or more; what is narrower is added
// up by pixel, and column(x, verb, share) tells which verb fills most of it, and how much of it is filled.
function paintable(row, timeline, view, width, verbOf, bar, column, shown = () => true) {
  const scale = width / (view.t1 - view.t0);
  const filled = new Map();
  let pixel = -1;
  const flush = () => {
    let most = -1, share = 0;
    for (const [verb, part] of filled) {
      share += part;
      if (most < 0 || part > filled.get(most)) most = verb;
    }
    if (most >= 0) column(pixel, most, Math.min(1, share));
    filled.clear();
  };
  const [first, end] = visible(row, view.t0, view.t1);
  for (let k = first; k < end; k++) {
    const op = row.order[k];
    if (!shown(op)) continue;
    const x0 = (timeline.from[op] - view.t0) * scale, x1 = (timeline.to[op] - view.t0) * scale;
    if (x1 - x0 >= 1) {
      bar(op, Math.max(x0, -8), Math.min(x1, width + 8));
      continue;
    }
    const left = Math.floor(x0);
    for (let x = left; x === left || x < x1; x++) {
      if (x !== pixel) flush();
      pixel = x;
      const part = Math.max(1e-6, Math.min(x1, x + 1) - Math.max(x0, x));
      filled.set(verbOf[op], (filled.get(verbOf[op]) ?? 0) + part);
    }
  }
  flush();
}

// How many operations of a row touch a span of time.
function countIn(row, timeline, t0, t1) {
  const [first, end] = visible(row, t0, t1);
  let count = 0;
  for (let k = first; k < end; k++) count += timeline.to[row.order[k]] >= t0;
  return count;
}

// A view is a span of time inside the step. Zoomed by a factor around a time that stays where it is.
function zoomed(view, factor, around, seconds) {
  const span = Math.min(seconds, Math.max((view.t1 - view.t0) / factor, seconds * 1e-8));
  const share = (around - view.t0) / (view.t1 - view.t0);
  return within({ t0: around - share * span, t1: around + (1 - share) * span }, seconds);
}

function panned(view, by, seconds) {
  return within({ t0: view.t0 + by, t1: view.t1 + by }, seconds);
}

// The same span moved into the step.
function within(view, seconds) {
  const span = Math.min(view.t1 - view.t0, seconds);
  const t0 = Math.min(Math.max(view.t0, 0), seconds - span);
  return { t0, t1: t0 + span };
}

// The view moved or widened just enough to show a span of time, and some of what is around it.
function showing(view, from, to, seconds) {
  if (from >= view.t0 && to <= view.t1) return view;
  const span = Math.max(view.t1 - view.t0, (to - from) * 1.5);
  const middle = (from + to) / 2;
  return within({ t0: middle - span / 2, t1: middle + span / 2 }, seconds);
}

// Those an operation has to follow: the one before it on its lane, and those it waits for. And those that follow it.
const before = (model, op) => [...[model.previous[op]].filter((n) => n >= 0), ...model.ops.waits[op]];
const behind = (model, op) => [...[model.next[op]].filter((n) => n >= 0), ...model.awaited[op]];

// How long an operation could have run and did not, in seconds.
function idle(timeline, op) {
  const cause = timeline.after[op];
  return Math.max(0, timeline.from[op] - (cause < 0 ? 0 : timeline.to[cause]));
}

// Operations whose name holds a text, in order of their start; all of one verb by its name.
function found(model, text) {
  const wanted = text.trim().toLowerCase();
  if (!wanted) return [];
  const start = model.timelines[0].from;
  const hits = [];
  for (let op = 0; op < model.count; op++) if (model.name(op).toLowerCase().includes(wanted)) hits.push(op);
  return hits.sort((a, b) => start[a] - start[b]);
}

// The operation with this name, or -1.
function named(model, text) {
  for (let op = 0; op < model.count; op++) if (model.name(op) === text) return op;
  return -1;
}

// At most `most` + 1 round times of a view, each with its label. Labels are told apart however narrow the view is.
function ticks({ t0, t1 }, most) {
  const [unit, name] = unitOf(t1);
  const span = (t1 - t0) / unit;
  if (!(span > 0)) return [{ time: t0, label: `0 ${name}` }];
  const power = 10 ** Math.floor(Math.log10(span / most));
  const step = [1, 2, 5, 10].map((k) => k * power).find((size) => size * most >= span * (1 - 1e-9));
  const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  const marks = [];
  for (let k = Math.ceil(t0 / unit / step - 1e-9); k * step <= (t1 / unit) * (1 + 1e-12); k++) {
    marks.push({ time: k * step * unit, label: `${(k * step).toFixed(Math.min(digits, 20))} ${name}` });
  }
  return marks;
}

const unitOf = (seconds) => [[1, "s"], [1e-3, "ms"], [1e-6, "us"]].find(([unit]) => seconds >= unit) ?? [1e-9, "ns"];

// So many digits and a unit: 42.1 ms, 1.23 GB.
function inWords(seconds, digits = 3) {
  const [unit, name] = seconds ? unitOf(seconds) : [1, "s"];
  return `${rounded(seconds / unit, digits)} ${name}`;
}

function amount(number, unit) {
  const power = Math.min(5, Math.max(0, Math.floor(Math.log10(Math.max(1, number)) / 3 + 1e-9)));
  return `${rounded(number / 1000 ** power, 3)} ${["", "k", "M", "G", "T", "P"][power]}${unit}`;
}

function rounded(number, digits) {
  return Number(number.toPrecision(digits)).toLocaleString("en", { maximumSignificantDigits: digits });
}

// What a link to a view holds, and a link read back: #t=0.1,0.2&op=update[3]&find=host&critical=0&hide=host,disk
function toHash({ view, op, find, critical, hide }, whole) {
  const parts = [];
  if (view.t0 > 0 || view.t1 < whole) parts.push(`t=${view.t0.toPrecision(10)},${view.t1.toPrecision(10)}`);
  if (op) parts.push(`op=${encodeURIComponent(op)}`);
  if (find) parts.push(`find=${encodeURIComponent(find)}`);
  if (!critical) parts.push("critical=0");
  if (hide.length) parts.push(`hide=${hide.map(encodeURIComponent).join(",")}`);
  return parts.join("&");
}

function fromHash(hash, whole) {
  const given = new Map(hash.replace(/^#/, "").split("&").map((part) => {
    const [key, ...value] = part.split("=");
    return [key, value.join("=")];
  }));
  const text = (key) => plain(given.get(key) ?? "");
  const [t0, t1] = (given.get("t") ?? "").split(",").map(Number);
  const view = t1 > t0 ? within({ t0, t1 }, whole) : { t0: 0, t1: whole };
  const hide = (given.get("hide") ?? "").split(",").filter(Boolean).map(plain);
  return { view, op: text("op"), find: text("find"), critical: given.get("critical") !== "0", hide };
}

// Percent escapes read; what is no escape stands for itself.
function plain(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}
