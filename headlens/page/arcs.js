/* Several heads at once: their names, and arcs from the query token to key tokens in the text. */

import { clamp } from "./text.js";
import { $, checkRadio, make } from "./dom.js";
import {
  A, B, comparable, enlarged, headName, meanIsShown, run, selectedHeads, state,
} from "./state.js";
import { LESS, MORE } from "./colours.js";
import { firstKey, scaleEnd } from "./maps.js";
import { cellOf } from "./cells.js";
import { toggleHead } from "./grid.js";

const MOST_ARCS = 12; // for each head: the strongest
const WEAKEST = 0.02; // of the largest weight of the scale
const SVG = "http://www.w3.org/2000/svg";

let shownQuery = 0;

export function buildArcs() {
  const choices = Array.from({ length: run.count }, (_, index) =>
    make("option", { value: index, textContent: headName(index) }));
  $("add-head").append(...choices);
  $("add-head").addEventListener("change", (event) => {
    const index = Number(event.target.value);
    event.target.value = "";
    if (!selectedHeads().includes(index)) toggleHead(index);
  });
}

/** Shows the names of the selected heads, each with its colour. */
export function drawHeads() {
  const heads = selectedHeads();
  $("heads").hidden = heads.length < 2;
  checkRadio("combine", state.mean ? "mean" : "overlaid");
  $("chips").replaceChildren(...heads.map((index, n) => {
    const title = `remove ${headName(index)}`;
    const remove = make("button", { className: "quiet", textContent: "×", title });
    remove.setAttribute("aria-label", title);
    remove.addEventListener("click", () => toggleHead(index));
    const chip = make("span", { className: "chip" }, make("i"), headName(index), remove);
    chip.dataset.head = index;
    chip.style.setProperty("--head", `var(--head-${meanIsShown() ? 0 : n})`);
    return chip;
  }));
}

/** Draws the arcs of the selected heads, or of their mean. */
export function drawArcs(query = shownQuery) {
  shownQuery = query;
  const heads = meanIsShown() ? [enlarged()] : selectedHeads();
  const shown = state.arcs && heads.length > 0;
  $("lines").classList.toggle("with-arcs", shown);
  const box = $("arc-lines").getBoundingClientRect();
  const places = shown ? [...$("text").children].slice(0, query + 1).map((span) => {
    // A token can begin with the space at the end of a line; its text is then on the next line.
    // Without a layout, as in a frame that is not visible yet, it has no rectangle.
    const [widest] = [...span.getClientRects()].sort((one, two) => two.width - one.width);
    if (!widest) return null;
    const { left, top, bottom, width } = widest;
    return { x: left - box.left + width / 2, top: top - box.top, bottom: bottom - box.top };
  }) : [];
  const arcs = shown ? heads.flatMap((index, n) => {
    const aside = 3 * (n - (heads.length - 1) / 2); // so that arcs of all heads are visible
    return strongest(index, query).filter(({ key }) => places[query] && places[key])
      .map((arc) => pathOf(arc, places, query, n, aside, heads.length));
  }) : [];
  $("arc-lines").replaceChildren(...arcs);
}

/** Returns [{key, part}] of a head: the largest weights of the query token as parts of the end of
 * the colour scale, negative where B has less. */
function strongest(index, query) {
  const what = comparable(index) ? state.show : "a";
  const most = scaleEnd(index, what);
  const arcs = [];
  for (let key = firstKey(); key <= query; key++) {
    const [one, two] = [A, B].map((of) => cellOf(of, index, query, key));
    const value = what === "a" ? one.value : what === "b" ? two.value : two.value - one.value;
    if (Math.abs(value) >= WEAKEST * most) arcs.push({ key, part: value / most });
  }
  return arcs.sort((a, b) => Math.abs(b.part) - Math.abs(a.part)).slice(0, MOST_ARCS);
}

function pathOf({ key, part }, places, query, n, aside, many) {
  const [from, to] = [places[query], places[key]];
  const [x, end] = [from.x + aside, to.x + aside];
  let curve;
  if (key === query) { // a loop above the token
    curve = `M${x - 4} ${from.top}C${x - 15} ${from.top - 18} ${x + 15} ${from.top - 18} ` +
      `${x + 4} ${from.top}`;
  } else if (to.bottom > from.top) { // on the same line
    const high = from.top - clamp(Math.abs(x - end) / 2, 9, 26) + 1.5 * aside;
    curve = `M${x} ${from.top}C${x} ${high} ${end} ${high} ${end} ${to.top}`;
  } else { // on a line above
    const middle = (from.top + to.bottom) / 2 + 1.5 * aside;
    curve = `M${x} ${from.top}C${x} ${middle} ${end} ${middle} ${end} ${to.bottom}`;
  }
  const path = document.createElementNS(SVG, "path");
  const strength = Math.min(1, Math.abs(part));
  path.setAttribute("d", curve);
  path.dataset.head = selectedHeads()[n];
  path.dataset.key = key;
  path.style.strokeWidth = (1 + (many > 1 ? 2 : 3) * strength).toFixed(2);
  path.style.strokeOpacity = (0.25 + 0.65 * Math.sqrt(strength)).toFixed(2);
  const signed = part < 0 || (B && state.show === "difference" && comparable(selectedHeads()[n]));
  if (signed && many === 1) path.style.stroke = `rgb(${(part < 0 ? LESS : MORE).join(" ")})`;
  else path.style.stroke = `var(--head-${n})`;
  if (part < 0) path.style.strokeDasharray = "4 3";
  return path;
}
