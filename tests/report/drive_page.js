// Clicks through the pages of test_html.py and writes down what they then show.
window.addEventListener("load", () => {
  const found = {};
  const inside = (id) => {
    const frame = document.getElementById(id);
    const { contentDocument: page, contentWindow: at } = frame;
    const all = (what, where = page) => [...where.querySelectorAll(what)];
    const view = (name) => page.querySelector(`[data-view=${name}]`);
    const names = (name) => all("tbody tr:not(.detail)", view(name))
      .map((row) => row.cells[0].textContent);
    const press = (name, number) => all("th button", view(name))[number].click();
    const fire = (node, type, more = {}) =>
      node.dispatchEvent(new at.MouseEvent(type, { bubbles: true, ...more }));
    const words = (node) => node.textContent.replace(/\s+/g, " ").trim();
    return { page, at, all, view, names, press, fire, words };
  };
  try {
    {
      const { all, view, names, fire, words } = inside("plan");
      const bars = all(".col", view("phases"));
      const parts = all("i", bars[0]);
      const plan = { tables: names("tables"), heights: [] };
      plan.heights = parts.map((part) => parseFloat(part.style.height));
      fire(parts[4], "mousemove", { clientX: 9, clientY: 9 });
      const lines = all(".tip div").map((line) =>
        [...line.children].map(words).join(" "));
      plan.tip = lines.join("; ");
      bars[0].click();
      plan.rank = words(view("tables").querySelector(".note"));
      view("tables").querySelector("td button").click();
      plan.shards = all(".shards span").map(words);
      found.plan = plan;
    }
    {
      const { all, view, names, press } = inside("compared");
      const compared = { moves: names("moves") };
      press("moves", 0);
      press("moves", 0);
      compared["by name, down"] = names("moves");
      compared.tops = all("[data-view=phases]").slice(0, 2).map((host) => {
        const parts = all("i", all(".col", host)[1]);
        return parts.reduce((sum, part) => sum + parseFloat(part.style.height), 0);
      });
      found.compared = compared;
    }
    {
      const { at, all, view, names, press, words } = inside("large");
      const large = { "laid out": names("tables").length };
      const scroll = view("tables").querySelector(".scroll");
      large.costliest = names("tables")[0];
      scroll.scrollTop = scroll.scrollHeight;
      scroll.dispatchEvent(new at.Event("scroll"));
      large["after scrolling"] = names("tables").length;
      press("tables", 0);
      large["by name"] = names("tables").slice(0, 3);
      const input = view("tables").querySelector("input");
      const status = view("tables").querySelector("[role=status]");
      input.value = "1777 WISE";
      input.dispatchEvent(new at.Event("input"));
      large.filtered = [...names("tables"), status.textContent];
      input.value = "";
      input.dispatchEvent(new at.Event("input"));
      const select = view("tables").querySelector("select");
      select.value = "5";
      select.dispatchEvent(new at.Event("change"));
      large["on rank 5"] = status.textContent;
      const heads = all("th", view("ranks"));
      heads[1].querySelector("button").click();
      large.sorted = heads.map((head) => head.getAttribute("aria-sort"));
      view("ranks").querySelector("td button").click();
      large["by the list"] = words(view("tables").querySelector(".note"));
      found.large = large;
    }
    found.notebook = inside("notebook").names("tables");
  } catch (error) {
    found.error = `${error}\n${error.stack}`;
  }
  found.hacked = "hacked" in window;
  document.getElementById("found").textContent = JSON.stringify(found);
});
