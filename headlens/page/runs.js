/* The tab "runs" of a page of a server: one row for each run, drawn again when it has changed. */

import { $, make } from "./dom.js";
import { poll } from "./polling.js";
import { pathOf } from "./training.js";

const rows = new Map(); // address of a run -> {text: its JSON, node}
let base = ""; // the address of the list, as the page sees it

/** Shows the runs from now on. isList: whether this is the page of the list; else of one run. */
export function followRuns(isList) {
  base = isList ? "" : "../../";
  $("tab-runs").append(make("p", { id: "folder", className: "quiet-text", role: "status" }),
    make("ul", { id: "runs" }), make("p", { id: "more", className: "quiet-text" }));
  let folder = "";
  poll(`${base}runs.json`, (found) => {
    folder = found.runs.length ? found.folder
      : `${found.folder} has no runs yet. Start one with: python train.py`;
    showRuns(found);
  }, (status) => {
    $("folder").textContent = status === 200 ? folder
      : "Not connected: the server has stopped. This page continues when it is back.";
  }, () => !$("tab-runs").hidden);
}

/** Returns the losses as a small drawing: x is the step, y the loss. */
function sparkline(lines) {
  const points = Object.values(lines).flat();
  const range = (n) => [Math.min, Math.max].map((most) => most(...points.map((point) => point[n])));
  const [[, last], [low, high]] = [range(0), range(1)];
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const values = { viewBox: "0 0 100 100", preserveAspectRatio: "none", role: "img",
    "aria-label": "losses over steps" };
  for (const [key, value] of Object.entries(values)) svg.setAttribute(key, value);
  for (const [name, line] of Object.entries(lines)) {
    const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
    path.setAttribute("class", name);
    path.setAttribute("d", pathOf(line, (step) => (100 * step) / (last || 1),
      (loss) => 100 - (100 * (loss - low)) / (high - low || 1)));
    svg.append(path);
  }
  return svg;
}

function rowOf({ name, address, date, size, state, text, done, losses, lines, picture }) {
  const image = picture
    ? [make("img", { src: base + picture, alt: "attention of one head", loading: "lazy" })] : [];
  const bar = done === null ? []
    : [make("progress", { value: done, ariaLabel: "part of the steps" })];
  const values = losses.map(([of, loss]) => make("div", {},
    make("dt", { className: of, textContent: of }), make("dd", { textContent: loss })));
  return make("li", {}, make("div", { className: "picture" }, ...image),
    make("div", {}, make("h2", {}, make("a", { href: base + address, textContent: name })),
      make("p", { className: "quiet-text", textContent: [date, size].filter(Boolean).join(" · ") })),
    make("div", {}, make("p", { className: state, textContent: text }), ...bar),
    make("div", {}, ...(losses.length ? [sparkline(lines)] : [])), make("dl", {}, ...values));
}

function showRuns({ runs, more }) {
  $("more").textContent = more ? `${more} older runs are not shown` : "";
  for (const one of runs) {
    const [before, text] = [rows.get(one.address), JSON.stringify(one)];
    if (before?.text === text) continue;
    const node = rowOf(one);
    const hasFocus = before?.node.contains(document.activeElement);
    before?.node.replaceWith(node);
    if (hasFocus) node.querySelector("a").focus();
    rows.set(one.address, { text, node });
  }
  const shown = runs.map(({ address }) => rows.get(address).node);
  const list = $("runs");
  if (shown.some((node, n) => list.children[n] !== node) || list.children.length !== shown.length) {
    list.replaceChildren(...shown);
  }
}
