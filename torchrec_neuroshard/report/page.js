"use strict";
// Fills the report's page from the JSON in it. Names reach the page as text alone.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const CHUNK = 100; // rows of a table that are laid out at a time
  const FEW = 24; // ranks whose bars have room between them
  const [RANK, ROWS, COLUMNS, USED, COMPUTE, COMMS, PATH] = [0, 1, 2, 3, 4, 5, 6]; // of a shard

  // ---- small things ----

  function make(tag, props = {}, ...children) {
    const { class: name, aria = {}, on = {}, ...rest } = props;
    const node = Object.assign(document.createElement(tag), rest);
    if (name) node.className = name;
    for (const [key, value] of Object.entries(aria)) node.setAttribute(key, value);
    for (const [key, value] of Object.entries(on)) node.addEventListener(key, value);
    node.append(...children);
    return node;
  }

  const naming = new Intl.Collator("en", { numeric: true });
  const whole = (x) => x.toLocaleString("en-US");
  const ms = (x) => x.toFixed(3);
  const gib = (x) => (x === null ? "" : (x / 2 ** 30).toFixed(2));
  const sum = (values) => values.reduce((a, b) => a + b, 0);
  const largest = (values) => values.reduce((a, b) => Math.max(a, b), 0);
  const swatch = (name) => make("i", { class: `swatch ${name}` });
  const note = (text) => make("p", { class: "note" }, text);
  const ranksOf = (table) => [...new Set(table.shards.map((s) => s[RANK]))]
    .sort((a, b) => a - b);

  // What shards take: memory and path together, times on the rank where they are longest.
  function held(table, shards) {
    const longest = (time) => {
      const times = new Map();
      for (const s of shards) times.set(s[RANK], (times.get(s[RANK]) ?? 0) + s[time]);
      return largest([...times.values()]);
    };
    return {
      table,
      shards,
      rows: largest(shards.map((s) => s[ROWS])),
      columns: largest(shards.map((s) => s[COLUMNS])),
      used: sum(shards.map((s) => s[USED])),
      path: sum(shards.map((s) => s[PATH])),
      compute: longest(COMPUTE),
      comms: longest(COMMS),
    };
  }

  function runs(ranks) {
    const found = [];
    for (const rank of ranks) {
      const last = found[found.length - 1];
      if (last && rank === last[1] + 1) last[1] = rank;
      else found.push([rank, rank]);
    }
    const more = found.length - 6;
    const texts = found.slice(0, 6).map(([a, b]) => (a === b ? `${a}` : `${a}-${b}`));
    return texts.join(", ") + (more > 0 ? ` and ${more} more` : "");
  }

  const tip = document.body.appendChild(make("div", { class: "tip", hidden: true }));

  const line = (left, right, name = "") =>
    make("div", { class: name }, make("span", {}, ...left), make("span", {}, right));

  // Shows lines beside the pointer for as long as it is on a node.
  function hint(node, lines) {
    node.addEventListener("mousemove", (event) => {
      tip.replaceChildren(...lines());
      tip.hidden = false;
      const { width, height } = tip.getBoundingClientRect();
      const left = Math.min(event.clientX + 14, innerWidth - width - 8);
      const below = event.clientY + 18;
      const top = below + height > innerHeight ? event.clientY - height - 12 : below;
      tip.style.left = `${Math.max(4, left)}px`;
      tip.style.top = `${Math.max(4, top)}px`;
    });
    node.addEventListener("mouseleave", () => { tip.hidden = true; });
  }

  // ---- tables that can be sorted and filtered ----

  // A column: title, get(row) -> what is sorted by, show(row) -> text or node,
  // `number` if it is one, mark(row) -> class. Rows are laid out as they are reached.
  function grid({ label, columns, rows, tools = [], start, detail, open }) {
    const head = make("tr");
    const body = make("tbody");
    const count = make("span", { aria: { role: "status" } });
    const words = make("input", {
      type: "search",
      placeholder: "Filter: words that a row has",
      aria: { "aria-label": `Filter ${label}` },
      on: { input: () => update() },
    });
    const scroll = make("div", {
      class: "scroll", tabIndex: 0, aria: { role: "region", "aria-label": label },
    }, make("table", { aria: { "aria-label": label } }, make("thead", {}, head), body));
    let shown = [];
    let next = 0;
    let order = start;

    for (const column of columns) {
      const press = () => {
        const down = order.column === column ? !order.down : !!column.number;
        order = { column, down };
        update();
      };
      column.head = make("th", { scope: "col", class: column.number ? "number" : "" },
        make("button", { type: "button", on: { click: press } },
          ...(column.icon ? [column.icon] : []), column.title));
      head.append(column.head);
    }

    function lay(row) {
      const cells = columns.map((column) => {
        const value = column.show ? column.show(row) : column.get(row);
        const mark = column.mark ? column.mark(row) : "";
        const kind = column.number ? "number" : (column.kind ?? "");
        return make("td", { class: `${kind} ${mark}`.trim() }, value ?? "");
      });
      const tr = make("tr", {}, ...cells);
      if (!open && !detail) return tr;
      const button = make("button", { type: "button" }, ...cells[0].childNodes);
      cells[0].append(button);
      if (open) button.addEventListener("click", () => open(row));
      else {
        button.setAttribute("aria-expanded", "false");
        button.addEventListener("click", () => {
          const shut = button.getAttribute("aria-expanded") === "true";
          button.setAttribute("aria-expanded", String(!shut));
          if (shut) tr.nextSibling.remove();
          else tr.after(make("tr", { class: "detail" },
            make("td", { colSpan: columns.length }, ...detail(row))));
        });
      }
      return tr;
    }

    function more(limit) {
      body.append(...shown.slice(next, next + limit).map(lay));
      next = Math.min(shown.length, next + limit);
    }

    function update() {
      const all = rows();
      const wanted = words.value.toLowerCase().split(/\s+/).filter(Boolean);
      const text = (row) => columns.filter((c) => !c.number)
        .map((c) => String(c.get(row))).join(" ").toLowerCase();
      shown = all.filter((row) => ((t) => wanted.every((w) => t.includes(w)))(text(row)));
      const { column: { get }, down } = order;
      const compare = (x, y) => {
        if (x === null || y === null) return (x === null) - (y === null);
        return (down ? -1 : 1) * (typeof x === "string" ? naming.compare(x, y) : x - y);
      };
      shown.sort((a, b) => compare(get(a), get(b)));
      for (const column of columns) {
        if (column !== order.column) column.head.removeAttribute("aria-sort");
        else column.head.setAttribute("aria-sort", down ? "descending" : "ascending");
      }
      count.textContent = shown.length === all.length
        ? `${whole(all.length)} ${label}`
        : `${whole(shown.length)} of ${whole(all.length)} ${label}`;
      body.replaceChildren();
      next = 0;
      scroll.scrollTop = 0;
      more(CHUNK);
    }

    scroll.addEventListener("scroll", () => {
      const left = scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight;
      if (next < shown.length && left < 600) more(CHUNK);
    });
    addEventListener("beforeprint", () => more(shown.length));
    update();
    return { nodes: [make("div", { class: "tools" }, words, ...tools, count), scroll], update };
  }

  // ---- a plan ----

  const plans = data.plans.map((given) => {
    const ranks = given.ranks.map(([rank, shards, columns, used, memory, costs]) => {
      const phases = costs.slice(0, data.phases.length);
      return { rank, shards, columns, used, memory, phases, total: sum(phases) };
    });
    const tables = given.tables.map(([name, type, kernel, rows, columns, shards, text]) => ({
      name, type, kernel, rows, columns, shards, text,
    }));
    const worst = data.phases.map((_, p) => largest(ranks.map((r) => r.phases[p])));
    const slowest = worst.map((value, p) =>
      (value > 0 ? ranks.filter((r) => r.phases[p] === value).map((r) => r.rank) : []));
    return {
      ...given, ranks, tables, worst, slowest,
      costed: tables.some((t) => t.shards.some((s) => s[COMPUTE] || s[COMMS])),
      charts: [], // columns of each chart, by rank
      rank: null, // the one that is looked at
      pick: null, // shows a rank's tables
    };
  });

  function memoryLine(rank) {
    const of = rank.memory === null
      ? " GiB" : ` of ${gib(rank.memory)} GiB (${(100 * rank.used / rank.memory).toFixed(0)}%)`;
    return gib(rank.used) + of;
  }

  // A column for each rank. parts(rank) -> [class, value]; top: the scale's end.
  function chart(plan, { label, top, unit, parts, lines, low }) {
    const step = 10 ** Math.floor(Math.log10(top / 2 || 1));
    const tick = [1, 2, 5, 10].map((k) => k * step).find((k) => top / k <= (low ? 4 : 5));
    const axis = make("div", { class: "axis" });
    const bars = make("div", { class: "bars" });
    for (let value = 0; value <= top * 1.001; value += tick) {
      const text = `${+value.toPrecision(3)}${value ? "" : ` ${unit}`}`;
      const mark = axis.appendChild(make("span", {}, text));
      const rule = bars.appendChild(make("hr"));
      mark.style.bottom = rule.style.bottom = `${(100 * value) / top}%`;
    }
    const every = Math.ceil(plan.ranks.length / 32);
    const names = make("div", { class: "names" });
    const columns = plan.ranks.map((rank) => {
      const column = make("div", {
        class: "col", on: { click: () => plan.pick(rank.rank) },
      });
      for (const [name, value] of parts(rank)) {
        const part = column.appendChild(make("i", { class: name }));
        part.style.height = `${(100 * value) / top}%`;
      }
      hint(column, () => [...lines(rank), make("em", {}, "Click to see its tables.")]);
      names.append(make("span", {}, rank.rank % every ? "" : `${rank.rank}`));
      return column;
    });
    bars.append(make("div", { class: "cols" }, ...columns));
    plan.charts.push(columns);
    const few = plan.ranks.length <= FEW;
    return make("div", {
      class: `chart${low ? " low" : ""}${few ? " few" : ""}`,
      aria: { role: "img", "aria-label": label },
    }, axis, bars, names);
  }

  const column = (title, get, show) => ({
    title, number: true, get, show: (row) => show(get(row)),
  });

  const views = {
    legend: () => [make("div", { class: "legend" }, ...data.phases.map((name, p) =>
      make("span", {}, swatch(`c${p}`), name)))],

    path(plan) {
      const total = sum(plan.worst);
      if (!(total > 0) || !plan.path_ms) return [note("Not known.")];
      const bar = make("div", { class: "path" });
      plan.worst.forEach((value, p) => {
        const part = bar.appendChild(make("i", { class: `c${p}` }));
        part.style.width = `${(100 * value) / total}%`;
        hint(part, () => [
          line([swatch(`c${p}`), data.phases[p]], `${ms(value)} ms`, "hot"),
          line([`${(100 * value / total).toFixed(1)}% of the path`],
            `slowest: rank ${runs(plan.slowest[p])}`),
        ]);
      });
      const notes = ["Each phase as long as on its slowest rank: collectives wait for it."];
      if (plan.bound_ms > 0) {
        const bound = bar.appendChild(make("div", { class: "bound" }));
        bound.style.left = `${Math.min(100, (100 * plan.bound_ms) / total)}%`;
        notes.push(plan.bound_is_proven ? `Dashed: no plan is below ${ms(plan.bound_ms)} ms.`
          : `Dashed: by an estimate, no plan is below ${ms(plan.bound_ms)} ms.`);
      }
      if (Math.abs(total / plan.path_ms - 1) > 1e-3) {
        notes.push(`Together ${ms(total)} ms; by stages, other layers and what runs beside `
          + `something else, the path is ${ms(plan.path_ms)} ms.`);
      }
      return [bar, note(notes.join(" "))];
    },

    phases(plan) {
      // Plans that stand on one page have one scale.
      const top = 1.05 * largest(plans.flatMap((p) => p.ranks.map((r) => r.total)));
      if (!(top > 0)) return [note("Not known.")];
      return [chart(plan, {
        label: "Milliseconds of each rank, phase by phase", top, unit: "ms",
        parts: (rank) => rank.phases.map((value, p) => [`c${p}`, value]),
        lines: (rank) => [
          line([`rank ${rank.rank}`], `${ms(rank.total)} ms`, "hot"),
          ...data.phases.map((name, p) => line([swatch(`c${p}`), name],
            `${ms(rank.phases[p])} ms`
            + (plan.slowest[p].includes(rank.rank) ? ", slowest" : ""))),
        ],
      })];
    },

    memory(plan) {
      const room = (r) => Math.max(r.used, r.memory ?? 0);
      const top = largest(plans.flatMap((p) => p.ranks.map(room))) / 2 ** 30 || 1;
      return [chart(plan, {
        label: "Memory of each rank", top, unit: "GiB", low: true,
        parts: (rank) => [
          ...(rank.memory === null ? [] : [["limit", rank.memory / 2 ** 30]]),
          ["used", rank.used / 2 ** 30],
        ],
        lines: (rank) => [
          line([`rank ${rank.rank}`], memoryLine(rank), "hot"),
          line(["shards"], whole(rank.shards)),
        ],
      })];
    },

    ranks(plan) {
      const columns = [
        column("rank", (r) => r.rank, whole),
        column("all phases", (r) => r.total, ms),
        ...data.phases.map((name, p) => ({
          ...column(name, (r) => r.phases[p], ms), icon: swatch(`c${p}`),
          // Where most are equally slow, none stands out.
          mark: (r) => (plan.slowest[p].length <= plan.ranks.length / 2
            && plan.slowest[p].includes(r.rank) ? "worst" : ""),
        })),
        column("shards", (r) => r.shards, whole),
        column("columns", (r) => r.columns, whole),
        column("GiB", (r) => r.used, gib),
        column("of GiB", (r) => r.memory, gib),
      ];
      return grid({
        label: "ranks", columns, rows: () => plan.ranks,
        start: { column: columns[0], down: false },
        open: (row) => plan.pick(row.rank),
      }).nodes.slice(1); // nothing in it to filter by
    },

    tables(plan) {
      const columns = [
        { title: "table", get: (r) => r.table.name, kind: "name" },
        { title: "sharding", get: (r) => r.table.type },
        { title: "kernel", get: (r) => r.table.kernel },
        {
          title: "ranks", number: true,
          get: (r) => (r.table.shards.length ? r.table.shards[0][RANK] : null),
          show: (r) => runs(ranksOf(r.table)),
        },
        column("rows", (r) => (plan.rank === null ? r.table.rows : r.rows), whole),
        column("columns", (r) => (plan.rank === null ? r.table.columns : r.columns), whole),
        column("GiB", (r) => r.used, gib),
      ];
      if (plan.costed) {
        columns.push(
          column("kernels [ms]", (r) => r.compute, ms),
          column("collectives [ms]", (r) => r.comms, ms),
          column("critical path [ms]", (r) => r.path, ms),
        );
      }
      const said = note("");
      const select = make("select", {
        aria: { "aria-label": "Rank" },
        on: { change: () => choose(select.value === "" ? null : +select.value) },
      }, make("option", { value: "" }, "all ranks"),
      ...plan.ranks.map((r) => make("option", { value: r.rank }, `rank ${r.rank}`)));
      let rows = [];
      const table = grid({
        label: "tables", columns, tools: [select],
        rows: () => rows,
        start: { column: columns[columns.length - 1], down: true },
        detail: (row) => [
          ...(row.table.text ? [make("p", {}, row.table.text)] : []),
          make("div", { class: "shards" }, ...row.shards.map((s) => make("span", {},
            `rank ${s[RANK]}: ${whole(s[ROWS])} \u00d7 ${whole(s[COLUMNS])}, `
            + `${gib(s[USED])} GiB`
            + (plan.costed ? `, ${ms(s[COMPUTE] + s[COMMS])} ms` : "")))),
        ],
      });

      function choose(rank) {
        plan.rank = rank;
        select.value = rank === null ? "" : `${rank}`;
        rows = plan.tables.map((t) => held(t,
          rank === null ? t.shards : t.shards.filter((s) => s[RANK] === rank)))
          .filter((row) => rank === null || row.shards.length);
        const r = plan.ranks[rank];
        said.textContent = rank === null
          ? "Memory is of all ranks, times are of a table's slowest rank. Its part of the "
            + "critical path counts the phases in which its rank is the slowest. A table's "
            + "name opens its shards."
          : `Rank ${rank} alone: ${whole(r.shards)} shards, ${memoryLine(r)}`
            + (plan.costed ? `, ${ms(r.total)} ms in an iteration.` : ".");
        for (const bars of plan.charts) {
          bars.forEach((node, k) => node.classList.toggle("on", k === rank));
        }
        table.update();
      }
      plan.pick = (rank) => {
        choose(rank === plan.rank ? null : rank);
        select.scrollIntoView({ block: "nearest" });
      };
      choose(null);
      return [said, ...table.nodes];
    },

    moves() {
      const bytes = column("GiB to fetch", (m) => m[3], gib);
      const path = (plan) => {
        const known = new Map(plan.tables.map((t) => [t.name, held(t, t.shards).path]));
        return column(`ms, ${plan.name}`, (m) => known.get(m[0]) ?? 0, ms);
      };
      return grid({
        label: "tables that are placed differently",
        columns: [
          { title: "table", get: (m) => m[0], kind: "name" },
          ...plans.map((p, k) => ({ title: p.name, get: (m) => m[1 + k] || "not there" })),
          ...(plans.every((p) => p.costed) ? plans.map(path) : []),
          bytes,
        ],
        rows: () => data.moves, start: { column: bytes, down: true },
      }).nodes;
    },
  };

  for (const host of document.querySelectorAll("[data-view]")) {
    host.append(...views[host.dataset.view](plans[host.dataset.plan]));
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
