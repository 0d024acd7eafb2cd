/* Formats numbers. Python makes the texts of tokens (headlens/prompts.py). */

export const clamp = (x, low, high) => Math.min(high, Math.max(low, x));

// For each kind of number [[from this size on, decimals], ...]: DIGITS of headlens/rounding.py.
const DIGITS = JSON.parse('__DIGITS__');

/** Returns the number of decimals of a value of a kind: "value", "loss", "error", "chance", "percent",
 * "weight". */
const decimals = (value, kind) =>
  DIGITS[kind].find(([size]) => Math.abs(value) >= size)?.[1] ?? 0;

/** Returns a value with a number of decimals; a dash if there is none. signed: the value is a change. */
function rounded(value, digits, signed = false) {
  if (!Number.isFinite(value)) return "–";
  const text = Math.abs(value).toFixed(digits);
  if (Number(text)) return (value < 0 ? "−" : signed ? "+" : "") + text;
  if (signed || value === 0) return "0";
  return `${value < 0 ? ">−" : "<"}${(10 ** -digits).toFixed(digits)}`;
}

/** Returns a number as text: 0.42, 12.3, 250, <0.01. */
export const format = (value, signed = false, kind = "value") =>
  rounded(value, decimals(value, kind), signed);

/** Returns a loss, or with `signed` the change of a loss. */
export const formatLoss = (value, signed = false) => format(value, signed, "loss");

/** Returns a mean on the text with its standard error: "0.62 ± 0.03", "0.617 ± 0.004". */
export function formatMean(value, error) {
  if (error === null) return format(value);
  const digits = decimals(error, "error");
  return `${rounded(value, digits)} ± ${rounded(error, digits)}`;
}

/** Returns a weight of a heatmap. That of the byte 0 is not 0, but small. */
export const formatWeight = (weight) => format(weight || Number.MIN_VALUE, false, "weight");

/** Returns a cell of a heatmap, from cellOf in cells.js. */
export const formatCell = ({ value, isWeight }) => (isWeight ? formatWeight(value) : format(value));

/** Returns the difference of two cells, b - a, with the decimals of the less exact one. */
export const formatChange = (a, b) => rounded(b.value - a.value,
  decimals(Math.max(a.value, b.value), a.isWeight ? "weight" : "value"), true);

export const plural = (n, what) => `${n} ${what}${n === 1 ? "" : "s"}`;

/** Returns a text of at most `longest` characters. */
export function clip(text, longest) {
  const shown = [...text];
  return shown.length > longest ? shown.slice(0, longest - 1).join("") + "…" : text;
}

export const stepText = (step) => `step ${step.toLocaleString("en")}`;

export function shortNumber(n) {
  if (Math.abs(n) >= 1e4) return `${+(n / 1e3).toPrecision(3)}k`;
  return n >= 1e3 ? n.toLocaleString("en") : String(n);
}
