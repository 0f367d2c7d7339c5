// The timeline of an iteration, and its export as a trace.

const STREAMS = ["compute", "collectives", "cache"];
const REORDERS = { fwd_reorder: "fwd_comms", bwd_reorder: "bwd_comms" };
const KINDS = ["index_comms", "cache", "fwd_compute", "fwd_comms", "bwd_comms", "bwd_compute"];
const LABELS = { dense: "dense layers", waiting: "waiting: no kernel runs" };

const kindOf = (phase) => REORDERS[phase] ?? (KINDS.includes(phase) ? phase : "dense");
const nameOf = (phase) => (kindOf(phase) === "dense" ? `dense layers, ${phase}` : phase);
const toSpan = ([rank, stream, phase, stage, batch, start, end, binds]) =>
  ({ rank, stream, phase, stage, batch, start, end, binds });

// Gaps between a rank's kernels, each with what ends with it, if known.
function waitsOf(rank, spans, period) {
  const own = spans.filter((span) => span.rank === rank);
  const kernels = own.filter(({ stream }) => stream === "compute")
    .sort((a, b) => a.start - b.start);
  const least = 1e-4 * period;
  const waits = [];
  let since = 0;
  for (const { start, end } of [...kernels, { start: period, end: period }]) {
    if (start - since > least) {
      const exchange = own.find(({ stream, end: done }) =>
        stream === "collectives" && Math.abs(done - start) < least);
      const next = start === period ? "the next iteration begins" : "";
      const until = exchange ? `${exchange.phase} is done` : next;
      waits.push({ rank, start: since, end: start, until });
    }
    since = Math.max(since, end);
  }
  return waits;
}

// How long a collective runs beside its rank's kernels.
const besideKernels = (span, spans) => sum(spans
  .filter(({ rank, stream }) => rank === span.rank && stream === "compute")
  .map(({ start, end }) => Math.max(0, Math.min(end, span.end) - Math.max(start, span.start))));

// Spans as Chrome's trace events, which Perfetto opens: a process per rank, a thread per
// stream, times in microseconds.
function traceOf(spans, ranks, streams, stages) {
  const name = (kind, pid, tid, args) => ({ ph: "M", name: kind, pid, tid, args });
  const names = ranks.flatMap((rank) => [
    name("process_name", rank, 0, { name: `rank ${rank}` }),
    name("process_sort_index", rank, 0, { sort_index: rank }),
    ...streams.map((stream, tid) => name("thread_name", rank, tid, { name: stream })),
  ]);
  const events = spans.map(({ rank, stream, phase, stage, batch, start, end, binds }) => ({
    ph: "X", name: phase, cat: stream, pid: rank, tid: streams.indexOf(stream),
    ts: 1e3 * start, dur: 1e3 * (end - start), args: { stage: stages[stage] ?? "", batch, binds },
  }));
  return { traceEvents: [...names, ...events], displayTimeUnit: "ms" };
}

// A lane per rank and stream. What binds is outlined; the dashed line is the bound.
function timeline({ period_ms: period, bound_ms: bound, stages, ranks, spans: given }) {
  const spans = given.map(toSpan);
  const streams = STREAMS.filter((name) => spans.some(({ stream }) => stream === name));
  const several = stages.length > 1;
  const hatch = (stage) => (several && stage >= 0 ? ` h${stage % 4}` : "");
  const at = (value) => `${(100 * value) / period}%`;
  const lanes = new Map();
  const chart = make("div", {
    class: "lanes", aria: { role: "group", "aria-label": "Timeline of one iteration [ms]" },
  });
  for (const rank of ranks) {
    streams.forEach((stream, k) => {
      const lane = make("div", { class: "lane" });
      const row = [make("span", { class: "name" }, k ? "" : `rank ${rank}`),
        make("span", { class: "name minor" }, stream), lane];
      lanes.set(`${rank} ${stream}`, { lane, row: lanes.size });
      row.forEach((cell, column) => {
        cell.style.gridArea = `${lanes.size} / ${column + 1}`;
        cell.dataset.rank = rank;
        if (!k) cell.classList.add("first");
      });
      chart.append(...row);
    });
  }
  const axis = make("div", { class: "times" });
  axis.style.gridRow = `1 / ${lanes.size + 2}`;
  for (let value = 0, tick = tickOf(period, 8); value <= period; value += tick) {
    const text = `${+value.toPrecision(3)}${value ? "" : " ms"}`;
    axis.appendChild(make("span", {}, make("span", {}, text))).style.left = at(value);
  }
  if (bound > 0 && bound <= period) {
    axis.appendChild(make("div", { class: "bound" })).style.left = at(bound);
  }
  chart.prepend(axis);

  const all = [];
  function put(name, { rank, start, end }, stream, title, facts, stage = "") {
    const node = make("i", { class: name }, make("span", {}, stage ? make("b", {}, stage) : "",
      make("em", {}, ms(end - start))));
    node.style.left = at(start);
    node.style.width = at(end - start);
    const { lane, row } = lanes.get(`${rank} ${stream}`);
    lane.append(node);
    const lines = [`rank ${rank}: ${title}`, `${ms(end - start)} ms`, ...facts.filter(Boolean)];
    all.push({ node, rank, row, column: start, lines });
  }
  for (const span of spans) {
    const { stream, phase, stage, batch, binds } = span;
    const beside = stream === "collectives" ? besideKernels(span, spans) : 0;
    const kind = `${kindOf(phase)}${hatch(stage)}${binds ? " binds" : ""}${batch ? " other" : ""}`;
    put(kind, span, stream, nameOf(phase), [
      beside > 0 && `${ms(beside)} ms of it beside kernels`, stages[stage],
      batch && `batch ${batch > 0 ? "+" : ""}${batch}`, binds && "binds",
    ], several && stage >= 0 ? `${stage + 1}` : "");
  }
  const waits = ranks.flatMap((rank) => waitsOf(rank, spans, period));
  for (const wait of waits) {
    put("waiting", wait, "compute", "waiting", [wait.until && `until ${wait.until}`]);
  }
  all.sort((a, b) => a.row - b.row || a.column - b.column);
  reach(chart, all);

  const used = [...KINDS, "dense"].filter((name) =>
    spans.some(({ phase }) => kindOf(phase) === name));
  if (waits.length) used.push("waiting");
  const named = !several ? [] : [make("div", { class: "legend" },
    ...stages.map((name, k) => make("span", {},
      make("i", { class: `swatch plain${hatch(k)}` }), `${k + 1} ${name}`)))];
  const download = () => save(JSON.stringify(traceOf(spans, ranks, streams, stages)),
    "application/json", "iteration.trace.json");
  const trace = make("button", { type: "button", on: { click: download } }, "Save for Perfetto");
  return [make("div", { class: "tools" }, legend(used, LABELS), trace), ...named,
    make("div", { class: "frame" }, chart)];
}
