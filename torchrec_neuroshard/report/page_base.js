"use strict";
// What all parts of the page use. Names are only ever set as text.
const data = JSON.parse(document.getElementById("data").textContent);

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

function save(text, type, download) {
  const href = URL.createObjectURL(new Blob([text], { type }));
  make("a", { href, download }).click();
  setTimeout(() => URL.revokeObjectURL(href), 10_000);
}
