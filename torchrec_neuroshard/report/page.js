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
  const gib = (x) => (x / 2 ** 30).toFixed(2);
  const sum = (values) => values.reduce((a, b) => a + b, 0);
  const largest = (values) => values.reduce((a, b) => Math.max(a, b), 0);
  const swatch = (name) => make("i", { class: `swatch ${name}` });

  const ranksOf = (table) => [...new Set(table.shards.map((s) => s[RANK]))]
    .sort((a, b) => a - b);

  // What shards take: memory and path together, times on the rank where they are longest.
  function held(table, shards) {
    const row = { table, shards, rows: 0, columns: 0, used: 0, path: 0 };
    const compute = new Map();
    const comms = new Map();
    const add = (times, shard, ms) =>
      times.set(shard[RANK], (times.get(shard[RANK]) ?? 0) + ms);
    for (const shard of shards) {
      row.rows = Math.max(row.rows, shard[ROWS]);
      row.columns = Math.max(row.columns, shard[COLUMNS]);
      row.used += shard[USED];
      row.path += shard[PATH];
      add(compute, shard, shard[COMPUTE]);
      add(comms, shard, shard[COMMS]);
    }
    row.compute = largest([...compute.values()]);
    row.comms = largest([...comms.values()]);
    return row;
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

  function hint(event, lines) {
    tip.replaceChildren(...lines);
    tip.hidden = false;
    const { innerWidth, innerHeight } = window;
    const { width, height } = tip.getBoundingClientRect();
    const left = Math.min(event.clientX + 14, innerWidth - width - 8);
    const below = event.clientY + 18;
    const top = below + height > innerHeight ? event.clientY - height - 12 : below;
    tip.style.left = `${Math.max(4, left)}px`;
    tip.style.top = `${Math.max(4, top)}px`;
  }

  const line = (left, right, name = "") =>
    make("div", { class: name }, make("span", {}, ...left), make("span", {}, right));

  // Under the pointer, or beside what the keyboard has come to.
  const beside = (node, lines) => {
    const { left, top } = node.getBoundingClientRect();
    hint({ clientX: left, clientY: top }, lines);
  };
  const hide = () => { tip.hidden = true; };
  const said = (lines) =>
    lines.map((l) => [...l.children].map((n) => n.textContent).join(" ")).join("; ");

  // ---- tables that can be sorted and filtered ----

  // A column: title, get(row) -> what is sorted by, show(row) -> text or node,
  // `number` if it is one, mark(row) -> class. Rows are laid out as they are reached.
  function grid({ label, columns, rows, tools = [], start, detail, hover, open }) {
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
    });
    scroll.append(make("table", { aria: { "aria-label": label } },
      make("thead", {}, head), body));
    let shown = [];
    let next = 0;
    let order = start;

    for (const column of columns) {
      const th = make("th", { scope: "col", class: column.number ? "number" : "" });
      const press = () => {
        const down = order && order.column === column ? !order.down : !!column.number;
        order = { column, down };
        update();
      };
      th.append(make("button", { type: "button", on: { click: press } },
        ...(column.icon ? [column.icon] : []), column.title));
      column.head = th;
      head.append(th);
    }

    function lay(row) {
      const cells = columns.map((column) => {
        const value = column.show ? column.show(row) : column.get(row);
        const mark = column.mark ? column.mark(row) : "";
        const kind = column.number ? "number" : (column.kind ?? "");
        return make("td", { class: `${kind} ${mark}`.trim() }, value ?? "");
      });
      const tr = make("tr", {}, ...cells);
      if (hover) {
        tr.addEventListener("mouseenter", () => hover(row));
        tr.addEventListener("mouseleave", () => hover(null));
      }
      if (open) tr.addEventListener("click", () => open(row));
      const button = make("button", { type: "button" }); // which keys reach
      if (open || detail) {
        button.append(...cells[0].childNodes);
        cells[0].append(button);
      }
      if (detail) {
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
      const text = (row) =>
        columns.filter((c) => !c.number).map((c) => String(c.get(row))).join(" ")
          .toLowerCase();
      shown = wanted.length
        ? all.filter((row) => ((t) => wanted.every((w) => t.includes(w)))(text(row)))
        : [...all];
      if (order) {
        const { get } = order.column;
        const sign = order.down ? -1 : 1;
        const compare = (x, y) => {
          if (x === null || y === null) return (x === null) - (y === null);
          return sign * (typeof x === "string" ? naming.compare(x, y) : x - y);
        };
        shown = shown.map((row) => [get(row), row])
          .sort((a, b) => compare(a[0], b[0])).map((pair) => pair[1]);
      }
      for (const column of columns) {
        const on = order && order.column === column;
        if (!on) column.head.removeAttribute("aria-sort");
        else {
          column.head.setAttribute("aria-sort", order.down ? "descending" : "ascending");
        }
      }
      count.textContent = shown.length === all.length
        ? `${whole(all.length)} ${label}`
        : `${whole(shown.length)} of ${whole(all.length)} ${label}`;
      body.replaceChildren();
      next = 0;
      scroll.scrollTop = 0;
      more(printing ? shown.length : CHUNK);
    }

    scroll.addEventListener("scroll", () => {
      const left = scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight;
      if (next < shown.length && left < 600) more(CHUNK);
    });
    window.addEventListener("beforeprint", () => more(shown.length));
    update();
    return { nodes: [make("div", { class: "tools" }, words, ...tools, count), scroll], update };
  }

  // ---- a plan ----

  const plans = data.plans.map((given, number) => {
    const ranks = given.ranks.map(([shards, columns, used, memory, phases], rank) => ({
      rank, shards, columns, used, memory, phases, total: sum(phases),
    }));
    const tables = given.tables.map(([name, type, kernel, rows, columns, note, shards]) => ({
      name, type, kernel, rows, columns, note, shards,
    }));
    const worst = data.phases.map((_, p) => largest(ranks.map((r) => r.phases[p])));
    const slowest = worst.map((value, p) =>
      (value > 0 ? ranks.filter((r) => r.phases[p] === value).map((r) => r.rank) : []));
    return {
      ...given, ranks, tables, worst, slowest,
      costed: tables.some((t) => t.shards.some((s) => s[COMPUTE] || s[COMMS])),
      charts: [], // columns of each chart, by rank
      rank: null, // the one that is looked at
      pick(rank) { // which the view of tables knows once it is drawn
        draw(document.querySelector(`[data-view=tables][data-plan="${number}"]`));
        this.pick(rank);
      },
    };
  });

  function light(plan, ranks) {
    const lit = new Set(ranks);
    for (const columns of plan.charts) {
      columns.forEach((node, rank) => node.classList.toggle("lit", lit.has(rank)));
    }
  }

  function phaseLines(plan, rank, hot) {
    const lines = data.phases.map((name, p) => {
      const slow = plan.slowest[p].includes(rank.rank) ? ", slowest" : "";
      return line([swatch(`c${p}`), name], `${ms(rank.phases[p])} ms${slow}`,
        p === hot ? "hot" : "");
    });
    return [line([`rank ${rank.rank}`], `${ms(rank.total)} ms`, "hot"), ...lines];
  }

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
      const place = `${(100 * value) / top}%`;
      const text = `${+value.toPrecision(3)}${value ? "" : ` ${unit}`}`;
      const mark = make("span", {}, text);
      const rule = make("hr");
      mark.style.bottom = rule.style.bottom = place;
      axis.append(mark);
      bars.append(rule);
    }
    const few = plan.ranks.length <= FEW;
    const host = make("div", {
      class: `chart${low ? " low" : ""}${few ? " few" : ""}`,
      tabIndex: 0,
      aria: {
        role: "slider",
        "aria-label": label,
        "aria-valuemin": "0",
        "aria-valuemax": `${plan.ranks.length - 1}`,
        "aria-valuenow": "0",
      },
    });
    const every = Math.ceil(plan.ranks.length / 32);
    const names = make("div", { class: "names" });
    const columns = plan.ranks.map((rank) => {
      const column = make("div", { class: rank.rank === plan.rank ? "col on" : "col" });
      for (const [name, value] of parts(rank)) {
        const part = make("i", { class: name });
        part.style.height = `${(100 * value) / top}%`;
        column.append(part);
      }
      const hotOf = (node) => {
        const p = [...node.classList].find((n) => /^c\d$/.test(n));
        return p ? +p[1] : null;
      };
      column.addEventListener("mousemove", (event) => {
        const hot = hotOf(event.target);
        if (hot === null) delete host.dataset.hot;
        else host.dataset.hot = hot;
        hint(event, lines(rank, hot));
      });
      column.addEventListener("click", () => plan.pick(rank.rank));
      names.append(make("span", {}, rank.rank % every ? "" : `${rank.rank}`));
      return column;
    });
    host.addEventListener("mouseleave", () => {
      hide();
      delete host.dataset.hot;
    });
    let at = 0;
    function goTo(rank) {
      columns[at].classList.remove("at");
      at = Math.max(0, Math.min(columns.length - 1, rank));
      columns[at].classList.add("at");
      const shown = lines(plan.ranks[at], null);
      host.setAttribute("aria-valuenow", `${at}`);
      host.setAttribute("aria-valuetext", said(shown));
      beside(columns[at], shown);
    }
    host.addEventListener("keydown", (event) => {
      const to = {
        ArrowRight: at + 1, ArrowUp: at + 1, ArrowLeft: at - 1, ArrowDown: at - 1,
        PageUp: at + 8, PageDown: at - 8, Home: 0, End: columns.length - 1,
      }[event.key];
      if (to !== undefined) goTo(to);
      else if (event.key === "Enter" || event.key === " ") plan.pick(at);
      else return;
      event.preventDefault();
    });
    host.addEventListener("focus", () => host.matches(":focus-visible") && goTo(at));
    host.addEventListener("blur", () => {
      columns[at].classList.remove("at");
      hide();
    });
    bars.append(make("div", { class: "cols" }, ...columns));
    plan.charts.push(columns);
    host.append(axis, bars, names);
    return host;
  }

  const click = "Click a rank, or press Enter, to see its tables.";
  const views = {
    legend: () => [make("div", { class: "legend" }, ...data.phases.map((name, p) =>
      make("span", {}, swatch(`c${p}`), name)))],

    path(plan) {
      const total = sum(plan.worst);
      if (!(total > 0) || !plan.path_ms) return [make("p", { class: "note" }, "Not known.")];
      const bar = make("div", { class: "path" });
      plan.worst.forEach((value, p) => {
        const lines = [
          line([swatch(`c${p}`), data.phases[p]], `${ms(value)} ms`, "hot"),
          line([`${(100 * value / total).toFixed(1)}% of the path`],
            `slowest: rank ${runs(plan.slowest[p])}`),
        ];
        const part = make("i", {
          class: `c${p}`, tabIndex: 0, aria: { role: "img", "aria-label": said(lines) },
          on: {
            mousemove: (event) => hint(event, lines),
            focus: () => beside(part, lines),
            blur: hide,
          },
        });
        part.style.width = `${(100 * value) / total}%`;
        bar.append(part);
      });
      if (plan.bound_ms > 0) {
        const bound = make("div", { class: "bound" });
        bound.style.left = `${Math.min(100, (100 * plan.bound_ms) / total)}%`;
        bar.append(bound);
      }
      bar.addEventListener("mouseleave", hide);
      const notes = ["Each phase as long as on its slowest rank: collectives wait for it."];
      if (plan.bound_ms > 0) {
        notes.push(plan.bound_is_proven ? `Dashed: no plan is below ${ms(plan.bound_ms)} ms.`
          : `Dashed: by an estimate, no plan is below ${ms(plan.bound_ms)} ms.`);
      }
      if (Math.abs(total / plan.path_ms - 1) > 1e-3) {
        notes.push(`Together ${ms(total)} ms; by stages, other layers and what runs beside `
          + `something else, the path is ${ms(plan.path_ms)} ms.`);
      }
      return [bar, make("p", { class: "note" }, notes.join(" "))];
    },

    phases(plan) {
      // Plans that stand on one page have one scale.
      const top = 1.05 * largest(plans.flatMap((p) => p.ranks.map((r) => r.total)));
      if (!(top > 0)) return [make("p", { class: "note" }, "Not known.")];
      return [chart(plan, {
        label: "Milliseconds of each rank, phase by phase", top, unit: "ms",
        parts: (rank) => rank.phases.map((value, p) => [`c${p}`, value]),
        lines: (rank, hot) => [...phaseLines(plan, rank, hot), make("em", {}, click)],
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
          line(["shards"], whole(rank.shards)), make("em", {}, click),
        ],
      })];
    },

    ranks(plan) {
      const number = (title, get, show = whole) => ({
        title, number: true, get, show: (row) => show(get(row)),
      });
      const columns = [
        number("rank", (r) => r.rank),
        number("all phases", (r) => r.total, ms),
        ...data.phases.map((name, p) => ({
          ...number(name, (r) => r.phases[p], ms), icon: swatch(`c${p}`),
          // Where most are equally slow, none stands out.
          mark: (r) => (plan.slowest[p].length <= plan.ranks.length / 2
            && plan.slowest[p].includes(r.rank) ? "worst" : ""),
        })),
        number("shards", (r) => r.shards),
        number("columns", (r) => r.columns),
        number("GiB", (r) => r.used, gib),
      ];
      if (plan.ranks.some((r) => r.memory !== null)) {
        columns.push(number("of GiB", (r) => r.memory,
          (x) => (x === null ? "" : gib(x))));
      }
      return grid({
        label: "ranks", columns, rows: () => plan.ranks,
        start: { column: columns[0], down: false },
        hover: (row) => light(plan, row ? [row.rank] : []),
        open: (row) => plan.pick(row.rank),
      }).nodes.slice(1); // nothing in it to filter by
    },

    tables(plan) {
      const count = (title, get, show) => ({
        title, number: true, get, show: (row) => show(get(row)),
      });
      const columns = [
        { title: "table", get: (r) => r.table.name, kind: "name" },
        { title: "sharding", get: (r) => r.table.type },
        { title: "kernel", get: (r) => r.table.kernel },
        {
          title: "ranks", number: true,
          get: (r) => (r.table.shards.length ? r.table.shards[0][RANK] : null),
          show: (r) => runs(ranksOf(r.table)),
        },
        count("rows", (r) => (plan.rank === null ? r.table.rows : r.rows), whole),
        count("columns",
          (r) => (plan.rank === null ? r.table.columns : r.columns), whole),
        count("GiB", (r) => r.used, gib),
      ];
      if (plan.costed) {
        columns.push(
          count("kernels [ms]", (r) => r.compute, ms),
          count("collectives [ms]", (r) => r.comms, ms),
          count("critical path [ms]", (r) => r.path, ms),
        );
      }
      const note = make("p", { class: "note" });
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
        hover: (row) => light(plan, row ? ranksOf(row.table) : []),
        detail: (row) => [
          ...(row.table.note ? [make("p", {}, row.table.note)] : []),
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
        note.textContent = rank === null
          ? "Memory is of all ranks, times are of a table's slowest rank. Its part of the "
            + "critical path counts the phases in which its rank is the slowest. A table's "
            + "name opens its shards; its ranks are marked in the charts."
          : `Rank ${rank} alone: ${whole(r.shards)} shards, ${memoryLine(r)}`
            + (plan.costed ? `, ${ms(r.total)} ms in an iteration.` : ".");
        for (const columnsOfChart of plan.charts) {
          columnsOfChart.forEach((node, k) => node.classList.toggle("on", k === rank));
        }
        table.update();
      }
      plan.pick = (rank) => {
        choose(rank === plan.rank ? null : rank);
        select.scrollIntoView({ block: "nearest" });
      };
      choose(null);
      return [note, ...table.nodes];
    },

    splits(plan) {
      const columns = [
        { title: "table", get: (s) => s[0], kind: "name" },
        { title: "columns (rank)", get: (s) => s[1] },
        { title: "why", get: (s) => s[2] },
      ];
      return grid({
        label: "split tables", columns, rows: () => plan.splits,
      }).nodes;
    },
  };

  function moves() {
    const [first, second] = plans.map((plan) => new Map(plan.tables.map((t) => {
      const row = held(t, t.shards);
      return [t.name, row.path];
    })));
    const cost = (known) => ([name]) => known.get(name) ?? 0;
    const columns = [
      { title: "table", get: (m) => m[0], kind: "name" },
      ...plans.map((plan, k) => ({ title: plan.name, get: (m) => m[1 + k] || "not there" })),
    ];
    if (plans.every((plan) => plan.costed)) {
      for (const [plan, known] of [[plans[0], first], [plans[1], second]]) {
        columns.push({
          title: `ms, ${plan.name}`, number: true, get: cost(known),
          show: (m) => ms(cost(known)(m)),
        });
      }
    }
    const bytes = {
      title: "GiB to fetch", number: true, get: (m) => m[3], show: (m) => gib(m[3]),
    };
    columns.push(bytes);
    return grid({
      label: "tables that lie otherwise", columns,
      rows: () => data.moves, start: { column: bytes, down: true },
    }).nodes;
  }

  // ---- views are drawn as the reader comes near, and all of them for paper ----

  const waiting = new Set(document.querySelectorAll("[data-view]"));
  let printing = false;

  function draw(host) {
    if (!waiting.delete(host)) return;
    const { view, plan } = host.dataset;
    host.replaceChildren(...(view === "moves" ? moves() : views[view](plans[plan])));
  }

  function drawNear() {
    for (const host of [...waiting]) {
      if (host.getBoundingClientRect().top > 2 * innerHeight) return;
      draw(host);
    }
  }

  for (const event of ["scroll", "resize"]) addEventListener(event, drawNear);
  addEventListener("beforeprint", () => {
    printing = true;
    [...waiting].forEach(draw);
    printing = false;
  });
  drawNear();

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
