/* Formats numbers, names and tokens as text. */

export const clamp = (x, low, high) => Math.min(high, Math.max(low, x));

/** Returns a number as text: 0.42, 12.3, 250; a dash if there is no value. */
export function format(value, signed = false) {
  if (value === null || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  const text = size.toFixed(size >= 100 ? 0 : size >= 10 ? 1 : 2);
  const sign = value < 0 && Number(text) > 0 ? "−" : signed && Number(text) > 0 ? "+" : "";
  return sign + text;
}

/** Returns the number of decimals for the change of a loss, which may be small. */
export const lossDigits = (change) => (Math.abs(change) < 0.1 ? 4 : 2);

/** Returns a loss, or with `signed` the change of a loss, as text. */
export function formatLoss(value, signed = false) {
  if (value === null) return "–";
  return (value < 0 ? "−" : signed ? "+" : "") + Math.abs(value).toFixed(lossDigits(value));
}

/** Returns the number of correct decimals of a value that is one of an interval of values with the
 * same code: the unit of the last digit is not smaller than this interval. */
const digitsOf = (interval) => Math.max(0, Math.floor(-Math.log10(interval)));

/** Returns the length of the interval of weights that have the same code as a weight. */
export const intervalOf = (weight) => Math.max((2 * Math.sqrt(weight)) / 255, 1 / 510 ** 2);

/** Returns a weight as text, without digits that its code does not determine. */
export function formatWeight(weight, digits = digitsOf(intervalOf(weight))) {
  const text = weight.toFixed(digits);
  return Number(text) ? text : `<${(10 ** -digits).toFixed(digits)}`;
}

/** Formats a cell of a heatmap, from cellOf in kinds.js. */
export const formatCell = ({ value, interval }) => formatWeight(value, digitsOf(interval));

/** Returns the difference of two cells, b - a, with the digits of the less exact one. */
export function formatChange(a, b) {
  const text = Math.abs(b.value - a.value).toFixed(digitsOf(Math.max(a.interval, b.interval)));
  return (Number(text) ? (b.value < a.value ? "−" : "+") : "") + text;
}

export const plural = (n, what) => `${n} ${what}${n === 1 ? "" : "s"}`;

const SIGNS = { "\n": "⏎", "\r": "␍", "\t": "⇥" };
const UNSEEN = /[\p{Cc}\p{Cf}\p{Cs}\p{Co}\p{Cn}\u2028\u2029]/gu;

/** Returns a token with visible control characters, which then cannot affect other text. */
export function visible(token, longest = 60) {
  const shown = [...token.replace(UNSEEN, (c) => (c === "\u200d" ? c : SIGNS[c] ?? "·"))];
  return shown.length > longest ? shown.slice(0, longest - 1).join("") + "…" : shown.join("");
}

/** Returns a token as a short label, with leading and trailing white space made visible. */
export function label(token, longest = 12) {
  const spaces = (space) => "␣".repeat([...space].length);
  const marked = token.replace(/^[^\S\r\n\t]+|[^\S\r\n\t]+$/g, spaces);
  return visible(marked, longest) || "∅";
}

/** Returns an explanation of the signs in the labels of tokens, "" if there are none. */
export function explainSigns(tokens) {
  const shown = tokens.map((token) => label(token, Infinity)).join(" ");
  const used = [["␣", "␣ space"], ["⏎", "⏎ line break"], ["␍", "␍ carriage return"], ["⇥", "⇥ tab"],
    ["∅", "∅ empty token"], [/<0x[\dA-F]{2}>/, "byte of a character that has several tokens"]];
  return used.map(([sign, meaning]) => {
    const found = shown.match(sign)?.[0];
    return found && (typeof sign === "string" ? meaning : `${found} ${meaning}`);
  }).filter(Boolean).join(" · ");
}

/** Returns the text of tokens. If tokens share a character, the first has it, the others null. */
export function joinBytes(tokens) {
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
        // no complete character yet
      }
    }
  }
  return texts;
}

/** Returns tokens as one line of text. */
export const plainText = (tokens) => joinBytes(tokens).join("").replace(/\s+/g, " ").trim();

export function shortNumber(n) {
  return Math.abs(n) >= 1e4 ? `${+(n / 1e3).toPrecision(3)}k` : String(n);
}
