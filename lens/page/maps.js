/* Draws one head as a heatmap: one pixel for each weight. */

import { A, B, comparable, indexInB, state } from "./state.js";
import { WEIGHTS, colourTable, colours } from "./colours.js";

const images = new Map(); // T -> the ImageData that all heatmaps of this size share

function imageFor(T) {
  if (!images.has(T)) {
    const image = new ImageData(T, T);
    images.set(T, { image, pixels: new Uint32Array(image.data.buffer) });
  }
  return images.get(T);
}

/** Returns the largest code of a head without the first column; 255 if all codes are 0. */
function largestCode(of, index) {
  let most = 0;
  let place = of.start + index * of.triangle;
  for (let query = 0; query < of.T; query++) {
    for (let key = 1; key <= query; key++) most = Math.max(most, of.bytes[place + key]);
    place += query + 1;
  }
  return most || 255;
}

/** Returns the code at the end of the colour scale of a head, the same for A and B. */
export function maxCode(index, of = A) {
  if (!state.hideFirst) return 255;
  if (comparable(index)) return Math.max(largestCode(A, index), largestCode(B, indexInB(index)));
  return largestCode(of, of === A ? index : indexInB(index));
}

/** Returns the difference at the end of the colour scale of a head. */
export function maxDifference(index) {
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

/** Draws one head with T x T pixels. what: "a", "b" or "difference". */
export function paint({ canvas, context }, index, what) {
  const of = what === "b" ? B : A;
  if (canvas.width !== of.T) canvas.width = canvas.height = of.T;
  const { image, pixels } = imageFor(of.T);
  const first = state.hideFirst ? 1 : 0;
  const place = of === A ? index : indexInB(index);
  pixels.fill(colours.masked);
  if (what === "difference") {
    if (comparable(index)) paintDifference(pixels, index, maxDifference(index), first);
  } else if (place >= 0) paintWeights(pixels, of, place, maxCode(index, of), first);
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
