// The simulator of zfunc.core.simulator, in the same order of additions: the same times, to the bit. Operations, lanes,
// kinds and places of memory are numbers; times are seconds since the step began.
"use strict";

// A plan of the page's data, without the waits in `removed` ("operation,awaited"), and what follows from it.
function planOf(data, number, removed = new Set()) {
  const { graph, lanes, rows, waits } = data.plans[number];
  const { ops, ofRanks } = data.graphs[graph];
  const count = waits.length;
  const plan = { graph: data.graphs[graph], ops, count, lanes, rows, unified: data.hardware.unified };
  plan.waits = waits.map((before, op) => before.filter((n) => !removed.has(`${op},${n}`)));
  [plan.lane, plan.position] = [new Int32Array(count), new Int32Array(count)];
  lanes.forEach(({ ops: own }, n) => own.forEach((op, p) => ([plan.lane[op], plan.position[op]] = [n, p])));
  // What an operation runs on: a resource for each kind and device, and Python's lock of a process.
  plan.resources = [];
  const numbers = new Map();
  const resource = (kind, device) => {
    const key = `${kind},${device}`;
    if (!numbers.has(key)) numbers.set(key, plan.resources.push({ kind, device }) - 1);
    return numbers.get(key);
  };
  plan.on = ops.kind.map((kind, op) => resource(kind, ops.device[op]));
  plan.locks = ops.device.map((device) => resource(-1, ofRanks ? device : 0));
  plan.order = topologicalOrder(plan);
  plan.clocks = clocksOf(plan);
  plan.behind = endedBefore(plan, (kind) => data.unwatched.includes(kind));
  plan.waited = plan.unified ? endedBefore(plan, () => true) : plan.behind;
  return plan;
}

// All operations, so that each lane keeps its order and each comes after what it waits for.
function topologicalOrder({ lanes, waits, count }) {
  const all = lanes.flatMap(({ ops }) => ops);
  const ascending = lanes.every(({ ops }) => ops.every((op, p) => !p || ops[p - 1] < op));
  if (ascending && all.every((op) => waits[op].every((n) => n < op))) return all.sort((a, b) => a - b);
  const pending = new Int32Array(count);
  const unlocks = lists(count);
  for (const { ops } of lanes) {
    ops.forEach((op, p) => {
      const before = p ? [...waits[op], ops[p - 1]] : waits[op];
      pending[op] = before.length;
      for (const n of before) unlocks[n].push(op);
    });
  }
  const ready = all.filter((op) => !pending[op]).reverse();
  const order = [];
  while (ready.length) {
    const op = ready.pop();
    order.push(op);
    for (const after of unlocks[op]) if (!--pending[after]) ready.push(after);
  }
  return order;
}

const lists = (count) => Array.from({ length: count }, () => []);

// What is known when an operation ends: of each lane the position of the last operation that has ended for certain.
function tick(clock, op, { lane, position, waits }, clocks) {
  const known = Int32Array.from(clock);
  for (const n of waits[op]) clocks[n].forEach((p, other) => (known[other] = Math.max(known[other], p)));
  known[lane[op]] = position[op];
  return known;
}

function clocksOf(plan) {
  const clocks = [], last = plan.lanes.map(() => new Int32Array(plan.lanes.length).fill(-1));
  for (const op of plan.order) clocks[op] = last[plan.lane[op]] = tick(last[plan.lane[op]], op, plan, clocks);
  return clocks;
}

// Where lanes share a thread of Python: what has ended on other lanes when the thread comes to an operation, as it has
// waited for all of certain kinds.
function endedBefore(plan, waitedFor) {
  const { lanes, lane, ops } = plan;
  const found = lists(plan.count), clocks = [], last = {};
  if (new Set(lanes.map(({ thread }) => thread)).size === lanes.length) return found;
  for (const op of plan.order) {
    const { thread } = lanes[lane[op]];
    const clock = last[thread] ?? new Int32Array(lanes.length).fill(-1);
    clock.forEach((p, n) => n !== lane[op] && p >= 0 && found[op].push(lanes[n].ops[p]));
    const known = tick(clock, op, plan, clocks);
    if (!waitedFor(ops.kind[op])) known[lane[op]] = clock[lane[op]];
    clocks[op] = last[thread] = known;
  }
  return found;
}

// --- seconds of operations alone, from their work and the rates of a machine ---

function secondsAlone(ops, hardware) {
  const { flops, attention, rates, latencies, launch, collectives, kinds } = hardware;
  const copies = Math.min(rates[kinds.indexOf("h2d")], rates[kinds.indexOf("d2h")]);
  const network = kinds.indexOf("network");
  return Float64Array.from(ops.kind, (kind, op) => {
    const at = (rate) => ops.products[op] / flops + ops.attention[op] / attention + ops.nbytes[op] / rate;
    const ways = [[latencies[kind], rates[kind]], ...(kind === network ? collectives : [])];
    const work = Math.min(...ways.map(([latency, rate]) => latency + at(rate)));
    return Math.max(work, ops.launches[op] * launch, ops.copied[op] / copies) * (ops.pace?.[op] ?? 1);
  });
}

// The seconds in which Python issues each operation, a part of those it takes.
function issuedSeconds(ops, { issue, launch }, alone) {
  const own = (kind, op) => (issue[kind] ? issue[kind] + ops.launches[op] * launch : 0);
  return Float64Array.from(ops.kind, (kind, op) => Math.min(alone[op], own(kind, op)));
}

// The machine with its FLOP/s and its rates times a factor each, by kind.
function scaled(hardware, factors, compute) {
  const rates = hardware.rates.map((rate, kind) => rate * factors[kind]);
  return { ...hardware, rates, flops: hardware.flops * compute, attention: hardware.attention * compute };
}

// --- the speed of what runs at once ---

function speedsOf(plan, { shared }) {
  const cache = new Map();
  return (counts) => {
    const key = counts.join();
    if (!cache.has(key)) cache.set(key, together(plan.resources, shared, counts));
    return cache.get(key);
  };
}

function together(resources, shared, counts) {
  const speeds = Float64Array.from(counts, (n) => 1 / n); // its own resource, of as many as run
  for (const { shares, neighbours } of shared) {
    const groups = new Map();
    resources.forEach(({ kind, device }, x) => {
      if (!counts[x] || !shares[kind]) return;
      const group = neighbours ? Math.floor(device / neighbours) : 0;
      groups.set(group, [...(groups.get(group) ?? []), x]);
    });
    for (const group of groups.values()) {
      const demand = exactSum(group.map((x) => shares[resources[x].kind] * counts[x]));
      if (demand > 1) for (const x of group) speeds[x] = Math.min(speeds[x], 1 / demand);
    }
  }
  return speeds;
}

// The sum, rounded once: Python's math.fsum.
function exactSum(values) {
  const parts = [];
  for (let x of values) {
    let kept = 0;
    for (let y of parts) {
      if (Math.abs(x) < Math.abs(y)) [x, y] = [y, x];
      const high = x + y, low = y - (high - x);
      if (low) parts[kept++] = low;
      x = high;
    }
    parts.length = kept;
    parts.push(x);
  }
  let high = parts.pop() ?? 0, low = 0;
  while (parts.length && !low) {
    const x = high, y = parts.pop();
    high = x + y;
    low = y - (high - x);
  }
  const next = parts.at(-1) ?? 0; // half way between two numbers, what is left decides
  const rounded = high + 2 * low;
  return Math.sign(low) === Math.sign(next) && 2 * low === rounded - high ? rounded : high;
}

// --- the step ---

// When each operation starts and ends. A lane that slept is woken, where Python's lock is counted, by an operation WAKING.
function simulate(plan, hardware) {
  const WAKING = -1;
  const { lanes, lane, ops, count, on, locks } = plan;
  const { handoff, locked } = hardware;
  const alone = secondsAlone(ops, hardware), speeds = speedsOf(plan, hardware);
  const issued = locked ? issuedSeconds(ops, hardware, alone) : new Float64Array(count);
  const start = new Float64Array(count), end = new Float64Array(count);
  const pending = new Int32Array(count), unlocks = lists(count), beside = lists(count);
  for (let op = 0; op < count; op++) {
    for (const n of [...plan.waits[op], ...plan.waited[op]]) {
      const here = lanes[lane[n]].thread === lanes[lane[op]].thread && lane[n] !== lane[op];
      (here ? beside : unlocks)[n].push(op);
      pending[op]++;
    }
  }
  const at = lanes.map(() => 0), idle = lanes.map(() => true);
  const counts = new Int32Array(plan.resources.length);
  const handed = []; // [time, operations], in order of time
  let running = [];

  function run(op, resource, own, now, seconds, rest = 0) {
    running.push({ op, resource, lane: own, since: now, left: seconds, speed: 1, end: now + seconds, rest });
    counts[resource]++;
    idle[own] = false;
  }

  const next = (own) => {
    const op = lanes[own].ops[at[own]];
    return idle[own] && op !== undefined && !pending[op] ? op : -1;
  };

  function begin(own, now) {
    const op = next(own);
    if (op < 0) return;
    if (issued[op]) run(op, locks[op], own, now, issued[op], alone[op] - issued[op]);
    else run(op, on[op], own, now, alone[op]);
    at[own]++;
    start[op] = now;
  }

  function wake(own, now) {
    if (!locked) begin(own, now);
    else if (next(own) >= 0) run(WAKING, locks[next(own)], own, now, handoff);
  }

  // To the next end or hand-over; what it unblocks starts, and all that runs shares the machine again.
  function advance() {
    let now = handed.length ? handed[0][0] : Infinity;
    for (const r of running) now = Math.min(now, r.end);
    const told = locked ? now : now + handoff;
    const free = [], woken = [], before = running;
    running = [];
    for (const r of before) {
      if (r.end !== now) {
        running.push(r);
        continue;
      }
      counts[r.resource]--;
      if (r.rest > 0) {
        run(r.op, on[r.op], r.lane, now, r.rest);
        continue;
      }
      idle[r.lane] = true;
      free.push(r.lane);
      if (r.op === WAKING) continue;
      end[r.op] = now;
      for (const op of beside[r.op]) {
        pending[op]--;
        free.push(lane[op]);
      }
      if (unlocks[r.op].length) handed.push([told, unlocks[r.op]]);
    }
    while (handed.length && handed[0][0] <= now) {
      for (const op of handed.shift()[1]) {
        pending[op]--;
        woken.push(lane[op]);
      }
    }
    for (const own of free) begin(own, now);
    for (const own of woken) wake(own, now);
    share(now);
  }

  function share(now) {
    const fast = speeds(counts);
    for (const r of running) {
      const speed = fast[r.resource];
      if (speed === r.speed) continue;
      r.left = Math.max(0, r.left - (now - r.since) * r.speed);
      [r.since, r.speed, r.end] = [now, speed, now + r.left / speed];
    }
  }

  lanes.forEach((_, own) => begin(own, 0));
  share(0);
  while (running.length || handed.length) advance();
  return { start, end };
}

// Of each operation the one that ended last of those before it: on its lane, by a wait, or on its thread; and the last.
function heldUp({ lanes, lane, position, waits, behind, count }, end) {
  const latest = (of) => of.reduce((best, n) => (best < 0 || end[n] > end[best] ? n : best), -1);
  const after = Array.from({ length: count }, (_, op) => {
    const previous = position[op] ? [lanes[lane[op]].ops[position[op] - 1]] : [];
    return latest([...previous, ...waits[op], ...behind[op]]);
  });
  return { after, last: latest([...Array(count).keys()]) };
}

// --- memory ---

// What is allocated for a part of the step: bytes at a place of memory, and the operations that use them, in order.
function allocations(graph, places) {
  const { ops, regions } = graph;
  if (graph.allocated) return graph.allocated;
  const used = lists(regions.name.length), found = [];
  ops.reads.forEach((reads, op) => {
    const touched = [...new Set([...reads, ...ops.writes[op]])];
    for (const r of touched) used[r].push(op);
    if (!ops.workspace[op]) return;
    const there = touched.map((r) => regions.place[r]).find((n) => places[n].startsWith("device"));
    found.push({ place: there ?? places.indexOf("device"), nbytes: ops.workspace[op], ops: [op] });
  });
  used.forEach((of, r) => {
    if (!regions.kept[r] && of.length) found.push({ place: regions.place[r], nbytes: regions.nbytes[r], ops: of });
  });
  return (graph.allocated = found);
}

// The most bytes of each place in any timing that the plan allows: zfunc.core.memory_model.
function mostBytes(plan, places) {
  const { graph, lanes, lane, position, clocks } = plan;
  const changes = places.map(() => lanes.map(({ ops }) => new Float64Array(ops.length + 2)));
  for (const { place, nbytes, ops } of allocations(graph, places)) {
    lanes.forEach(({ ops: own }, n) => {
      let after = 0;
      for (const op of ops) {
        const first = own.findIndex((of) => clocks[of][lane[op]] >= position[op]);
        after = Math.max(after, lane[op] === n ? position[op] + 1 : first < 0 ? own.length : first);
      }
      changes[place][n][clocks[ops[0]][n] + 1] += nbytes;
      changes[place][n][after + 1] -= nbytes;
    });
  }
  return places.map((_, place) => {
    let most = Infinity;
    lanes.forEach(({ ops }, n) => {
      let now = 0;
      if (ops.length) most = Math.min(most, Math.max(...changes[place][n].map((by) => (now += by))));
    });
    return graph.kept[place] + (most < Infinity ? most : 0);
  });
}

// The bytes of each place over time, in one timing: [times, bytes], from each time on.
function bytesOverTime({ graph }, places, start, end) {
  const changes = places.map(() => []);
  for (const { place, nbytes, ops } of allocations(graph, places)) {
    const from = Math.min(...ops.map((op) => start[op])), to = Math.max(...ops.map((op) => end[op]));
    if (to > from) changes[place].push([from, nbytes], [to, -nbytes]);
  }
  return changes.map((of, place) => {
    const times = [0], bytes = [graph.kept[place]];
    for (const [time, by] of of.sort((a, b) => a[0] - b[0] || a[1] - b[1])) { // what ends makes room first
      if (time > times.at(-1)) [times[times.length], bytes[bytes.length]] = [time, bytes.at(-1)];
      bytes[bytes.length - 1] += by;
    }
    return { times, bytes };
  });
}
