// What is told of an operation: in full where it was chosen, in short where it is pointed at. All of it is text, never
// markup, whatever names hold.

function teller(document, model, choose) {
  const node = (tag, text = "", attributes = {}) =>
    Object.assign(document.createElement(tag), { textContent: text }, attributes);
  const link = (op) => node("button", model.name(op), { type: "button", className: "op", onclick: () => choose(op) });

  function list(made, none = "nothing", most = 60) {
    const items = made.slice(0, most);
    const more = made.length > most ? [node("span", ` and ${(made.length - most).toLocaleString("en")} more`)] : [];
    return items.length ? [...items.flatMap((item) => [item, " "]), ...more] : [none];
  }

  function brief(what, names, most = 6) {
    const more = names.length > most ? ` and ${names.length - most} more` : "";
    return names.length ? [`${what} ${names.slice(0, most).join(" ")}${more}`] : [];
  }

  function when(op, timeline) {
    const { from, to, after, critical } = timeline;
    const cause = after[op];
    const why = cause >= 0 && model.lane[cause] === model.lane[op] ? "the one before it on its lane" : "which it waits for";
    const gap = idle(timeline, op);
    const rest = gap > 0 ? `idle for ${inWords(gap)}` : "at once";
    const held = cause < 0 ? "after the step began" : `after ${model.name(cause)}, ${why}`;
    const end = critical[op] ? "; on the critical path" : "";
    return `${inWords(to[op] - from[op])}, from ${inWords(from[op], 6)}; ${rest} ${held}${end}`;
  }

  function work(op) {
    const { kind, nbytes, flops } = model.ops;
    const parts = [nbytes[op] ? amount(nbytes[op], "B") : "", flops[op] ? amount(flops[op], "FLOP") : ""];
    return `${parts.filter(Boolean).join(", ") || "no bytes, no FLOPs"}, of the kind ${model.kinds[kind[op]]}`;
  }

  function head(tag, op) {
    const made = node(tag, `${model.name(op)} `);
    made.append(node("small", `lane ${model.lanes[model.lane[op]].name}`));
    return made;
  }

  function detail(op) {
    const regions = (of) => list(of[op].map((r) => node("code", model.regions[r])));
    const beside = [model.previous[op], model.next[op]].filter((n) => n >= 0);
    const facts = [
      ...model.timelines.map((t) => [t.source, [when(op, t)]]),
      ["work", [work(op)]],
      ["reads", regions(model.ops.reads)],
      ["writes", regions(model.ops.writes)],
      ["waits for", list(model.ops.waits[op].map(link))],
      ["on its lane", list(beside.map(link), "alone")],
      ["awaited by", list(model.awaited[op].map(link))],
    ];
    const terms = node("dl");
    for (const [term, content] of facts) {
      const value = node("dd");
      value.append(...content);
      terms.append(node("dt", term), value);
    }
    return [head("h2", op), terms];
  }

  function tip(op, others) {
    const names = (of) => of[op].map((r) => model.regions[r]);
    const lines = [
      ...model.timelines.map((t) => `${t.source}: ${when(op, t)}`),
      work(op),
      ...brief("reads", names(model.ops.reads)),
      ...brief("writes", names(model.ops.writes)),
      ...brief("waits for", model.ops.waits[op].map(model.name)),
      ...(others > 0 ? [`and ${others.toLocaleString("en")} more here: zoom in`] : []),
    ];
    return [head("b", op), ...lines.map((line) => node("div", line))];
  }

  return { node, detail, tip };
}
