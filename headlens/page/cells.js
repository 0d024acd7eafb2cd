/* What a heatmap shows: attention weights or value-weighted attention, of one head or the mean of
 * several heads. */

import { A, B, comparable, indexInB, meanIsShown, run, selectedHeads, state } from "./state.js";
import { WEIGHTS } from "./colours.js";

/** Replaces the codes of A and B if they are not those of the weights of single heads: codes of
 * weight times norm, and the mean of the selected heads as one more head after the last. */
export function prepareMaps() {
  const sides = B ? [A, B] : [A];
  const valued = state.map === "valued" && sides.every((of) => of.norms);
  for (const of of sides) {
    Object.assign(of, { raw: of.bytes, rawStart: of.start, valued, tops: null });
  }
  if (!valued && !meanIsShown()) return;
  for (const of of sides) {
    const { count } = of.run;
    of.start = 0;
    of.bytes = new Uint8Array((count + 1) * of.triangle);
    of.tops = new Float64Array(count + 1).fill(1);
    of.bytes.set(of.raw.subarray(of.rawStart, of.rawStart + count * of.triangle));
    for (let index = 0; valued && index < count; index++) {
      of.tops[index] = largestProduct(of, index);
    }
  }
  if (valued) {
    for (let index = 0; index < run.count; index++) shareTop(index);
    for (const of of sides) writeProducts(of);
  }
  if (meanIsShown()) writeMeans(sides, valued);
}

/** Gives a head of A and of B the same largest value, so that their colours are comparable. */
function shareTop(index) {
  if (!comparable(index)) return;
  const place = indexInB(index);
  A.tops[index] = B.tops[place] = Math.max(A.tops[index], B.tops[place]);
}

const largestNorm = (of, index) => of.facts.largest_norms[of.prompt][index];

/** Returns the largest weight times norm of a head. */
function largestProduct(of, index) {
  let most = 0;
  let place = of.rawStart + index * of.triangle;
  const norms = of.normStart + index * of.T;
  for (let query = 0; query < of.T; query++) {
    for (let key = 0; key <= query; key++) {
      most = Math.max(most, of.raw[place + key] * of.norms[norms + key]);
    }
    place += query + 1;
  }
  return (most / 255 ** 2) ** 2 * largestNorm(of, index) || 1;
}

function writeProducts(of) {
  for (let index = 0; index < of.run.count; index++) {
    const factor = Math.sqrt(largestNorm(of, index) / of.tops[index]) / 255;
    let place = index * of.triangle;
    const norms = of.normStart + index * of.T;
    for (let query = 0; query < of.T; query++) {
      for (let key = 0; key <= query; key++) {
        const product = of.raw[of.rawStart + place + key] * of.norms[norms + key];
        of.bytes[place + key] = Math.round(product * factor);
      }
      place += query + 1;
    }
  }
}

/** Returns the selected heads as heads of A or of B. */
const membersIn = (of) => selectedHeads().map((index) => (of === A ? index : indexInB(index)));

function writeMeans(sides, valued) {
  const means = sides.filter((of) => membersIn(of).every((index) => index >= 0)).map((of) => {
    const mean = new Float64Array(of.triangle);
    const members = membersIn(of);
    for (const index of members) {
      const part = of.tops[index] / members.length;
      for (let n = 0; n < of.triangle; n++) {
        mean[n] += part * WEIGHTS[of.bytes[index * of.triangle + n]];
      }
    }
    return { of, mean };
  });
  const largest = means.map(({ mean }) => mean.reduce((a, b) => Math.max(a, b), 0));
  const shared = means.length === 2 && B.same ? largest.fill(Math.max(...largest)) : largest;
  means.forEach(({ of, mean }, side) => {
    const { count } = of.run;
    if (valued) of.tops[count] = shared[side] || 1;
    mean.forEach((value, n) => {
      of.bytes[count * of.triangle + n] = Math.round(255 * Math.sqrt(value / of.tops[count]));
    });
  });
}

/** Returns {value, isWeight} of a cell of a head of A or of the mean, in A or B, from the recorded
 * codes; null if B does not have the head. In the value-weighted map also its {weight, norm}. */
export function cellOf(of, index, query, key) {
  if (index === run.count) {
    const parts = selectedHeads().map((head) => cellOf(of, head, query, key));
    if (parts.includes(null)) return null;
    const value = parts.reduce((sum, part) => sum + part.value, 0) / parts.length;
    return { value, isWeight: !of.valued };
  }
  if (of === B && !comparable(index)) return null;
  const place = of === A ? index : indexInB(index);
  const at = of.rawStart + place * of.triangle + (query * (query + 1)) / 2 + key;
  const weight = { value: WEIGHTS[of.raw[at]], isWeight: true };
  if (!of.valued) return weight;
  const code = of.norms[of.normStart + place * of.T + key];
  const norm = { value: WEIGHTS[code] * largestNorm(of, place) };
  return { value: weight.value * norm.value, weight, norm };
}
