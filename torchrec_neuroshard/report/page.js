"use strict";
// Draws charts and tables from the page's JSON. Names are only ever set as text.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const CHUNK = 100; // rows added to a table at a time
  const FEW = 24; // up to so many ranks, bars have wide gaps

  function make(tag, props = {}, ...children) {
    const { class: name, aria = {}, on = {}, ...rest } = props;
    const node = Object.assign(document.createElement(tag), rest);
    if (name) node.className = name;
    for (const [key, value] of Object.entries(aria)) node.setAttribute(key, value);
    for (const [key, value] of Object.entries(on)) node.addEventListener(key, value);
    node.append(...children);
    return node;
  }

  const ms = (x) => x.toFixed(3);
  const sum = (values) => values.reduce((a, b) => a + b, 0);
  const largest = (values) => values.reduce((a, b) => Math.max(a, b), 0);
  const naming = new Intl.Collator("en", { numeric: true });
  const FORMATS = { // as in sections.py
    text: String,
    count: (x) => x.toLocaleString("en-US"),
    rate: (x) => Math.round(x).toLocaleString("en-US"),
    percent: (x) => `${(100 * x).toFixed(0)}%`,
    change: (x) => `${x < 0 ? "" : "+"}${(100 * x).toFixed(1)}%`,
    gib: (x) => (x / 2 ** 30).toFixed(2),
    figure: ms,
    ms,
    peak: ms,
  };

  // ---- tables ----

  // Fills host with a table to sort, filter and save. Rows are added on scrolling.
  function grid(host, [label, given, rows]) {
    const columns = given.map(([title, kind], number) => {
      const values = kind === "peak" ? rows.map((row) => row[number]) : [];
      const peak = largest(values);
      // If most values equal the peak, none stands out.
      const stands = values.filter((v) => v === peak).length <= values.length / 2;
      return { title, kind, peak: stands ? peak : null, number };
    });
    const words = make("input", {
      type: "search",
      placeholder: "Filter: words, or column:value",
      aria: { "aria-label": `Filter ${label}` },
      on: { input: () => update() },
    });
    const count = make("span", { aria: { role: "status" } });
    const head = make("tr");
    const body = make("tbody");
    const scroll = make("div", {
      class: "scroll", tabIndex: 0, aria: { role: "region", "aria-label": label },
    }, make("table", { aria: { "aria-label": label } }, make("thead", {}, head), body));
    let shown = [];
    let next = 0;
    let order = null;

    const side = ({ kind }) => (kind === "text" ? "" : "number");
    for (const column of columns) {
      const press = () => {
        const down = order?.column === column ? !order.down : column.kind !== "text";
        order = { column, down };
        update();
      };
      column.head = head.appendChild(make("th", { scope: "col", class: side(column) },
        make("button", { type: "button", on: { click: press } }, column.title)));
    }

    const cell = (column, value) => make("td", {
      class: side(column) + (value && value === column.peak ? " worst" : ""),
    }, value === null ? "" : FORMATS[column.kind](value));

    function more(limit) {
      const chunk = shown.slice(next, next + limit);
      body.append(...chunk.map((row) => make("tr", {}, ...columns.map((column) =>
        cell(column, row[column.number])))));
      next += chunk.length;
    }

    // True if a text column contains the word, or if "column:value" matches exactly.
    function matches(row, word) {
      const [title, value] = word.split(/:(.*)/s);
      const column = columns.find((c) => c.title.toLowerCase() === title);
      if (column && value) return `${row[column.number]}`.toLowerCase() === value;
      return columns.some(({ kind, number }) =>
        kind === "text" && `${row[number]}`.toLowerCase().includes(word));
    }

    function compare(x, y) {
      if (x === null || y === null) return (x === null) - (y === null);
      const sign = order.down ? -1 : 1;
      return sign * (typeof x === "string" ? naming.compare(x, y) : x - y);
    }

    function update() {
      const wanted = words.value.toLowerCase().split(/\s+/).filter(Boolean);
      shown = rows.filter((row) => wanted.every((word) => matches(row, word)));
      if (order) {
        const { number } = order.column;
        shown.sort((a, b) => compare(a[number], b[number]));
        for (const column of columns) column.head.removeAttribute("aria-sort");
        order.column.head.setAttribute("aria-sort",
          order.down ? "descending" : "ascending");
      }
      const all = FORMATS.count(rows.length);
      count.textContent = shown.length === rows.length
        ? `${all} ${label}` : `${FORMATS.count(shown.length)} of ${all} ${label}`;
      body.replaceChildren();
      next = 0;
      scroll.scrollTop = 0;
      more(CHUNK);
    }

    // Saves all rows as CSV, with units in the headings.
    function download() {
      const quote = (text) => (/[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);
      const titles = columns.map(({ title, kind }) => {
        const unit = { gib: "GiB", ms: "ms", peak: "ms" }[kind];
        return !unit || title.includes(unit) ? title : `${title} [${unit}]`;
      });
      const values = rows.map((row) => columns.map(({ kind, number }) =>
        (kind === "gib" && row[number] !== null ? row[number] / 2 ** 30 : row[number] ?? "")));
      const text = [titles, ...values].map((line) => line.map((value) => quote(`${value}`)).join())
        .join("\r\n");
      const href = URL.createObjectURL(new Blob([text, "\r\n"], { type: "text/csv" }));
      make("a", { href, download: `${label}.csv` }).click();
      setTimeout(() => URL.revokeObjectURL(href), 10_000);
    }

    scroll.addEventListener("scroll", () => {
      const left = scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight;
      if (left < 600) more(CHUNK);
    });
    addEventListener("beforeprint", () => more(shown.length));
    update();
    const save = make("button", {
      type: "button", title: `Save all ${label} as CSV`, on: { click: download },
    }, "CSV");
    const filter = rows.length > 10 ? [words, count] : [];
    host.append(make("div", { class: "tools" }, ...filter, save), scroll);
    host.filter = (text) => {
      words.value = words.value === text ? "" : text;
      update();
      host.scrollIntoView({ block: "nearest" });
    };
  }

  // ---- charts ----

  const legend = (names) => make("div", { class: "legend" }, ...names.map((name) =>
    make("span", {}, make("i", { class: `swatch ${name}` }), name)));

  // The least of 1, 2 and 5 times a power of ten that gives at most so many steps to top.
  function tickOf(top, most) {
    const power = 10 ** Math.floor(Math.log10(top / most));
    return [1, 2, 5, 10].map((k) => k * power).find((k) => top / k <= most);
  }

  // A lane per rank and stream. What binds is outlined; the dashed line is the bound.
  function timeline({ period_ms: period, bound_ms: bound, stages, ranks, spans }) {
    const STREAMS = ["compute", "collectives", "cache"];
    const streams = STREAMS.filter((name) => spans.some(([, stream]) => stream === name));
    const kinds = { fwd_reorder: "fwd_comms", bwd_reorder: "bwd_comms" };
    const known = ["index_comms", "cache", "fwd_compute", "fwd_comms", "bwd_comms", "bwd_compute"];
    const kindOf = (phase) => kinds[phase] ?? (known.includes(phase) ? phase : "dense");
    const hatch = (stage) => (stages.length > 1 && stage >= 0 ? ` h${stage % 4}` : "");
    const at = (value) => `${(100 * value) / period}%`;
    const lanes = new Map();
    const chart = make("div", {
      class: "lanes", aria: { role: "img", "aria-label": "Timeline of one iteration [ms]" },
    });
    for (const rank of ranks) {
      streams.forEach((stream, k) => {
        const lane = make("div", { class: "lane" });
        lanes.set(`${rank} ${stream}`, lane);
        const row = [make("span", { class: "name" }, k ? "" : `rank ${rank}`),
          make("span", { class: "name minor" }, stream), lane];
        row.forEach((cell, column) => {
          cell.style.gridArea = `${lanes.size} / ${column + 1}`;
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
    for (const [rank, stream, phase, stage, batch, start, end, binds] of spans) {
      const label = stages.length > 1 && stage >= 0 ? `${stage + 1}` : "";
      const block = make("i", {
        class: `${kindOf(phase)}${hatch(stage)}${binds ? " binds" : ""}${batch ? " other" : ""}`,
        title: [`rank ${rank}`, phase, stages[stage], `${ms(end - start)} ms`,
          batch && `batch ${batch > 0 ? "+" : ""}${batch}`, binds && "binds",
        ].filter(Boolean).join(" \u00b7 "),
      }, label);
      block.style.left = at(start);
      block.style.width = at(end - start);
      lanes.get(`${rank} ${stream}`).append(block);
    }
    const used = known.filter((name) => spans.some((span) => kindOf(span[2]) === name));
    if (spans.some((span) => kindOf(span[2]) === "dense")) used.push("dense");
    const named = stages.length < 2 ? [] : [make("div", { class: "legend" },
      ...stages.map((name, k) => make("span", {},
        make("i", { class: `swatch plain${hatch(k)}` }), `${k + 1} ${name}`)))];
    return [legend(used), ...named, make("div", { class: "frame" }, chart)];
  }

  // The smallest power of two that leaves at most so many of count labels.
  const step = (count, most) => 2 ** Math.max(0, Math.ceil(Math.log2(count / most)));

  // A bar per rank. A click filters the shards of the same part of the page.
  function bars({ title = "", unit, names, rows, ranks_per_node: perNode }, host) {
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
    const columns = rows.map(([rank, ...values]) => {
      const parts = names.map((name, k) => `${name}: ${values[k].toFixed(3)} ${unit}`);
      const column = make("div", {
        class: numNodes > 1 && rank % perNode === 0 ? "col edge" : "col",
        title: [`rank ${rank}`, ...parts].join("\n"),
        on: {
          click: () => host.closest("section").querySelector("[data-grids].shards")
            ?.filter(`rank:${rank}`),
        },
      });
      names.forEach((name, k) => {
        const part = column.appendChild(make("i", { class: name }));
        part.style.height = `${(100 * values[k]) / top}%`;
      });
      ranks.append(make("span", {
        class: rank % step(rows.length, 0.6 * most) ? "minor" : "",
      }, rank % every ? "" : `${rank}`));
      return column;
    });
    for (let node = 0; numNodes > 1 && node < numNodes; node += step(numNodes, 10)) {
      const isMinor = node % step(numNodes, 5) !== 0;
      const label = nodes.appendChild(make("span", {
        class: isMinor ? "node minor" : "node",
      }, `node ${node}`));
      const size = Math.min(step(numNodes, 10) * perNode, rows.length - node * perNode);
      Object.assign(label.style, { flexGrow: size, maxWidth: `${5 * size}rem` });
    }
    area.append(make("div", { class: "cols" }, ...columns));
    const chart = make("div", {
      class: `chart${rows.length <= FEW ? " few" : ""}`,
      aria: { role: "img", "aria-label": `${names.join(", ")} of each rank [${unit}]` },
    }, axis, area, ranks, ...(numNodes > 1 ? [nodes] : []));
    return [...(title ? [make("h3", {}, title)] : []), legend(names),
      make("div", { class: "frame" }, chart)];
  }

  for (const host of document.querySelectorAll("[data-grids]")) {
    const given = data.grids[host.dataset.grids];
    host.className = given[0];
    grid(host, given);
  }
  for (const host of document.querySelectorAll("[data-charts]")) {
    const chart = data.charts[host.dataset.charts];
    host.append(...(chart.kind === "timeline" ? timeline(chart) : bars(chart, host)));
  }

  const theme = document.getElementById("theme");
  const root = document.documentElement;
  const isDark = () => (root.style.colorScheme
    || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  const name = () => { theme.textContent = isDark() ? "Light" : "Dark"; };
  theme.addEventListener("click", () => {
    root.style.colorScheme = isDark() ? "light" : "dark";
    name();
  });
  name();
})();
