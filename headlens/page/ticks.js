/* Ticks of an axis. */

/** Returns about `count` multiples of 1, 2 or 5 times a power of ten from low to high, at least two.
 * covers: the first and the last may be outside, so that they include low and high. */
export function roundTicks(low, high, count, covers = false) {
  const rough = (high - low || Math.abs(high) || 1) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((n) => n * power >= rough * 0.999);
  const [from, to] = [low / step, high / step];
  const first = covers ? Math.floor(from + 1e-9) : Math.ceil(from - 1e-9);
  const last = covers ? Math.max(Math.ceil(to - 1e-9), first + 1) : Math.floor(to + 1e-9);
  const ticks = Array.from({ length: last - first + 1 }, (_, n) =>
    +((first + n) * step).toPrecision(12));
  return ticks.length < 2 ? roundTicks(low, high, count + 1, covers) : ticks;
}
