// Clicks through the pages of test_html.py and records what they show.
window.addEventListener("load", () => {
  const found = {};
  const inside = (id) => {
    const frame = document.getElementById(id);
    const { contentDocument: page, contentWindow: at } = frame;
    const all = (what, where = page) => [...where.querySelectorAll(what)];
    const words = (node) => node.textContent.replace(/\s+/g, " ").trim();
    const grid = (label) => page.querySelector(`[data-grids].${label}`);
    const charts = (part = page) => all("[data-charts] .chart", part);
    const column = (label, title) =>
      all("th", grid(label)).findIndex((head) => words(head) === title);
    const cells = (label, title) => all("tbody tr", grid(label))
      .map((row) => words(row.cells[column(label, title)]));
    const press = (label, title) =>
      all("th button", grid(label))[column(label, title)].click();
    const status = (label) => words(grid(label).querySelector("[role=status]"));
    return { page, at, all, words, grid, charts, cells, press, status };
  };
  try {
    {
      const { page, at, all, charts, cells, grid, words } = inside("plan");
      const bars = all(".col", charts()[0]);
      const parts = all("i", bars[0]);
      const plan = { tables: cells("tables", "table") };
      plan.heights = parts.map((part) => parseFloat(part.style.height));
      plan.hint = bars[0].ariaLabel;
      plan.lanes = all(".lanes .name").map(words);
      plan.blocks = Object.fromEntries(all(".lane i").map((block) => [block.ariaLabel, {
        text: words(block),
        left: parseFloat(block.style.left),
        width: parseFloat(block.style.width),
        outlined: at.getComputedStyle(block).boxShadow !== "none",
      }]));
      plan.times = all(".times span > span").map(words);
      plan.bound = parseFloat(all(".times .bound")[0].style.left);
      plan.peaks = all(".worst", grid("ranks")).map(words);
      plan.notes = all("li[class=warning]").map(words);
      // Tab leads to one part of a chart, arrow keys to the others.
      const lanes = page.querySelector(".lanes");
      const tip = page.querySelector(".tip");
      const tips = () => (tip.hidden ? [] : [...tip.children].map(words));
      const press = (key) => page.activeElement.dispatchEvent(
        new at.KeyboardEvent("keydown", { key, bubbles: true }));
      const tabbed = all("[tabindex='0']", lanes);
      tabbed[0].focus();
      plan.walk = [tabbed.length, tips()[0], ...["ArrowRight", "End", "ArrowDown", "Home"].map(
        (key) => { press(key); return tips()[0]; })];
      plan["tabbed after"] = all("[tabindex='0']", lanes).map((node) => node.ariaLabel);
      press("Escape");
      plan.dismissed = tips();
      bars[0].dispatchEvent(new at.PointerEvent("pointerover", { bubbles: true }));
      plan.hovered = tips();
      bars[0].dispatchEvent(new at.PointerEvent("pointerout", { bubbles: true }));
      plan.hovered.push(...tips());
      const pressed = () => all("[aria-pressed=true]").map((node) => node.ariaLabel);
      bars[1].click();
      plan.tapped = tips()[0];
      plan["of rank 1"] = cells("shards", "table");
      plan.pressed = pressed();
      plan.selected = all("span.selected").map(words);
      plan.kept = words(page.querySelector(".kept"));
      bars[1].click();
      plan.shards = cells("shards", "rank").length;
      const heat = all(".heat i");
      plan.heat = heat.map((cell) => [cell.ariaLabel, words(cell)]);
      heat[1].focus();
      press("Enter");
      plan["in all charts"] = pressed().map((label) => label.includes("rank 1"));
      press("Escape");
      plan["let go"] = [...pressed(), words(page.querySelector(".kept"))];
      plan["shards then"] = cells("shards", "rank").length;
      const units = page.querySelector("select");
      units.value = 1;
      units.dispatchEvent(new at.Event("change"));
      plan["heat in GiB"] = all(".heat i").map(words);
      // Record what a click on CSV saves, and under which name.
      at.Blob = function save(parts) { plan.csv = parts.join(""); };
      at.URL.createObjectURL = () => "#";
      at.HTMLAnchorElement.prototype.click = function click() { plan.file = this.download; };
      all(".tools button", grid("shards"))[0].click();
      plan.saved = [plan.file, plan.csv];
      all(".tools button")[0].click();
      plan.trace = [plan.file, JSON.parse(plan.csv)];
      found.plan = plan;
    }
    {
      const { all, cells, charts, press } = inside("compared");
      const compared = { moves: cells("moves", "table") };
      press("moves", "table");
      press("moves", "table");
      compared["by name, down"] = cells("moves", "table");
      compared.tops = charts().slice(0, 2).map((host) => {
        const parts = all("i", all(".col", host)[1]);
        return parts.reduce((sum, part) => sum + parseFloat(part.style.height), 0);
      });
      found.compared = compared;
    }
    {
      const { page, at, all, words, cells, charts, grid, press, status } = inside("large");
      const names = () => cells("tables", "table");
      const large = { "laid out": names().length };
      const scroll = grid("tables").querySelector(".scroll");
      large.costliest = names()[0];
      scroll.scrollTop = scroll.scrollHeight;
      scroll.dispatchEvent(new at.Event("scroll"));
      large["after scrolling"] = names().length;
      press("tables", "table");
      large["by name"] = names().slice(0, 3);
      const input = grid("tables").querySelector("input");
      input.value = "1777 WISE";
      input.dispatchEvent(new at.Event("input"));
      large.filtered = [...names(), status("tables")];
      large.filters = Object.fromEntries(["rows>=4e3 shards=4", "gib<1e-6", "rows>1e6",
        "table=table_7", "table!=table_7", "table:table_7", "rows:4,000", "no:such", "rows>many",
        "columns<=", "no>3", "table>3", "table_1 rows>many"].map((text) => {
        input.value = text;
        input.dispatchEvent(new at.Event("input"));
        return [text, [status("tables"), input.getAttribute("aria-invalid")]];
      }));
      large.example = input.placeholder;
      large.rest = words(page.querySelector(".wide + p"));
      large.blocks = all(".lane i").map((block) => [block.ariaLabel, words(block)]);
      large.drawn = all(".heat .name").length;
      all(".col", charts()[1])[5].click();
      large["on rank 5"] = status("shards");
      press("ranks", "all");
      large.sorted = all("th", grid("ranks")).map((head) => head.getAttribute("aria-sort"));
      large.slowest = cells("ranks", "rank")[0];
      large.nodes = all(".node", charts()[0]).map((node) => node.textContent);
      large.edges = all(".edge", charts()[0]).length;
      found.large = large;
    }
    {
      const { page, at, cells, all } = inside("notebook");
      found.notebook = { tables: cells("tables", "table") };
      const links = all("nav a");
      const to = page.querySelector(links.at(-1).hash);
      page.documentElement.style.height = "20000px";
      to.style.marginTop = "15000px";
      links.at(-1).click();
      found.notebook.followed = [at.scrollY > 5000, page.URL];
    }
  } catch (error) {
    found.error = `${error}\n${error.stack}`;
  }
  found.hacked = "hacked" in window;
  document.getElementById("found").textContent = JSON.stringify(found);
});
