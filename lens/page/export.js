/* Saves the enlarged head or all heads as an image file: SVG with text, or PNG. */

import { clamp, joinBytes, label, visible } from "./text.js";
import { $, make, showMessage } from "./dom.js";
import {
  A, B, enlarged, gridShows, here, indexInB, indexName, run, selected, sideName, state,
} from "./state.js";
import { colours, readTheme, viridis } from "./colours.js";
import { paint, scaleEnd } from "./maps.js";
import { colourTicks } from "./detail.js";

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
    $("save-head").firstChild.textContent = headName(state.layer, state.head);
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

/** Returns {svg, width, height} of a drawing on white, with a title, a prompt and a colour bar. */
function figureOf(title, body, width, bodyHeight, bar) {
  const height = bodyHeight + 40;
  const prompt = run.prompts[state.prompt];
  const text = joinBytes(prompt.tokens).join("").replace(/\s+/g, " ").trim();
  const shown = prompt.period ? `${prompt.period} random tokens, written twice` : `“${text}”`;
  const about = visible(`${shown} · ${run.name}`, Math.floor(width / 6));
  const svg = `<svg xmlns="http://www.w3.org/2000/svg" width="${width}" height="${height}" ` +
    `viewBox="0 0 ${width} ${height}" font-family="DejaVu Sans, Helvetica, Arial, sans-serif">` +
    `<rect width="100%" height="100%" fill="#fff"/>` +
    write(MARGIN_OF_FIGURE, 28, title, { size: 17, colour: "#000", more: 'font-weight="bold"' }) +
    write(MARGIN_OF_FIGURE, 48, about, { size: 12 }) + body +
    `<g transform="translate(${bar.x} ${bodyHeight})">${colourBar(bar)}</g></svg>`;
  return { svg, width, height };
}

function colourBar({ difference, largest }) {
  const table = difference ? colours.diverging : viridis;
  const stops = Array.from({ length: 52 }, (_, n) =>
    `<stop offset="${(n / 51).toFixed(4)}" stop-color="rgb(${table[5 * n]})"/>`);
  const same = largest.every((most) => most === largest[0]);
  const ends = [{ far: 0, text: "0" }, { far: 1, text: "largest of each head" }];
  const ticks = same ? colourTicks(difference, largest[0])
    : difference ? [{ far: 0.5, text: "0" }] : ends;
  return `<linearGradient id="scale">${stops.join("")}</linearGradient>` +
    `<rect width="${BAR}" height="10" fill="url(#scale)"/>` +
    ticks.map(({ far, text }) =>
      `<path d="M${far * BAR} 10v3" stroke="#444"/>` +
      write(far * BAR, 24, text, { size: 10, anchor: "middle" })).join("");
}

function titleOf(what, subject) {
  const sides = what === "difference" ? `B − A (${sideName(A)}, ${sideName(B)})`
    : sideName(what === "b" ? B : A);
  const kind = A.valued ? ", weight × value norm" : "";
  return visible(`${subject}${kind}, ${sides}`, 200);
}

/** Returns the name of a head of A, such as "induction", or "". */
function nameInFigure(index) {
  const names = run === A.run ? run.namesAt[run.nameSteps.indexOf(A.step)] : null;
  return run.names[names?.[index]]?.title ?? "";
}

/** Returns a figure of one head, with tokens on both axes. */
function headFigure(index) {
  const what = gridShows();
  const cell = clamp(Math.floor(576 / A.T), 2, 48);
  const size = cell * A.T;
  const font = clamp(cell, 8, 12);
  const labels = A.tokens.map((token) => label(token, 10));
  const ruler = make("canvas").getContext("2d");
  ruler.font = `${font}px DejaVu Sans, Helvetica, Arial, sans-serif`;
  const widest = Math.ceil(Math.max(...labels.map((text) => ruler.measureText(text).width)));
  const [left, top] = [MARGIN_OF_FIGURE + 24 + widest, 64];
  let body = heatmap(left, top, size, index, what, 512);
  for (let n = 0; n < A.T; n += Math.ceil(8 / cell)) {
    const middle = (n + 0.5) * cell;
    body += write(left - 5, top + middle + font / 3, labels[n], { size: font, anchor: "end" });
    body += write(0, 0, labels[n], { size: font, anchor: "end",
      more: `transform="translate(${left + middle + font / 3} ${top + size + 5}) rotate(-90)"` });
  }
  const below = top + size + widest + 20;
  body += write(left + size / 2, below, "key token", { size: 12, anchor: "middle" });
  body += write(0, 0, "query token", { size: 12, anchor: "middle",
    more: `transform="translate(${MARGIN_OF_FIGURE + 8} ${top + size / 2}) rotate(-90)"` });
  const bar = { x: left, difference: what === "difference", largest: [scaleEnd(index, what)] };
  const width = Math.max(left + size, left + BAR + 20) + MARGIN_OF_FIGURE;
  const name = what === "a" ? nameInFigure(index) : "";
  const title = titleOf(what, `${indexName(index)} ${name}`.trim());
  return figureOf(title, body, width, below + 16, bar);
}

/** Returns a figure of all heads: a row for each layer, a column for each head. */
function gridFigure() {
  const what = gridShows();
  const tile = Math.min(220, Math.max(30, Math.floor(860 / run.heads)));
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
  const width = Math.max(left + run.heads * tile, left + BAR + 120) + MARGIN_OF_FIGURE;
  const bar = { x: left, difference: what === "difference", largest };
  return figureOf(titleOf(what, "all heads"), body, width, below + 14, bar);
}
