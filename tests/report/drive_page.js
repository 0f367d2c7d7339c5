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
      const { at, all, charts, cells, grid, words } = inside("plan");
      const bars = all(".col", charts()[0]);
      const parts = all("i", bars[0]);
      const plan = { tables: cells("tables", "table") };
      plan.heights = parts.map((part) => parseFloat(part.style.height));
      plan.hint = bars[0].title;
      plan.lanes = all(".lanes .name").map(words);
      plan.blocks = Object.fromEntries(all(".lane i").map((block) => [block.title, {
        left: parseFloat(block.style.left),
        width: parseFloat(block.style.width),
        outlined: at.getComputedStyle(block).boxShadow !== "none",
      }]));
      plan.times = all(".times span > span").map(words);
      plan.bound = parseFloat(all(".times .bound")[0].style.left);
      plan.peaks = all(".worst", grid("ranks")).map(words);
      plan.notes = all("li[class=warning]").map(words);
      bars[1].click();
      plan["of rank 1"] = cells("shards", "table");
      bars[1].click();
      plan.shards = cells("shards", "rank").length;
      // Record what a click on CSV saves, and under which name.
      at.Blob = function save(parts) { plan.csv = parts.join(""); };
      at.URL.createObjectURL = () => "#";
      at.HTMLAnchorElement.prototype.click = function click() { plan.file = this.download; };
      all(".tools button", grid("shards"))[0].click();
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
      const { at, all, cells, charts, grid, press, status } = inside("large");
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
      all(".col", charts()[1])[5].click();
      large["on rank 5"] = status("shards");
      press("ranks", "all");
      large.sorted = all("th", grid("ranks")).map((head) => head.getAttribute("aria-sort"));
      large.slowest = cells("ranks", "rank")[0];
      large.nodes = all(".node", charts()[0]).map((node) => node.textContent);
      large.edges = all(".edge", charts()[0]).length;
      found.large = large;
    }
    found.notebook = inside("notebook").cells("tables", "table");
  } catch (error) {
    found.error = `${error}\n${error.stack}`;
  }
  found.hacked = "hacked" in window;
  document.getElementById("found").textContent = JSON.stringify(found);
});
