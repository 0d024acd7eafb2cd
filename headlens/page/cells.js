/* What a heatmap shows: attention weights or value-weighted attention. */

import { A, B, comparable, indexInB, run, state } from "./state.js";
import { WEIGHTS } from "./colours.js";

/** Replaces the codes of A and B in the value-weighted map: codes of weight times norm. */
export function prepareMaps() {
  const sides = B ? [A, B] : [A];
  const valued = state.map === "valued" && sides.every((of) => of.norms);
  for (const of of sides) {
    Object.assign(of, { raw: of.bytes, rawStart: of.start, valued, tops: null });
  }
  if (!valued) return;
  for (const of of sides) {
    const { count } = of.run;
    of.start = 0;
    of.bytes = new Uint8Array(count * of.triangle);
    of.tops = Float64Array.from({ length: count }, (_, index) => largestProduct(of, index));
  }
  for (let index = 0; index < run.count; index++) shareTop(index);
  for (const of of sides) writeProducts(of);
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

/** Returns {value, isWeight} of a cell of a head of A, in A or B, from the recorded codes; null if B does
 * not have the head. In the value-weighted map also its {weight, norm}. */
export function cellOf(of, index, query, key) {
  if (of === B && !comparable(index)) return null;
  const place = of === A ? index : indexInB(index);
  const at = of.rawStart + place * of.triangle + (query * (query + 1)) / 2 + key;
  const weight = { value: WEIGHTS[of.raw[at]], isWeight: true };
  if (!of.valued) return weight;
  const code = of.norms[of.normStart + place * of.T + key];
  const norm = { value: WEIGHTS[code] * largestNorm(of, place) };
  return { value: weight.value * norm.value, weight, norm };
}
