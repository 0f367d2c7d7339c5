// Tables to sort, filter and save.

const CHUNK = 100; // rows added to a table at a time
const SCALES = { gib: 2 ** 30, percent: 0.01, change: 0.01 }; // of a column's unit
const EXAMPLES = { rank: "rank=3", rows: "rows>1e6", gib: "gib>=0.5" };
const COMPARE = {
  ">": (value, bound) => value > bound,
  ">=": (value, bound) => value >= bound,
  "<": (value, bound) => value < bound,
  "<=": (value, bound) => value <= bound,
};

const keyOf = (title) => title.toLowerCase().replaceAll(" ", "_");
const numberIn = (text) => (text ? Number(text.replaceAll(",", "").replace(/%$/, "")) : NaN);

// Reads one word of a filter: a test of rows, or a text that says why there is none.
// "rows>1e6" compares a column, in the unit that it shows. "table:a" and "table=a" find
// exactly that value. Other words are looked for in all text columns.
function readFilter(word, columns) {
  const [, key, sign, given] = word.match(/^([^<>=!:]+)(<=|>=|!=|[<>=:])(.*)$/s) ?? [];
  const column = columns.find(({ title }) => keyOf(title) === key);
  const texts = columns.filter(({ kind }) => kind === "text");
  const contains = (row) => texts.some(({ number }) =>
    `${row[number]}`.toLowerCase().includes(word));
  if (!sign || (!column && sign === ":")) return contains;
  if (!column) return `there is no column '${key}'`;
  const { kind, number } = column;
  if (kind === "text" && COMPARE[sign]) return `${key} is text, so only = and != work`;
  if (given === "") return `a value is missing after ${key}${sign}`;
  const wanted = numberIn(given);
  if (kind !== "text" && Number.isNaN(wanted)) return `'${given}' is no number`;
  if (COMPARE[sign]) {
    const bound = wanted * (SCALES[kind] ?? 1);
    return (row) => row[number] !== null && COMPARE[sign](row[number], bound);
  }
  const isEqual = (value) => (kind === "text" ? `${value}`.toLowerCase() === given
    : value !== null && [numberIn(FORMATS[kind](value)), value].includes(wanted));
  return (row) => isEqual(row[number]) !== (sign === "!=");
}

// Fills host with a table to sort, filter and save. Rows are added on scrolling.
function grid(host, [label, given, rows]) {
  const columns = given.map(([title, kind], number) => {
    const values = kind === "peak" ? rows.map((row) => row[number]) : [];
    const peak = largest(values);
    // If most values equal the peak, none stands out.
    const stands = values.filter((v) => v === peak).length <= values.length / 2;
    return { title, kind, peak: stands ? peak : null, number };
  });
  const numeric = columns.filter(({ kind }) => kind !== "text").map(({ title }) => keyOf(title));
  const known = Object.keys(EXAMPLES).filter((key) => numeric.includes(key));
  const examples = known.length ? known.map((key) => EXAMPLES[key])
    : numeric.slice(0, 1).map((key) => `${key}>0`);
  const words = make("input", {
    type: "search",
    placeholder: `Filter: ${["words", ...examples].join(", ")}`,
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

  function compare(x, y) {
    if (x === null || y === null) return (x === null) - (y === null);
    const sign = order.down ? -1 : 1;
    return sign * (typeof x === "string" ? naming.compare(x, y) : x - y);
  }

  function update() {
    const filters = words.value.toLowerCase().split(/\s+/).filter(Boolean)
      .map((word) => readFilter(word, columns));
    const faults = filters.filter((filter) => typeof filter === "string");
    const tests = filters.filter((filter) => typeof filter === "function");
    shown = rows.filter((row) => tests.every((test) => test(row)));
    if (order) {
      const { number } = order.column;
      shown.sort((a, b) => compare(a[number], b[number]));
      for (const column of columns) column.head.removeAttribute("aria-sort");
      order.column.head.setAttribute("aria-sort",
        order.down ? "descending" : "ascending");
    }
    const all = FORMATS.count(rows.length);
    const number = shown.length === rows.length ? all
      : `${FORMATS.count(shown.length)} of ${all}`;
    count.textContent = [`${number} ${label}`, ...faults].join("; ");
    count.classList.toggle("fault", faults.length > 0);
    words.setAttribute("aria-invalid", faults.length > 0);
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
    const lines = [titles, ...values].map((line) => line.map((value) => quote(`${value}`)).join());
    save(`${lines.join("\r\n")}\r\n`, "text/csv", `${label}.csv`);
  }

  scroll.addEventListener("scroll", () => {
    const left = scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight;
    if (left < 600) more(CHUNK);
  });
  addEventListener("beforeprint", () => more(shown.length));
  update();
  const csv = make("button", {
    type: "button", title: `Save all ${label} as CSV`, on: { click: download },
  }, "CSV");
  const filter = rows.length > 10 ? [words, count] : [];
  host.append(make("div", { class: "tools" }, ...filter, csv), scroll);
  host.filter = (text) => {
    words.value = text;
    update();
    return shown.length;
  };
}
