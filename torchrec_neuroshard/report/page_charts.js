// Bars of ranks, and the heat map of tables and ranks.

const FEW = 24; // up to so many ranks, bars have wide gaps
const MANY = 128; // with more ranks, bars have no gaps
const WITH_TEXT = 32; // with more ranks, cells of the heat map have no room for figures

const legend = (names, labels = {}) => make("div", { class: "legend" }, ...names.map((name) =>
  make("span", {}, make("i", { class: `swatch ${name}` }), labels[name] ?? name)));

// The least of 1, 2 and 5 times a power of ten that gives at most so many steps to top.
function tickOf(top, most) {
  const power = 10 ** Math.floor(Math.log10(top / most));
  return [1, 2, 5, 10].map((k) => k * power).find((k) => top / k <= most);
}

// The smallest power of two that leaves at most so many of count labels.
const step = (count, most) => 2 ** Math.max(0, Math.ceil(Math.log2(count / most)));

// A bar per rank. Dashed: the limit of what is not reserved.
function bars(chart) {
  const { title = "", unit, names, labels = {}, rows, limits = [] } = chart;
  const perNode = chart.ranks_per_node;
  // All charts of a unit share one scale.
  const top = 1.05 * largest(data.charts.filter((c) => c.unit === unit)
    .flatMap((c) => c.rows.map(([, ...values]) => sum(values))));
  if (!top) return [];
  const tick = tickOf(top, 5);
  const axis = make("div", { class: "axis" });
  const area = make("div", { class: "bars" });
  for (let value = 0; value <= top; value += tick) {
    const text = `${+value.toPrecision(3)}${value ? "" : ` ${unit}`}`;
    const mark = axis.appendChild(make("span", {}, text));
    const rule = area.appendChild(make("hr"));
    mark.style.bottom = rule.style.bottom = `${(100 * value) / top}%`;
  }
  const numNodes = Math.ceil(rows.length / perNode);
  const most = rows.length > 100 ? 10 : 16; // labels; narrow pages hide every other one
  const every = step(rows.length, most);
  const ranks = make("div", { class: "names" });
  const nodes = make("div", { class: "names" });
  const columns = rows.map(([rank, ...values], place) => {
    const node = make("div", {
      class: numNodes > 1 && rank % perNode === 0 ? "col edge" : "col",
    });
    names.forEach((name, k) => {
      const part = node.appendChild(make("i", { class: name }));
      part.style.height = `${(100 * values[k]) / top}%`;
    });
    if (limits[place]) {
      node.appendChild(make("b")).style.bottom = `${(100 * limits[place]) / top}%`;
    }
    const label = make("span", {
      class: rank % step(rows.length, 0.6 * most) ? "minor" : "",
    }, rank % every ? "" : `${rank}`);
    label.dataset.rank = rank;
    ranks.append(label);
    const parts = names.map((name, k) =>
      `${labels[name] ?? name}: ${values[k].toFixed(3)} ${unit}`);
    return { node, rank, row: 0, column: place, lines: [`rank ${rank}`, ...parts] };
  });
  for (let node = 0; numNodes > 1 && node < numNodes; node += step(numNodes, 10)) {
    const isMinor = node % step(numNodes, 5) !== 0;
    const label = nodes.appendChild(make("span", {
      class: isMinor ? "node minor" : "node",
    }, `node ${node}`));
    const size = Math.min(step(numNodes, 10) * perNode, rows.length - node * perNode);
    Object.assign(label.style, { flexGrow: size, maxWidth: `${5 * size}rem` });
  }
  area.append(make("div", { class: "cols" }, ...columns.map(({ node }) => node)));
  const drawn = make("div", {
    class: `chart${rows.length <= FEW ? " few" : ""}${rows.length > MANY ? " many" : ""}`,
    aria: { role: "group", "aria-label": `${names.join(", ")} of each rank [${unit}]` },
  }, axis, area, ranks, ...(numNodes > 1 ? [nodes] : []));
  reach(area, columns);
  return [...(title ? [make("h3", {}, title)] : []), legend(names, labels),
    make("div", { class: "frame" }, drawn)];
}

// What the most expensive tables cost each rank, in one unit at a time. All maps share
// one scale.
function heatMap({ num_ranks: numRanks, ranks_per_node: perNode, views, tables }) {
  const host = make("div");
  const units = make("select", {
    aria: { "aria-label": "Unit of the heat map" }, on: { change: () => draw(views[units.value]) },
  }, ...views.map(({ unit }, value) => make("option", { value }, unit)));

  function draw({ unit, rows, left, most_left: mostLeft }) {
    const digits = unit === "ms" ? 3 : 2;
    const valueOf = ([, compute, comms, gib]) => (unit === "ms" ? compute + comms : gib);
    const top = largest(data.charts.filter(({ kind }) => kind === "heat map")
      .flatMap((map) => map.tables.flatMap(([, cells]) => cells.map(valueOf))));
    const chart = make("div", {
      class: "heat", aria: { role: "group", "aria-label": `Tables and ranks [${unit}]` },
    });
    chart.style.setProperty("--ranks", numRanks);
    const put = (row, rank, node) => {
      node.style.left = `${(100 * rank) / numRanks}%`;
      if (numRanks > perNode && rank % perNode === 0) node.classList.add("edge");
      return row.appendChild(node);
    };
    const head = make("div", { class: "row" });
    chart.append(make("span"), head);
    for (let rank = 0; rank < numRanks; rank += step(numRanks, 100)) {
      put(head, rank, make("span", {}, `${rank}`)).dataset.rank = rank;
    }
    const cells = rows.flatMap((table, row) => {
      const [name, values] = tables[table];
      const line = make("div", { class: "row" });
      chart.append(make("span", { class: "name" }, make("bdi", { dir: "ltr" }, name)), line);
      return values.map((cell) => {
        const [rank, compute, comms, gib] = cell;
        const value = valueOf(cell);
        const share = value / top;
        const text = numRanks > WITH_TEXT ? [] : [make("span", {}, value.toFixed(digits))];
        const node = put(line, rank, make("i", { class: share > 0.62 ? "deep" : "" }, ...text));
        node.style.setProperty("--share", `${(6 + 94 * share).toFixed(1)}%`);
        const times = compute + comms > 0
          ? [`kernels ${ms(compute)} ms, collectives ${ms(comms)} ms`] : [];
        const lines = [name, `rank ${rank}`, ...times, `${gib.toFixed(2)} GiB`];
        return { node, rank, row, column: rank, lines };
      });
    });
    reach(chart, cells);
    const scale = make("div", { class: "legend" }, make("span", {}, "0",
      make("i", { class: "scale" }), `${top.toFixed(digits)} ${unit}`));
    const rest = left ? [make("p", {}, `${FORMATS.count(left)} more tables are left out; they take `
      + `at most ${mostLeft.toFixed(digits)} ${unit} on any rank.`)] : [];
    const frame = make("div", { class: "wide" }, chart);
    host.replaceChildren(scale, frame, ...rest);
    const { selected } = host.closest("section")?.dataset ?? {};
    if (selected) select(host.closest("section"), Number(selected));
  }
  draw(views[0]);
  return [make("div", { class: "tools" }, make("label", {}, "Show ", units)), host];
}
