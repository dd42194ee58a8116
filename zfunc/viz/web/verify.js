// The verifier of zfunc.core.verifier: conflicting operations that nothing keeps in their serial order.

// The conflicting pairs from which all others follow: a read follows the last write, a write the last write and every
// read since. [before, after, region].
function conflictsOf({ ops, regions }) {
  const written = regions.name.map(() => -1), readers = regions.name.map(() => []);
  const found = [];
  ops.reads.forEach((reads, op) => {
    for (const r of reads) if (written[r] >= 0) found.push([written[r], op, r]);
    for (const r of ops.writes[op]) {
      if (written[r] >= 0 && !reads.includes(r)) found.push([written[r], op, r]);
      for (const reader of readers[r]) found.push([reader, op, r]);
    }
    for (const r of reads) readers[r].push(op);
    for (const r of ops.writes[op]) [written[r], readers[r]] = [op, []];
  });
  return found;
}

// Those that lanes and waits leave open.
function races(plan) {
  const { clocks, lane, position } = plan;
  return conflictsOf(plan.graph).filter(([before, after]) => clocks[after][lane[before]] < position[before]);
}
