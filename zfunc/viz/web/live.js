// The live page: plans to choose, a machine to change, waits to remove. Whatever changes, the step is simulated again.

const DOUBLINGS = 4; // a rate goes from a 16th to 16 times what it is
const RATES = {
  compute: "Memory of the device", h2d: "Host to device", d2h: "Device to host", host: "Cores and memory of the host",
  read: "Read from drives", write: "Write to drives", network: "Network",
};
const WORDS = {
  compute: "computing", h2d: "copies to the device", d2h: "copies to the host", host: "work of the host", read: "reading from drives",
  write: "writing to drives", network: "the network",
};

function live(document) {
  const data = readData(document);
  const { kinds, places, hardware } = data;
  const root = document.documentElement;
  const node = (tag, text = "", attributes = {}) =>
    Object.assign(document.createElement(tag), { textContent: text }, attributes);
  const el = Object.fromEntries([...document.querySelectorAll("[id]")].map((e) => [e.id, e]));
  const brush = el.memory.getContext("2d");
  const removed = data.plans.map(() => []); // of each plan: [operation, awaited]
  const factors = kinds.map(() => 1);
  const shown = { number: 0, came: data.plans.map(() => 0) };
  let compute = 1, machine = hardware, page = null, waiting = false, later = 0;

  // --- the step ---

  // A plan with what does not change while sliders move.
  function choosePlan(number) {
    const whole = data.plans[number], graph = data.graphs[whole.graph];
    const plan = planOf(data, number, new Set(removed[number].map(String)));
    const numbered = data.verbs.map((_, verb) => whole.numbered.includes(verb));
    const lanes = whole.rows.map(({ lane, thin }) => ({ ...whole.lanes[lane], thin }));
    const frame = related({ ...data, numbered, lanes, regions: graph.regions.name, ops: { ...graph.ops, waits: plan.waits } });
    frame.removed = removed[number];
    const most = mostBytes(plan, places);
    Object.assign(shown, { number, plan, frame, most, races: races(plan) });
    shown.came = simulateOn(planOf(data, number), hardware).seconds;
  }

  function simulateOn(plan, on) {
    const { start, end } = simulate(plan, on);
    return { start, end, seconds: Math.max(0, ...end) };
  }

  function step() {
    waiting = false;
    const began = performance.now(), { plan } = shown;
    machine = scaled(hardware, factors, compute);
    const { start, end, seconds } = simulateOn(plan, machine);
    const { after, last } = heldUp(plan, end);
    shown.bytes = bytesOverTime(plan, places, start, end);
    shown.model = timedBy(shown.frame, [{ source: "simulated", from: start, to: end, after, last }]);
    shown.seconds = seconds;
    const inside = [el.detail, el.race].find((part) => part.contains(document.activeElement));
    if (page) page.show(shown.model);
    tell();
    if (inside && !inside.contains(document.activeElement)) (inside.hidden ? el.picture : inside).focus(); // its button is gone
    root.dataset.frame = (performance.now() - began).toFixed(1);
    clearTimeout(later);
    if (el.all.open) later = setTimeout(compare, 200);
    return shown.model;
  }

  function again() {
    if (!waiting) requestAnimationFrame(step);
    waiting = true;
  }

  function replan(number = shown.number) {
    choosePlan(number);
    again();
  }

  // --- what is told ---

  function tell() {
    const { seconds, came, model } = shown;
    const change = 100 * (seconds / came - 1), size = rounded(Math.abs(change), 2);
    const beside = Math.abs(change) < 0.005 ? "" : `, ${size}% ${change < 0 ? "less" : "more"} than the ${inWords(came)} it came with`;
    el.time.replaceChildren(node("b", inWords(seconds)), ` a step${beside}. The critical path is ${path(model.timelines[0])}.`);
    const lacks = lacking(shown.most);
    el.fits.className = lacks.length ? "error" : "";
    el.fits.textContent = lacks.length ? `Does not fit: ${lacks.join(", ")}.` : `At most ${held(shown.most)}, in any timing.`;
    root.dataset.races = shown.races.length;
    el.race.hidden = !shown.races.length;
    el.race.replaceChildren(...(shown.races.length ? toldOf(shown.races) : []));
  }

  // What the chain of operations that led to the end is made of, in shares of the step.
  function path({ chain, from, to, seconds }) {
    const shares = new Map();
    const add = (what, part) => shares.set(what, (shares.get(what) ?? 0) + part);
    chain.forEach((op, n) => {
      add("idle", Math.max(0, from[op] - (n ? to[chain[n - 1]] : 0)));
      add(WORDS[kinds[shown.frame.ops.kind[op]]], to[op] - from[op]);
    });
    const largest = [...shares].sort((a, b) => b[1] - a[1]).filter(([, part]) => part > 0.005 * seconds);
    return largest.map(([what, part]) => `${what} ${Math.round((100 * part) / seconds)}%`).join(", ") || "empty";
  }

  const held = (bytes) => places.flatMap((x, n) => (bytes[n] ? [`${amount(bytes[n], "B")} ${x}`] : [])).join(", ");

  // Pinned memory is the host's; on a unified machine that of devices, too.
  function lacking(bytes) {
    const needed = {};
    places.forEach((place, n) => {
      const base = place.split(/[:@]/)[0], onHost = base === "pinned" || (base === "device" && hardware.unified);
      const tier = onHost ? place.replace(base, "host") : place;
      needed[tier] = (needed[tier] ?? 0) + bytes[n];
    });
    return Object.entries(needed).flatMap(([place, n]) => {
      const limit = hardware.memory[place.split(/[:@]/)[0]] ?? Infinity;
      return n > limit ? [`${place} needs ${amount(n, "B")} of ${amount(limit, "B")}`] : [];
    });
  }

  function toldOf(found) {
    const { frame, plan, model } = shown;
    const [{ from, to }] = model.timelines, most = 5;
    const lane = (op) => plan.lanes[plan.lane[op]].name;
    const does = (op, r) => (frame.ops.writes[op].includes(r) ? "writes" : "reads");
    const lines = found.slice(0, most).map(([before, after, r]) => {
      const [a, b] = [frame.name(before), frame.name(after)];
      const luck = from[after] >= to[before] ? `In this timing ${b} comes after ${a} by luck alone` : `In this timing ${b} begins before ${a} has ended`;
      return node("p", `${a} (lane ${lane(before)}) ${does(before, r)} ${frame.regions[r]}, ${b} (lane ${lane(after)}) ${does(after, r)} it, and nothing makes the second wait for the first. ${luck}.`);
    });
    const more = found.length > most ? [node("p", `and ${found.length - most} more pairs.`)] : [];
    const back = removed[shown.number].map(([op, n]) =>
      node("button", `Put back: ${frame.name(op)} waits for ${frame.name(n)}`, { type: "button", className: "remove", onclick: () => toggle(op, n) }));
    return [node("h2", found.length > 1 ? `${found.length} races` : "A race"), ...lines, ...more, ...back];
  }

  // --- waits ---

  const isRemoved = (op, n) => removed[shown.number].some(([a, b]) => a === op && b === n);

  function toggle(op, n) {
    const own = removed[shown.number];
    if (isRemoved(op, n)) own.splice(own.findIndex(([a, b]) => a === op && b === n), 1);
    else own.push([op, n]);
    replan();
  }

  function removeWait() {
    const op = page.state.chosen;
    if (op < 0) return;
    const left = shown.plan.waits[op], cause = shown.model.timelines[0].after[op];
    if (left.length) toggle(op, left.includes(cause) ? cause : left[0]);
  }

  const told = ({ to, from }) =>
    `${shown.frame.name(to)} waits for ${shown.frame.name(from)}. Click to ${isRemoved(to, from) ? "put the wait back" : "remove the wait"}`;

  // With the keyboard, a button lies on one arrow after the other.
  const handle = node("button", "", { type: "button", id: "wait", hidden: true });
  let arrows = [];
  const heldArrow = ({ wait }) => arrows.findIndex(({ from, to }) => wait && wait.from === from && wait.to === to);

  function alongArrows(by) {
    const now = heldArrow(page.state);
    page.hold(arrows[now < 0 ? 0 : (now + by + arrows.length) % arrows.length] ?? null);
  }

  function placeHandle({ gutter, width }, state) {
    const arrow = arrows[heldArrow(state)];
    handle.hidden = !arrows.length;
    handle.textContent = arrow ? told(arrow).replace("Click", "Enter") : "Waits";
    const { x, y } = arrow ? along(arrow, 0.5) : { x: 0, y: 0 };
    handle.style.left = `${Math.max(0, Math.min(width - handle.offsetWidth, gutter + x + 12))}px`;
    handle.style.top = `${y - handle.offsetHeight / 2}px`;
  }

  handle.onfocus = () => alongArrows(0);
  handle.onblur = () => page.hold(null);
  handle.onclick = () => page.state.wait && toggle(page.state.wait.to, page.state.wait.from);
  handle.onkeydown = ({ key }) => {
    const by = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[key];
    if (by) alongArrows(by);
    if (key === "Escape") el.picture.focus();
  };

  // For each wait of an operation a button to remove it, or to put it back; and what is in memory when it begins.
  function waits(op, say) {
    const buttons = data.plans[shown.number].waits[op].map((n) => {
      const words = isRemoved(op, n) ? "Put back the wait for" : "Remove the wait for";
      return say.node("button", `${words} ${shown.frame.name(n)}`, { type: "button", className: "remove", onclick: () => toggle(op, n) });
    });
    const at = bytesAt(shown.model.timelines[0].from[op]);
    return [say.node("p", `When it begins: ${held(at)}.`), ...buttons];
  }

  // --- memory, under the lanes ---

  const bytesAt = (time) => shown.bytes.map(({ times, bytes }) => bytes[Math.max(0, below(times, time, true) - 1)]);

  function paintMemory(place, { view }, colour) {
    const rows = places.flatMap((name, n) => (shown.most[n] ? [{ name, n }] : []));
    const high = 40, between = 12, sharp = window.devicePixelRatio || 1, height = rows.length * (high + between);
    [el.memory.width, el.memory.height] = [Math.round(place.width * sharp), Math.round(height * sharp)];
    [el.memory.style.width, el.memory.style.height] = [`${place.width}px`, `${height}px`];
    brush.setTransform(sharp, 0, 0, sharp, 0, 0);
    const scale = place.plot / (view.t1 - view.t0);
    const x = (time) => place.gutter + Math.min(place.plot, Math.max(0, (time - view.t0) * scale));
    rows.forEach(({ name, n }, k) => {
      const top = k * (high + between), { times, bytes } = shown.bytes[n], most = shown.most[n];
      const y = (size) => top + high - (size / most) * (high - 4);
      brush.fillStyle = colour.track;
      brush.fillRect(place.gutter, top, place.plot, high);
      brush.fillStyle = filled;
      brush.beginPath();
      brush.moveTo(place.gutter, top + high);
      for (let at = Math.max(0, below(times, view.t0) - 1); at < times.length && times[at] < view.t1; at++) {
        for (const time of [times[at], times[at + 1] ?? view.t1]) brush.lineTo(x(time), y(bytes[at]));
      }
      brush.lineTo(place.gutter + place.plot, top + high);
      brush.fill();
      brush.fillStyle = colour.ink; // the most in any timing
      for (let at = place.gutter; at < place.gutter + place.plot; at += 7) brush.fillRect(at, y(most), 4, 1);
      brush.textAlign = "left";
      brush.font = `600 12px ${colour.font}`;
      brush.fillText(name, 2, top + 15, place.gutter - 6);
      brush.fillStyle = colour.dim;
      brush.font = `12px ${colour.font}`;
      brush.fillText(amount(Math.max(...bytes), "B"), 2, top + 31, place.gutter - 6);
    });
  }

  // Around operations that race, and from one to the other, in the colour of an error and with a word for it.
  function paintRaces(context, place, { view }, colour) {
    const { model } = shown, [{ from, to }] = model.timelines, scale = place.plot / (view.t1 - view.t0);
    context.save();
    context.beginPath();
    context.rect(place.gutter, 0, place.plot, place.height);
    context.clip();
    context.strokeStyle = error;
    context.setLineDash([5, 3]);
    context.lineWidth = 2;
    for (const [before, after] of shown.races.slice(0, 20)) {
      const [a, b] = [before, after].map((op) => {
        const row = place.rows[model.lane[op]], left = place.gutter + (from[op] - view.t0) * scale;
        const wide = Math.max(3, (to[op] - from[op]) * scale);
        context.strokeRect(left - 1, row.y - 2, wide + 2, row.bar + 4);
        return { x: left + wide / 2, y: row.y + row.bar / 2 };
      });
      context.beginPath();
      context.moveTo(a.x, a.y);
      context.lineTo(b.x, b.y);
      context.stroke();
      const x = Math.min(place.width - 34, Math.max(place.gutter + 18, (a.x + b.x) / 2)), y = (a.y + b.y) / 2 - (a.y === b.y) * 22;
      context.fillStyle = colour.track;
      context.fillRect(x - 17, y - 8, 34, 16);
      context.fillStyle = error;
      context.font = `600 12px ${colour.font}`;
      context.textAlign = "center";
      context.fillText("race", x, y + 4);
    }
    context.restore();
  }

  let error = "", filled = "";

  function paint(context, place, state, colour, painted) {
    arrows = painted.sort((a, b) => a.x1 - b.x1);
    placeHandle(place, state);
    const style = getComputedStyle(root);
    [error, filled] = ["--error", "--filled"].map((name) => style.getPropertyValue(name).trim());
    if (shown.races.length) paintRaces(context, place, state, colour);
    paintMemory(place, state, colour);
  }

  // --- choices ---

  // A choice for each question; the plan with this answer that differs least from what is shown.
  function answer(question, text) {
    const now = data.plans[shown.number].answers;
    const alike = ({ answers }) => answers.filter((x, n) => x === (n === question ? text : now[n])).length;
    const fit = data.plans.map((_, n) => n).filter((n) => data.plans[n].answers[question] === text);
    choose(fit.reduce((best, n) => (alike(data.plans[n]) > alike(data.plans[best]) ? n : best)));
  }

  function choose(number) {
    replan(number);
    data.plans[number].answers.forEach((text, n) => (el.choices.querySelectorAll("select")[n].value = text));
    markCurrent();
  }

  function showChoices() {
    data.questions.forEach((question, n) => {
      const select = node("select", "", { onchange: () => answer(n, select.value) });
      const texts = [...new Set(data.plans.map(({ answers }) => answers[n]))];
      select.append(...texts.map((text) => node("option", text, { value: text })));
      select.disabled = texts.length < 2;
      const label = node("label", question);
      label.append(select);
      el.choices.append(label);
    });
  }

  function showMachine() {
    el.machine.append(node("span", hardware.name, { className: "dim" }));
    const reset = [];
    const used = new Set(data.graphs.flatMap(({ ops }) => ops.kind));
    const slider = (id, name, came, unit, set) => {
      const input = node("input", "", { type: "range", min: -DOUBLINGS, max: DOUBLINGS, step: 0.05, id });
      const output = node("output"), label = node("label", name);
      const change = () => {
        const factor = 2 ** input.value;
        set(factor);
        output.textContent = `${amount(came * factor, unit)}${factor === 1 ? "" : `, x ${rounded(factor, 2)}`}`;
        input.setAttribute("aria-valuetext", output.textContent);
      };
      input.oninput = () => (change(), again());
      reset.push(() => ((input.value = 0), change()));
      label.append(output, input);
      el.machine.append(label);
    };
    slider("flops", "Arithmetic of the device", hardware.flops, "FLOP/s", (factor) => (compute = factor));
    for (const [kind, name] of Object.entries(RATES)) {
      const n = kinds.indexOf(kind);
      if (used.has(n)) slider(kind, name, hardware.rates[n], "B/s", (factor) => (factors[n] = factor));
    }
    reset.forEach((back) => back());
    el.machine.append(node("button", "As the page came", { type: "button", id: "back", onclick: () => (reset.forEach((back) => back()), again()) }));
  }

  // Every plan on this machine, one after the other, so that the page stays quick.
  function compare(rows = []) {
    const number = rows.length;
    if (number < data.plans.length) {
      const plan = planOf(data, number);
      rows.push({ number, seconds: simulateOn(plan, machine).seconds, most: mostBytes(plan, places) });
      later = setTimeout(compare, 0, rows);
      return;
    }
    const seen = places.map((_, n) => n).filter((n) => rows.some(({ most }) => most[n]));
    const head = node("tr");
    head.append(...["", ...data.questions, "a step", ...seen.map((n) => places[n])].map((text) => node("th", text, { scope: "col" })));
    el.plans.replaceChildren(head, ...rows.sort((a, b) => a.seconds - b.seconds).map(({ number: n, seconds, most }) => {
      const row = node("tr"), button = node("td");
      button.append(node("button", "Show", { type: "button", onclick: () => choose(n) }));
      const cells = [...data.plans[n].answers, inWords(seconds), ...seen.map((place) => amount(most[place], "B"))];
      row.dataset.number = n;
      row.append(button, ...cells.map((text) => node("td", text)));
      return row;
    }));
    markCurrent();
  }

  function markCurrent() {
    for (const row of el.plans.rows) row.setAttribute("aria-current", String(row.dataset.number === String(shown.number)));
  }

  el.all.ontoggle = () => el.all.open && compare();
  el.memory.onpointermove = ({ offsetX }) => {
    const { view } = page.state, gutter = layout(shown.model, el.stage.clientWidth);
    const time = view.t0 + ((offsetX - gutter.gutter) / gutter.plot) * (view.t1 - view.t0);
    el.memory.title = time < view.t0 ? "" : `at ${inWords(time, 4)}: ${held(bytesAt(time))}`;
  };
  el.detail.addEventListener("keydown", ({ key }) => key === "Escape" && el.picture.focus());

  const keys = {
    ArrowLeft: () => page.alongLane(-1), ArrowRight: () => page.alongLane(1),
    z: () => page.state.chosen >= 0 && page.closeUp(page.state.chosen),
    Enter: () => page.state.chosen >= 0 && el.detail.focus(),
    Delete: removeWait, Backspace: removeWait,
    Insert: () => removed[shown.number].length && toggle(...removed[shown.number].at(-1)),
  };

  el.picture.after(handle);
  showChoices();
  showMachine();
  choosePlan(0);
  page = start(document, step(), { paint, detail: waits, keys, toggle, told });
}

live(document);
