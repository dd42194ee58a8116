// The page: what the hands do to the view, and what is told of an operation. The live page has `own` keys, texts and
// pictures beside these; and on it arrows can be held, which `own.told` puts into words, and clicked.

const readData = (document) => JSON.parse(document.getElementById("data").textContent);

function start(document, first, own = {}) {
  let model = first;
  const el = Object.fromEntries([...document.querySelectorAll("[id]")].map((e) => [e.id, e]));
  const context = el.picture.getContext("2d");
  const root = document.documentElement;
  const state = { view: { t0: 0, t1: model.seconds }, hover: -1, chosen: -1, lit: null, matches: [], critical: true, wait: null };
  state.hidden = new Set();
  let say = teller(document, model, (op) => choose(op));
  let arrows = [], place = layout(model, 800), colour = {}, asked = false, linked = null;

  // --- painting ---

  function repaint() {
    if (!asked) requestAnimationFrame(() => asked && paint());
    asked = true;
  }

  function paint() {
    asked = false;
    const began = performance.now();
    const sharp = window.devicePixelRatio || 1;
    place = layout(model, Math.max(280, el.stage.clientWidth));
    const [width, height] = [Math.round(place.width * sharp), Math.round(place.height * sharp)];
    if (el.picture.width !== width || el.picture.height !== height) {
      [el.picture.width, el.picture.height] = [width, height];
      [el.picture.style.width, el.picture.style.height] = [`${place.width}px`, `${place.height}px`];
    }
    context.setTransform(sharp, 0, 0, sharp, 0, 0);
    arrows = painter(context, model, place, state, colour)();
    own.paint?.(context, place, state, colour, arrows);
    const { t0, t1 } = state.view;
    const zoom = model.seconds / (t1 - t0);
    el.where.textContent = zoom < 1.0001 ? "the whole step" : `${inWords(t0, 6)} to ${inWords(t1, 6)}, ${rounded(zoom, 3)} times closer`;
    root.dataset.painted = (performance.now() - began).toFixed(1);
  }

  function readColours() {
    const style = getComputedStyle(root);
    const names = { ink: "--ink", dim: "--dim", line: "--line", track: "--track", onBar: "--on-bar", critical: "--critical", focus: "--focus", font: "--font" };
    colour = Object.fromEntries(Object.entries(names).map(([key, name]) => [key, style.getPropertyValue(name).trim()]));
    repaint();
  }

  // --- the view, and the link to it ---

  function look(view) {
    state.view = view;
    el.tip.hidden = true;
    changed();
  }

  function changed() {
    repaint();
    clearTimeout(linked);
    linked = setTimeout(() => {
      const hash = toHash(linkable(), model.seconds);
      if (hash !== location.hash.slice(1)) location.replace(`#${hash}`);
    }, 250);
  }

  const linkable = () => ({
    view: state.view, op: state.chosen < 0 ? "" : model.name(state.chosen), find: el.find.value, critical: state.critical,
    hide: [...state.hidden].map((verb) => model.verbs[verb]),
  });

  function followLink() {
    if (location.hash.slice(1) === toHash(linkable(), model.seconds)) return;
    const link = fromHash(location.hash, model.seconds);
    state.view = link.view;
    state.hidden = new Set(link.hide.map((verb) => model.verbs.indexOf(verb)).filter((verb) => verb >= 0));
    light(link.critical);
    showLegend();
    el.find.value = link.find;
    search();
    choose(link.op ? named(model, link.op) : -1, { move: false });
    changed();
  }

  const timeAt = (x) => state.view.t0 + ((x - place.gutter) / place.plot) * (state.view.t1 - state.view.t0);
  const zoom = (factor, around = (state.view.t0 + state.view.t1) / 2) => look(zoomed(state.view, factor, around, model.seconds));
  const pan = (share) => look(panned(state.view, share * (state.view.t1 - state.view.t0), model.seconds));
  const whole = () => look({ t0: 0, t1: model.seconds });

  function closeUp(op) {
    const from = Math.min(...model.timelines.map((t) => t.from[op])), to = Math.max(...model.timelines.map((t) => t.to[op]));
    const room = Math.max(to - from, model.seconds * 1e-7) * 4;
    look(within({ t0: (from + to - room) / 2, t1: (from + to + room) / 2 }, model.seconds));
  }

  // --- choosing and finding ---

  function choose(op, { move = true } = {}) {
    state.chosen = op;
    if (op >= 0 && move) {
      const { from, to } = model.timelines[0];
      state.view = showing(state.view, from[op], to[op], model.seconds);
    }
    relight();
    detail();
    changed();
  }

  function detail() {
    const op = state.chosen;
    el.detail.replaceChildren(...(op < 0 ? [] : [...say.detail(op), ...(own.detail?.(op, say) ?? [])]));
    el.detail.hidden = op < 0;
  }

  // Lit are the chosen operation and its relations, else what is searched for, else nothing in particular.
  function relight() {
    const { chosen } = state;
    const ops = chosen >= 0 ? [chosen, ...before(model, chosen), ...behind(model, chosen)] : state.matches;
    state.lit = chosen >= 0 || el.find.value.trim() ? new Uint8Array(model.count) : null;
    for (const op of ops) state.lit[op] = 1;
  }

  function search() {
    state.matches = found(model, el.find.value);
    relight();
    count();
    changed();
  }

  function count() {
    const at = state.matches.indexOf(state.chosen);
    const many = state.matches.length.toLocaleString("en");
    el.matches.textContent = el.find.value.trim() ? (at < 0 ? `${many} found` : `${at + 1} of ${many}`) : "";
  }

  function step(by) {
    const { matches } = state;
    if (!matches.length) return;
    const at = matches.indexOf(state.chosen);
    choose(matches[at < 0 ? (by > 0 ? 0 : matches.length - 1) : (at + by + matches.length) % matches.length]);
    count();
  }

  function alongLane(by) {
    const { chosen } = state;
    const first = () => model.timelines[0].chain[0] ?? -1;
    const op = chosen < 0 ? first() : by > 0 ? model.next[chosen] : model.previous[chosen];
    if (op >= 0) choose(op);
  }

  function acrossLanes(by) {
    const { chosen } = state;
    if (chosen < 0) return alongLane(1);
    const [timeline] = model.timelines;
    const time = (timeline.from[chosen] + timeline.to[chosen]) / 2;
    for (let lane = model.lane[chosen] + by; timeline.rows[lane]; lane += by) {
      const op = at(timeline.rows[lane], timeline, time, model.seconds);
      if (op >= 0) return choose(op);
    }
  }

  function light(critical) {
    state.critical = critical;
    el.critical.setAttribute("aria-pressed", String(critical));
    changed();
  }

  function showLegend() {
    const counts = new Int32Array(model.verbs.length);
    for (const verb of model.ops.verb) counts[verb]++;
    el.legend.replaceChildren(...model.verbs.map((verb, n) => {
      const swatch = say.node("span", "", { className: "swatch" });
      swatch.style.background = model.colours[n];
      const chip = say.node("button", "", { type: "button", title: "Click to hide or show; with Shift, to show it alone" });
      chip.append(swatch, verb, say.node("small", ` ${counts[n].toLocaleString("en")}`));
      chip.setAttribute("aria-pressed", String(!state.hidden.has(n)));
      chip.onclick = (event) => hide(n, event.shiftKey);
      chip.hidden = !counts[n];
      return chip;
    }));
  }

  function hide(verb, alone) {
    const { hidden } = state;
    if (alone) state.hidden = new Set(model.verbs.map((_, n) => n).filter((n) => n !== verb));
    else if (!hidden.delete(verb)) hidden.add(verb);
    el.legend.childNodes.forEach((chip, n) => chip.setAttribute("aria-pressed", String(!state.hidden.has(n))));
    changed();
  }

  // --- hands ---

  function pick({ offsetX, offsetY }) {
    const row = rowAt(place, offsetY);
    if (!row || offsetX < place.gutter) return { op: -1, row };
    const timeline = model.timelines[row.timeline];
    const slack = (4 * (state.view.t1 - state.view.t0)) / place.plot;
    const shown = (op) => !state.hidden.has(model.ops.verb[op]);
    return { op: at(timeline.rows[row.lane], timeline, timeAt(offsetX), slack, shown), row };
  }

  // The wait whose arrow is pointed at, unless an operation is.
  function waitAt(event) {
    const { offsetX, offsetY, pointerType } = event, row = rowAt(place, offsetY);
    const onBar = row && offsetY >= row.y && offsetY < row.y + row.bar && pick(event).op >= 0;
    return own.toggle && !onBar ? arrowAt(arrows, offsetX - place.gutter, offsetY, pointerType === "mouse" ? 6 : 12) : null;
  }

  function hold(wait) {
    if (wait?.from !== state.wait?.from || wait?.to !== state.wait?.to) repaint();
    state.wait = wait;
    el.picture.style.cursor = wait ? "pointer" : "";
  }

  const fingers = new Map();
  let moved = 0;

  el.picture.onpointerdown = (event) => {
    if (event.button) return;
    el.picture.setPointerCapture(event.pointerId);
    if (!fingers.size) moved = 0;
    fingers.set(event.pointerId, event.offsetX);
  };

  el.picture.onpointermove = (event) => {
    const last = fingers.get(event.pointerId);
    if (last === undefined) return event.pointerType === "mouse" ? hover(event) : undefined;
    const others = [...fingers].filter(([id]) => id !== event.pointerId).map(([, x]) => x);
    const perPixel = (state.view.t1 - state.view.t0) / place.plot;
    moved += Math.abs(event.offsetX - last);
    fingers.set(event.pointerId, event.offsetX);
    if (others.length === 1) {
      const [still] = others;
      const factor = Math.max(12, Math.abs(event.offsetX - still)) / Math.max(12, Math.abs(last - still));
      zoom(factor, timeAt(still));
    } else if (moved > 4) {
      el.picture.classList.add("held");
      look(panned(state.view, (last - event.offsetX) * perPixel, model.seconds));
    }
  };

  el.picture.onpointerup = el.picture.onpointercancel = (event) => {
    const held = fingers.delete(event.pointerId);
    el.picture.classList.remove("held");
    if (!held || fingers.size || moved > 4 || event.type !== "pointerup") return;
    const wait = waitAt(event);
    if (wait) (el.tip.hidden = true), own.toggle(wait.to, wait.from);
    else choose(pick(event).op, { move: false });
  };

  el.picture.onpointerleave = () => {
    el.tip.hidden = true;
    if (state.hover >= 0) repaint();
    state.hover = -1;
    hold(null);
  };

  function hover(event) {
    const wait = waitAt(event), { op, row } = wait ? { op: -1 } : pick(event);
    hold(wait);
    if (wait) tip(event, [own.told(wait)], event.offsetY - 6, event.offsetY + 18);
    else if (op >= 0) tip(event, about(event, op, row), row.y, row.y + row.bar + STRIPE + 4);
    else el.tip.hidden = true;
    if (op !== state.hover) repaint();
    state.hover = op;
  }

  function about(event, op, row) {
    const timeline = model.timelines[row.timeline];
    const time = timeAt(event.offsetX), pixel = (state.view.t1 - state.view.t0) / place.plot;
    const others = countIn(timeline.rows[row.lane], timeline, time - pixel / 2, time + pixel / 2) - 1;
    return say.tip(op, others);
  }

  function tip(event, content, above, below) {
    el.tip.replaceChildren(...content);
    el.tip.hidden = false;
    const room = el.stage.clientWidth - el.tip.offsetWidth - 4;
    el.tip.style.left = `${Math.max(0, Math.min(room, event.offsetX + 14))}px`;
    const fits = el.stage.getBoundingClientRect().top + below + el.tip.offsetHeight < window.innerHeight;
    el.tip.style.top = `${fits || above < el.tip.offsetHeight ? below : above - el.tip.offsetHeight - 6}px`;
  }

  el.picture.ondblclick = (event) => {
    const { op } = pick(event);
    if (op >= 0) closeUp(op);
  };

  el.picture.addEventListener("wheel", (event) => {
    event.preventDefault();
    const lines = event.deltaMode ? 16 : 1;
    const [x, y] = [event.deltaX * lines, event.deltaY * lines];
    const sideways = event.shiftKey ? x || y : Math.abs(x) > Math.abs(y) ? x : 0;
    if (sideways) pan(sideways / place.plot);
    else zoom(Math.exp(-y * (event.ctrlKey ? 0.01 : 0.002)), timeAt(event.offsetX));
  }, { passive: false });

  const KEYS = {
    ArrowLeft: () => pan(-0.15), ArrowRight: () => pan(0.15), ArrowUp: () => acrossLanes(-1), ArrowDown: () => acrossLanes(1),
    "+": () => zoom(1.5), "=": () => zoom(1.5), "-": () => zoom(1 / 1.5), 0: whole, Home: whole,
    ",": () => alongLane(-1), ".": () => alongLane(1),
    b: () => state.chosen >= 0 && model.timelines[0].after[state.chosen] >= 0 && choose(model.timelines[0].after[state.chosen]),
    Enter: () => state.chosen >= 0 && closeUp(state.chosen), Escape: () => choose(-1),
    ...own.keys,
  };

  el.picture.onkeydown = (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || !KEYS[event.key]) return;
    event.preventDefault();
    KEYS[event.key]();
  };

  document.onkeydown = (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches?.("input")) return;
    if (event.key === "c") light(!state.critical);
    if (event.key === "/") el.find.focus();
    if (event.key === "c" || event.key === "/") event.preventDefault();
  };

  el.find.oninput = () => {
    if (state.chosen >= 0) choose(-1);
    search();
  };
  el.find.onkeydown = (event) => {
    if (event.key === "Enter") step(event.shiftKey ? -1 : 1);
    if (event.key === "Escape") el.picture.focus();
  };
  el.earlier.onclick = () => step(-1);
  el.later.onclick = () => step(1);
  el.closer.onclick = () => zoom(2);
  el.farther.onclick = () => zoom(0.5);
  el.whole.onclick = whole;
  el.critical.onclick = () => light(!state.critical);

  new ResizeObserver(repaint).observe(el.stage);
  window.addEventListener("resize", repaint);
  window.addEventListener("hashchange", followLink);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", readColours);
  readColours();
  showLegend();
  followLink();
  paint();
  root.dataset.ready = String(model.count);

  // Another step in the place of this one; an operation stays chosen by its name. A view of the whole step stays one.
  function show(next) {
    const { view, chosen, hover } = state, whole = view.t0 <= 0 && view.t1 >= model.seconds;
    const again = (op) => (op < 0 ? op : named(next, model.name(op)));
    const others = next.ops !== model.ops;
    [state.chosen, state.hover] = [again(chosen), again(hover)];
    state.view = whole ? { t0: 0, t1: next.seconds } : within(view, next.seconds);
    model = next;
    say = teller(document, model, (op) => choose(op));
    if (others) showLegend();
    search();
    detail();
    paint();
  }

  return { show, choose, closeUp, alongLane, hold, state };
}
