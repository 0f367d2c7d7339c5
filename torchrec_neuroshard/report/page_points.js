// Charts that mouse, touch and keyboard reach: a tooltip for each of their parts, and
// the rank that a click selects in all charts of a part of the page.

const points = new WeakMap(); // node -> its lines, rank, row and column
const tip = document.body.appendChild(make("div", {
  class: "tip", hidden: true, aria: { "aria-hidden": "true" },
}));
const kept = document.body.appendChild(make("div", { class: "kept", aria: { role: "status" } }));
let pointed = null; // the node that the tooltip is of

function showTip(node) {
  pointed = node;
  tip.replaceChildren(...points.get(node).lines.map((line) => make("div", {}, line)));
  tip.hidden = false;
  const at = node.getBoundingClientRect();
  const { width, height } = tip.getBoundingClientRect();
  const most = document.documentElement.clientWidth - width - 4;
  const left = Math.max(4, Math.min(most, at.left + (at.width - width) / 2));
  const above = at.top - height - 6;
  tip.style.left = `${left}px`;
  tip.style.top = `${above < 4 ? Math.min(at.bottom + 6, innerHeight - height - 4) : above}px`;
}

function hideTip() {
  pointed = null;
  tip.hidden = true;
}

// Selects a rank, which marks it in the part's charts and filters its shards; null: none.
function select(part, rank) {
  const shards = part.querySelector("[data-grids].shards");
  if (rank === null) delete part.dataset.selected;
  else part.dataset.selected = rank;
  for (const node of part.querySelectorAll("[data-rank]")) {
    const own = rank !== null && node.dataset.rank === `${rank}`;
    node.classList.toggle("selected", own);
    if (node.hasAttribute("aria-pressed")) node.setAttribute("aria-pressed", own);
  }
  const count = shards?.filter(rank === null ? "" : `rank=${rank}`);
  kept.replaceChildren();
  if (rank === null) return;
  const button = (text, click) => make("button", { type: "button", on: { click } }, text);
  const shown = `${FORMATS.count(count ?? 0)} shard${count === 1 ? "" : "s"}`;
  kept.append(`rank ${rank} selected`, ...(shards ? [button(shown,
    () => shards.scrollIntoView({ block: "nearest" }))] : []),
  button("Clear", () => select(part, null)));
}

function pressed(node) {
  const part = node.closest("section");
  const { rank } = points.get(node);
  for (const other of document.querySelectorAll("[data-selected]")) {
    if (other !== part) select(other, null);
  }
  select(part, part.dataset.selected === `${rank}` ? null : rank);
}

// The point that an arrow key leads to: the next one in its row, or the nearest one in
// the next row.
function neighbour(all, from, key) {
  const back = ["ArrowLeft", "ArrowUp", "Home"].includes(key) ? -1 : 1;
  const isVertical = key === "ArrowUp" || key === "ArrowDown";
  const axis = isVertical ? "row" : "column";
  const ahead = all.filter((p) => back * (p[axis] - from[axis]) > 0
    && (isVertical || p.row === from.row));
  const far = key === "Home" || key === "End" ? -1 : 1;
  const cost = (p) => [far * Math.abs(p[axis] - from[axis]), Math.abs(p.column - from.column)];
  return ahead.map((p) => [...cost(p), p])
    .reduce((a, b) => (b[0] - a[0] || b[1] - a[1]) < 0 ? b : a, [Infinity, 0, from])[2];
}

// Makes points of a chart reachable. Tab leads to one of them, arrow keys to the others.
function reach(chart, all) {
  if (!all.length) return;
  let current = all[0];
  for (const point of all) {
    const { node, lines, rank } = point;
    points.set(node, point);
    node.tabIndex = point === current ? 0 : -1;
    node.dataset.rank = rank;
    node.setAttribute("role", "button");
    node.setAttribute("aria-label", lines.join(", "));
    node.setAttribute("aria-pressed", false);
  }
  const pointAt = ({ target }) => {
    const node = target.closest("[aria-pressed]");
    return node && points.has(node) ? node : null;
  };
  const on = {
    pointerover: (event) => {
      if (event.pointerType !== "touch" && pointAt(event)) showTip(pointAt(event));
    },
    pointerout: (event) => { if (event.pointerType !== "touch") hideTip(); },
    focusin: (event) => {
      const node = pointAt(event);
      if (!node) return;
      current.node.tabIndex = -1;
      current = points.get(node);
      node.tabIndex = 0;
      showTip(node);
    },
    focusout: hideTip,
    click: (event) => {
      const node = pointAt(event);
      if (!node) return;
      pressed(node);
      showTip(node);
    },
    keydown: (event) => {
      if (!pointAt(event)) return;
      const { key } = event;
      if (key === "Enter" || key === " ") pressed(current.node);
      else if (/^Arrow|^Home$|^End$/.test(key)) neighbour(all, current, key).node.focus();
      else return;
      event.preventDefault();
    },
  };
  for (const [name, act] of Object.entries(on)) chart.addEventListener(name, act);
}

addEventListener("scroll", () => { // a key may have scrolled to the focused point
  if (pointed && pointed === document.activeElement) showTip(pointed);
  else hideTip();
}, { capture: true, passive: true });
addEventListener("pointerdown", ({ target }) => { if (!pointed?.contains(target)) hideTip(); });
addEventListener("keydown", ({ key, target }) => {
  if (key !== "Escape" || target.tagName === "INPUT") return;
  hideTip();
  for (const part of document.querySelectorAll("[data-selected]")) select(part, null);
});
