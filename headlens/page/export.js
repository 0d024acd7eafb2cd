/* Saves the enlarged head or all heads as an image file: SVG with text, or PNG. */

import { clamp, clip } from "./text.js";
import { $, make, showMessage } from "./dom.js";
import {
  A, B, comparable, enlarged, gridShows, here, indexInB, indexName, run, selected, sideName, state,
} from "./state.js";
import { colours, readTheme, viridis } from "./colours.js";
import { paint, scaleEnd } from "./maps.js";
import { findName, plainName, whereText } from "./names.js";
import { colourTicks } from "./plots.js";

const MARGIN_OF_FIGURE = 16;
const BAR = 300; // width of the colour bar

export function buildExport() {
  const button = (what, kind) => {
    const node = make("button", { textContent: kind.toUpperCase() });
    node.dataset.figure = `${what}.${kind}`;
    node.addEventListener("click", () => save(what === "head" ? enlarged() : null, kind));
    return node;
  };
  const row = (what, text) => make("p", { id: `save-${what}` }, make("span", {}, text),
    button(what, "svg"), button(what, "png"));
  const close = make("button", { textContent: "close" });
  close.addEventListener("click", () => $("save").close());
  const title = make("h2", { id: "save-title", textContent: "Save image" });
  $("save").append(make("header", {}, title, close), row("head", ""),
    row("grid", "all heads"), make("p", { textContent:
      "The image shows the current step, prompt and colour scale on a white background. In an " +
      "SVG file, the text can be edited." }), make("p", { id: "saved" }));
  $("save-image").addEventListener("click", () => {
    $("save-head").hidden = selected() === null;
    $("save-head").firstChild.textContent = selected() === null ? "" : indexName(enlarged());
    $("saved").replaceChildren();
    $("save").showModal();
  });
}

async function save(index, kind) {
  const figure = inLightTheme(() => (index === null ? gridFigure() : headFigure(index)));
  const name = index === null ? "heads" : indexName(index).replace(" ", "");
  const file = `${run.name}-${name}-step${here.step}.${kind}`.replace(/[^\w.-]+/g, "-");
  try {
    const address = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(figure.svg)}`;
    const href = kind === "svg" ? address : await rendered(address, figure);
    if (window.top === window) {
      make("a", { download: file, href }).click();
      $("save").close();
    } else { // a sandboxed frame may not download files
      const image = make("img", { src: href, alt: file });
      $("saved").replaceChildren("Right-click the image to save it.", image);
    }
  } catch {
    showMessage("This browser cannot draw the image. Save it as SVG.");
  }
}

/** Calls draw() with the colours of the light theme. */
function inLightTheme(draw) {
  const { theme } = state;
  state.theme = "light";
  readTheme();
  try {
    return draw();
  } finally {
    state.theme = theme;
    readTheme();
  }
}

/** Returns the address of a PNG of a drawing, with two pixels for each unit. */
async function rendered(src, { width, height }) {
  const image = make("img", { src });
  await image.decode();
  const canvas = make("canvas", { width: 2 * width, height: 2 * height });
  canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
  return canvas.toDataURL();
}

const escape = (text) => text.replace(/[&<>"]/g, (c) => `&#${c.charCodeAt(0)};`);

function write(x, y, text, { size = 11, anchor = "start", colour = "#444", more = "" } = {}) {
  return `<text x="${x}" y="${y}" font-size="${size}" text-anchor="${anchor}" fill="${colour}" ` +
    `${more}>${escape(text)}</text>`;
}

/** Returns a heatmap as an image of the drawing. pixels: its minimum size. */
function heatmap(x, y, size, index, what, pixels) {
  const map = make("canvas");
  paint({ canvas: map, context: map.getContext("2d", { alpha: false }) }, index, what);
  // Enlarged, because some programs blur the pixels of an image.
  const large = make("canvas");
  large.width = large.height = map.width * Math.ceil(pixels / map.width);
  const context = large.getContext("2d", { alpha: false });
  context.imageSmoothingEnabled = false;
  context.drawImage(map, 0, 0, large.width, large.height);
  const title = indexName(index);
  return `<image x="${x}" y="${y}" width="${size}" height="${size}" preserveAspectRatio="none" ` +
    `style="image-rendering:optimizeSpeed;image-rendering:pixelated" href="${large.toDataURL()}">` +
    `<title>${title}</title></image>`;
}

/** Returns {svg, width, height} of a drawing on white, with a title, a prompt and a colour bar.
 * what: "a", "b" or "difference". x: of the colour bar. largest: see colourBar. */
function figureOf(what, subject, body, width, bodyHeight, { x, largest }) {
  const height = bodyHeight + 40;
  const of = what === "b" ? B : A;
  const sides = what === "difference" ? `B − A (${sideName(A)}, ${sideName(B)})` : sideName(of);
  const title = clip(`${subject}${A.valued ? ", weight × value norm" : ""}, ${sides}`, 200);
  const about = clip(`${of.run.prompts[of.prompt].title} · ${of.run.name}`, Math.floor(width / 6));
  const svg = `<svg xmlns="http://www.w3.org/2000/svg" width="${width}" height="${height}" ` +
    `viewBox="0 0 ${width} ${height}" font-family="DejaVu Sans, Helvetica, Arial, sans-serif">` +
    `<rect width="100%" height="100%" fill="#fff"/>` +
    write(MARGIN_OF_FIGURE, 28, title, { size: 17, colour: "#000", more: 'font-weight="bold"' }) +
    write(MARGIN_OF_FIGURE, 48, about, { size: 12 }) + body +
    `<g transform="translate(${x} ${bodyHeight})">${colourBar(what === "difference", largest)}` +
    "</g></svg>";
  return { svg, width, height };
}

/** largest: the values at the end of the colour scales of all heads in the figure. */
function colourBar(difference, largest) {
  const table = difference ? colours.diverging : viridis;
  const stops = Array.from({ length: 52 }, (_, n) =>
    `<stop offset="${(n / 51).toFixed(4)}" stop-color="rgb(${table[5 * n]})"/>`);
  const ends = [{ far: 0, text: "0" }, { far: 1, text: "largest of each head" }];
  const ticks = largest.every((most) => most === largest[0]) ? colourTicks(difference, largest[0])
    : difference ? [{ far: 0.5, text: "0" }] : ends;
  return `<linearGradient id="scale">${stops.join("")}</linearGradient>` +
    `<rect width="${BAR}" height="10" fill="url(#scale)"/>` +
    ticks.map(({ far, text }) =>
      `<path d="M${far * BAR} 10v3" stroke="#444"/>` +
      write(far * BAR, 24, text, { size: 10, anchor: "middle" })).join("");
}

const upright = (x, y, text, options) =>
  write(0, 0, text, { ...options, more: `transform="translate(${x} ${y}) rotate(-90)"` });

/** Returns a figure of one head, with tokens on both axes. */
function headFigure(index) {
  const what = comparable(index) ? state.show : "a";
  const cell = clamp(Math.floor(576 / A.T), 8, 48); // large enough for the label of each token
  const size = cell * A.T;
  const font = clamp(cell, 8, 12);
  const labels = A.labels.map((label) => clip(label, 10));
  const ruler = make("canvas").getContext("2d");
  ruler.font = `${font}px DejaVu Sans, Helvetica, Arial, sans-serif`;
  const widest = Math.ceil(Math.max(...labels.map((text) => ruler.measureText(text).width)));
  const { period } = A.run.prompts[A.prompt];
  const side = MARGIN_OF_FIGURE + (period ? 24 : 8); // where the names of the copies are
  const [left, top] = [side + 16 + widest, 64];
  const below = top + size + widest + (period ? 36 : 20);
  let body = heatmap(left, top, size, index, what, 512);
  labels.forEach((text, n) => {
    const middle = (n + 0.5) * cell + font / 3;
    body += write(left - 5, top + middle, text, { size: font, anchor: "end" }) +
      upright(left + middle, top + size + 5, text, { size: font, anchor: "end" });
  });
  for (const copy of period ? [1, 2] : []) {
    const [name, middle] = [`copy ${copy}`, (1 + (copy - 0.5) * period) * cell];
    body += write(left + middle, below - 16, name, { anchor: "middle" }) +
      upright(side, top + middle, name, { anchor: "middle" });
  }
  const edge = (period + 1) * cell; // where copy 2 begins
  if (period) {
    body += `<path d="M${left} ${top + edge}h${size}M${left + edge} ${top + edge}V${top + size}" ` +
      'fill="none" stroke="#888" stroke-dasharray="3"/>';
  }
  body += write(left + size / 2, below, "key token", { size: 12, anchor: "middle" }) +
    upright(MARGIN_OF_FIGURE + 8, top + size / 2, "query token", { size: 12, anchor: "middle" });
  const width = Math.max(size, BAR + 20) + left + MARGIN_OF_FIGURE;
  const name = what === "a" && plainName(run, index, A.step);
  const where = name ? whereText(findName(run, index, A.step) ?? {}) : "";
  const subject = name ? `${indexName(index)} ${name}${where}` : indexName(index);
  return figureOf(what, subject, body, width, below + 16,
    { x: left, largest: [scaleEnd(index, what)] });
}

/** Returns a figure of all heads: a row for each layer, a column for each head. */
function gridFigure() {
  const what = gridShows();
  const tile = clamp(Math.floor(860 / run.heads), 30, 220);
  const [left, top] = [MARGIN_OF_FIGURE + 34, 84];
  let body = "";
  const largest = [];
  for (let head = 0; head < run.heads; head++) {
    body += write(left + (head + 0.5) * tile, top - 6, `H${head}`, { anchor: "middle" });
  }
  for (let layer = 0; layer < run.layers; layer++) {
    body += write(left - 6, top + (layer + 0.5) * tile + 4, `L${layer}`, { anchor: "end" });
    for (let head = 0; head < run.heads; head++) {
      const index = layer * run.heads + head;
      body += heatmap(left + head * tile, top + layer * tile, tile - 4, index, what, 64);
      if (what === "a" || indexInB(index) >= 0) largest.push(scaleEnd(index, what));
    }
  }
  const below = top + run.layers * tile + 14;
  body += write(left, below, "row: query token, column: key token");
  const width = Math.max(run.heads * tile, BAR + 120) + left + MARGIN_OF_FIGURE;
  return figureOf(what, "all heads", body, width, below + 14, { x: left, largest });
}
