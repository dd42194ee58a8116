// The canvas: what is in a view, painted in one go. It reads the model and the state and changes neither.

const AXIS = 26, STRIPE = 7, BETWEEN = 13, LETTER = 6.4;
const ARROWS_UP_TO = 120; // operations in view; with more, the waits hide what they should show
const FULL_UP_TO = 200; // operations; with more, narrow ones in full colour would hide how idle a lane is

// Where everything is on a canvas `width` px wide: a row for each lane and timeline, timelines of a lane together.
function layout(model, width) {
  const many = model.timelines.length > 1;
  const rows = [];
  let y = AXIS + 6;
  model.lanes.forEach(({ thin }, lane) => {
    const bar = (many ? 24 : 32) / (thin ? 2 : 1);
    model.timelines.forEach((_, timeline) => {
      rows.push({ lane, timeline, y, bar });
      y += bar + STRIPE;
    });
    y += BETWEEN;
  });
  const longest = Math.max(0, ...model.lanes.map(({ name }) => name.length));
  const source = many ? Math.max(...model.timelines.map((t) => t.source.length)) + 6 : 0;
  const gutter = Math.min(width * 0.4, Math.max(92, (longest + source) * LETTER * 1.08 + 24));
  return { rows, width, height: y, gutter, plot: Math.max(1, width - gutter - 12) };
}

// The arrow of a wait that is nearest to a point of the plot and at most `slack` px from it, else null.
function arrowAt(arrows, x, y, slack) {
  let nearest = null, least = slack;
  for (const arrow of arrows) {
    for (let k = 0; k <= 24; k++) {
      const { x: at, y: height } = along(arrow, k / 24), away = Math.hypot(at - x, height - y);
      if (away <= least) [nearest, least] = [arrow, away];
    }
  }
  return nearest;
}

// A point of an arrow, from 0 where it begins to 1 at its head: vertical at both ends, as `arrow` of the painter.
function along({ x0, y0, x1, y1 }, t) {
  const turn = t * t * (3 - 2 * t), s = 1 - t, middle = (y0 + y1) / 2;
  return { x: x0 + (x1 - x0) * turn, y: s ** 3 * y0 + 3 * s * t * middle + t ** 3 * y1 };
}

const rowAt = (place, y) => place.rows.find((r) => y >= r.y - 3 && y < r.y + r.bar + STRIPE) ?? null;

function painter(context, model, place, state, colour) {
  const { view } = state;
  const arrows = []; // of waits, as painted
  const faintest = model.count > FULL_UP_TO ? 0.2 : 1;
  const scale = place.plot / (view.t1 - view.t0);
  const shown = (op) => !state.hidden.has(model.ops.verb[op]);
  const fill = (verb) => model.colours[verb];
  const rowOf = (op, timeline) => place.rows[model.lane[op] * model.timelines.length + timeline];
  const left = (timeline, op) => (model.timelines[timeline].from[op] - view.t0) * scale;
  const right = (timeline, op) => (model.timelines[timeline].to[op] - view.t0) * scale;
  const inView = (x0, x1) => x1 >= -20 && x0 <= place.plot + 20;

  function paint() {
    context.clearRect(0, 0, place.width, place.height);
    axis();
    place.rows.forEach(label);
    context.save();
    context.translate(place.gutter, 0);
    context.beginPath();
    context.rect(0, AXIS, place.plot, place.height - AXIS);
    context.clip();
    const bars = place.rows.flatMap(bodies);
    if (state.critical) model.timelines.forEach((_, timeline) => path(timeline));
    if (state.lit) raised();
    if (state.chosen >= 0) model.timelines.forEach((_, timeline) => relations(timeline));
    else if (!state.lit && model.timelines.length === 1 && bars.length <= ARROWS_UP_TO) waits(bars);
    for (const [to, from] of model.removed ?? []) arrow(0, from, to, 1.6, colour.ink, [2, 3]);
    for (const op of new Set([state.hover, state.chosen])) if (op >= 0) outline(op);
    context.restore();
    return arrows;
  }

  function axis() {
    context.font = `12px ${colour.font}`;
    context.textAlign = "center";
    for (const { time, label } of ticks(view, Math.max(2, Math.floor(place.plot / 110)))) {
      const x = Math.round(place.gutter + (time - view.t0) * scale) + 0.5;
      context.fillStyle = colour.line;
      context.fillRect(x - 0.5, AXIS - 4, 1, place.height - AXIS - BETWEEN + 4);
      context.fillStyle = colour.dim;
      const half = context.measureText(label).width / 2;
      context.fillText(label, Math.min(place.width - half - 2, Math.max(half + 2, x)), AXIS - 10);
    }
  }

  function label({ lane, timeline, y, bar }) {
    const { source, rows, from, to, seconds } = model.timelines[timeline];
    context.fillStyle = colour.track;
    context.fillRect(place.gutter, y, place.plot, bar);
    let busy = 0;
    for (const op of rows[lane].order) busy += to[op] - from[op];
    const share = `${Math.round((100 * busy) / (seconds || 1))}%`;
    const many = model.timelines.length > 1;
    const beside = many || model.lanes[lane].thin;
    const middle = y + bar / 2 + 4;
    context.textAlign = "left";
    if (timeline === 0) {
      context.font = `600 12px ${colour.font}`;
      context.fillStyle = colour.ink;
      context.fillText(model.lanes[lane].name, 2, beside ? middle : middle - 7, place.gutter * (beside ? 0.5 : 0.95));
    }
    context.font = `12px ${colour.font}`;
    context.fillStyle = colour.dim;
    context.textAlign = beside ? "right" : "left";
    const words = many ? `${source} ${share}` : beside ? share : `${share} busy`;
    context.fillText(words, beside ? place.gutter - 10 : 2, beside ? middle : middle + 8);
  }

  // The operations of one row; those wide enough to be told apart are returned, with their place.
  function bodies(row) {
    const timeline = model.timelines[row.timeline];
    const dimmed = state.lit ? 0.22 : 1;
    const wide = [];
    const bar = (op, x0, x1) => {
      context.globalAlpha = dimmed;
      context.fillStyle = fill(model.ops.verb[op]);
      context.fillRect(x0, row.y, x1 - x0 - Math.min(0.8, (x1 - x0) / 5), row.bar);
      if (!state.lit) name(op, x0, x1, row);
      wide.push(op);
    };
    const column = (x, verb, share) => {
      context.globalAlpha = dimmed * Math.max(faintest, share);
      context.fillStyle = fill(verb);
      context.fillRect(x, row.y, 1, row.bar);
    };
    paintable(timeline.rows[row.lane], timeline, view, place.plot, model.ops.verb, bar, column, shown);
    context.globalAlpha = 1;
    return wide;
  }

  // The name where it fits, else the index, because the colour tells the verb; of a pipeline's pass its micro-batch.
  function name(op, x0, x1, row) {
    const numbered = model.numbered[model.ops.verb[op]]; // boxes of a pipeline are many
    const from = Math.max(0, x0), space = numbered ? 3 : 6, room = Math.min(place.plot, x1) - from - space;
    if (room < LETTER) return;
    const index = numbered ? model.ops.index[op].slice(0, 1) : model.ops.index[op];
    const text = [model.name(op), String(index)].find((t) => t && t.length * LETTER <= room);
    if (!text) return;
    context.font = `11px ${colour.font}`;
    context.textAlign = "center";
    context.fillStyle = colour.onBar;
    context.fillText(text, from + (space + room) / 2, row.y + row.bar / 2 + 4);
  }

  // The critical path: a stripe below its operations, and lines where it goes from lane to lane, if they can be told
  // apart.
  function path(timeline) {
    const { chain, critical, rows } = model.timelines[timeline];
    context.fillStyle = colour.critical;
    for (const row of place.rows.filter((r) => r.timeline === timeline)) {
      const bar = (_, x0, x1) => context.fillRect(x0, row.y + row.bar + 1, x1 - x0, STRIPE - 3);
      const column = (x, _, share) => {
        context.globalAlpha = Math.max(faintest, share);
        bar(-1, x, x + 1);
        context.globalAlpha = 1;
      };
      paintable(rows[row.lane], model.timelines[timeline], view, place.plot, model.ops.verb, bar, column, (op) => critical[op]);
    }
    const crossings = [];
    for (let k = 1; k < chain.length && crossings.length <= ARROWS_UP_TO; k++) {
      const x = left(timeline, chain[k]);
      if (model.lane[chain[k]] !== model.lane[chain[k - 1]] && inView(x, x)) crossings.push([x, chain[k - 1], chain[k]]);
    }
    if (crossings.length > ARROWS_UP_TO) return;
    for (const [x, ...ops] of crossings) {
      const [a, b] = ops.map((op) => rowOf(op, timeline)).map((row) => row.y + row.bar + 1).sort((p, q) => p - q);
      context.fillRect(x - 0.75, a, 1.5, b - a + STRIPE - 3);
    }
  }

  // What is lit, over all that is dimmed: wide enough to be seen.
  function raised() {
    for (const row of place.rows) {
      const timeline = model.timelines[row.timeline];
      const { order } = timeline.rows[row.lane];
      const [first, end] = visible(timeline.rows[row.lane], view.t0, view.t1);
      for (let k = first; k < end; k++) {
        const op = order[k];
        if (!state.lit[op] || !shown(op)) continue;
        const x0 = left(row.timeline, op), x1 = Math.max(x0 + 2, right(row.timeline, op));
        context.fillStyle = fill(model.ops.verb[op]);
        context.fillRect(x0, row.y, x1 - x0 - Math.min(0.8, (x1 - x0) / 5), row.bar);
        name(op, x0, x1, row);
      }
    }
  }

  // Arrows from what the chosen operation follows, and to what follows it; the one that held it up in bold.
  function relations(timeline) {
    const op = state.chosen;
    for (const n of before(model, op)) arrow(timeline, n, op, n === model.timelines[timeline].after[op] ? 2.2 : 1.1);
    for (const n of behind(model, op)) arrow(timeline, op, n, 1.1);
  }

  function waits(bars) {
    context.globalAlpha = 0.5;
    for (const op of bars) for (const n of model.ops.waits[op]) if (shown(n)) arrow(0, n, op, 0.9);
    context.globalAlpha = 1;
  }

  function arrow(timeline, from, to, thick, ink = colour.ink, dashes = []) {
    const a = rowOf(from, timeline), b = rowOf(to, timeline);
    const x0 = right(timeline, from) - 0.8, x1 = left(timeline, to) + 1;
    if (a === b || !inView(Math.min(x0, x1), Math.max(x0, x1))) return;
    const down = b.y > a.y;
    const y0 = down ? a.y + a.bar : a.y, y1 = down ? b.y : b.y + b.bar;
    const bend = (y1 - y0) / 2;
    const held = state.wait && state.wait.from === from && state.wait.to === to;
    arrows.push({ from, to, x0, y0, x1, y1 });
    context.save();
    if (held) context.globalAlpha = 1;
    context.strokeStyle = context.fillStyle = held ? colour.focus : ink;
    context.lineWidth = held ? 3.5 : thick;
    context.setLineDash(dashes);
    context.beginPath();
    context.moveTo(x0, y0);
    context.bezierCurveTo(x0, y0 + bend, x1, y1 - bend, x1, y1);
    context.stroke();
    context.beginPath();
    context.moveTo(x1, y1);
    context.lineTo(x1 - 3, y1 - (down ? 6 : -6));
    context.lineTo(x1 + 3, y1 - (down ? 6 : -6));
    context.fill();
    context.restore();
  }

  function outline(op) {
    context.strokeStyle = colour.ink;
    context.lineWidth = op === state.chosen ? 2 : 1.2;
    model.timelines.forEach((_, timeline) => {
      const row = rowOf(op, timeline), x0 = left(timeline, op), x1 = right(timeline, op);
      if (inView(x0, x1)) context.strokeRect(x0 - 1, row.y - 1, Math.max(2, x1 - x0) + 1, row.bar + 2);
    });
  }

  return paint;
}
