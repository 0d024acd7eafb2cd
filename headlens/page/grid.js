/* The grid of all heads: order, filter, selection; the layout of the page. */

import { clamp, format, formatLoss, formatMean } from "./text.js";
import { $, make } from "./dom.js";
import {
  A, B, REMOVED, gridShows, headName, hoverHead, hovered, layerName, placeOfHead, run, selected, shownValue,
  state, statisticOf, uniformOf, update,
} from "./state.js";
import { fillTag, onShownSide, shownName, statusOf } from "./names.js";
import { sharpestQuery } from "./finding.js";
import { paint } from "./maps.js";

const OTHERS = 14; // pixels: height of the row of other layers
const tiles = []; // for each head: button, canvas and position
let order = []; // indices of the heads in the order of the grid

export function buildGrid() {
  const grid = $("grid");
  const put = (node, row, column) => {
    node.style.gridRow = row;
    node.style.gridColumn = column;
    grid.append(node);
  };
  for (let head = 0; head < run.heads; head++) {
    put(make("span", { className: "label column", textContent: `H${head}` }), 1, head + 2);
  }
  let row = 1;
  const putOthers = (layer) => { // the layers without attention weights before this one
    const textContent = run.between[layer];
    const node = make("p", { className: "label others", textContent });
    if (textContent) put(node, ++row, `2 / span ${run.heads}`);
  };
  for (let layer = 0; layer < run.layers; layer++) {
    putOthers(layer);
    put(make("span", { className: "label row", textContent: layerName(layer) }), ++row, 1);
    for (let head = 0; head < run.heads; head++) {
      const canvas = make("canvas", { className: "pixels", width: 0, height: 0 });
      const value = make("span", { className: "number" });
      const name = make("b", { textContent: headName(tiles.length) });
      const caption = make("span", { className: "caption" }, name, value);
      const tag = make("span", { className: "tag" });
      const button = make("button", { className: "head", tabIndex: -1 }, canvas, tag, caption);
      button.dataset.layer = layer;
      button.dataset.head = head;
      put(button, row, head + 2);
      // Only putImageData is used, so the pixels stay in main memory.
      const context = canvas.getContext("2d", { alpha: false, willReadFrequently: true });
      tiles.push({ button, canvas, context, tag, value, index: tiles.length, layer, head });
    }
  }
  putOthers(run.layers);
  tiles[0].button.tabIndex = 0;
  order = tiles.map((tile) => tile.index);
  const tileOf = (event) => {
    const button = event.target.closest(".head");
    return button && tiles[button.dataset.layer * run.heads + Number(button.dataset.head)];
  };
  grid.addEventListener("click", (event) => {
    const tile = tileOf(event);
    if (tile) select(tile.index);
  });
  const point = (event) => hoverHead(tileOf(event)?.index ?? null);
  grid.addEventListener("pointerover", point);
  grid.addEventListener("focusin", point);
  grid.addEventListener("pointerleave", () => hoverHead(null));
  grid.addEventListener("focusout", () => hoverHead(null));
}

/** Filters and sorts the heads. Moves the thumbnails if the order has changed. */
function arrange() {
  const passes = (index) => !state.name || shownName(index)?.key === state.name;
  const passing = tiles.map((tile) => passes(tile.index));
  const sorted = tiles.map((tile) => tile.index);
  if (state.sort) {
    const values = tiles.map((tile) => shownValue(state.sort, tile.index));
    const sign = state.descending ? -1 : 1;
    const last = (value) => (value === null ? 1 : 0); // heads without a value come last
    sorted.sort((i, j) =>
      last(values[i]) - last(values[j]) || sign * (values[i] - values[j]) || i - j);
  }
  const shown = state.sort ? sorted.filter((index) => passing[index]) : sorted;
  for (const tile of tiles) {
    tile.button.classList.toggle("out", !passing[tile.index]);
    tile.button.hidden = Boolean(state.sort) && !passing[tile.index];
  }
  if (shown.join() !== order.join()) {
    const focused = document.activeElement;
    $("grid").append(...shown.map((index) => tiles[index].button));
    if (focused?.isConnected && focused !== document.activeElement) {
      focused.focus({ preventScroll: true });
    }
  }
  order = shown;
  setTabStop(tiles.find((tile) => tile.button.tabIndex === 0).index);
  const count = passing.filter(Boolean).length;
  $("count").textContent = state.name ? ` · ${count} of ${run.count} heads` : "";
}

export function drawGrid() {
  arrange();
  const usual = statisticOf(run, "induction") ?? run.statistics[0];
  const key = state.sort || usual?.key;
  const signed = B && state.show === "difference";
  const title = statisticOf(run, key)?.title;
  for (const tile of tiles) {
    if (tile.button.hidden) continue;
    paint(tile, tile.index, gridShows(), tilePixels);
    const found = key ? shownValue(key, tile.index) : null;
    const value = !key ? "" : key === REMOVED.key ? formatLoss(found, true) : format(found, signed);
    const name = shownName(tile.index);
    fillTag(tile.tag, name);
    const text = [`layer ${run.numbers[tile.layer]} head ${tile.head}`,
      ...(run.off?.has(tile.index) ? ["switched off"] : []),
      ...(name ? [[name.title, name.where].filter(Boolean).join(", ")] : []),
      ...(key ? [`${title} ${value}`] : [])].join(", ");
    if (tile.text !== text) tile.button.setAttribute("aria-label", (tile.text = text));
    if (state.sort) tile.value.textContent = value;
    tile.button.setAttribute("aria-pressed", tile.index === selected());
    tile.button.classList.toggle("off", Boolean(run.off?.has(tile.index)));
  }
}

let marked = null; // the tile of the head under the pointer

/** Marks the head under the pointer in the grid. */
export function markHovered() {
  marked?.button.classList.remove("marked");
  marked = tiles[hovered.index] ?? null;
  marked?.button.classList.add("marked");
}

/** Shows the name of the head under the pointer, unless this head is enlarged. Its tooltip has all
 * statistics. */
export function showHovered() {
  const { index } = hovered;
  const text = index === null ? "" : headValues(index);
  if (text) tiles[index].button.title = text;
  $("hovered").textContent = index === selected() || !text ? ""
    : onShownSide(statusOf, index) ?? "";
}

/** Returns the name and all statistics of a head. */
function headValues(index) {
  const values = run.statistics.filter((statistic) => !statistic.empty).map(({ key, title }) =>
    `${title} ${withUniform(key, index, shownValue(key, index), B && state.show === "difference")}`);
  return [onShownSide(statusOf, index) ?? headName(index), ...values].join("\n");
}

/** Returns a value of a head as text, with its standard error if it is known, and with the value for uniform
 * attention if it is not a difference. */
export function withUniform(key, index, value, signed = false, error = null) {
  const uniform = signed || value === null ? null : uniformOf(A, key, index);
  return (error === null ? format(value, signed) : formatMean(value, error)) +
    (uniform === null ? "" : `, chance ${format(uniform)}`);
}

/** Enlarges a head. null: closes the enlarged head. */
export function select(index) {
  const before = selected();
  if (index === null) {
    update({ layer: null, head: null });
    if (before !== null) focusTile(before);
    return;
  }
  // A row that shows the name of the previous head gives way to one that shows the name of this head.
  const stays = state.query !== null && (before === null || state.query !== sharpestQuery(before));
  const query = stays ? state.query : sharpestQuery(index);
  update({ ...placeOfHead(index), query });
  setTabStop(index);
  if (before !== null) return;
  showDetail();
}

export function showDetail() {
  $("side").scrollTop = 0;
  if (!$("app").classList.contains("wide")) $("detail").scrollIntoView();
}

/** Sets the only tab stop of the grid, where arrow keys start. It is never a hidden head. */
export function setTabStop(index) {
  if (tiles[index].button.hidden) index = order[0] ?? index;
  if (tiles[index].button.tabIndex === 0) return;
  for (const { button } of tiles) if (button.tabIndex === 0) button.tabIndex = -1;
  tiles[index].button.tabIndex = 0;
}

function focusTile(index, options = {}) {
  setTabStop(index);
  tiles[index].button.focus(options);
}

/** Moves to a neighbour of the enlarged head or, if no head is enlarged, of the focused head. */
export function moveHead(right, down) {
  const active = tiles.findIndex((tile) => tile.button === document.activeElement);
  const from = selected() ?? (active >= 0 ? active : null);
  if (!order.length) return;
  let to = order[0];
  if (from !== null && state.sort) {
    const top = (index) => tiles[index].button.offsetTop;
    const columns = order.filter((index) => top(index) === top(order[0])).length;
    to = order[clamp(order.indexOf(from) + right + down * columns, 0, order.length - 1)];
  } else if (from !== null) {
    const layer = clamp(tiles[from].layer + down, 0, run.layers - 1);
    to = layer * run.heads + clamp(tiles[from].head + right, 0, run.heads - 1);
  } else {
    to = tiles.find((tile) => tile.button.tabIndex === 0).index;
  }
  if (selected() !== null) select(to);
  if (selected() === null || active >= 0) focusTile(to, { preventScroll: selected() !== null });
}

/** Enlarges the next head in the order of the grid; stops at the ends. */
export function stepHead(by) {
  if (order.length) select(order[clamp(order.indexOf(selected()) + by, 0, order.length - 1)]);
}

let laidOut = ""; // the values that the current layout depends on
let bodyTop = 0; // of the grid, without the options: they do not make it smaller
let tilePixels = 0; // width of a thumbnail in pixels of the screen
let measuredWidth = 0;

/** Sets the sizes of thumbnails and columns if a value that they depend on has changed. */
export function layOut(force = false) {
  const [width, tall] = [document.documentElement.clientWidth, innerHeight];
  const facts = [width, tall, devicePixelRatio, A.T, Boolean(state.sort)].join();
  if (facts === laidOut && !force) return;
  laidOut = facts;
  const compact = tall < 500 && window.parent !== window; // a panel of a dashboard
  $("app").classList.toggle("compact", compact);
  measureBar();
  const [margin, labels, gap] = compact ? [16, 28, 2]
    : [width > 760 ? 40 : 20, width > 480 ? 28 : 22, width > 480 ? 3 : 2];
  // Many heads in a row, of 24 pixels at least, leave no room for an enlarged head next to them.
  const least = compact || state.sort ? 0 : labels + run.heads * (24 + gap);
  let wide = width >= 900 && width - margin - 28 - least >= 330;
  const room = wide ? (width - margin - 28) * 0.41 : width - margin;
  let tile = (room - labels) / run.heads - gap;
  if (!$("app").classList.contains("open")) bodyTop = $("body").offsetTop;
  const others = run.between.filter(Boolean).length * (OTHERS + gap);
  const below = tall - bodyTop - (compact ? 26 : 150 + (state.sort ? 0 : others));
  const low = below / run.layers - gap;
  if (low >= (compact ? 10 : 24)) tile = Math.min(tile, low); // the whole grid on one screen
  if (compact && !state.sort) wide ||= width - margin - run.heads * (tile + gap) - labels >= 240;
  $("app").classList.toggle("wide", wide);
  placeGroups(wide);
  if (state.sort) tile = Math.max(62, Math.min(tile, 92));
  tile = clamp(tile, compact ? 6 : 24, 150); // large enough for a finger; the grid can scroll
  const exact = (Math.floor((tile * devicePixelRatio) / A.T) * A.T) / devicePixelRatio;
  if (exact >= 0.86 * tile) tile = exact; // a whole number of pixels for each weight
  tilePixels = Math.floor(tile * devicePixelRatio + 0.001); // without rounding errors of `exact`
  tile = tilePixels / devicePixelRatio;
  $("all").classList.toggle("scrolls", !state.sort && (tile + gap) * run.heads + labels > room + 9);
  $("grid").classList.toggle("thin", tile < 26); // only some columns have labels
  $("grid").classList.toggle("small", tile < 60); // names are marks without a letter
  document.documentElement.style.setProperty("--tile", `${tile}px`);
  $("grid").classList.toggle("sorted", Boolean(state.sort));
  // A grid that fits stays next to a long right column; next to a long grid, the right column stays.
  const rows = state.sort ? Math.ceil(run.count / Math.floor(room / (tile + 6))) : run.layers;
  $("app").classList.toggle("tall", rows * (tile + (state.sort ? 22 : gap)) > below);
  $("grid").style.width = state.sort && wide ? `${room}px` : "";
  measureSide();
}

/** Places the table of removed heads below the grid or, in one column and on paper, after the enlarged
 * head. */
function placeGroups(isBelowGrid) {
  if (isBelowGrid) $("all").append($("groups"));
  else $("charts-title").before($("groups"));
}

const PAPER = 940; // pixels: height of a page of paper, A4 or Letter, without margins

/** Arranges the page for paper: the grid and the enlarged heatmap fit on one page. */
export function fitPaper(isPrinted) {
  placeGroups(!isPrinted && $("app").classList.contains("wide"));
  const high = (...ids) => ids.reduce((sum, id) => sum + $(id).offsetHeight, 0);
  const maps = high("grid") + $("map").parentElement.offsetHeight;
  const rest = high("bar", "subject", "how", "names", "what", "finding") + 120; // headings and gaps
  const scale = clamp((PAPER - rest) / maps, 0.4, 1);
  document.documentElement.style.setProperty("--print", scale);
}

/** Measures the bar, and where the shorter column stays while the page scrolls: below the bar or, if it
 * is longer than the window, with its end at the end of the window. */
export function measureBar() {
  const isCompact = $("app").classList.contains("compact"); // then the top stays too
  const top = isCompact ? $("top").offsetHeight : 0;
  const bar = $("bar").offsetHeight + top;
  document.documentElement.style.setProperty("--top", `${top}px`);
  document.documentElement.style.setProperty("--bar", `${bar}px`);
  for (const id of ["all", "side"]) {
    const stick = Math.min(bar + 10, innerHeight - $(id).offsetHeight - 10);
    $(id).style.setProperty("--stick", `${stick}px`);
  }
}

/** Returns the pixels for the enlarged head and the charts. */
export const sideWidth = () => measuredWidth;

/** Measures sideWidth. Returns whether it has changed. */
export function measureSide() {
  const width = $("side").clientWidth - ($("app").classList.contains("wide") ? 8 : 0);
  const changed = width !== measuredWidth;
  measuredWidth = width;
  return changed;
}
