/* Draws one head as a heatmap: one pixel for each weight or, in a small map, for several. */

import { A, B, comparable, indexInB, state } from "./state.js";
import { WEIGHTS, colourTable, colours } from "./colours.js";

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

export const firstKey = () => (state.hideFirst ? 1 : 0); // the first column that is shown

/** Returns the largest shown code of a head; 255 if all are 0. The first row is skipped, because
 * the first token can only attend to itself. */
function largestCode(of, index) {
  const first = firstKey();
  let most = 0;
  let place = of.start + index * of.triangle + 1;
  for (let query = 1; query < of.T; query++) {
    for (let key = first; key <= query; key++) most = Math.max(most, of.bytes[place + key]);
    place += query + 1;
  }
  return most || 255;
}

/** Returns the code at the end of the colour scale of a head, the same for A and B. */
function maxCode(index, of = A) {
  if (!state.stretch) return 255;
  if (comparable(index)) return Math.max(largestCode(A, index), largestCode(B, indexInB(index)));
  return largestCode(of, of === A ? index : indexInB(index));
}

/** Returns the difference at the end of the colour scale of a head. */
function maxDifference(index) {
  if (!state.stretch) return 1;
  const first = firstKey();
  let most = 0;
  let [a, b] = [A.start + index * A.triangle, B.start + indexInB(index) * B.triangle];
  for (let query = 0; query < A.T; query++) {
    for (let key = first; key <= query; key++) {
      const difference = WEIGHTS[B.bytes[b + key]] - WEIGHTS[A.bytes[a + key]];
      most = Math.max(most, Math.abs(difference));
    }
    a += query + 1;
    b += query + 1;
  }
  return most || 1;
}

/** Returns the value or difference at the end of the colour scale of a head. */
export function scaleEnd(index, what) {
  const of = what === "b" ? B : A;
  const top = of.tops?.[of === A ? index : indexInB(index)] ?? 1;
  return top * (what === "difference" ? maxDifference(index) : WEIGHTS[maxCode(index, of)]);
}

/** Draws one head with T x T pixels, or with `most` x `most` if this is less: then each pixel shows
 * the largest of several weights, so that a line of weights does not disappear. what: "a", "b" or
 * "difference". */
export function paint({ canvas, context }, index, what, most = Infinity) {
  const of = what === "b" ? B : A;
  const shared = buffersOf(of.T, Math.min(of.T, most));
  const { image, pixels, places, levels, size } = shared;
  if (canvas.width !== size) canvas.width = canvas.height = size;
  const first = firstKey();
  const place = of === A ? index : indexInB(index);
  pixels.fill(colours.masked);
  let table = null;
  if (what === "difference" && comparable(index)) {
    table = colours.divergingPacked;
    findDifferences(shared, index, maxDifference(index), first);
  } else if (what !== "difference" && place >= 0) {
    table = colourTable(maxCode(index, of));
    findWeights(shared, of, place, first);
  }
  for (let y = 0; table && y < size; y++) {
    for (let x = places[first]; x <= y; x++) pixels[y * size + x] = table[levels[y * size + x]];
  }
  context.putImageData(image, 0, 0);
}

function findWeights({ levels, places, size }, { bytes, start, triangle, T }, index, first) {
  levels.fill(0);
  let place = start + index * triangle;
  for (let query = 0; query < T; query++) {
    const row = places[query] * size;
    for (let key = first; key <= query; key++) {
      const at = row + places[key];
      const code = bytes[place + key];
      if (code > levels[at]) levels[at] = code;
    }
    place += query + 1;
  }
}

function findDifferences({ levels, places, size }, index, most, first) {
  levels.fill(128);
  const root = state.scale === "sqrt";
  let [a, b] = [A.start + index * A.triangle, B.start + indexInB(index) * B.triangle];
  for (let query = 0; query < A.T; query++) {
    const row = places[query] * size;
    for (let key = first; key <= query; key++) {
      const part = (WEIGHTS[B.bytes[b + key]] - WEIGHTS[A.bytes[a + key]]) / most;
      const far = root ? Math.sqrt(Math.abs(part)) : Math.abs(part);
      const level = (part < 0 ? 128.5 - 128 * far : 128.5 + 127 * far) | 0; // faster than Math.round
      const at = row + places[key];
      if (Math.abs(level - 128) > Math.abs(levels[at] - 128)) levels[at] = level;
    }
    a += query + 1;
    b += query + 1;
  }
}
