// ---------------------------------------------------------------- small things

const $ = (id) => document.getElementById(id);
const clamp = (x, low, high) => Math.min(high, Math.max(low, x));

/** A new element; text goes in as text, never as markup. */
function make(tag, properties = {}, ...children) {
  const node = Object.assign(document.createElement(tag), properties);
  node.append(...children);
  return node;
}

/** A number for a label: 0.42, 12.3, 250; no value is a dash. */
function format(value, signed = false) {
  if (value === null || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  const text = size.toFixed(size >= 100 ? 0 : size >= 10 ? 1 : 2);
  const sign = value < 0 && Number(text) > 0 ? "−" : signed && Number(text) > 0 ? "+" : "";
  return sign + text;
}

const SIGNS = { "\n": "⏎", "\r": "␍", "\t": "⇥" };
const UNSEEN = /[\p{Cc}\p{Cf}\p{Cs}\p{Co}\p{Cn}\u2028\u2029]/gu;

/** A token with its control characters visible (and unable to turn the text around them). */
function visible(token, longest = 60) {
  const shown = [...token.replace(UNSEEN, (c) => (c === "\u200d" ? c : SIGNS[c] ?? "·"))];
  return shown.length > longest ? shown.slice(0, longest - 1).join("") + "…" : shown.join("");
}

/** A token as a short label: white space at its ends visible too. */
function label(token, longest = 12) {
  const spaces = (space) => "␣".repeat([...space].length);
  const marked = token.replace(/^[^\S\r\n\t]+|[^\S\r\n\t]+$/g, spaces);
  return visible(marked, longest) || "∅";
}

/** Tokens as text: of those that split a character, the first has all of it, the others null. */
function joinBytes(tokens) {
  const texts = [...tokens];
  for (let first = 0; first < tokens.length; first++) {
    let bytes = "";
    for (let n = first; /^(<0x[\dA-F]{2}>)+$/.test(tokens[n]); n++) {
      bytes += tokens[n].replace(/<0x(..)>/g, "%$1");
      try {
        const text = decodeURIComponent(bytes);
        if (n > first) texts.fill(null, first, n + 1)[first] = text;
        first = n;
        break;
      } catch {
        // not yet whole characters
      }
    }
  }
  return texts;
}

const many = (n, what) => `${n} ${what}${n === 1 ? "" : "s"}`;
const headName = (layer, head) => `L${layer} H${head}`;

// ---------------------------------------------------------------- data

const DECODED_BYTES = 200e6; // how much of decoded frames is kept

/** The JSON text of a page -> its runs, checked; throws an Error that a reader understands. */
function readData(text) {
  const not = (why) => new Error(`This is not a page of the attention lens: ${why}.`);
  let data;
  try {
    data = JSON.parse(text);
  } catch {
    throw not("its data block is not JSON");
  }
  if (data?.version !== 1) throw not("its data is not of version 1");
  if (!Array.isArray(data.runs) || !data.runs.length) throw not("it has no runs");
  const whole = (n, low) => Number.isInteger(n) && n >= low && n <= 1e4;
  const strings = (list) => Array.isArray(list) && list.every((x) => typeof x === "string");
  for (const run of data.runs) {
    if (!whole(run?.layers, 1) || !whole(run.heads, 1)) throw not("layers or heads are missing");
    if (!Array.isArray(run.prompts) || !run.prompts.length) throw not("it has no prompts");
    for (const prompt of run.prompts) {
      if (!strings(prompt?.tokens) || !prompt.tokens.length) throw not("a prompt has no tokens");
    }
    if (!Array.isArray(run.frames) || !run.frames.length) throw not("it has no weights");
    if (!run.frames.every((f) => Number.isFinite(f?.step) && typeof f.weights === "string")) {
      throw not("its weights are damaged");
    }
    const keys = Array.isArray(run.statistics) && run.statistics.map((s) => s?.key);
    if (!strings(keys) || typeof run.history !== "string") throw not("its statistics are missing");
  }
  return data.runs;
}

async function inflate(base64) {
  const text = atob(base64);
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

/** Reads a run's history and works out where each prompt's weights begin in a frame. */
async function prepare(run) {
  if (typeof DecompressionStream === "undefined") {
    throw new Error("This browser is too old for this page: it has no DecompressionStream.");
  }
  run.count = run.layers * run.heads;
  run.size = 0;
  for (const prompt of run.prompts) {
    prompt.length = prompt.tokens.length;
    prompt.triangle = (prompt.length * (prompt.length + 1)) / 2;
    prompt.start = run.size;
    run.size += run.count * prompt.triangle;
  }
  try {
    const { steps, values } = JSON.parse(new TextDecoder().decode(await inflate(run.history)));
    run.steps = steps;
    for (const statistic of run.statistics) {
      statistic.values = Object.hasOwn(values, statistic.key) ? values[statistic.key] : [];
      const all = statistic.values.flat().filter((v) => Number.isFinite(v));
      statistic.low = all.reduce((a, b) => Math.min(a, b), Infinity);
      statistic.high = all.reduce((a, b) => Math.max(a, b), -Infinity);
      statistic.empty = !all.length;
    }
  } catch {
    throw new Error(`The statistics of ${run.name} are damaged.`);
  }
  return run;
}

const decoded = []; // frames with bytes, the longest unused first

/** The bytes of a frame, decoded when they are first asked for. */
function decode(run, index) {
  const frame = run.frames[index];
  frame.pending ??= inflate(frame.weights).then(
    (bytes) => {
      if (bytes.length !== run.size) throw 0;
      frame.bytes = bytes;
      decoded.push(frame);
      let kept = decoded.reduce((sum, f) => sum + f.bytes.length, 0);
      while (kept > DECODED_BYTES && decoded.length > 2) {
        const old = decoded.shift();
        kept -= old.bytes.length;
        old.bytes = old.pending = undefined;
      }
      return bytes;
    },
  ).catch(() => {
    throw new Error(`The weights of step ${frame.step} of ${run.name} are damaged.`);
  });
  return frame.pending;
}

/** Decodes the other frames while nothing else happens, as many as are kept. */
async function prefetch(run) {
  const many = Math.min(run.frames.length, Math.floor(DECODED_BYTES / run.size) - 2);
  for (let index = 0; index < many; index++) {
    await new Promise((done) => (window.requestIdleCallback ?? setTimeout)(done));
    await decode(run, index).catch(() => {});
  }
}

/** One decoded weight; NaN where it is not decoded (see lens.decode) or does not exist. */
function weight(run, frame, prompt, layer, head, query, key) {
  const { start, triangle } = run.prompts[prompt];
  const place = start + (layer * run.heads + head) * triangle + (query * (query + 1)) / 2 + key;
  return key > query ? 0 : ((run.frames[frame].bytes?.[place] ?? NaN) / 255) ** 2;
}

// ---------------------------------------------------------------- colours

// matplotlib's viridis, within 2/255 everywhere: position:colour
const VIRIDIS = `0:440154 13:481467 30:472a7a 42:443983 58:3e4c8a 81:32648e 125:218e8d
  141:1e9d89 153:22a884 162:2ab07f 174:3bbb75 193:60ca60 201:73d056 215:95d840 233:c5e021
  240:d8e219 246:e7e419 251:f4e61e 255:fde725`;
// Blue: less; orange: more. Zero is pale on a pale page and dark on a dark one.
const DIVERGING = {
  light: "0:053061 64:3a87bd 128:fafafa 191:e08a1e 255:7a3606",
  dark: "0:b5dcff 64:3d86cc 128:3b3f45 191:d27f22 255:ffdf9e",
};

const rgb = (hex) => [0, 2, 4].map((i) => parseInt(hex.slice(i, i + 2), 16));
const packed = ([r, g, b]) => (255 << 24 | b << 16 | g << 8 | r) >>> 0; // as ImageData has it

/** "position:colour ..." -> 256 colours as [r, g, b]. */
function ramp(anchors) {
  const points = anchors.trim().split(/\s+/).map((point) => {
    const [place, hex] = point.split(":");
    return { place: Number(place), colour: rgb(hex) };
  });
  return Array.from({ length: 256 }, (_, i) => {
    const right = Math.max(1, points.findIndex((point) => point.place >= i));
    const [from, to] = [points[right - 1], points[right]];
    const part = (i - from.place) / (to.place - from.place);
    return from.colour.map((c, n) => Math.round(c + (to.colour[n] - c) * part));
  });
}

const viridis = ramp(VIRIDIS);
const viridisPacked = Uint32Array.from(viridis, packed);
const WEIGHTS = Float64Array.from({ length: 256 }, (_, code) => (code / 255) ** 2);

const dark = matchMedia("(prefers-color-scheme: dark)");
const colours = {}; // of the theme, as the canvases need them

function readTheme() {
  const isDark = state.theme === "auto" ? dark.matches : state.theme === "dark";
  document.documentElement.style.colorScheme = state.theme === "auto" ? "" : state.theme;
  document.documentElement.dataset.theme = isDark ? "dark" : "light";
  for (const name of ["page", "ink", "muted", "line", "tint", "accent", "other"]) {
    document.body.style.outlineColor = `var(--${name})`; // asks the browser for a light-dark()
    colours[name] = getComputedStyle(document.body).outlineColor;
  }
  colours.isDark = isDark;
  colours.masked = packed(colours.tint.match(/\d+/g).map(Number));
  colours.diverging = ramp(isDark ? DIVERGING.dark : DIVERGING.light);
  colours.divergingPacked = Uint32Array.from(colours.diverging, packed);
}

/** How far up the colours a weight is, 0 to 1, where `most` is the weight at their end. */
function height(value, most = 1) {
  const part = clamp(value / most, 0, 1);
  return state.scale === "sqrt" ? Math.sqrt(part) : part;
}

/** A table code -> colour, up to the code `most`. */
function colourTable(most) {
  if (most === 255 && state.scale === "sqrt") return viridisPacked;
  const table = new Uint32Array(256);
  for (let code = 0; code < 256; code++) {
    table[code] = viridisPacked[Math.round(255 * height(WEIGHTS[code], WEIGHTS[most]))];
  }
  return table;
}

// ---------------------------------------------------------------- state

const DEFAULTS = {
  prompt: 0,
  frame: 0, // index into the frames of runs[0]
  layer: null, // the enlarged head
  head: null,
  query: null, // the token that looks; null: the last
  sort: "", // "" is layer order, else a statistic's key
  descending: true,
  filter: "", // a statistic's key
  threshold: null,
  scale: "sqrt", // or "linear"
  hideFirst: false,
  compare: "off", // "run": the other run at this step, "run:40", "step:40"
  show: "difference", // what the grid shows while comparing: "a", "b", "difference"
  theme: "auto", // "light", "dark"
};
const state = { ...DEFAULTS };
const pointed = { index: null, at: null, query: null, key: null }; // under the pointer
const timing = { ready: 0, grid: 0, redraw: 0 };
const tiles = [];
let run; // the run of the page
let other = null; // a second run to compare with
let A; // what is shown: {run, frame, prompt, tokens, T, bytes}
let B = null; // what it is compared with, of two steps the later; and same: has it A's tokens
let here; // A or B: what the slider moves
let order = []; // the indices of the heads as the grid shows them

const statisticOf = (of, key) => of.statistics.find((statistic) => statistic.key === key);
const selected = () => (state.layer === null ? null : state.layer * run.heads + state.head);

/** What one side shows; its bytes are there when its frame is decoded. */
function side(of, frame, prompt) {
  const { tokens, length, start, triangle } = of.prompts[prompt];
  const { step, bytes } = of.frames[frame];
  let at = of.steps.indexOf(step);
  if (at < 0) at = Math.max(0, of.steps.findLastIndex((other) => other <= step));
  return { run: of, frame, step, prompt, tokens, T: length, start, triangle, bytes, at };
}

function nearestFrame(of, step) {
  const distances = of.frames.map((frame) => Math.abs(frame.step - step));
  return distances.indexOf(Math.min(...distances));
}

const sameTokens = (one, two) => one.tokens.join("\0") === two.tokens.join("\0");

/** What is compared with the shown step, or null. */
function otherSide() {
  const [kind, step] = state.compare.split(":");
  if (kind === "step") return side(run, nearestFrame(run, Number(step)), state.prompt);
  if (kind !== "run" || !other) return null;
  const frame = nearestFrame(other, Number(step ?? run.frames[state.frame].step));
  const match = other.prompts.findIndex((of) => sameTokens(of, run.prompts[state.prompt]));
  return side(other, frame, match >= 0 ? match : Math.min(state.prompt, other.prompts.length - 1));
}

/** The other run's side, or null. */
const foreign = () => (B && B.run !== run ? B : null);

/** What the maps of the grid show; different prompts are not subtracted. */
const gridShows = () => (B && (B.same || state.show === "b") ? state.show : "a");

/** The index of A's head in the run of B, or -1. */
function indexInB(index) {
  const [layer, head] = [Math.floor(index / run.heads), index % run.heads];
  const fits = B && layer < B.run.layers && head < B.run.heads;
  return fits ? layer * B.run.heads + head : -1;
}

/** Whether B's weights can be laid over A's for this head. */
const comparable = (index) => Boolean(B?.same) && indexInB(index) >= 0;

function valueAt(of, key, index) {
  return statisticOf(of.run, key)?.values[of.at]?.[index] ?? null;
}

/** A statistic of a head as the grid has it: of A, of B, or what B has more. */
function shownValue(key, index) {
  const a = valueAt(A, key, index);
  if (!B || state.show === "a") return a;
  const place = indexInB(index);
  const b = place < 0 ? null : valueAt(B, key, place);
  if (state.show === "b") return b;
  return a === null || b === null ? null : b - a;
}

let tickets = 0;

/** Changes the state and shows it, at once if its frames are decoded. */
function update(changes = {}) {
  Object.assign(state, changes);
  const ticket = ++tickets;
  const needed = [[run, state.frame]];
  const b = otherSide();
  if (b) needed.push([b.run, b.frame]);
  if (needed.every(([of, frame]) => of.frames[frame].bytes)) {
    redraw();
    return Promise.resolve();
  }
  const waiting = Promise.all(needed.map(([of, frame]) => decode(of, frame)));
  return waiting.then(() => ticket === tickets && redraw(), (error) => say(error.message));
}

/** Draws everything from the state. No element is made or thrown away here for a new step. */
function redraw() {
  const begin = performance.now();
  here = side(run, state.frame, state.prompt);
  const there = otherSide();
  // Of two steps of this run A is the earlier: B − A is what was gained since.
  [A, B] = there?.run === run && there.step < here.step ? [there, here] : [here, there];
  if (B) B.same = sameTokens(A, B);
  showControls();
  layOut();
  drawGrid();
  timing.grid = performance.now() - begin;
  drawDetail();
  drawCharts();
  sayPointed();
  keepLink();
  timing.redraw = performance.now() - begin;
  return timing.redraw;
}

// The view as the part of an address after #, and back

function linkText() {
  const parts = new URLSearchParams();
  const put = (name, value, normal) => value !== normal && parts.set(name, value);
  put("prompt", state.prompt, 0);
  put("step", run.frames[state.frame].step, run.frames.at(-1).step);
  if (state.layer !== null) parts.set("head", `${state.layer}.${state.head}`);
  put("query", state.query, null);
  if (state.sort) parts.set("sort", (state.descending ? "-" : "+") + state.sort);
  if (state.filter) parts.set("filter", `${state.filter}:${+state.threshold.toPrecision(4)}`);
  put("scale", state.scale, "sqrt");
  if (state.hideFirst) parts.set("first", "hidden");
  put("compare", state.compare, other ? null : "off"); // of two runs it is "run" unless said
  if (state.compare !== "off") parts.set("show", state.show);
  put("theme", state.theme, "auto");
  return "#" + parts;
}

/** The state that a link's text means; what makes no sense is left out. */
function readLink(text) {
  const parts = new URLSearchParams(text.replace(/^.*#/, ""));
  const found = { ...DEFAULTS, frame: run.frames.length - 1 };
  const fits = (n, below) => Number.isInteger(n) && n >= 0 && n < below;
  const whole = (name, below) => {
    const value = Number(parts.get(name) || NaN);
    return fits(value, below) ? value : null;
  };
  const choice = (name, choices) => choices.includes(parts.get(name)) && parts.get(name);
  const known = (key) => statisticOf(run, key) && !statisticOf(run, key).empty;
  found.prompt = whole("prompt", run.prompts.length) ?? 0;
  const step = run.frames.findIndex((frame) => String(frame.step) === parts.get("step"));
  if (step >= 0) found.frame = step;
  const [layer, head] = (parts.get("head") ?? "").split(".").map((n) => (n ? Number(n) : NaN));
  if (fits(layer, run.layers) && fits(head, run.heads)) Object.assign(found, { layer, head });
  found.query = whole("query", run.prompts[found.prompt].length);
  const [, sign, key] = (parts.get("sort") ?? "").match(/^([-+ ]?)(.*)$/s);
  if (known(key)) Object.assign(found, { sort: key, descending: sign === "-" || sign === "" });
  const [, filter, value] = (parts.get("filter") ?? "").match(/^(.*):(-?[\d.e-]+)$/s) ?? [];
  if (known(filter) && Number.isFinite(+value)) Object.assign(found, { filter, threshold: +value });
  found.scale = choice("scale", ["linear"]) || "sqrt";
  found.hideFirst = parts.get("first") === "hidden";
  const compare = parts.get("compare") ?? (other ? "run" : "off");
  if ([...$("compare").options].some((option) => option.value === compare)) found.compare = compare;
  found.show = choice("show", ["a", "b"]) || "difference";
  found.theme = choice("theme", ["light", "dark"]) || "auto";
  return found;
}

let linkTimer;

/** Keeps the address up to date, after a while: browsers allow only so many changes. */
function keepLink() {
  clearTimeout(linkTimer);
  if (playing) return;
  linkTimer = setTimeout(() => {
    try {
      history.replaceState(null, "", linkText());
    } catch {
      // A sandboxed frame has no address of its own; "link" shows the text instead.
    }
  }, 250);
}

// ---------------------------------------------------------------- the grid of all heads

const images = new Map(); // T -> the ImageData that all maps of that size share

function imageFor(T) {
  if (!images.has(T)) {
    const image = new ImageData(T, T);
    images.set(T, { image, pixels: new Uint32Array(image.data.buffer) });
  }
  return images.get(T);
}

/** The largest code of a head outside the first column (255 if there is none). */
function largestCode(of, index) {
  let most = 0;
  let place = of.start + index * of.triangle;
  for (let query = 0; query < of.T; query++) {
    for (let key = 1; key <= query; key++) most = Math.max(most, of.bytes[place + key]);
    place += query + 1;
  }
  return most || 255;
}

/** The code at the end of a head's colours. Both sides of a comparison have the same. */
function mostCode(index, of = A) {
  if (!state.hideFirst) return 255;
  if (comparable(index)) return Math.max(largestCode(A, index), largestCode(B, indexInB(index)));
  return largestCode(of, of === A ? index : indexInB(index));
}

/** The largest difference between A and B of a head that is to be told apart. */
function mostDifference(index) {
  if (!state.hideFirst) return 1;
  let most = 0;
  let [a, b] = [A.start + index * A.triangle, B.start + indexInB(index) * B.triangle];
  for (let query = 0; query < A.T; query++) {
    for (let key = 1; key <= query; key++) {
      const difference = WEIGHTS[B.bytes[b + key]] - WEIGHTS[A.bytes[a + key]];
      most = Math.max(most, Math.abs(difference));
    }
    a += query + 1;
    b += query + 1;
  }
  return most || 1;
}

/** Draws one head, T x T pixels, one for each weight. what: "a", "b" or "difference". */
function paint({ canvas, context }, index, what) {
  const of = what === "b" ? B : A;
  if (canvas.width !== of.T) canvas.width = canvas.height = of.T;
  const { image, pixels } = imageFor(of.T);
  const first = state.hideFirst ? 1 : 0;
  const place = of === A ? index : indexInB(index);
  pixels.fill(colours.masked);
  if (what === "difference") {
    if (comparable(index)) paintDifference(pixels, index, mostDifference(index), first);
  } else if (place >= 0) paintWeights(pixels, of, place, mostCode(index, of), first);
  context.putImageData(image, 0, 0);
}

function paintWeights(pixels, { bytes, start, triangle, T }, index, most, first) {
  const table = colourTable(most);
  let place = start + index * triangle;
  for (let query = 0; query < T; query++) {
    const row = query * T;
    for (let key = first; key <= query; key++) pixels[row + key] = table[bytes[place + key]];
    place += query + 1;
  }
}

function paintDifference(pixels, index, most, first) {
  const table = colours.divergingPacked;
  const root = state.scale === "sqrt";
  let [a, b] = [A.start + index * A.triangle, B.start + indexInB(index) * B.triangle];
  for (let query = 0; query < A.T; query++) {
    for (let key = first; key <= query; key++) {
      const part = (WEIGHTS[B.bytes[b + key]] - WEIGHTS[A.bytes[a + key]]) / most;
      const far = root ? Math.sqrt(Math.abs(part)) : Math.abs(part);
      pixels[query * A.T + key] = table[Math.round(part < 0 ? 128 - 128 * far : 128 + 127 * far)];
    }
    a += query + 1;
    b += query + 1;
  }
}

function buildGrid() {
  const grid = $("grid");
  const put = (node, row, column) => {
    node.style.gridRow = row;
    node.style.gridColumn = column;
    grid.append(node);
  };
  const thin = run.heads > 16 ? 5 : 1; // with many heads, not every column has its label
  for (let head = 0; head < run.heads; head++) {
    const text = head % thin ? "" : `H${head}`;
    put(make("span", { className: "label column", textContent: text }), 1, head + 2);
  }
  for (let layer = 0; layer < run.layers; layer++) {
    put(make("span", { className: "label row", textContent: `L${layer}` }), layer + 2, 1);
    for (let head = 0; head < run.heads; head++) {
      const canvas = make("canvas", { className: "pixels", width: 0, height: 0 });
      const value = make("span", { className: "number" });
      const name = make("b", { textContent: headName(layer, head) });
      const caption = make("span", { className: "caption" }, name, value);
      const button = make("button", { className: "head", tabIndex: -1 }, canvas, caption);
      button.dataset.layer = layer;
      button.dataset.head = head;
      put(button, layer + 2, head + 2);
      // Only putImageData is used, so the pixels had better stay in the main memory.
      const context = canvas.getContext("2d", { alpha: false, willReadFrequently: true });
      tiles.push({ button, canvas, context, value, index: tiles.length, layer, head });
    }
  }
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
  const point = (event) => pointAt(tileOf(event)?.index ?? null);
  grid.addEventListener("pointerover", point);
  grid.addEventListener("focusin", point);
  grid.addEventListener("pointerleave", () => pointAt(null));
  grid.addEventListener("focusout", () => pointAt(null));
}

/** Which heads pass the filter, in which order; moves the thumbnails if the order is new. */
function arrange() {
  const passes = (index) => {
    if (!state.filter) return true;
    const value = shownValue(state.filter, index);
    return value !== null && value >= state.threshold;
  };
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
  $("count").textContent = state.filter ? `${count} of ${run.count} heads` : "";
}

function drawGrid() {
  arrange();
  const usual = statisticOf(run, "induction") ?? run.statistics[0];
  const key = state.sort || state.filter || usual?.key;
  const signed = B && state.show === "difference";
  const title = statisticOf(run, key)?.title;
  const chosen = selected();
  for (const tile of tiles) {
    if (tile.button.hidden) continue;
    paint(tile, tile.index, gridShows());
    const value = key ? format(shownValue(key, tile.index), signed) : "";
    const text = `layer ${tile.layer} head ${tile.head}` + (key ? `, ${title} ${value}` : "");
    if (tile.text !== text) tile.button.setAttribute("aria-label", (tile.text = text));
    if (state.sort) tile.value.textContent = value;
    tile.button.setAttribute("aria-pressed", tile.index === chosen);
  }
}

/** Marks a head (null: none) in the grid and in the charts, and says its values. */
function pointAt(index, at = null) {
  if (index === pointed.index && at === pointed.at) return;
  if (pointed.index !== null) tiles[pointed.index].button.classList.remove("marked");
  Object.assign(pointed, { index, at });
  if (index !== null) tiles[index].button.classList.add("marked");
  sayPointed();
  drawChartMarks();
}

/** Says the values of the head under the pointer; those of the enlarged one stand beside it. */
function sayPointed() {
  const { index } = pointed;
  const text = index === null ? "" : headValues(index);
  if (text) tiles[index].button.title = text.replaceAll(" · ", "\n");
  $("hovered").textContent = index === selected() ? "" : text;
}

function headValues(index) {
  const values = run.statistics.filter((statistic) => !statistic.empty).map(({ key, title }) =>
    `${title} ${format(shownValue(key, index), B && state.show === "difference")}`);
  return [headName(tiles[index].layer, tiles[index].head), ...values].join(" · ");
}

/** Enlarges a head; null: back to no head. */
function select(index) {
  const before = selected();
  if (index === null) {
    update({ layer: null, head: null });
    if (before !== null) focusTile(before);
    return;
  }
  const { layer, head } = tiles[index];
  update({ layer, head });
  setTabStop(index);
  if (before !== null) return;
  showDetail();
}

function showDetail() {
  $("side").scrollTop = 0;
  if (!$("app").classList.contains("wide")) $("detail").scrollIntoView();
}

/** One tab stop for the whole grid, from where the arrows go on; never a head that is left out. */
function setTabStop(index) {
  if (tiles[index].button.hidden) index = order[0] ?? index;
  if (tiles[index].button.tabIndex === 0) return;
  for (const { button } of tiles) if (button.tabIndex === 0) button.tabIndex = -1;
  tiles[index].button.tabIndex = 0;
}

function focusTile(index, options = {}) {
  setTabStop(index);
  tiles[index].button.focus(options);
}

/** Goes to a neighbouring head: the enlarged one if there is one, else the one in focus. */
function moveHead(right, down) {
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

/** The next head in the order of the grid; at the end it stays. */
function stepHead(by) {
  if (order.length) select(order[clamp(order.indexOf(selected()) + by, 0, order.length - 1)]);
}

let laidOut = "";
let sideWidth = 0;

/** Sizes of thumbnails and columns; does nothing while nothing that matters has changed. */
function layOut(force = false) {
  const [width, tall] = [document.documentElement.clientWidth, innerHeight];
  const facts = [width, tall, devicePixelRatio, A.T, Boolean(B), Boolean(state.sort)].join();
  if (facts === laidOut && !force) return;
  laidOut = facts;
  const app = $("app");
  const wide = width >= 900;
  app.classList.toggle("wide", wide);
  measureBar();
  const [margin, labels, gap] = [width > 760 ? 40 : 20, width > 480 ? 28 : 22, width > 480 ? 3 : 2];
  const room = wide ? (width - margin - 28) * (B ? 0.45 : 0.6) : width - margin;
  let tile = (room - labels) / run.heads - gap;
  const below = tall - $("body").offsetTop - 76;
  const low = below / run.layers - gap;
  if (low >= 30) tile = Math.min(tile, low); // the whole grid on one screen
  if (state.sort) tile = Math.max(62, Math.min(tile, 92));
  tile = clamp(tile, 6, 150);
  const exact = (Math.floor((tile * devicePixelRatio) / A.T) * A.T) / devicePixelRatio;
  if (exact >= 0.86 * tile) tile = exact; // each weight the same whole number of pixels
  $("grid").classList.toggle("small", tile * devicePixelRatio < A.T);
  document.documentElement.style.setProperty("--tile", `${tile}px`);
  $("grid").classList.toggle("sorted", Boolean(state.sort));
  $("grid").style.width = state.sort && wide ? `${room}px` : "";
  measureSide();
}

function measureBar() {
  document.documentElement.style.setProperty("--bar", `${$("bar").offsetHeight}px`);
}

/** Whether the width for the enlarged head and the charts has changed. */
function measureSide() {
  const width = $("side").clientWidth - ($("app").classList.contains("wide") ? 8 : 0);
  const changed = width !== sideWidth;
  sideWidth = width;
  return changed;
}

// ---------------------------------------------------------------- one head, enlarged

const plots = ["a", "b", "difference"].map((what) => ({ what }));

function buildDetail() {
  const ids = { a: "map", b: "map-b", difference: "map-difference" };
  for (const plot of plots) {
    plot.map = plot.canvas = make("canvas", { id: ids[plot.what], className: "pixels" });
    plot.marks = make("canvas", { className: "marks" });
    plot.title = make("figcaption");
    plot.frame = make("div", { className: "frame" }, plot.map, plot.marks);
    plot.figure = make("figure", { className: "plot" }, plot.title, plot.frame);
    plot.context = plot.map.getContext("2d", { alpha: false, willReadFrequently: true });
    $("reading").before(plot.figure);
    const cell = (event) => {
      const box = plot.map.getBoundingClientRect();
      const place = (part) => clamp(Math.floor(part * A.T), 0, A.T - 1);
      const query = place((event.clientY - box.top) / box.height);
      const key = place((event.clientX - box.left) / box.width);
      return { query, key: Math.min(key, query) };
    };
    plot.map.addEventListener("pointermove", (event) => pointAtCell(cell(event)));
    plot.map.addEventListener("pointerleave", (event) => {
      if (event.pointerType === "mouse") pointAtCell(null);
    });
    plot.map.addEventListener("click", (event) => {
      const { query, key } = cell(event);
      update({ query });
      pointAtCell({ query, key });
    });
  }
  const text = $("text");
  const onToken = (kind, act) => text.addEventListener(kind, ({ target }) => {
    const token = target.closest("[data-token]")?.dataset.token;
    if (token !== undefined) act(Number(token));
  });
  onToken("pointerover", (query) => pointAtCell({ query, key: null }));
  onToken("click", (query) => update({ query }));
  text.addEventListener("pointerleave", () => pointAtCell(null));
}

/** Points at a cell of the map ({query, key}), at a row (key null), or at nothing (null). */
function pointAtCell(cell) {
  Object.assign(pointed, cell ?? { query: null, key: null });
  drawReading();
}

const chosenQuery = () => Math.min(state.query ?? Infinity, A.T - 1);

function drawDetail() {
  const index = selected();
  $("detail").hidden = index === null;
  if (index === null) return;
  const { layer, head } = state;
  $("detail-title").textContent = headName(layer, head);
  if (pointed.query >= A.T) Object.assign(pointed, { query: null, key: null });
  const shown = B?.same ? plots : plots.slice(0, 1);
  placePlots(shown);
  for (const plot of plots) {
    plot.figure.hidden = !shown.includes(plot);
    if (plot.figure.hidden) continue;
    paint(plot, index, plot.what);
    const title = plot.what === "difference" ? "B − A" : sideName(plot.what === "a" ? A : B);
    Object.assign(plot.title, { textContent: title, title });
    plot.map.setAttribute("role", "img");
    plot.map.setAttribute("aria-label", `attention of layer ${layer} head ${head}: ${title}`);
  }
  drawValues(index);
  drawReading();
}

function sideName(of) {
  if (!B) return `step ${of.step}`;
  const name = foreign() ? `, ${of.run.name}` : "";
  return `${of === A ? "A" : "B"}: step ${of.step}${name}`;
}

const FONT = "11px ui-monospace, SF Mono, Menlo, Consolas, DejaVu Sans Mono, monospace";
const ruler = document.createElement("canvas").getContext("2d");

const TOP = 6; // above a map, for the first label

/** The sizes of the enlarged maps: as large as there is room, each weight whole pixels. */
function placePlots(shown) {
  ruler.font = FONT;
  const labels = A.tokens.map((token) => label(token));
  const widest = Math.max(...labels.map((text) => ruler.measureText(text).width));
  const left = Math.ceil(clamp(widest, 12, 84)) + 8;
  const narrow = !$("app").classList.contains("wide");
  // In a low window, such as a panel of a dashboard, text goes beside the map and not below it.
  const low = Math.max(170, innerHeight - left - (narrow ? 150 : 390));
  const inRow = (sideWidth - left - 14 - 26 * (shown.length - 1)) / shown.length;
  const stacked = shown.length > 1 && inRow < 120;
  const room = Math.max(40, Math.min(stacked ? sideWidth - left - 22 : inRow, low, 560));
  const cell = Math.min(room / A.T, Math.max(46, 90 / A.T));
  const whole = Math.floor(cell * devicePixelRatio) / devicePixelRatio;
  const size = (whole > 0.8 * cell ? whole : cell) * A.T;
  for (const plot of shown) {
    const plain = plot.what !== "a" && !stacked; // the first map's labels are for the row
    Object.assign(plot, { left: plain ? 4 : left, size, cell: size / A.T, labels, plain });
    plot.width = plot.left + Math.max(size, 60) + 10;
    plot.height = TOP + size + left + 34;
    plot.figure.style.width = plot.frame.style.width = `${plot.width}px`;
    plot.frame.style.height = `${plot.height}px`;
    Object.assign(plot.map.style, { left: `${plot.left}px`, top: `${TOP}px` });
    plot.map.style.width = plot.map.style.height = `${size}px`;
    plot.barTop = size + left + 2;
  }
}

/** Makes a canvas as sharp as the screen; returns a context in CSS pixels. */
function sharp(canvas, width, height) {
  const ratio = devicePixelRatio || 1;
  const [w, h] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== w || canvas.height !== h) {
    canvas.width = w;
    canvas.height = h;
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}

/** Labels, cross-hair and colour bar of one map. */
function drawMarks(plot, query, key) {
  const context = sharp(plot.marks, plot.width, plot.height);
  const { left, size, cell } = plot;
  const every = Math.ceil(11.5 / cell);
  context.font = FONT;
  context.textBaseline = "middle";
  context.textAlign = "right";
  context.translate(0, TOP);
  const write = (n, column, strong) => {
    const text = plot.labels[n];
    context.save();
    context.translate(column ? left + (n + 0.5) * cell : left - 4,
      column ? size + 5 : (n + 0.5) * cell);
    if (column) context.rotate(-Math.PI / 2);
    if (strong) {
      const width = Math.min(context.measureText(text).width, 84) + 5;
      context.fillStyle = colours.accent;
      context.beginPath();
      context.roundRect(-width + 2.5, -7.5, width, 15, 3);
      context.fill();
    }
    context.fillStyle = strong ? colours.page : colours.muted;
    context.fillText(text, 0, 0.5, 84);
    context.restore();
  };
  for (const column of [false, true]) {
    if (!column && plot.plain) continue;
    for (let n = 0; n < A.T; n += every) write(n, column, false);
  }
  if (!plot.plain) write(query, false, true);
  if (key !== null) write(key, true, true);

  const box = (x, y, w, h, colour, line) => {
    context.strokeStyle = colour;
    context.lineWidth = line;
    context.strokeRect(left + x * cell, y * cell, w * cell, h * cell);
  };
  box(0, query, query + 1, 1, colours.page, 2.5);
  box(0, query, query + 1, 1, colours.accent, 1.5);
  if (key !== null) {
    box(key, key, 1, A.T - key, colours.page, 2.5);
    box(key, key, 1, A.T - key, colours.accent, 1.5);
    box(key, query, 1, 1, colours.ink, 2);
  }
  drawColourBar(context, plot);
}

function drawColourBar(context, plot) {
  const { left, barTop, what } = plot;
  const width = Math.max(plot.size, 60);
  const index = selected();
  const difference = what === "difference";
  if (what !== "a" && !comparable(index)) return;
  const most = difference ? mostDifference(index) : WEIGHTS[mostCode(index)];
  const table = difference ? colours.diverging : viridis;
  for (let x = 0; x < width; x++) {
    context.fillStyle = `rgb(${table[Math.min(255, Math.floor((x / width) * 256))]})`;
    context.fillRect(left + x, barTop, Math.min(1.5, width - x), 8);
  }
  const parts = state.scale === "sqrt" ? [0, 0.01, 0.1, 0.25, 0.5, 1] : [0, 0.25, 0.5, 0.75, 1];
  const signed = [0, 0.1, 0.5, 1].flatMap((part) => (part ? [-part, part] : [0]));
  context.font = "10.5px system-ui, sans-serif";
  context.fillStyle = colours.muted;
  context.textBaseline = "alphabetic";
  context.textAlign = "left";
  let free = -Infinity; // labels that would touch the one before are left out
  const ticks = (difference ? signed.sort((a, b) => a - b) : parts).map((part) => {
    const far = Math.sign(part) * height(Math.abs(part));
    const place = left + width * (difference ? (far + 1) / 2 : far);
    const text = String(+(Math.abs(part) * most).toPrecision(most === 1 ? 3 : 2));
    return { place, text: (part < 0 ? "−" : difference && part > 0 ? "+" : "") + text };
  });
  const end = ticks.at(-1);
  const endWidth = context.measureText(end.text).width;
  for (const tick of ticks) {
    const wide = context.measureText(tick.text).width;
    const x = clamp(tick.place - wide / 2, left, left + width - wide);
    const last = tick === end;
    if (x < free || (!last && x + wide + 5 > left + width - endWidth)) continue;
    context.fillRect(clamp(tick.place - 0.5, left, left + width - 1), barTop + 8, 1, 3);
    context.fillText(tick.text, x, barTop + 21);
    free = x + wide + 5;
  }
}

/** The weight of a cell of the enlarged head, in A or B; null where B has none. */
function weightOf(of, query, key) {
  if (of === B && !comparable(selected())) return null;
  const index = of === A ? selected() : indexInB(selected());
  return WEIGHTS[of.bytes[of.start + index * of.triangle + (query * (query + 1)) / 2 + key]];
}

/** What depends on the token under the pointer: cross-hairs, the sentence, the running text. */
function drawReading() {
  if (selected() === null) return;
  const query = pointed.query ?? chosenQuery();
  for (const plot of plots) if (!plot.figure.hidden) drawMarks(plot, query, pointed.key);
  drawReadout(query, pointed.key);
  drawText(query);
}

function drawReadout(query, key) {
  const most = key === null;
  if (most) {
    const first = state.hideFirst && query > 0 ? 1 : 0;
    key = first;
    for (let k = first; k <= query; k++) {
      if (weightOf(here, query, k) > weightOf(here, query, key)) key = k;
    }
  }
  const token = (n) => make("bdi", { textContent: `"${visible(A.tokens[n], 40)}"`,
    title: A.tokens[n] });
  const [a, b] = [weightOf(A, query, key), B && weightOf(B, query, key)];
  const bold = (text) => make("b", { textContent: text });
  const parts = [token(query), ` (${query}) looks ${most ? "most " : ""}at `, token(key),
    ` (${key}): `];
  if (!B) parts.push(bold(a.toFixed(3)));
  else if (b === null) parts.push("A ", bold(a.toFixed(3)));
  else {
    const sign = b - a < -0.0005 ? "−" : b - a > 0.0005 ? "+" : "";
    parts.push("A ", bold(a.toFixed(3)), ", B ", bold(b.toFixed(3)), ", B − A ",
      bold(sign + Math.abs(b - a).toFixed(3)));
  }
  $("readout").setAttribute("aria-live", playing ? "off" : "polite");
  $("readout").replaceChildren(...parts);
}

let textTokens = null; // whose tokens the running text has

/** The prompt as running text: what the query looks at is shaded by its weight. */
function drawText(query) {
  const text = $("text");
  if (textTokens !== A.tokens) {
    textTokens = A.tokens;
    text.replaceChildren(...joinBytes(A.tokens).map((token, n) => {
      const shown = token === null ? "" : token.trim() ? visible(token) : label(token);
      const span = make("span", { textContent: shown.replaceAll("⏎", "⏎\n") });
      span.dataset.token = n;
      return span;
    }));
  }
  const index = selected();
  const what = comparable(index) ? state.show : "a";
  const most = what === "difference" ? mostDifference(index) : WEIGHTS[mostCode(index)];
  const strongest = colours.isDark ? 0.6 : 0.85;
  [...text.children].forEach((span, key) => {
    span.className = key > query ? "after" : key === query ? "query" : "";
    const hidden = key > query || (state.hideFirst && key === 0);
    let value = hidden ? 0 : weightOf(what === "b" ? B : A, query, key);
    if (what === "difference" && !hidden) value = weightOf(B, query, key) - value;
    const alpha = strongest * height(Math.abs(value), most);
    const hue = what !== "difference" ? "255 176 32" : value < 0 ? "60 130 215" : "235 125 20";
    span.style.backgroundColor = alpha > 0.01 ? `rgb(${hue} / ${alpha.toFixed(3)})` : "";
    span.title = key > query ? "" :
      `${A.tokens[key].slice(0, 400)}\nposition ${key}: ${value.toFixed(3)}`;
  });
}

function drawValues(index) {
  const list = $("values");
  const shown = run.statistics.filter((statistic) => !statistic.empty);
  if (list.children.length !== shown.length) {
    list.replaceChildren(...shown.map(({ title, about }) =>
      make("div", { title: about }, make("dt", { textContent: title }),
        make("dd", { className: "number" }))));
  }
  list.classList.toggle("two", B !== null);
  shown.forEach(({ key }, n) => {
    const a = format(valueAt(A, key, index));
    const b = B && indexInB(index) >= 0 ? ` → ${format(valueAt(B, key, indexInB(index)))}` : "";
    list.children[n].lastChild.textContent = a + b;
  });
}

// ---------------------------------------------------------------- the statistics over the steps

const charts = [];
const MARGIN = { left: 34, right: 8, top: 6, bottom: 16 };

function buildCharts() {
  for (const statistic of run.statistics) {
    const chart = { statistic, value: make("span", { className: "value number" }) };
    chart.lines = make("canvas");
    chart.marks = make("canvas", { className: "marks" });
    chart.lines.setAttribute("role", "img");
    chart.lines.setAttribute("aria-label", `${statistic.title} of every head over the steps`);
    chart.frame = make("div", { className: "frame" }, chart.lines, chart.marks);
    const title = make("button", { textContent: statistic.title, title: statistic.about });
    title.addEventListener("click", () => openHelp(statistic.key));
    const caption = make("figcaption", {}, title, chart.value);
    const figure = make("figure", { className: "chart" }, caption, chart.frame);
    figure.dataset.statistic = statistic.key;
    $("charts").append(figure);
    charts.push(chart);
    chart.lines.addEventListener("pointermove", (event) => {
      const near = nearest(chart, event);
      pointAt(near?.index ?? null, near?.at ?? null);
    });
    chart.lines.addEventListener("pointerleave", () => pointAt(null));
    chart.lines.addEventListener("click", (event) => {
      const near = nearest(chart, event);
      if (near) select(near.index);
    });
  }
  new ResizeObserver(() => {
    if (!A || !measureSide()) return;
    drawDetail();
    drawCharts();
  }).observe($("side"));
  new ResizeObserver(measureBar).observe($("bar"));
}

/** Round numbers from low to high, about `many` of them and at least two. */
function roundTicks(low, high, many) {
  const rough = (high - low || 1) / many;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= rough * 0.999);
  const ticks = [];
  for (let n = Math.ceil(low / step - 1e-9); n * step <= high + step * 1e-9; n++) {
    ticks.push(+(n * step).toPrecision(12));
  }
  return ticks.length < 2 ? roundTicks(low, high, many + 1) : ticks;
}

/** The chart's scales: from a step (or, with one step, a layer) and a value to a place. */
function measure(chart) {
  const { statistic } = chart;
  const second = foreign() && statisticOf(B.run, statistic.key);
  const known = [statistic, second].filter((s) => s && !s.empty);
  const bounds = known.flatMap((s) => [s.low, s.high]);
  if (Number.isFinite(statistic.uniform)) bounds.push(statistic.uniform);
  let [low, high] = [Math.min(...bounds), Math.max(...bounds)];
  if (low > 0 && low < 0.6 * high) low = 0;
  if (low === high) [low, high] = [low - 0.5, high + 0.5];
  const steps = [...run.steps, ...(second ? B.run.steps : [])];
  const { clientWidth: width, clientHeight: tall } = chart.frame;
  const single = run.steps.length === 1;
  const [from, to] = single ? [-0.5, run.layers - 0.5] : [Math.min(...steps), Math.max(...steps)];
  const inner = width - MARGIN.left - MARGIN.right;
  const x = (value) => MARGIN.left + ((value - from) / (to - from || 1)) * inner;
  const y = (value) => tall - MARGIN.bottom -
    ((value - low) / (high - low)) * (tall - MARGIN.top - MARGIN.bottom);
  Object.assign(chart, { width, tall, single, from, to, low, high, x, y });
}

const shortNumber = (n) => (Math.abs(n) >= 1e4 ? `${+(n / 1e3).toPrecision(3)}k` : String(n));

/** The part that stays from step to step: axes and the faint lines of all heads. */
function drawChartLines() {
  for (const chart of charts) {
    measure(chart);
    const { statistic, width, tall, x, y } = chart;
    const context = sharp(chart.lines, width, tall);
    context.font = "10.5px system-ui, sans-serif";
    context.fillStyle = colours.muted;
    context.textBaseline = "middle";
    if (statistic.empty) {
      context.fillText("no values", MARGIN.left, tall / 2);
      continue;
    }
    context.textAlign = "right";
    context.lineWidth = 1;
    for (const tick of roundTicks(chart.low, chart.high, 3)) {
      context.strokeStyle = colours.line;
      line(context, [[MARGIN.left, y(tick)], [width - MARGIN.right, y(tick)]]);
      context.fillText(shortNumber(tick), MARGIN.left - 5, y(tick));
    }
    context.textBaseline = "alphabetic";
    const ends = chart.single ? [0, run.layers - 1] : [chart.from, chart.to];
    [...new Set(ends)].forEach((value, n) => {
      const text = chart.single ? `L${value}` : (n ? "" : "step ") + shortNumber(value);
      context.textAlign = chart.single ? "center" : n ? "right" : "left";
      context.fillText(text, x(value), tall - 3);
    });
    for (const of of [foreign(), A]) {
      if (!of) continue;
      const { count } = of.run;
      context.strokeStyle = context.fillStyle = of === A ? colours.ink : colours.other;
      context.globalAlpha =
        chart.single ? clamp(60 / count, 0.15, 0.6) : clamp(16 / count, 0.025, 0.45);
      for (let index = 0; index < count; index++) drawHistory(context, chart, of.run, index, of.at);
    }
    context.globalAlpha = 1;
    if (Number.isFinite(statistic.uniform)) {
      context.strokeStyle = colours.muted;
      context.setLineDash([3, 3]);
      const level = y(statistic.uniform);
      line(context, [[MARGIN.left, level], [width - MARGIN.right, level]]);
      context.setLineDash([]);
    }
  }
}

function line(context, points) {
  context.beginPath();
  for (const [x, y] of points) context.lineTo(x, y);
  context.stroke();
}

/** One head over the steps: a line with gaps where it has no value; with one step a dot. */
function drawHistory(context, chart, of, index, at) {
  const values = statisticOf(of, chart.statistic.key)?.values ?? [];
  if (chart.single || of.steps.length === 1) {
    const value = values[at]?.[index];
    const x = chart.x(chart.single ? Math.floor(index / of.heads) : of.steps[at]);
    if (Number.isFinite(value)) dot(context, x, chart.y(value), 2.5);
    return;
  }
  context.beginPath();
  let pen = false;
  values.forEach((row, at) => {
    const known = Number.isFinite(row[index]);
    if (known) context[pen ? "lineTo" : "moveTo"](chart.x(of.steps[at]), chart.y(row[index]));
    pen = known;
  });
  context.stroke();
}

function dot(context, x, y, size) {
  context.beginPath();
  context.arc(x, y, size, 0, 2 * Math.PI);
  context.fill();
}

/** The part that changes: the shown step, the chosen head, the head under the pointer. */
function drawChartMarks() {
  for (const chart of charts) {
    if (!chart.x || chart.statistic.empty) continue;
    const { width, tall, x, y, statistic, single } = chart;
    const context = sharp(chart.marks, width, tall);
    const upright = (step, colour) => {
      context.strokeStyle = colour;
      context.lineWidth = 1;
      line(context, [[x(step), MARGIN.top - 4], [x(step), tall - MARGIN.bottom]]);
    };
    if (!single && B) upright((here === A ? B : A).step, colours.other);
    if (!single) upright(here.step, colours.ink);
    const trace = (of, index, colour, thick, at) => {
      context.strokeStyle = context.fillStyle = colour;
      context.lineWidth = thick;
      drawHistory(context, chart, of.run, index, at);
      const value = statisticOf(of.run, statistic.key)?.values[at]?.[index];
      const place = single ? Math.floor(index / of.run.heads) : of.run.steps[at];
      if (Number.isFinite(value)) dot(context, x(place), y(value), 3.2);
    };
    const at = pointed.at ?? here.at;
    const index = pointed.index ?? selected();
    const chosen = selected() ?? index; // none enlarged: the one in focus
    if (chosen !== null) {
      if (foreign()) trace(B, indexInB(chosen), colours.other, 2, B.at);
      trace(here, chosen, colours.accent, 2, index === chosen ? at : here.at);
    }
    if (index !== chosen) trace(here, index, colours.ink, 1.4, at);
    const value = index === null ? null : statistic.values[at]?.[index] ?? null;
    const { layer, head } = tiles[index ?? 0];
    const when = pointed.at === null || single ? "" : `· ${run.steps[at]} · `;
    const text = `${headName(layer, head)} ${when}${format(value)}`;
    chart.value.textContent = index === null ? "" : text;
  }
}

/** The point nearest to the pointer: {index of the head, at: index of the step}, or null. */
function nearest(chart, event) {
  const box = chart.lines.getBoundingClientRect();
  const [px, py] = [event.clientX - box.left, event.clientY - box.top];
  const far = (place) => Math.abs(chart.x(place) - px);
  const at = chart.single ? 0 :
    run.steps.reduce((best, step, n) => (far(step) < far(run.steps[best]) ? n : best), 0);
  let found = null;
  let least = Infinity;
  chart.statistic.values[at]?.forEach((value, index) => {
    if (!Number.isFinite(value)) return;
    const across = chart.single ? far(Math.floor(index / run.heads)) : 0;
    const distance = Math.hypot(chart.y(value) - py, across);
    if (distance < least) [least, found] = [distance, { index, at }];
  });
  return found;
}

let chartFacts = [];

function drawCharts() {
  const at = run.steps.length === 1 && B?.at;
  const facts = [document.documentElement.dataset.theme, foreign()?.run, at, sideWidth];
  if (facts.some((fact, n) => fact !== chartFacts[n])) drawChartLines();
  chartFacts = facts;
  drawChartMarks();
}

// ---------------------------------------------------------------- controls

function fillSelect(select, choices) {
  select.replaceChildren(...choices.map(([value, textContent, disabled = false]) =>
    make("option", { value, textContent, disabled })));
}

function buildControls() {
  fillSelect($("prompt"), run.prompts.map((prompt, n) => {
    const text = joinBytes(prompt.tokens).join("").replace(/\s+/g, " ").trim();
    return [n, `${n + 1}: ${visible(text, 70) || prompt.name}`];
  }));
  const choices = run.statistics.map(({ key, title, empty }) => [key, title, empty]);
  fillSelect($("sort"), [["", "layer order"], ...choices]);
  fillSelect($("filter-statistic"), [["", "any values"], ...choices]);
  buildCompare();
  $("step").max = run.frames.length - 1;
  $("time").hidden = run.frames.length === 1;

  const on = (id, event, act) => $(id).addEventListener(event, act);
  on("step", "input", (event) => {
    pause();
    update({ frame: Number(event.target.value) });
  });
  on("play", "click", togglePlay);
  on("prompt", "change", (event) => choosePrompt(Number(event.target.value)));
  on("scale", "change", (event) => update({ scale: event.target.value }));
  on("first-column", "change", (event) => update({ hideFirst: event.target.checked }));
  on("sort", "change", (event) => update({ sort: event.target.value }));
  on("direction", "click", () => update({ descending: !state.descending }));
  on("filter-statistic", "change", (event) => {
    const filter = event.target.value;
    update({ filter, threshold: filter ? filterRange(filter)[0] : null });
  });
  on("filter-value", "input", (event) => {
    const [low] = filterRange(state.filter);
    const value = Number(event.target.value); // 0 to 200
    update({ threshold: value ? low + (value / 200) * (filterRange(state.filter)[1] - low) : low });
  });
  on("compare", "change", (event) => update({ compare: event.target.value }));
  on("compare-file", "change", (event) => openPage(event.target.files[0]));
  on("show", "change", (event) => update({ show: event.target.value }));
  on("theme", "click", toggleTheme);
  on("copy-link", "click", copyLink);
  on("link-close", "click", () => ($("link").hidden = true));
  on("link-go", "click", () => restore($("link-text").value));
  on("link-text", "keydown", (event) => {
    if (event.key === "Enter") restore(event.target.value);
  });
  on("show-help", "click", () => openHelp());
  on("close", "click", () => select(null));
  on("previous-head", "click", () => stepHead(-1));
  on("next-head", "click", () => stepHead(1));
  on("options", "click", () => {
    const open = $("app").classList.toggle("open");
    $("options").setAttribute("aria-expanded", open);
    if (open) scrollTo(0, 0); // the controls are at the top
    layOut(true);
  });
  $("filter-value").max = 200;
}

/** What does not wait for a control: only once something is drawn. */
function listen() {
  document.addEventListener("keydown", onKey);
  // Not location.hash: keepLink may have replaced that before this event arrives.
  addEventListener("hashchange", (event) => restore(new URL(event.newURL).hash));
  addEventListener("resize", () => update());
  dark.addEventListener("change", () => {
    readTheme();
    update();
  });
}

function buildCompare() {
  const select = $("compare");
  fillSelect(select, [["off", "nothing"]]);
  const group = (text, values) => {
    const options = values.map(([value, textContent]) => make("option", { value, textContent }));
    select.append(make("optgroup", { label: text }, ...options));
  };
  const steps = (of, kind) => of.frames.map(({ step }) => [`${kind}:${step}`, `step ${step}`]);
  if (run.frames.length > 1) group("a step of this run", steps(run, "step"));
  if (other) group(other.name, [["run", "same step"], ...steps(other, "run")]);
}

/** What the filter's slider spans: [low, high] of the statistic as the grid shows it. */
function filterRange(key) {
  const found = [run, B?.run].map((of) => of && statisticOf(of, key)).filter((s) => s && !s.empty);
  const [low, high] = [Math.min(...found.map((s) => s.low)), Math.max(...found.map((s) => s.high))];
  return B && state.show === "difference" ? [low - high, high - low] : [low, high];
}

/** Brings every control and note to the state. */
function showControls() {
  $("step-number").textContent = `step ${here.step}`;
  $("step").value = state.frame;
  $("step").setAttribute("aria-valuetext", `step ${here.step}`);
  $("play").textContent = playing ? "❚❚" : "▶";
  $("play").setAttribute("aria-label", playing ? "pause" : "play");
  $("prompt").value = state.prompt;
  $("scale").value = state.scale;
  $("first-column").checked = state.hideFirst;
  $("sort").value = state.sort;
  $("direction").hidden = !state.sort;
  $("direction").textContent = state.descending ? "↓" : "↑";
  $("direction").title = state.descending ? "largest first" : "smallest first";
  $("filter-statistic").value = state.filter;
  $("threshold").hidden = $("count").hidden = !state.filter;
  if (state.filter) {
    const [low, high] = filterRange(state.filter);
    $("filter-value").value = (200 * (state.threshold - low)) / (high - low || 1);
    $("filter-value").setAttribute("aria-valuetext", format(state.threshold));
    $("threshold").firstChild.textContent = `≥ ${format(state.threshold)}`;
  }
  $("compare").value = state.compare;
  $("show").hidden = !B;
  for (const input of $("show").querySelectorAll("input")) {
    input.checked = input.value === state.show;
  }
  $("brighter").textContent = gridShows() === "difference"
    ? "orange: more weight in B, blue: less" : "brighter: more weight";
  showNotes();
}

function showNotes() {
  const prompt = run.prompts[state.prompt];
  const bold = (text) => make("b", { textContent: text });
  const what = [bold(run.name), ` · ${many(run.layers, "layer")} × ` +
    `${many(run.heads, "head")} · ${many(A.T, "token")}`];
  if (prompt.cropped) what.push(" (the prompt is longer)");
  if (prompt.period > 0) {
    what.push(` · ${prompt.period} random tokens, twice: an induction head looks from the second` +
      ` time at the token after the first, a stripe ${prompt.period - 1} left of the diagonal`);
  }
  for (const key of new Set([state.sort, state.filter])) {
    const statistic = statisticOf(run, key);
    if (statistic) what.push(" · ", bold(statistic.title), ": ", statistic.about);
  }
  $("what").replaceChildren(...what);
  const notes = [];
  if (B) {
    notes.push(`${sideName(A)}, ${sideName(B)}.`);
    if (!B.same) {
      notes.push("These are different prompts, so only the statistics are subtracted" +
        (state.show === "difference" ? "; the maps are A's." : "."));
    }
    if (B.run.layers !== run.layers || B.run.heads !== run.heads) {
      notes.push(`B has ${many(B.run.layers, "layer")} × ${many(B.run.heads, "head")}: compared ` +
        "is what both have.");
    }
  }
  $("compare-note").hidden = !B;
  const text = notes.join(" ");
  if ($("compare-note").textContent !== text) $("compare-note").textContent = text;
  const across = run.steps.length > 1 ? "over the steps" : "by layer";
  $("legend").replaceChildren(`Every head, ${across}, mean over all prompts · `,
    make("i", { textContent: "the chosen head" }),
    make("b", { textContent: foreign() ? " · B" : "" }), " · dashed: attending evenly");
}

function choosePrompt(prompt) {
  update({ prompt, query: null });
}

// Playing

let playing = false;
let playTimer;

function togglePlay() {
  if (playing) pause();
  else if (run.frames.length > 1) {
    playing = true;
    const over = state.frame === run.frames.length - 1;
    update(over ? { frame: 0 } : {});
    playTimer = setTimeout(tick, 1000 / Number($("speed").value));
  }
}

async function tick() {
  const begin = performance.now();
  await update({ frame: Math.min(state.frame + 1, run.frames.length - 1) });
  if (!playing) return;
  if (state.frame === run.frames.length - 1) return pause();
  const took = performance.now() - begin;
  playTimer = setTimeout(tick, Math.max(0, 1000 / Number($("speed").value) - took));
}

function pause() {
  clearTimeout(playTimer);
  if (!playing) return;
  playing = false;
  update();
}

function goStep(by) {
  pause();
  update({ frame: clamp(state.frame + by, 0, run.frames.length - 1) });
}

// Comparing

/** Takes the data out of another page of the lens; nothing in it is run. */
async function openPage(file) {
  if (!file) return;
  try {
    const text = await file.text();
    const mark = 'type="application/json" id="data">';
    const begin = text.indexOf(mark) + mark.length;
    if (begin < mark.length) throw new Error("This is not a page of the attention lens.");
    // The data has every < escaped, so the first one ends it.
    const found = await prepare(readData(text.slice(begin, text.indexOf("<", begin)))[0]);
    await decode(found, nearestFrame(found, here.step));
    other = found;
    buildCompare();
    await update({ compare: "run" });
    prefetch(found);
  } catch (error) {
    say(error.message);
  }
  $("compare-file").value = "";
}

let lastCompare = null;

/** Compares with what was last compared with; at first: the other run, or the first step. */
function toggleCompare() {
  const fallback = other ? "run" : `step:${run.frames.at(state.frame ? 0 : -1).step}`;
  if (state.compare !== "off") lastCompare = state.compare;
  if (lastCompare === `step:${here.step}`) lastCompare = null;
  const possible = other || run.frames.length > 1;
  if (!possible) say("Here is one step of one run: open another page to compare with.");
  else update({ compare: state.compare === "off" ? lastCompare ?? fallback : "off" });
}

// Theme, link, messages, help

function toggleTheme() {
  state.theme = colours.isDark ? "light" : "dark";
  readTheme();
  update();
}

/** Shows the view that a link's text means. */
function restore(text) {
  pause();
  Object.assign(pointed, { query: null, key: null });
  Object.assign(state, readLink(text));
  readTheme();
  return update();
}

async function copyLink() {
  const framed = window.top !== window || !/^(https?|file):$/.test(location.protocol);
  try {
    if (framed) throw 0;
    await navigator.clipboard.writeText(location.href.replace(/#.*$/s, "") + linkText());
    say("The link is copied.");
  } catch {
    $("link").hidden = false;
    $("link-text").value = linkText();
    $("link-text").select();
  }
}

let messageTimer;

function say(text) {
  $("message").textContent = text;
  $("message").hidden = false;
  clearTimeout(messageTimer);
  messageTimer = setTimeout(() => ($("message").hidden = true), 6000);
}

const KEYS = [
  ["← → ↑ ↓", "the next head"],
  ["Enter", "enlarge a head"],
  ["Esc", "back to all heads"],
  [", .", "a step back, a step on"],
  ["Space", "play, pause"],
  ["p", "the next prompt"],
  ["Shift ← → ↑ ↓", "the next cell of the enlarged map"],
  ["s", "colours: square root or linear"],
  ["h", "hide the first column"],
  ["d", "compare with the first step or the other run; stop"],
  ["t", "light or dark"],
  ["?", "this"],
];

function buildHelp() {
  const list = (pairs) => make("dl", {}, ...pairs.flatMap(([term, text, id = ""]) => [
    make("dt", { id }, term), make("dd", { textContent: text })]));
  const heading = (textContent) => make("h2", { textContent });
  const text = (textContent) => make("p", { textContent });
  const close = make("button", { textContent: "close" });
  close.addEventListener("click", () => $("help").close());
  const title = make("h2", { id: "help-title", textContent: "How to read this" });
  const keys = KEYS.map(([key, does]) => [make("kbd", { textContent: key }), does]);
  $("help").append(
    make("header", {}, title, close),
    text("Each square is one attention head on one prompt. A row is a token that looks, a column " +
      "a token looked at; brighter is more weight; a row's weights sum to one. A token cannot " +
      "look at what comes after it, so the upper right is empty. L3 H5 is head 5 of layer 3; " +
      "layers, heads and positions count from 0."),
    heading("Keys"), list(keys),
    heading("Statistics"), text("Means over all prompts on which they are defined."),
    list(run.statistics.map(({ key, title, about }) => [title, about, `about-${key}`])),
    heading("Colours"),
    text("Square root: a weight of 0.04 is a fifth as bright as a weight of 1. Hiding the first " +
      "column blanks the first token, where many heads rest, and stretches each head's colours " +
      "to the largest weight that remains; the weights that you read stay the same. A difference " +
      "is B − A: orange where B has more weight, blue where it has less. Of two steps, A is the " +
      "earlier."),
  );
  $("help").addEventListener("click", (event) => {
    if (event.target === $("help")) $("help").close(); // beside the box
  });
}

function openHelp(key = null) {
  if (!$("help").open) $("help").showModal();
  $("help").scrollTop = 0;
  if (key !== null) $(`about-${key}`)?.scrollIntoView({ block: "center" });
}

// Keys

function moveCell(right, down) {
  if (selected() === null) return;
  const query = clamp((pointed.query ?? chosenQuery()) + down, 0, A.T - 1);
  const key = clamp((pointed.key ?? query) + right, 0, query);
  update({ query });
  pointAtCell({ query, key });
}

const ARROWS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
const SHORTCUTS = {
  ",": () => goStep(-1),
  ".": () => goStep(1),
  "[": () => goStep(-1),
  "]": () => goStep(1),
  " ": togglePlay,
  p: () => choosePrompt((state.prompt + 1) % run.prompts.length),
  s: () => update({ scale: state.scale === "sqrt" ? "linear" : "sqrt" }),
  h: () => update({ hideFirst: !state.hideFirst }),
  d: toggleCompare,
  t: toggleTheme,
  "?": () => openHelp(),
  Escape: () => ($("link").hidden ? select(null) : ($("link").hidden = true)),
};

function onKey(event) {
  const { key, target } = event;
  if (event.ctrlKey || event.metaKey || event.altKey || $("help").open) return;
  const typing = target.matches("select, input:not([type=range], [type=checkbox], [type=radio])");
  if (typing && key !== "Escape") return;
  const onTile = target.matches(".head");
  if (key === " " && target.matches("button:not(.head), input, [type=file]")) return; // its own
  if (key in ARROWS) {
    if (target.matches("input")) return;
    if (target.id === "text" && ARROWS[key][0] && !event.shiftKey) {
      Object.assign(pointed, { query: null, key: null });
      update({ query: clamp(chosenQuery() + ARROWS[key][0], 0, A.T - 1) });
    } else if (event.shiftKey) moveCell(...ARROWS[key]);
    else moveHead(...ARROWS[key]);
    event.preventDefault();
  } else if (key === "Enter" && onTile) {
    event.preventDefault();
    select(tiles.findIndex((tile) => tile.button === target));
  } else if (Object.hasOwn(SHORTCUTS, key)) {
    event.preventDefault();
    SHORTCUTS[key]();
  }
}

// ---------------------------------------------------------------- the beginning

function fail(error) {
  $("app").hidden = true;
  $("error").hidden = false;
  $("error").textContent = error.message || String(error);
}

async function start() {
  const runs = readData($("data").textContent);
  $("data").textContent = ""; // the text is not needed twice
  [run, other = null] = await Promise.all(runs.slice(0, 2).map(prepare));
  window.lens.runs = runs;
  buildGrid();
  buildDetail();
  buildCharts();
  buildHelp();
  buildControls();
  Object.assign(state, readLink(location.hash));
  const needed = [decode(run, state.frame)];
  const b = otherSide();
  if (b) needed.push(decode(b.run, b.frame));
  await Promise.all(needed);
  $("app").hidden = false;
  readTheme();
  redraw();
  listen();
  if (selected() !== null) {
    setTabStop(selected());
    showDetail();
  }
  timing.ready = performance.now();
  document.documentElement.dataset.ready = "1";
  prefetch(run).then(() => other && prefetch(other));
}

window.lens = {
  state,
  timing,
  weight: (of, ...place) => weight(of ? other : run, ...place),
  decode: (of, frame) => decode(of ? other : run, frame),
  redraw,
  update,
  ready: null,
};
window.lens.ready = start().catch(fail);
