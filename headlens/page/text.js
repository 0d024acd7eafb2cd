/* Formats numbers, names and tokens as text. */

export const clamp = (x, low, high) => Math.min(high, Math.max(low, x));

// The rule for the digits of numbers is that of headlens/rounding.py, which explains it.

/** Returns a value with a number of decimals; a dash if there is none. signed: the value is a change. */
export function rounded(value, digits, signed = false) {
  if (!Number.isFinite(value)) return "–";
  const text = Math.abs(value).toFixed(digits);
  if (Number(text)) return (value < 0 ? "−" : signed ? "+" : "") + text;
  if (signed || value === 0) return "0";
  return `${value < 0 ? ">−" : "<"}${(10 ** -digits).toFixed(digits)}`;
}

/** Returns a value of a statistic, a weight or an accuracy: 0.42, 12.3, 250, <0.01. */
export function format(value, signed = false) {
  const size = Math.abs(value);
  return rounded(value, size >= 100 ? 0 : size >= 10 ? 1 : 2, signed);
}

/** Returns the number of decimals of a loss or of its change. */
export const lossDigits = (value) => (Math.abs(value) < 0.1 ? 4 : 2);

/** Returns a loss, or with `signed` the change of a loss. */
export const formatLoss = (value, signed = false) => rounded(value, lossDigits(value), signed);

/** Returns the change of a loss with its standard error, if it is known: "+1.33 ± 0.02". */
export function formatLossChange(change, error) {
  const size = error === null ? "" : ` ± ${rounded(error, lossDigits(change))}`;
  return formatLoss(change, true) + size;
}

/** Returns a mean on the text with its standard error: "0.62 ± 0.03", "0.617 ± 0.004". */
export function formatMean(value, error) {
  if (error === null) return format(value);
  const digits = error < 0.01 ? 3 : 2;
  return `${rounded(value, digits)} ± ${rounded(error, digits)}`;
}

/** Returns a limit as text. Next to "≥" it has a digit that is not 0, where a value has "<0.01". */
export function formatLimit(value) {
  const text = format(value);
  return /[<>]/.test(text) ? String(+value.toPrecision(1)).replace("-", "−") : text;
}

/** Returns a probability with two digits that are not leading zeros. */
export const formatChance = (p) =>
  (p < 0.001 ? "<0.001" : p > 0.995 && p < 1 ? ">0.99" : String(+p.toPrecision(2)));

/** Returns the number of correct decimals of a value that is one of an interval of values with the
 * same code: the unit of the last digit is not smaller than this interval. */
const digitsOf = (interval) => Math.max(0, Math.floor(-Math.log10(interval)));

/** Returns the length of the interval of weights that have the same code as a weight. */
export const intervalOf = (weight) => Math.max((2 * Math.sqrt(weight)) / 255, 1 / 510 ** 2);

/** Returns a weight as text, without digits that its code does not determine. The code 0 is not a
 * weight of 0, but a small one. */
export const formatWeight = (weight, digits = digitsOf(intervalOf(weight))) =>
  rounded(weight || Number.MIN_VALUE, digits);

/** Formats a cell of a heatmap, from cellOf in cells.js. */
export const formatCell = ({ value, interval }) => formatWeight(value, digitsOf(interval));

/** Returns the difference of two cells, b - a, with the digits of the less exact one. */
export const formatChange = (a, b) =>
  rounded(b.value - a.value, digitsOf(Math.max(a.interval, b.interval)), true);

export const plural = (n, what) => `${n} ${what}${n === 1 ? "" : "s"}`;

const BYTES = /^(<0x[\dA-F]{2}>)+$/; // a token without a complete character
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
  const shown = BYTES.test(marked) ? marked.replaceAll("><0x", " ") : marked; // <0xE3 81>
  return visible(shown, longest) || "∅";
}

/** Returns an explanation of the signs in the labels of tokens, "" if there are none. */
export function explainSigns(tokens, labels) {
  const shown = labels.map((token) => label(token, Infinity)).join(" ");
  const used = [["␣", "␣ space"], ["⏎", "⏎ line break"], ["␍", "␍ carriage return"], ["⇥", "⇥ tab"],
    ["∅", "∅ empty token"], [/<0x[\dA-F ]+>/, "part of a character, in bytes"]];
  const texts = used.map(([sign, meaning]) => {
    const found = shown.match(sign)?.[0];
    return found && (typeof sign === "string" ? meaning : `${found} ${meaning}`);
  });
  const part = labels.find((text, n) => text !== tokens[n]);
  if (part) texts.push(`${part} part of a character that has several tokens`);
  return texts.filter(Boolean).join(" · ");
}

const PARTS = "¹²³⁴"; // a character has at most four bytes
const MARKS_AFTER_NUMBER = /([¹²³⁴])(\p{M}+)/gu;

/** Returns {text, label} of each token. Of a character that several tokens share, the first token
 * has the text, and the labels of all have the number of the part: 語¹, 語², 語³. The rule for labels
 * is that of labels_of in headlens/prompts.py. */
export function joinBytes(tokens) {
  const joined = tokens.map((token) => ({ text: token, label: token }));
  for (let first = 0; first < tokens.length; first++) {
    const owners = []; // the token of each byte
    let bytes = "";
    for (let n = first; BYTES.test(tokens[n]); n++) {
      for (const [, byte] of tokens[n].matchAll(/<0x(..)>/g)) {
        bytes += `%${byte}`;
        owners.push(n);
      }
      let text = "";
      try {
        text = decodeURIComponent(bytes);
      } catch {
        continue; // no complete character yet
      }
      if (n === first) break; // a text such as <0x41>
      joined.fill(null, first, n + 1);
      let at = 0;
      for (const character of text) {
        const size = new TextEncoder().encode(character).length;
        [...new Set(owners.slice(at, at += size))].forEach((owner, part, all) => {
          joined[owner] ??= { text: "", label: "" };
          if (part === 0) joined[owner].text += character;
          joined[owner].label += character + (all.length > 1 ? PARTS[part] : "");
        });
      }
      first = n;
      break;
    }
  }
  for (const token of joined) {
    // A combining mark belongs to the letter before the number.
    if (token) token.label = token.label.replace(MARKS_AFTER_NUMBER, "$2$1");
  }
  return joined;
}

/** Returns tokens as one line of text. */
export const plainText = (tokens) =>
  joinBytes(tokens).map(({ text }) => text).join("").replace(/\s+/g, " ").trim();

export function shortNumber(n) {
  return Math.abs(n) >= 1e4 ? `${+(n / 1e3).toPrecision(3)}k` : String(n);
}
