// Fills the page, and switches between light and dark.

for (const host of document.querySelectorAll("[data-grids]")) {
  const given = data.grids[host.dataset.grids];
  host.className = given[0];
  grid(host, given);
}
const DRAW = { timeline, bars, "heat map": heatMap };
for (const host of document.querySelectorAll("[data-charts]")) {
  const chart = data.charts[host.dataset.charts];
  host.append(...DRAW[chart.kind](chart));
}

// In a notebook's frame, these links would open the notebook itself.
document.querySelector("nav")?.addEventListener("click", (event) => {
  if (!event.target.hash || location.protocol !== "about:") return;
  event.preventDefault();
  document.querySelector(event.target.hash).scrollIntoView();
});

const theme = document.getElementById("theme");
const root = document.documentElement;
const isDark = () => (root.style.colorScheme
  || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
const nameTheme = () => { theme.textContent = isDark() ? "Light" : "Dark"; };
theme.addEventListener("click", () => {
  root.style.colorScheme = isDark() ? "light" : "dark";
  nameTheme();
});
nameTheme();
