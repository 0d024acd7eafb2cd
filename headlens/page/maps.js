/* Draws one head as a heatmap: one pixel for each weight or, in a small map, for several. */

import { A, B, comparable, indexInB } from "./state.js";
import { WEIGHTS, colours, viridisPacked } from "./colours.js";

const buffers = new Map(); // buffers that heatmaps of the same size share

/** Returns the buffers of heatmaps of T x T weights with size x size pixels. */
function buffersOf(T, size) {
  const name = `${T} ${size}`;
  if (!buffers.has(name)) {
    if (buffers.size > 8) buffers.clear(); // each size of the window needs other buffers
    const image = new ImageData(size, size);
    const pixels = new Uint32Array(image.data.buffer);
    const places = Int32Array.from({ length: T }, (_, n) => Math.floor((n * size) / T));
    const levels = new Uint8Array(size * size); // indices into the colours
    buffers.set(name, { image, pixels, places, levels, size });
  }
  return buffers.get(name);
}

/** Returns the value or difference at the end of the colour scale of a head. */
export function scaleEnd(index, what) {
  const of = what === "b" ? B : A;
  return of.tops?.[of === A ? index : indexInB(index)] ?? 1;
}

/** Draws one head with T x T pixels, or with `most` x `most` if this is less: then each pixel shows
 * the largest of several weights, so that a line of weights does not disappear. what: "a", "b" or
 * "difference". */
export function paint({ canvas, context }, index, what, most = Infinity) {
  const of = what === "b" ? B : A;
  const shared = buffersOf(of.T, Math.min(of.T, most));
  const { image, pixels, levels, size } = shared;
  if (canvas.width !== size) canvas.width = canvas.height = size;
  const place = of === A ? index : indexInB(index);
  pixels.fill(colours.masked);
  let table = null;
  if (what === "difference" && comparable(index)) {
    table = colours.divergingPacked;
    findDifferences(shared, index);
  } else if (what !== "difference" && place >= 0) {
    table = viridisPacked;
    findWeights(shared, of, place);
  }
  for (let y = 0; table && y < size; y++) {
    for (let x = 0; x <= y; x++) pixels[y * size + x] = table[levels[y * size + x]];
  }
  context.putImageData(image, 0, 0);
}

function findWeights({ levels, places, size }, { bytes, start, triangle, T }, index) {
  levels.fill(0);
  let place = start + index * triangle;
  for (let query = 0; query < T; query++) {
    const row = places[query] * size;
    for (let key = 0; key <= query; key++) {
      const at = row + places[key];
      const code = bytes[place + key];
      if (code > levels[at]) levels[at] = code;
    }
    place += query + 1;
  }
}

function findDifferences({ levels, places, size }, index) {
  levels.fill(128);
  let [a, b] = [A.start + index * A.triangle, B.start + indexInB(index) * B.triangle];
  for (let query = 0; query < A.T; query++) {
    const row = places[query] * size;
    for (let key = 0; key <= query; key++) {
      const part = WEIGHTS[B.bytes[b + key]] - WEIGHTS[A.bytes[a + key]];
      const far = Math.sqrt(Math.abs(part));
      const level = (part < 0 ? 128.5 - 128 * far : 128.5 + 127 * far) | 0; // faster than Math.round
      const at = row + places[key];
      if (Math.abs(level - 128) > Math.abs(levels[at] - 128)) levels[at] = level;
    }
    a += query + 1;
    b += query + 1;
  }
}
