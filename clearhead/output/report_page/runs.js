// The list of runs: one row for each, drawn again when its content has changed.

import { rounded } from "../../../headlens/page/text.js";
import { poll } from "../../../headlens/page/polling.js";

const rows = new Map(); // address of a run -> {text: its JSON, node}
const byId = (id) => document.getElementById(id);

function element(tag, properties = {}, ...children) {
  const node = Object.assign(document.createElement(tag), properties);
  node.append(...children);
  return node;
}

function link(href, textContent) {
  return element("a", { href, textContent });
}

/** Returns the losses as a small drawing: x is the step, y the loss. */
function drawing(lines, steps) {
  const points = Object.values(lines).flat();
  const [low, high] = [Math.min, Math.max].map((most) => most(...points.map(([, loss]) => loss)));
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("viewBox", "0 0 100 100");
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", "losses over steps");
  for (const [name, line] of Object.entries(lines)) {
    const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
    const places = line.map(([step, loss]) =>
      `${(100 * step) / (steps || 1)} ${100 - (100 * (loss - low)) / (high - low || 1)}`);
    path.setAttribute("class", name);
    path.setAttribute("d", `M${places.join("L")}${places.length === 1 ? "h0" : ""}`);
    svg.append(path);
  }
  return svg;
}

function progress({ state, step, max_steps: planned }) {
  const count = (number) => number.toLocaleString("en");
  const isPart = state !== "finished" && planned;
  const text = `${state}, step ${count(step)}${isPart ? ` of ${count(planned)}` : ""}`;
  const bar = isPart ? [element("progress", { max: planned, value: step, ariaLabel: "steps" })] : [];
  return element("div", {}, element("p", { className: `state ${state}`, textContent: text }), ...bar);
}

function losses({ lines, losses: last, step, max_steps: planned, state }) {
  const values = Object.entries(last).map(([name, loss]) => element("div", {},
    element("dt", { className: name, textContent: name }),
    element("dd", { textContent: rounded(loss, 4) })));
  const end = state === "running" ? Math.max(step, planned ?? 0) : step; // the line grows to the right
  const drawn = Object.keys(lines).length ? [drawing(lines, end),
    element("dl", { className: "values" }, ...values)] : [];
  return element("div", { className: "losses" }, ...drawn);
}

function rowOf(run) {
  const size = run.parameters ? ` · ${run.parameters.toLocaleString("en")} parameters` : "";
  const pages = [...(run.has_attention ? [link(run.address, "attention")] : []),
    ...(run.has_report ? [link(`${run.address}report`, "report")] : [])];
  const name = pages.length ? link(pages[0].href, run.name) : run.name;
  return element("li", {}, element("div", {}, element("h2", {}, name),
    element("p", { className: "quiet", textContent: run.date + size }),
    element("p", { className: "links" }, ...pages)), progress(run), losses(run));
}

function show({ folder, runs, more }) {
  byId("folder").textContent = runs.length ? folder
    : `${folder} has no runs yet. Start one with: python train.py`;
  byId("more").textContent = more ? `${more} older runs are not shown` : "";
  for (const run of runs) {
    const [before, text] = [rows.get(run.address), JSON.stringify(run)];
    if (before?.text === text) continue;
    const node = rowOf(run);
    if (before) {
      const focused = [...before.node.querySelectorAll("a")].indexOf(document.activeElement);
      before.node.replaceWith(node);
      node.querySelectorAll("a")[focused]?.focus();
    }
    rows.set(run.address, { text, node });
  }
  const shown = runs.map(({ address }) => rows.get(address).node);
  const list = byId("runs");
  if (shown.some((node, n) => list.children[n] !== node) || list.children.length !== shown.length) {
    list.replaceChildren(...shown);
  }
  byId("runs").hidden = !runs.length;
}

poll("runs.json", show, (status) => (byId("lost").hidden = status === 200));
